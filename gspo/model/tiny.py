"""Tiny models with random weights and one token per character, for the testbed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from gspo.model.settings import POSITIONS
from gspo.model.tokenizer import character_tokenizer

if TYPE_CHECKING:
    from gspo.model.settings import Loaded, Tiny, TinyDense, TinyMoE


def random_qwen3_moe(settings: TinyMoE) -> Loaded:
    """Return a Qwen3-MoE with random weights that depend on `init_seed` alone, and its tokenizer."""
    tokenizer = character_tokenizer()
    config = transformers.Qwen3MoeConfig(
        **_shared_config(settings, tokenizer),
        num_experts=settings.experts,
        num_experts_per_tok=settings.experts_per_token,
        moe_intermediate_size=settings.expert_width,
        intermediate_size=settings.expert_width,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    return random_model(transformers.Qwen3MoeForCausalLM, config, settings.init_seed), tokenizer


def random_qwen3(settings: TinyDense) -> Loaded:
    """Return a dense Qwen3 with random weights that depend on `init_seed` alone, and its tokenizer."""
    tokenizer = character_tokenizer()
    config = transformers.Qwen3Config(
        **_shared_config(settings, tokenizer), intermediate_size=settings.width
    )
    return random_model(transformers.Qwen3ForCausalLM, config, settings.init_seed), tokenizer


def _shared_config(
    settings: Tiny, tokenizer: transformers.PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the configuration that both kinds of tiny model share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "head_dim": settings.hidden // settings.heads,
        "max_position_embeddings": POSITIONS,
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
