"""Our own forward and decode step against transformers' own, family by family; kernels against
their plain forms.
"""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from builders import batch_of, fed, problems, sample, small_policy
from gspo.algorithm.objectives import GSPO
from gspo.model.forward import kernels, network, packed_weights, packing
from gspo.model.policy import Policy
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from trainers import steps, trainer

MOE = {"num_experts": 6, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 16, "moe_intermediate_size": 12, **MOE}),
    "qwen3_some_layers_dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"head_dim": 16, "moe_intermediate_size": 12, "mlp_only_layers": [0], **MOE},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"norm_topk_prob": False, **MOE}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 6, "num_experts_per_tok": 2}),
    # biases, norms of heads, half of a head rotates, a dense layer, groups of experts, a shared expert
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {
            "head_dim": 16, "moe_intermediate_size": 12, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5,
            "use_qk_norm": True, "attention_bias": True,
        },
    ),
}  # fmt: skip


def made(kind: type, config: type, extra: dict) -> Policy:
    """A random model with two query heads per key head, the character tokenizer, and weights large
    enough to matter.
    """
    tokenizer = small_policy().tokenizer
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    model = kind(config(**(sizes | extra))).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    return Policy(model, tokenizer)


@pytest.fixture(params=FAMILIES)
def policy(request) -> Policy:
    return made(*FAMILIES[request.param])


def gradients(policy: Policy, batch, plain: bool) -> tuple:
    own, policy.network = policy.network, None if plain else policy.network
    output = policy.forward(batch)
    weights = torch.linspace(-1, 2, batch.mask_BT.numel()).view(batch.mask_BT.shape)
    torch.where(batch.mask_BT, output.logp_BT * weights, 0.0).sum().backward()
    found = {
        name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None
    }
    policy.model.zero_grad()
    policy.network = own
    return output, found


def test_log_probs_entropy_experts_and_every_gradient_are_those_of_the_model_itself(policy):
    assert policy.network, "a known family"
    batch = batch_of(policy, sample(policy))
    (ours, ours_grad), (theirs, theirs_grad) = (
        gradients(policy, batch, False),
        gradients(policy, batch, True),
    )
    mask = batch.mask_BT
    torch.testing.assert_close(ours.logp_BT[mask], theirs.logp_BT[mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.entropy_BT[mask], theirs.entropy_BT[mask], atol=1e-5, rtol=1e-5)
    if ours.experts_BSLK is not None:
        assert torch.equal(ours.experts_BSLK[fed(batch)], theirs.experts_BSLK[fed(batch)])
    assert ours_grad.keys() == theirs_grad.keys()
    for name, grad in theirs_grad.items():
        torch.testing.assert_close(
            ours_grad[name], grad, atol=2e-5 * float(grad.abs().max()) + 1e-9, rtol=1e-3
        )


def test_sampling_and_scoring_are_those_of_the_model_itself(policy, monkeypatch):
    """Prompts of several lengths, responses that end at different steps: cache growth, dropped
    rows, masks.
    """
    engine, sampling = LocalEngine(policy), Sampling(1.0, 60)
    record = policy.routing.layers > 0
    ours = engine.generate(
        SamplingRequest(problems(), 4, sampling, (3, "decode"), record_experts=record)
    )
    batch = batch_of(policy, flat(ours))
    own, policy.network = policy.network, None
    theirs = engine.generate(
        SamplingRequest(problems(), 4, sampling, (3, "decode"), record_experts=record)
    )
    logp = policy.score(batch, 4).logp_BT[batch.mask_BT]
    policy.network = own
    same_responses(ours, theirs, record)
    torch.testing.assert_close(
        policy.score(batch, 4).logp_BT[batch.mask_BT], logp, atol=1e-5, rtol=1e-5
    )

    # every matrix is prepared like a large matrix
    monkeypatch.setattr(packed_weights, "MIN_BLOCKED_NUMEL", 1)
    monkeypatch.setattr(packed_weights, "ALL_EXPERTS_BELOW", 0)
    with policy.network.frozen(copy_experts=True):
        assert all(
            own.experts if hasattr(layer.mlp, "experts") else own.down
            for layer, own in layers(policy)
        )
    same_responses(
        engine.generate(
            SamplingRequest(problems(), 4, sampling, (3, "decode"), record_experts=record)
        ),
        theirs,
        record,
    )
    torch.testing.assert_close(
        policy.score(batch, 4).logp_BT[batch.mask_BT], logp, atol=1e-5, rtol=1e-5
    )


def same_responses(ours, theirs, record: bool) -> None:
    lengths = set()
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        assert abs(a.logprobs - b.logprobs).max() < 1e-5
        lengths.add(len(a.token_ids))
        if record:
            assert a.experts.shape == (
                len(a.prompt_ids) + len(a.token_ids) - 1,
                *b.experts.shape[1:],
            )
            assert (a.experts == b.experts).all()
    assert len(lengths) > 3, "responses should end at different steps"


def flat(groups) -> list:
    return [response for group in groups for response in group]


def layers(policy: Policy):
    return zip(policy.network.body.layers, policy.network._frozen, strict=True)


def test_gradient_checkpointing_changes_no_gradient_also_under_a_replay():
    policy = made(*FAMILIES["qwen3_moe"])
    batch = batch_of(policy, sample(policy))
    batch.replay_BSLK = batch.experts_BSLK.flip(0)
    _, kept = gradients(policy, batch, False)
    policy.network.checkpointing = True
    _, again = gradients(policy, batch, False)
    for name, grad in kept.items():
        torch.testing.assert_close(again[name], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "extra",
    [
        {"hidden_act": "gelu"},
        {"attn_implementation": "eager"},
        {"use_sliding_window": True, "sliding_window": 4},
    ],
    ids=str,
)
def test_a_setting_that_changes_the_arithmetic_is_not_known(extra):
    kind, config, sizes = FAMILIES["qwen3"]
    assert made(kind, config, sizes | extra).network is None


def test_a_model_that_computes_otherwise_is_not_known_whatever_its_name():
    policy = made(*FAMILIES["llama"])
    assert network.is_supported(policy.model)
    policy.model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + 1)
    policy.model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: (output[0] * 2, output[1])
    )
    assert not network.is_supported(policy.model)


