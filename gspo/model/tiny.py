"""Tiny models with random weights and one token per character, for the testbed."""

from typing import Any

import torch
import transformers

from gspo.model.tokenizer import character_tokenizer
from gspo.model.weights import Loaded


def random_qwen3_moe(
    *,
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
    experts: int,
    experts_per_token: int,
    expert_width: int,
    init_seed: int,
) -> Loaded:
    """Return a Qwen3-MoE, whose random weights depend on `init_seed` alone, and its tokenizer."""
    tokenizer = character_tokenizer()
    config = transformers.Qwen3MoeConfig(
        **_shared_config(hidden, layers, heads, positions, tokenizer),
        num_experts=experts,
        num_experts_per_tok=experts_per_token,
        moe_intermediate_size=expert_width,
        intermediate_size=expert_width,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    return random_model(transformers.Qwen3MoeForCausalLM, config, init_seed), tokenizer


def random_qwen3(
    *,
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
    width: int,
    init_seed: int,
) -> Loaded:
    """Return a dense Qwen3, whose random weights depend on `init_seed` alone, and its tokenizer."""
    tokenizer = character_tokenizer()
    config = transformers.Qwen3Config(
        **_shared_config(hidden, layers, heads, positions, tokenizer), intermediate_size=width
    )
    return random_model(transformers.Qwen3ForCausalLM, config, init_seed), tokenizer


def _shared_config(
    hidden: int,
    layers: int,
    heads: int,
    positions: int,
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the configuration that both kinds of tiny model share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def random_model(
    model_class: type[transformers.PreTrainedModel],
    config: transformers.PretrainedConfig,
    seed: int,
) -> transformers.PreTrainedModel:
    """Return a float32 model with random weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).to(torch.float32)
