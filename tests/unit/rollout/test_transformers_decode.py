"""Architectures that run through their own forward: how they are padded, decoded, scored and
refused.
"""

import pytest
import torch

from architectures import small_model
from builders import batch_of, problems, sample, small_policy
from daily import daily_but
from gspo.data.pack import pack
from gspo.model.forward.padded_forward import PaddedRows, logits_of_row, padding_side
from gspo.model.policy import Policy
from gspo.model.tokenizer import character_tokenizer
from gspo.model.value_head import ValueHead
from gspo.rollout.engines import transformers_decode
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.transformers_decode import CachedDecoder, UncachedDecoder, disagreement
from gspo.train.old_policy import is_exact
from moe_families import MOE_FAMILIES

CACHED = ("gpt2", "qwen3_next", "qwen3_5_text", "mamba", "jamba", "lfm2", "gemma3_text")
UNCACHED = ("recurrent_gemma", "rwkv")


def policy_of(kind: str) -> Policy:
    policy = Policy(small_model(kind), character_tokenizer())
    assert policy.network is None
    return policy


@pytest.mark.parametrize("kind", ["nemotron_h", "gemma3_text"])
def test_the_old_policy_of_another_forward_pass_is_computed_and_not_taken_from_the_engine(kind):
    """A step of Nemotron-H's cache bounds a time step less tightly than its whole pass."""
    if kind == "nemotron_h":
        policy = small_policy(MOE_FAMILIES[kind])
    else:
        policy = policy_of(kind)
    engine = LocalEngine(policy)
    assert engine.shares_weights and engine.transformers_decoder is CachedDecoder
    assert not is_exact(engine)
    assert is_exact(LocalEngine(small_policy()))


def logp_of_rows(policy: Policy, responses) -> list[torch.Tensor]:
    """Log-probs of the response tokens, each row by itself, without padding and cache."""
    found = []
    for r in responses:
        logits_SV = logits_of_row(policy.model, [*r.prompt_ids, *r.token_ids]).log_softmax(-1)
        places = torch.arange(len(r.prompt_ids), len(r.prompt_ids) + len(r.token_ids))
        found.append(logits_SV[places - 1, torch.tensor(r.token_ids)])
    return found


@pytest.mark.parametrize(
    "kind", daily_but([*CACHED, *UNCACHED], "gpt2", "qwen3_next", "mamba", "gemma3_text", "rwkv")
)
def test_engine_and_trainer_compute_what_each_row_gives_alone(kind):
    """Prompts of unequal length, three responses each, rows that end early."""
    policy = policy_of(kind)
    assert LocalEngine(policy).transformers_decoder is (
        CachedDecoder if kind in CACHED else UncachedDecoder
    )
    policy.stop_ids = set(range(4, 99, 9))
    responses = sample(policy, tokens=20)
    assert len({len(r.token_ids) for r in responses}) > 1, "rows end at different tokens"
    batch = batch_of(policy, responses)
    with torch.no_grad():
        alone = logp_of_rows(policy, responses)
        scored = policy.forward(batch)
    for i, expected in enumerate(alone):
        torch.testing.assert_close(scored.logp_BT[i, : len(expected)], expected, atol=2e-4, rtol=0)
        torch.testing.assert_close(
            batch.engine_logp_BT[i, : len(expected)], expected, atol=2e-4, rtol=0
        )


@pytest.mark.slow
def test_both_decoders_draw_the_same_tokens(monkeypatch):
    """Routing is recorded alike too. Rounding may send one draw, or a few tokens to an expert, the
    other way.
    """
    policy = small_policy()
    policy.network = None
    found = []
    for decoder in (CachedDecoder, UncachedDecoder):
        monkeypatch.setattr(
            "gspo.rollout.engines.local.transformers_decoder",
            lambda policy, decoder=decoder: decoder,
        )
        groups = LocalEngine(policy).generate(
            SamplingRequest(problems(), 3, Sampling(1.0, 80), (1, "test"), record_experts=True)
        )
        found.append([r for group in groups for r in group])
    pairs = [(a, b) for a, b in zip(*found, strict=True) if a.token_ids == b.token_ids]
    assert len(pairs) >= len(found[0]) - 1
    for cached, whole in pairs:
        assert cached.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    same = [(a.experts == b.experts).mean() for a, b in pairs]
    assert sum(same) / len(same) > 0.99


