"""What a token costs: the parameters that it passes through.

An MoE model sends a token to K of its E experts. E and K are read from the configuration, in the names that
transformers' families use, and the experts' parameters from the modules called `experts`. Where the two do not fit
together the number is unknown (None): no number is better than a wrong one.
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def active_parameters(model: PreTrainedModel) -> int | None:
    """Parameters that one token passes through: of E routed experts K count, shared ones all; the input embedding's
    look-up does not count. None if it cannot be told."""
    config = model.config.get_text_config()
    total = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        total -= model.get_input_embeddings().weight.numel()
    routed = {name: module for name, module in model.named_modules() if name.split(".")[-1] == "experts"}
    experts, top_k = number(config, EXPERTS), number(config, TOP_K)
    if not routed and experts == 0:
        return total
    idle = getattr(config, "zero_expert_num", None)  # experts that compute nothing take some of a token's K places
    if not routed or not experts or not top_k or top_k > experts or idle or _others(model, routed):
        return None
    if not all(is_of(module, experts) for module in routed.values()):
        return None
    parameters = sum(p.numel() for module in routed.values() for p in module.parameters())
    return total - parameters // experts * (experts - top_k)


def number(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    """What the configuration says under any of these names; 0 if nothing, None if not one whole number."""
    found = [value for name in names if (value := getattr(config, name, None)) is not None]
    if any(not isinstance(value, int) or value != found[0] for value in found):
        return None
    return found[0] if found else 0


def is_of(module: nn.Module, experts: int) -> bool:
    """Whether a module is so many experts of one size: stacked along the first dimension of its tensors, or a list."""
    if isinstance(module, nn.ModuleList):
        return len(module) == experts and len({sum(p.numel() for p in one.parameters()) for one in module}) == 1
    return all(p.shape[0] == experts for p in module.parameters())


def _others(model: PreTrainedModel, routed: dict[str, nn.Module]) -> bool:
    """Whether there are further experts that are neither routed ones as known here nor shared ones."""
    known = tuple(f"{name}." for name in routed)
    names = (name for name, _ in model.named_parameters() if not name.startswith(known))
    return any("experts" in part and "shared" not in part for name in names for part in name.split("."))