def test_an_unknown_architecture_runs_through_its_own_forward():
    tokenizer = small_policy().tokenizer
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    policy = Policy(GPT2LMHeadModel(config), tokenizer)
    assert policy.network is None
    batch = batch_of(policy, sample(policy))
    difference = (policy.forward(batch).logp_BT - batch.engine_logp_BT)[batch.mask_BT]
    assert difference.abs().max() < 1e-5


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def compare(ours, plain, *inputs: torch.Tensor) -> None:
    """Values and gradients."""
    a, b = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(a)
    for x, y in zip(
        torch.autograd.grad((a * weights).sum(), inputs),
        torch.autograd.grad((b * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_kernels_against_their_plain_forms():
    torch.manual_seed(1)
    x, weight, per_head = (
        torch.randn(*shape, requires_grad=True) for shape in ((7, 3, 8), (8,), (3, 8))
    )

    def plain_norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    compare(lambda x, w: kernels.rms_norm(x, w, 1e-6), plain_norm, x, weight)
    compare(lambda x, w: kernels.rms_norm(x, w, 1e-6), plain_norm, x, per_head)
    compare(kernels.swiglu, lambda h: F.silu(h[..., :4]) * h[..., 4:], x)
    angle = torch.randn(7, 1, 4)

    def plain_rotate(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
        ).flatten(-2)

    compare(
        lambda x: kernels.rotate(x, torch.polar(torch.ones_like(angle), angle)), plain_rotate, x
    )
    with torch.no_grad():
        torch.testing.assert_close(kernels.rms_norm(x, per_head, 1e-6), plain_norm(x, per_head))
        torch.testing.assert_close(kernels.swiglu(x), F.silu(x[..., :4]) * x[..., 4:])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_in_chunks_are_those_of_all_logits_at_once(monkeypatch, temperature):
    monkeypatch.setattr(kernels, "CHUNK", {"cpu": 50})  # two tokens of 25
    x, weight = torch.randn(9, 6, requires_grad=True), torch.randn(25, 6, requires_grad=True)
    taken = torch.randint(0, 25, (9,))
    logits = x @ weight.t() / temperature
    plain = logits.log_softmax(-1)
    logp, entropy = kernels.TokenLogProbs.apply(x, weight, taken, temperature, True)
    torch.testing.assert_close(logp, plain.gather(-1, taken[:, None])[:, 0], atol=1e-6, rtol=1e-5)
    spread = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(entropy, spread, atol=1e-5, rtol=1e-4)
    slope, steep = torch.randn(2, 9)
    at_targets = plain.gather(-1, taken[:, None])[:, 0]
    for parts in ((1, 0), (0, 1), (1, 1)):  # log-probs alone, the entropy alone, both
        found = []
        for of_logp, of_entropy in ((logp, entropy), (at_targets, spread)):
            loss = sum(
                (part * s).sum()
                for part, s, on in zip((of_logp, of_entropy), (slope, steep), parts, strict=True)
                if on
            )
            found.append(torch.autograd.grad(loss, (x, weight), retain_graph=True))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_gradient_of_the_entropy_is_its_finite_difference():
    """In float32, so within the differences' own rounding; a far logit, whose probability is 0,
    gives no NaN.
    """
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
    weight[0] *= 200

    def total(x):
        return (
            kernels.TokenLogProbs.apply(x, weight, torch.tensor([1, 2, 3]), 0.8, True)[1]
            .double()
            .sum()
        )

    (grad,) = torch.autograd.grad(total(x), x)
    assert grad.isfinite().all()
    with torch.no_grad():
        for i, k in ((0, 0), (1, 2), (2, 3)):
            step = torch.zeros_like(x)
            step[i, k] = 2e-3
            assert grad[i, k] == pytest.approx(
                float(total(x + step) - total(x - step)) / 4e-3, abs=5e-3, rel=2e-2
            )


def test_memory_of_the_log_probs_does_not_grow_with_tokens_times_vocabulary(monkeypatch):
    """The largest tensor alive at once while 2,000 tokens meet a vocabulary of 5,000 is a chunk,
    not 40 MB.
    """
    monkeypatch.setattr(kernels, "CHUNK", {"cpu": 1 << 17})
    x, weight = torch.randn(2000, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            tensors = [
                t
                for t in (result if isinstance(result, tuple | list) else [result])
                if torch.is_tensor(t)
            ]
            largest = max([largest, *(t.numel() for t in tensors)])
            return result

    with Watch():
        logp, entropy = kernels.TokenLogProbs.apply(
            x, weight, torch.randint(0, 5000, (2000,)), 1.0, True
        )
        (logp.sum() + entropy.sum()).backward()
    assert largest <= 1 << 17


@pytest.fixture(params=["shared prompts", "rows by themselves"])
def laid_out(request, monkeypatch):
    """A policy, a batch and its layout, in buckets of a few rows."""
    monkeypatch.setattr(packing, "BUCKET_TOKENS", 40)
    monkeypatch.setattr(packing, "WORTH_SHARING", 0.1 if request.param == "shared prompts" else 1.0)
    policy = small_policy()
    batch = batch_of(policy, sample(policy, group_size=5))
    layout = packing.lay_out(batch)
    assert isinstance(layout, packing.SharedPrompts) == (request.param == "shared prompts")
    return policy, batch, layout


def test_every_position_stands_where_the_layout_says(laid_out):
    _, batch, layout = laid_out
    placed = layout.slot_BS >= 0
    assert torch.equal(placed | batch.attention_BS, batch.attention_BS) and placed[fed(batch)].all()
    assert torch.equal(layout.tokens_N[layout.slot_BS[placed]], batch.tokens_BS[placed])
    positions = batch.attention_BS.cumsum(1) - 1
    assert torch.equal(layout.positions_N[layout.slot_BS[placed]], positions[placed])
    assert layout.longest > int(layout.positions_N.max()) and len(layout.rectangles) > 3
    mask = batch.mask_BT
    back = layout.responses(layout.target_M.double(), mask.shape[1])
    assert (
        torch.equal(back[mask], batch.tokens_BS[:, batch.prompt_width :][mask].double())
        and not back[~mask].any()
    )


def test_little_is_computed_in_vain_or_twice(laid_out):
    _, batch, layout = laid_out
    assert len(layout.tokens_N) < 0.8 * batch.tokens_BS.numel()
    # prompts once and no last tokens: fewer than the real tokens
    if isinstance(layout, packing.SharedPrompts):
        assert len(layout.tokens_N) < 0.8 * int(batch.attention_BS.sum())


def test_a_response_does_not_see_its_neighbours_nor_its_future(laid_out):
    """Changing a token changes what stands after it in its own row and nothing else."""
    policy, batch, _ = laid_out
    before = policy.forward(batch).logp_BT
    row = int(batch.mask_BT.sum(1).argmax())
    column = batch.prompt_width + 4
    batch.tokens_BS[row, column] = (batch.tokens_BS[row, column] + 1) % 90
    # other rows may round otherwise, as the experts' groups have changed: 1e-5 in sums of a few
    # hundred numbers
    changed = ((policy.forward(batch).logp_BT - before).abs() > 1e-4).nonzero()
    assert (changed[:, 0] == row).all() and int(changed[:, 1].min()) == 4 and len(changed) > 3


def test_responses_of_one_token_are_predicted_by_the_prompt_alone():
    policy = small_policy()
    batch = batch_of(policy, sample(policy, tokens=1))
    assert isinstance(packing.lay_out(batch), packing.SharedPrompts)
    torch.testing.assert_close(
        policy.forward(batch).logp_BT, batch.engine_logp_BT, atol=1e-5, rtol=1e-5
    )


def test_prompts_that_an_engine_routed_differently_are_not_shared():
    policy = small_policy()
    batch = batch_of(policy, sample(policy))
    batch.replay_BSLK = batch.experts_BSLK.clone()
    assert isinstance(packing.lay_out(batch), packing.SharedPrompts)
    batch.replay_BSLK[1, batch.prompt_width - 1] = batch.replay_BSLK[
        1, batch.prompt_width - 1
    ].flip(0)
    assert not isinstance(packing.lay_out(batch), packing.SharedPrompts)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2"])
def test_mixed_precision_rounds_products_alone(family):
    """Log-probs and gradients near those of float32, float32 results and gradients, entropy and
    values too.
    """
    if family == "gpt2":
        tokenizer = small_policy().tokenizer
        config = GPT2Config(
            vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, eos_token_id=2
        )
        torch.manual_seed(0)
        policy = Policy(GPT2LMHeadModel(config), tokenizer)
    else:
        policy = made(*FAMILIES[family])
        with torch.no_grad():  # logits of usual size: rounding is relative
            for parameter in policy.model.parameters():
                parameter.mul_(0.4)
    batch = batch_of(policy, sample(policy))
    plain = policy.network is None
    exact, exact_grad = gradients(policy, batch, plain)
    # rounding may move a token to another expert, which is no error
    batch.replay_BSLK = batch.experts_BSLK
    policy.precision = torch.bfloat16
    rounded, rounded_grad = gradients(policy, batch, plain)
    mask = batch.mask_BT
    assert rounded.logp_BT.dtype == rounded.entropy_BT.dtype == torch.float32
    difference = (rounded.logp_BT - exact.logp_BT)[mask].abs()
    assert 1e-6 < difference.mean() < 0.02 and difference.max() < 0.15
    for name, grad in exact_grad.items():
        assert rounded_grad[name].dtype == torch.float32
        cosine = F.cosine_similarity(grad.flatten(), rounded_grad[name].flatten(), dim=0)
        assert cosine > 0.98 or grad.norm() < 1e-3, (name, float(cosine))


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["none", "r2"])
def test_three_steps_are_those_of_the_plain_path(replay):
    """The golden run: same problems, same random numbers, sampled, scored and trained with
    everything that is fast, and with transformers' own forward, a growing cache and a pass under
    the old policy."""
    found = {}
    for kind in ("fast", "plain"):
        t = trainer(
            GSPO(clip_low=0.01, clip_high=0.01),
            replay=replay,
            old_pass="auto" if kind == "fast" else "always",
        )
        if kind == "plain":
            t.policy.network = None
        found[kind] = steps(t, 3)
    for fast, plain in zip(found["fast"], found["plain"], strict=True):
        for name in plain.keys() & fast.keys():
            rounding = ("time/", "throughput/", "compute/", "mismatch/", "kl/", "ratio/floor_")
            if not name.startswith(rounding):
                assert fast[name] == pytest.approx(plain[name], rel=2e-3, abs=2e-5), name


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "olmoe"])
def test_a_rounded_pass_without_gradient_is_that_with_gradient(family):
    """Else the ratio to pi_old would not start at 1: norms must round at the same places."""
    policy = made(*FAMILIES[family])
    batch = batch_of(policy, sample(policy))
    policy.precision = torch.bfloat16
    with torch.no_grad():
        old = policy.forward(batch).logp_BT
    assert torch.equal(policy.forward(batch).logp_BT, old)


@pytest.mark.parametrize("shape", [(16,), (3, 16)], ids=["one weight", "a weight by head"])
def test_the_fused_norm_is_the_norm(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, *shape, generator=generator)
    weight = torch.rand(shape, generator=generator) + 0.5
    scale = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = (x.double() * scale * weight).float()
    torch.testing.assert_close(kernels.fused_rms_norm(x, weight, 1e-6), expected)
    rounded = kernels.fused_rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, atol=0.03, rtol=0.03)
    inputs = x.requires_grad_(), weight.requires_grad_()
    compare(
        lambda x, w: kernels.fused_rms_norm(x, w, 1e-6),
        lambda x, w: kernels.rms_norm(x, w, 1e-6),
        *inputs,
    )


def test_autocast_does_not_make_the_fused_norm_float32(monkeypatch):
    """For CUDA, autocast computes F.rms_norm in float32. Then q and k would have another type than
    v.
    """
    norm, enabled = F.rms_norm, []
    monkeypatch.setattr(
        F, "rms_norm", lambda *x: enabled.append(torch.is_autocast_enabled("cpu")) or norm(*x)
    )
    x = torch.randn(2, 3, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for weight in (torch.ones(16), torch.ones(3, 16)):
            assert kernels.fused_rms_norm(x, weight, 1e-6).dtype == torch.bfloat16
    assert enabled == [False, False]
