"""Small models of other families of transformers."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

from builders import small_policy
from gspo.model.policy import Policy


def other_family(kind: str) -> Policy:
    """A small random model of another MoE family, with the character tokenizer."""
    tokenizer = small_policy().tokenizer
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(**sizes, num_local_experts=6, num_experts_per_tok=2)
        )
    else:
        model = OlmoeForCausalLM(
            OlmoeConfig(**sizes, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    return Policy(model, tokenizer)
