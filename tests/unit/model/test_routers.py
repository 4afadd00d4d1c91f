"""Routing Replay of every family of routers, against transformers' own forward.

Replays are adversarial: no token goes to an expert that its router would choose. Where a family has
a bias that only selects, transformers itself is made to choose the replayed experts by it.
"""

import importlib
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from builders import batch_of, fed, sample, small_policy
from gspo.data.batch import NOT_RECORDED
from gspo.model.forward import network
from gspo.model.policy import Policy
from gspo.model.routers import (
    FORMULAS,
    SELECTION_BIAS,
    check_gate_formula,
    gate_weights,
    probabilities,
)
from gspo.model.routing_replay import Routing
from gspo.train.routing import expert_counts, token_consistency
from moe_families import EXPERTS, LAYERS, MOE_FAMILIES, TOP_K

# their routers select with a bias that does not change the weights of the selected
BIASED = (
    "gpt_oss", "minimax_m2", "deepseek_v3", "glm4_moe", "dots1", "kimi_linear", "nemotron_h",
    "deepseek_v4",
)  # fmt: skip
families = pytest.mark.parametrize("family", MOE_FAMILIES)


@cache
def policy_of(family: str) -> Policy:
    return small_policy(MOE_FAMILIES[family])


@cache
def batch_of_family(family: str, rows: int = 6):
    return batch_of(policy_of(family), sample(policy_of(family), group_size=2, tokens=6)[:rows])


def gradients(policy: Policy, batch) -> tuple:
    """Log-probs of the response tokens, the routers' choice, and the gradients of the routers."""
    policy.model.zero_grad()
    output = policy.forward(batch)
    logp_N = output.logp_BT[batch.mask_BT]
    logp_N.sum().backward()
    router_gradients = [router.weight.grad.clone() for router in policy.routing.routers]
    return logp_N.detach(), output.experts_BSLK, router_gradients


def assert_same_gradients(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3 * float(b.abs().max()) + 1e-6, rtol=0)


# ------------------------------------------------------------------------------------- whole models
@families
def test_a_forward_without_replay_is_that_of_transformers(family):
    policy, batch = policy_of(family), batch_of_family(family)
    assert {type(router).__name__ for router in policy.routing.routers} == {
        MOE_FAMILIES[family].router
    }
    with torch.no_grad():
        logp_BT = policy.forward(batch).logp_BT
        for row in range(len(batch)):
            tokens = batch.tokens_BS[row][batch.attention_BS[row]]
            count = int(batch.mask_BT[row].sum())
            logits_SV = policy.model(input_ids=tokens[None], use_cache=False).logits[0].float()
            expected = logits_SV.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[-count:, 0]
            torch.testing.assert_close(logp_BT[row, :count], expected, atol=2e-4, rtol=1e-4)


@families
def test_a_replay_of_the_own_choice_changes_nothing(family):
    policy, batch = policy_of(family), batch_of_family(family)
    free_logp_N, free_experts, free_gradients = gradients(policy, batch)
    replayed = replace(batch, replay_BSLK=batch.experts_BSLK)
    logp_N, experts, router_gradients = gradients(policy, replayed)
    torch.testing.assert_close(logp_N, free_logp_N, atol=1e-5, rtol=1e-5)
    real = fed(batch)
    assert torch.equal(experts[real].sort(-1).values, free_experts[real].sort(-1).values)
    assert_same_gradients(router_gradients, free_gradients)


