"""Small random models of the families of MoE models whose routers are known here."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from gspo.model.routers import SELECTION_BIAS
from gspo.model.tokenizer import character_tokenizer
from gspo.model.weights import Loaded

LAYERS = 2
EXPERTS = 8
TOP_K = 2

ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
# latent attention
LATENT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# the second layer has full attention, so that both kinds of layers are there
RECURRENT = {
    **ATTENTION,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": EXPERTS,
    "shared_expert_intermediate_size": 16,
}
# two of four groups of two experts, unlike any default
GROUPS = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


@dataclass(frozen=True)
class Family:
    """A small random model of a family; `make` is that of a model's settings.

    prefix    of the classes Config and ForCausalLM in transformers
    router    the class of its routers
    sizes     beside those that all families share
    """

    prefix: str
    router: str
    sizes: dict[str, Any]
    text_config: bool = False

    def make(self) -> Loaded:
        tokenizer = character_tokenizer()
        shared = {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 16,
            "moe_intermediate_size": 16,
            "num_hidden_layers": LAYERS,
            "num_experts_per_tok": TOP_K,
            "max_position_embeddings": 256,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        kind = "TextConfig" if self.text_config else "Config"
        config = getattr(transformers, f"{self.prefix}{kind}")(**(shared | self.sizes))
        model_class = getattr(transformers, f"{self.prefix}ForCausalLM")
        config._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
        generator = torch.Generator().manual_seed(5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            model = model_class(config).float().eval()
        # else every token would choose the same experts as without biases
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith((SELECTION_BIAS, "router.bias")):
                tensor.data.normal_(0, 0.3, generator=generator)
            elif name.endswith("tid2eid"):
                order = torch.rand(len(tensor), EXPERTS, generator=generator).argsort(-1)
                tensor.data.copy_(order[:, :TOP_K])
        return model, tokenizer


MOE_FAMILIES = {
    "qwen3_moe": Family(
        "Qwen3Moe",
        "Qwen3MoeTopKRouter",
        {**ATTENTION, "num_experts": EXPERTS, "norm_topk_prob": True},
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        "Qwen2MoeTopKRouter",
        {**ATTENTION, "num_experts": EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "olmoe": Family(
        "Olmoe", "OlmoeTopKRouter", {**ATTENTION, "num_experts": EXPERTS, "norm_topk_prob": False}
    ),
    "mixtral": Family("Mixtral", "MixtralTopKRouter", {**ATTENTION, "num_local_experts": EXPERTS}),
    "qwen3_next": Family("Qwen3Next", "Qwen3NextTopKRouter", RECURRENT),
    "qwen3_5_moe": Family("Qwen3_5Moe", "Qwen3_5MoeTopKRouter", RECURRENT, text_config=True),
    "gpt_oss": Family(
        "GptOss",
        "GptOssTopKRouter",
        {
            **ATTENTION,
            "num_local_experts": EXPERTS,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "minimax_m2": Family(
        "MiniMaxM2",
        "MiniMaxM2TopKRouter",
        {**ATTENTION, "num_local_experts": EXPERTS},
    ),
    "deepseek_v3": Family(
        "DeepseekV3", "DeepseekV3TopkRouter", {**LATENT, **GROUPS, "first_k_dense_replace": 0}
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        "Glm4MoeTopkRouter",
        {**ATTENTION, **GROUPS, "first_k_dense_replace": 1, "num_hidden_layers": LAYERS + 1},
    ),
    "dots1": Family("Dots1", "Dots1TopkRouter", {**ATTENTION, **GROUPS}),
    "kimi_linear": Family(
        "KimiLinear",
        "KimiLinearTopkRouter",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": None,
            "num_local_experts": EXPERTS,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "sparse"],
        },
    ),
    "nemotron_h": Family(
        "NemotronH",
        "NemotronHTopkRouter",
        {
            **ATTENTION,
            **GROUPS,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "mamba_num_heads": 2,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "expand": 1,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "deepseek_v4": Family(
        "DeepseekV4",
        "DeepseekV4TopKRouter",
        {
            "num_hidden_layers": LAYERS + 1,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": ["sliding_attention"] * (LAYERS + 1),
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_lora_rank": 8,
            "o_groups": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "hc_mult": 2,
            "n_routed_experts": EXPERTS,
            "sliding_window": 64,
        },
    ),
}


def wider(family: Family) -> Family:
    """The family with heads of 32 dimensions: vLLM has no kernel for smaller ones."""
    sizes = {
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
    }
    return replace(family, sizes=family.sizes | sizes)
