"""Active parameters, counted by hand for families of experts; unknown where configuration and
modules do not fit.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from builders import small_policy
from gspo.model.cost import EXPERTS, active_parameters, number, uniform_head_dim
from gspo.model.policy import Policy
from trainers import steps, trainer

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 16}
TWO_OF_64 = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}

EXPERT = 3 * 32 * 16  # gate, up and down
SQUARES = 4 * 32 * 32  # q, k, v and o
NORMS = 2 * 32  # of a layer
ROUTER = 64 * 32
ENDS = 32 + 100 * 32  # the last norm, and the output layer; not the input embedding's look-up
OF_LATENT = 32 * 12 + 12 + 12 * 2 * 12 + 32 * (8 + 4) + 8 + 8 * 2 * (8 + 16) + 2 * 16 * 32

FAMILIES = {
    "qwen3_moe": (
        Qwen3MoeConfig(**SIZES, **HEADS, **TWO_OF_64, num_experts=64),
        2 * (SQUARES + 2 * 16 + NORMS + ROUTER + 2 * EXPERT) + ENDS,
    ),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=64, num_experts_per_tok=2, intermediate_size=16),
        2 * (SQUARES + NORMS + ROUTER + 2 * EXPERT) + ENDS,
    ),
    "olmoe": (
        OlmoeConfig(**SIZES, num_experts=64, num_experts_per_tok=2, intermediate_size=16),
        2 * (SQUARES + 2 * 32 + NORMS + ROUTER + 2 * EXPERT) + ENDS,
    ),
    "glm4_moe": (  # a dense layer, then one with a shared expert
        Glm4MoeConfig(**SIZES, **HEADS, **TWO_OF_64, **GROUPS, n_routed_experts=64),
        2 * (SQUARES + NORMS) + 3 * 32 * 48 + ROUTER + 3 * EXPERT + ENDS,
    ),
    "gpt_oss": (  # biases everywhere, and an attention sink per head
        GptOssConfig(
            **SIZES, **HEADS, num_local_experts=64, num_experts_per_tok=2, intermediate_size=16
        ),
        2 * (SQUARES + 4 * 32 + 2 + NORMS + ROUTER + 64 + 2 * (EXPERT + 2 * 16 + 32)) + ENDS,
    ),
    "deepseek_v3": (
        DeepseekV3Config(**SIZES, **TWO_OF_64, **GROUPS, **LATENT, n_routed_experts=64),
        2 * (OF_LATENT + NORMS) + 3 * 32 * 48 + ROUTER + 3 * EXPERT + ENDS,
    ),
    "llama": (
        LlamaConfig(**SIZES, intermediate_size=48),
        2 * (SQUARES + NORMS + 3 * 32 * 48) + ENDS,
    ),
    "gpt2": (  # tied: the embedding counts as output layer; its positions, and biases
        GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2, n_positions=24),
        12 * 32 * 32 + (3 + 1 + 4 + 1) * 32 + 2 * NORMS + NORMS + 100 * 32 + 24 * 32,
    ),
}


def model(config) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_active_parameters_by_hand(family):
    config, by_hand = FAMILIES[family]
    assert active_parameters(model(config)) == by_hand


def test_attention_of_another_width_for_keys_than_for_values():
    policy = Policy(model(FAMILIES["deepseek_v3"][0]), small_policy().tokenizer)
    once, twice = (policy.forward_flops(torch.tensor([n])) for n in (1, 2))
    # 2 layers, 2 heads, 12 dimensions of queries and keys, 16 of values; half of the pairs of
    # positions
    assert twice - 2 * once == pytest.approx(2 * 2 * (12 + 16) * (2**2 - 2))


def test_what_cannot_be_told_is_no_number():
    zero = LongcatFlashConfig(
        **{k: v for k, v in SIZES.items() if k != "num_hidden_layers"}, **LATENT, num_layers=1, num_hidden_layers=2,
        n_routed_experts=8, zero_expert_num=4, moe_topk=2, ffn_hidden_size=48, expert_ffn_hidden_size=16,
    )  # fmt: skip
    assert active_parameters(model(zero)) is None, (
        "some of a token's places go to experts that compute nothing"
    )
    for key, value in (
        ("num_experts_per_tok", 65),
        ("num_experts_per_tok", 0),
        ("num_local_experts", 32),
    ):
        other = model(copy.deepcopy(FAMILIES["gpt_oss"][0]))
        setattr(other.config, key, value)
        assert active_parameters(other) is None, f"{key}={value}"
    for said in ({"num_experts": [8, 4]}, {"num_experts": 8, "n_routed_experts": 16}):
        assert number(SimpleNamespace(**said), EXPERTS) is None, said
    other = model(copy.deepcopy(FAMILIES["llama"][0]))
    other.config.num_experts = 8
    assert active_parameters(other) is None, "experts that are nowhere among the modules"


@pytest.mark.parametrize("family", ["gemma4_text", "minimax"])
def test_layers_of_several_sizes_and_linear_attention_have_no_cost_that_is_known(family):
    config = CONFIG_MAPPING[family]()
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    assert active_parameters(outline) is None
    assert (uniform_head_dim(config) is None) == (family == "gemma4_text")


def test_a_run_of_unknown_cost_reports_none():
    t = trainer()
    t.policy.active_parameters = None
    metrics = steps(t, 2)[-1]
    assert "compute/flops" not in metrics and metrics["compute/tokens"] > 0 and t.state.flops == 0.0