@families
def test_a_replay_of_experts_that_no_router_would_choose(family, monkeypatch):
    """The tokens go to these experts, with the weights of the family's formula, and the routers
    learn from it."""
    policy, batch = policy_of(family), batch_of_family(family, rows=1)
    positions = batch.tokens_BS.shape[1] - 1  # the last token predicts nothing
    replay_BSLK = torch.full_like(batch.experts_BSLK, NOT_RECORDED)
    generator = torch.Generator().manual_seed(6)
    for layer in range(LAYERS):  # a layer's own choice depends on the replay of those before it
        with torch.no_grad():
            own = policy.forward(replace(batch, replay_BSLK=replay_BSLK)).experts_BSLK[:, :, layer]
        chances_BSE = torch.rand(*own.shape[:2], EXPERTS, generator=generator)
        chances_BSE.scatter_(-1, own.clamp(min=0).long(), -1)
        replay_BSLK[:, :, layer] = chances_BSE.topk(TOP_K).indices
    with recorded_calls(policy, monkeypatch) as (logits, used):
        logp_N, own, router_gradients = gradients(policy, replace(batch, replay_BSLK=replay_BSLK))
    same = own[0, :positions, :, :, None] == replay_BSLK[0, :positions, :, None]
    assert not same.any(), "experts that the router would have chosen are replayed"
    assert torch.isfinite(logp_N).all()
    for layer, router in enumerate(policy.routing.routers):
        experts_NK, weights_NK = used[layer]
        expected_NK = replay_BSLK[0, :positions, layer].long()
        assert torch.equal(experts_NK[:positions], expected_NK)
        expected = formula_by_hand(router, logits[layer][:positions], expected_NK)
        torch.testing.assert_close(weights_NK[:positions], expected, atol=1e-6, rtol=1e-5)
        assert (weights_NK[:positions] > 0).all()
        predicting_NK = expected_NK[batch.prompt_width - 1 :]
        assert (router_gradients[layer][predicting_NK.unique()].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("family", BIASED)
def test_a_replay_is_what_transformers_computes_if_a_bias_makes_it_choose_these_experts(family):
    policy, batch = policy_of(family), batch_of_family(family)
    chosen = [2, 3]  # of one group where there are groups
    biases = selection_biases(policy)
    saved = [bias.clone() for bias in biases]
    try:
        for bias in biases:
            bias[chosen] += 64
        expected_logp_N, experts, expected_gradients = gradients(policy, batch)
    finally:
        for bias, before in zip(biases, saved, strict=True):
            bias.copy_(before)
    assert set(experts[fed(batch)].unique().tolist()) == set(chosen)
    # the order of a token's experts does not matter
    replay_BSLK = torch.tensor(chosen[::-1], dtype=torch.int16).expand(batch.experts_BSLK.shape)
    logp_N, _, router_gradients = gradients(policy, replace(batch, replay_BSLK=replay_BSLK))
    torch.testing.assert_close(logp_N, expected_logp_N, atol=1e-3, rtol=1e-3)
    assert_same_gradients(router_gradients, expected_gradients)


@families
def test_the_engine_records_what_the_trainer_would_choose(family):
    """Decoding with the model's cache, or from whole rows, for R3. Rounding may move a token."""
    policy = policy_of(family)
    batch = batch_of(policy, sample(policy, group_size=2, tokens=6, record_experts=True))
    real = fed(batch)
    theirs, own = batch.engine_experts_BSLK[real], batch.experts_BSLK[real]
    assert (theirs >= 0).all() and (theirs < EXPERTS).all()
    assert (theirs.sort(-1).values == own.sort(-1).values).all(-1).float().mean() > 0.98


def selection_biases(policy: Policy) -> list[torch.Tensor]:
    """The biases of the layers' routers, as tensors that share their memory."""
    tensors = [*policy.model.named_parameters(), *policy.model.named_buffers()]
    biases = [
        tensor.data for name, tensor in tensors if name.endswith((SELECTION_BIAS, "router.bias"))
    ]
    assert len(biases) == LAYERS
    return biases


@contextmanager
def recorded_calls(policy: Policy, monkeypatch):
    """Within: the logits of each router, and experts and weights that its experts were called with."""
    logits: list[torch.Tensor] = []
    used: list[tuple[torch.Tensor, torch.Tensor]] = []
    handles = [
        router.register_forward_hook(lambda _, __, output: logits.append(output[0].detach()))
        for router in policy.routing.routers
    ]
    if policy.network:
        computed = network.run_experts

        def watched(module, h_NW, weights_NK, experts_NK, *others):
            used.append((experts_NK, weights_NK.detach()))
            return computed(module, h_NW, weights_NK, experts_NK, *others)

        monkeypatch.setattr(network, "run_experts", watched)
    else:
        parents = [
            name.rpartition(".")[0]
            for name, module in policy.model.named_modules()
            if module in policy.routing.routers
        ]
        for parent in parents:
            module = policy.model.get_submodule(f"{parent}.experts")
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args: used.append((args[1], args[2].detach()))
                )
            )
    try:
        yield logits, used
    finally:
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------- the formulas
def formula_by_hand(router, logits_NE: torch.Tensor, experts_NK: torch.Tensor) -> torch.Tensor:
    """The weights, written down once more from the tables of the papers and of transformers."""
    name = type(router).__name__
    picked_NK = logits_NE.double().gather(-1, experts_NK)
    if name == "DeepseekV4TopKRouter":
        score_NK = picked_NK.exp().log1p().sqrt()  # the default: the root of softplus
    elif "Topk" in name or name == "MiniMaxM2TopKRouter":
        score_NK = 1 / (1 + (-picked_NK).exp())
    else:
        score_NK = picked_NK.exp() / logits_NE.double().exp().sum(-1, keepdim=True)
    always = ("Mixtral", "MiniMax", "Qwen3_5", "GptOss", "DeepseekV4")
    if name.startswith(always) or router.norm_topk_prob:
        score_NK = score_NK / score_NK.sum(-1, keepdim=True)
    factor = router.routed_scaling_factor if "Topk" in name or "V4" in name else 1.0
    return (factor * score_NK).to(logits_NE.dtype)