@pytest.mark.parametrize("replay", [False, True])
def test_padding_on_either_side_gives_the_same(replay):
    """Log-probs, entropy, experts, values and gradients, also with experts that are replayed."""
    policy = small_policy()
    policy.network = None
    policy.value_head = ValueHead(policy.model.config.hidden_size)
    torch.nn.init.normal_(policy.value_head.linear.weight, std=0.1)
    batch = batch_of(policy, sample(policy))
    if replay:
        batch.replay_BSLK = (batch.experts_BSLK + 1) % policy.routing.experts
    found = []
    for side in ("left", "right"):
        policy.padding_side = side
        policy.model.zero_grad()
        output = policy.forward(batch)
        (output.logp_BT * batch.mask_BT).sum().backward()
        gradients = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
        kept = batch.mask_BT
        by_token = [x[kept].detach() for x in (output.logp_BT, output.entropy_BT, output.values_BT)]
        found.append((by_token, output.experts_BSLK[batch.attention_BS], gradients))
    (left, left_experts, left_gradients), (right, right_experts, right_gradients) = found
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    assert (left_experts == right_experts).float().mean() > 0.99
    for a, b in zip(left_gradients, right_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * float(a.abs().max()) + 1e-9, rtol=0)


def test_rows_are_moved_by_hand():
    """Two rows: a prompt of two tokens with one of response, and a prompt of one token with two."""
    policy = small_policy()
    responses = sample(policy, group_size=1, tokens=3)[:2]
    for r, prompt, tokens in zip(responses, ([5, 6], [7]), ([8], [9, 4]), strict=True):
        r.prompt_ids, r.token_ids, r.logprobs = prompt, tokens, [0.0] * len(tokens)
    batch = pack(responses, pad_id=0)
    assert batch.tokens_BS.tolist() == [[5, 6, 8, 0], [0, 7, 9, 4]]
    rows = PaddedRows(batch, "right")
    assert rows.tokens_BS.tolist()[1][:3] == [7, 9, 4]
    assert rows.attention_BS.long().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert rows.kept_columns == 4, "from the last token of the shortest prompt on"
    places = torch.arange(4).expand(2, 4)
    assert rows.predicting(places).tolist() == [[1, 2], [0, 1]]
    assert rows.as_in_batch(places).tolist()[0] == [0, 1, 2, 3]
    assert rows.as_in_batch(places).tolist()[1][1:] == [0, 1, 2]


def test_a_model_whose_tokens_see_later_ones_is_refused():
    with pytest.raises(
        ValueError, match=r"BertLMHeadModel cannot be trained: it is not causal.*is_decoder=true"
    ):
        Policy(small_model("bert"), character_tokenizer())


def test_weights_of_nan_are_refused_by_their_name():
    model = small_model("gpt2")
    model.transformer.h[0].mlp.c_fc.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="cannot be trained: its logits are NaN"):
        padding_side(model)


def test_a_model_that_padding_changes_on_either_side_is_refused():
    model = small_model("gpt2")

    def shifted(module, args, kwargs, output):
        # every logit depends on the number of columns
        output.logits = output.logits + output.logits.shape[1]
        return output

    model.register_forward_hook(shifted, with_kwargs=True)
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be trained: it is not causal"):
        padding_side(model)

    other = small_model("gpt2")

    def counted(module, args, kwargs, output):
        if len(kwargs["input_ids"]) > 1:
            output.logits = output.logits + 5 * torch.randn(output.logits.shape[-1])
        return output

    other.register_forward_hook(counted, with_kwargs=True)
    with pytest.raises(
        ValueError,
        match=r"differ by \S+ with padding on the left and \S+ with padding on the right",
    ):
        padding_side(other)


def test_biases_of_0_do_not_hide_that_padding_reaches_other_tokens():
    """In RecurrentGemma, padding on the left reaches the row's tokens through biases."""
    model = small_model("recurrent_gemma")
    biases = [p for name, p in model.named_parameters() if name.endswith("linear_out.bias")]
    assert biases and not any(bias.any() for bias in biases)
    assert padding_side(model) == "right"
    assert not any(bias.any() for bias in biases), "the weights are as they were"


def test_a_forward_that_fails_is_one_line():
    model = small_model("gpt2")
    model.transformer.wpe = torch.nn.Embedding(4, 64)  # fewer positions than the configuration says
    with pytest.raises(
        ValueError,
        match=r"GPT2LMHeadModel cannot be used: its forward fails \(IndexError: index out",
    ):
        padding_side(model)


def test_a_cache_that_computes_something_else_is_not_used(capsys):
    """What it is, the user reads once, before the first rollout."""
    policy = policy_of("recurrent_gemma")
    assert disagreement(policy).startswith("its logits differ from those of a whole forward by 0.")
    LocalEngine(policy)
    assert capsys.readouterr().err.startswith(
        "RecurrentGemmaForCausalLM: its cache is not used, because its logits"
    )


def test_a_cache_whose_rows_cannot_be_chosen_is_not_used(monkeypatch):
    policy = policy_of("gpt2")
    monkeypatch.setattr(transformers_decode, "rows_of", lambda value, rows: 1 / 0)
    assert disagreement(policy) == (
        "it cannot be driven as `generate` drives others (ZeroDivisionError: division by zero)"
    )
