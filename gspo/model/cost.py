"""Counts the parameters that one token passes through, which is what a token costs, and the FLOPs
of a forward pass.

An MoE model sends a token to K of its E experts. E and K are read from the configuration, under the
names that the families of transformers use. The experts' parameters are those of the modules called
`experts`. Where configuration and modules do not fit together the count is None: no number is
better than a wrong one.
"""

from __future__ import annotations

import transformers
from torch import Tensor, nn

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def active_parameters(model: transformers.PreTrainedModel) -> int | None:
    """Return the number of parameters that one token passes through, None if it cannot be
    determined.

    Of E routed experts K count; shared experts count in full; the look-up in the input embedding
    does not count. It is None for models with recurrent layers too, which compute with their states
    beside the parameters."""
    config = model.config.get_text_config()
    if model._is_stateful:
        return None
    total = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        total -= model.get_input_embeddings().weight.numel()
    routed = {
        name: module for name, module in model.named_modules() if name.split(".")[-1] == "experts"
    }
    experts, top_k = number(config, EXPERTS), number(config, TOP_K)
    if not routed and experts == 0:
        return total
    # experts that compute nothing use up some of a token's K choices
    idle = getattr(config, "zero_expert_num", None)
    if not routed or not experts or not top_k or top_k > experts or idle or _others(model, routed):
        return None
    if not all(is_of(module, experts) for module in routed.values()):
        return None
    parameters = sum(p.numel() for module in routed.values() for p in module.parameters())
    return total - parameters // experts * (experts - top_k)


def forward_flops(config: transformers.PretrainedConfig, active: int, lengths: Tensor) -> float:
    """Return the FLOPs of one forward over sequences of these lengths: 2 per active parameter and
    token, plus attention.

    Attention costs two multiply-adds per head dimension and pair of positions, one for the score
    and one for the weighted value, and half of the pairs are masked: 2 * layers * heads * head_dim
    * length^2 per sequence."""
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # latent attention: keys are wider than values
    scores = getattr(config, "qk_head_dim", None) or head_dim
    values = getattr(config, "v_head_dim", None) or head_dim
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    # others, such as convolutions, see no pairs
    layers = sum(kind.endswith("attention") for kind in kinds)
    attention = 1.0 * layers * config.num_attention_heads * (scores + values)
    lengths = lengths.double()
    return float(2.0 * active * lengths.sum() + attention * lengths.square().sum())


def number(config: transformers.PretrainedConfig, names: tuple[str, ...]) -> int | None:
    """Return the whole number that the configuration has under any of these names: 0 if it has none
    of them, None if they disagree or are no whole numbers."""
    found = [value for name in names if (value := getattr(config, name, None)) is not None]
    if any(not isinstance(value, int) or value != found[0] for value in found):
        return None
    return found[0] if found else 0


def is_of(module: nn.Module, experts: int) -> bool:
    """Return whether a module consists of `experts` experts of one size, as a list of modules or
    stacked along the first dimension of its tensors."""
    if isinstance(module, nn.ModuleList):
        return (
            len(module) == experts
            and len({sum(p.numel() for p in one.parameters()) for one in module}) == 1
        )
    return all(p.shape[0] == experts for p in module.parameters())


def _others(model: transformers.PreTrainedModel, routed: dict[str, nn.Module]) -> bool:
    """Return whether the model has experts that are neither in the `routed` modules nor shared
    ones.
    """
    prefixes = tuple(f"{name}." for name in routed)
    names = (name for name, _ in model.named_parameters() if not name.startswith(prefixes))
    return any(
        "experts" in part and "shared" not in part for name in names for part in name.split(".")
    )