# the modules of transformers that hold the routers
MODULES = {
    "Qwen3MoeTopKRouter": "qwen3_moe",
    "Qwen2MoeTopKRouter": "qwen2_moe",
    "Qwen3NextTopKRouter": "qwen3_next",
    "Qwen3_5MoeTopKRouter": "qwen3_5_moe",
    "OlmoeTopKRouter": "olmoe",
    "FlexOlmoTopKRouter": "flex_olmo",
    "MixtralTopKRouter": "mixtral",
    "MiniMaxTopKRouter": "minimax",
    "GptOssTopKRouter": "gpt_oss",
    "MiniMaxM2TopKRouter": "minimax_m2",
    "DeepseekV3TopkRouter": "deepseek_v3",
    "DeepseekV32TopkRouter": "deepseek_v32",
    "Glm4MoeTopkRouter": "glm4_moe",
    "Glm4MoeLiteTopkRouter": "glm4_moe_lite",
    "GlmMoeDsaTopkRouter": "glm_moe_dsa",
    "KimiLinearTopkRouter": "kimi_linear",
    "Dots1TopkRouter": "dots1",
    "NemotronHTopkRouter": "nemotron_h",
    "ExaoneMoeTopkRouter": "exaone_moe",
    "MiMoV2FlashTopkRouter": "mimo_v2_flash",
    "SolarOpenTopkRouter": "solar_open",
    "DeepseekV4TopKRouter": "deepseek_v4",
}


def router_of(name: str, normalises: bool):
    """A router of this class with random weights."""
    kind = MODULES[name]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = CONFIG_MAPPING[kind]().get_text_config()
    config.hidden_size, config.norm_topk_prob = 32, normalises
    config.num_experts_per_tok, config.routed_scaling_factor = TOP_K, 1.75
    config.n_group, config.topk_group = 4, 2
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, key):
            setattr(config, key, EXPERTS)
    router = getattr(module, name)(config)
    generator = torch.Generator().manual_seed(7)
    for tensor in router.state_dict().values():
        tensor.normal_(0, 0.3, generator=generator)
    return router


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_of_every_class_of_routers(name, normalises):
    """On random input the weights of any experts, chosen or not, are those of the formula."""
    router = router_of(name, normalises)
    check_gate_formula(router)
    h_NW = torch.randn(64, 32, generator=torch.Generator().manual_seed(8))
    arguments = (torch.zeros(EXPERTS),) if name == "MiniMaxM2TopKRouter" else ()
    logits_NE, weights_NK, own_NK = router(h_NW, *arguments)
    torch.testing.assert_close(formula_by_hand(router, logits_NE, own_NK), weights_NK)
    other_NK = logits_NE.scatter(-1, own_NK, 1e9).topk(TOP_K, largest=False).indices
    assert not (other_NK[:, :, None] == own_NK[:, None]).any()
    ours_NK = gate_weights(router, logits_NE, other_NK)
    torch.testing.assert_close(ours_NK, formula_by_hand(router, logits_NE, other_NK))
    (ours_NK * torch.tensor([1.0, 3.0])).sum().backward()
    assert router.weight.grad[other_NK.unique()].abs().amax(-1).min() > 0
    p_NE = probabilities(router, logits_NE)
    assert p_NE.min() >= 0
    torch.testing.assert_close(p_NE.sum(-1), torch.ones(len(p_NE)))


def test_a_router_whose_weights_contain_the_bias_is_refused():
    class Glm4MoeTopkRouter(torch.nn.Module):
        """Has the name of a router we know, but weighs experts by the scores that select."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8))
            self.e_score_correction_bias = torch.nn.Buffer(torch.zeros(4))
            self.norm_topk_prob, self.routed_scaling_factor = True, 1.0

        def forward(self, x):
            logits = x @ self.weight.T
            weights, experts = (logits.sigmoid() + self.e_score_correction_bias).topk(2)
            return logits, weights / weights.sum(-1, keepdim=True), experts

    with pytest.raises(ValueError, match=r"Glm4MoeTopkRouter .* cannot be replayed"):
        Routing(Glm4MoeTopkRouter()).check_replay()


def test_a_router_of_another_class_is_refused_by_name():
    """It returns its results in another order."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = GraniteMoeConfig(vocab_size=40, **sizes, **heads)
    routing = Routing(GraniteMoeForCausalLM(config))
    assert routing.layers == 0, "so nothing is recorded"
    with pytest.raises(ValueError, match=r"no router to replay.*has GraniteMoeTopKRouter$"):
        routing.check_replay()
    with pytest.raises(ValueError, match=r"no supported router.*has GraniteMoeTopKRouter$"):
        routing.parameters()


# ------------------------------------------------------------------------------------------ metrics
def test_layers_with_a_fixed_table_are_counted_out():
    """The first layer of this DeepSeek-V4 reads a token's experts from a table."""
    policy, batch = policy_of("deepseek_v4"), batch_of_family("deepseek_v4")
    assert policy.model.config.num_hidden_layers == LAYERS + 1
    assert policy.routing.layer_numbers == [1, 2]
    assert batch.experts_BSLK.shape[2] == LAYERS
    assert token_consistency(batch.experts_BSLK, batch.experts_BSLK, batch).shape[1] == LAYERS
    routers = sum(len(list(router.parameters())) for router in policy.routing.routers)
    assert len(policy.routing.parameters()) == routers + 1, "its weights can be frozen too"


@families
def test_consistency_compares_sets_and_loads_count_choices(family):
    policy, batch = policy_of(family), batch_of_family(family)
    reversed_BSLK = batch.experts_BSLK.flip(-1)
    assert (token_consistency(reversed_BSLK, batch.experts_BSLK, batch) == 1).all()
    counts_LE = expert_counts(batch.experts_BSLK, batch, policy.routing.experts)
    assert counts_LE.sum(-1).tolist() == [TOP_K * int(batch.mask_BT.sum())] * LAYERS


@families
def test_the_balance_of_equal_loads_is_one(family):
    """E sum_e p_e / E, for probabilities that sum to 1."""
    policy, batch = policy_of(family), batch_of_family(family)
    loads_LE = torch.full((LAYERS, EXPERTS), 1 / EXPERTS)
    with policy.routing.balancing(loads_LE):
        balance_BT = policy.forward(batch).balance_BT
    torch.testing.assert_close(
        balance_BT[batch.mask_BT], torch.ones(int(batch.mask_BT.sum())), atol=1e-5, rtol=0
    )


# --------------------------------------------------------------------------------------- precision
@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "qwen3_next"])
def test_routers_stay_float32_where_products_are_bfloat16(family):
    model, tokenizer = MOE_FAMILIES[family].make()
    policy = Policy(model, tokenizer, precision=torch.bfloat16)
    exact = batch_of_family(family)
    seen = []
    for router in policy.routing.routers:
        router.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    output = policy.forward(replace(exact, replay_BSLK=exact.experts_BSLK))
    for router, (h, (logits_NE, _, _)) in zip(policy.routing.routers, seen, strict=True):
        h_NW = h.detach().float().reshape(-1, h.shape[-1])
        expected = torch.nn.functional.linear(h_NW, router.weight, getattr(router, "bias", None))
        assert logits_NE.dtype == torch.float32
        torch.testing.assert_close(logits_NE, expected)
    output.logp_BT[exact.mask_BT].sum().backward()
    assert all(router.weight.grad.abs().max() > 0 for router in policy.routing.routers)
