"""Counts the parameters that a token passes through, and the FLOPs of a forward pass.

An MoE model sends a token to K of its E experts. E and K are read from the configuration, under the
names that the families of transformers use. The experts' parameters are the parameters of the
modules called `experts`. If configuration and modules do not fit together, the count is None: no
number is better than a wrong number.
"""

import transformers
from torch import Tensor, nn

from gspo.model.weights import input_embedding, parts_without_text

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def active_parameters(model: transformers.PreTrainedModel) -> int | None:
    """Return the number of parameters that a token passes through, None if it is unknown.

    K of the E routed experts count. Shared experts count in full. The look-up in the input
    embedding does not count. The count is also None for models with recurrent layers, which compute
    with their states too, and for models whose layers have different sizes. A multimodal model's
    vision part does not count."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or []
    if model._is_stateful or "linear_attention" in layer_types or config.is_heterogeneous:
        return None
    without_text = parts_without_text(model)
    total = 0
    for name, parameter in model.named_parameters():
        if not name.startswith(without_text):
            total += parameter.numel()
    if not getattr(config, "tie_word_embeddings", False):
        total -= input_embedding(model).numel()
    routed = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] == "experts":
            routed[name] = module
    experts = number(config, EXPERTS)
    top_k = number(config, TOP_K)
    if not routed and experts == 0:
        return total
    if not routed or not experts or not top_k or top_k > experts:
        return None
    # experts that compute nothing use up some of a token's K choices
    has_idle_experts = bool(getattr(config, "zero_expert_num", None))
    if has_idle_experts or _has_other_experts(model, routed):
        return None
    if not all(consists_of_experts(module, experts) for module in routed.values()):
        return None
    routed_parameters = 0
    for module in routed.values():
        routed_parameters += sum(p.numel() for p in module.parameters())
    return total - routed_parameters // experts * (experts - top_k)


def uniform_head_dim(config: transformers.PretrainedConfig) -> int | None:
    """Return `head_dim_of` a model, None if its layers have heads of different sizes (Gemma 4)."""
    return None if config.get_text_config().is_heterogeneous else head_dim_of(config)


def head_dim_of(config: transformers.PretrainedConfig) -> int:
    """Return the number of dimensions of an attention head of the model."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def forward_flops(config: transformers.PretrainedConfig, active: int, lengths: Tensor) -> float:
    """Return the FLOPs of a forward pass over sequences of these lengths.

    They are 2 per active parameter and token, plus attention. Attention costs two multiply-adds per
    head dimension and pair of positions: one for the score and one for the weighted value. Half of
    the pairs are masked. So it costs 2 * layers * heads * head_dim * length^2 per sequence."""
    head_dim = head_dim_of(config)
    config = config.get_text_config()
    # latent attention: keys are wider than values
    key_dim = getattr(config, "qk_head_dim", None) or head_dim
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = ["full_attention"] * config.num_hidden_layers
    # other layers, such as convolutions, see no pairs
    attention_layers = sum(kind.endswith("attention") for kind in layer_types)
    flops_per_pair = 1.0 * attention_layers * config.num_attention_heads * (key_dim + value_dim)
    lengths = lengths.double()
    pairs = lengths.square().sum()
    return float(2.0 * active * lengths.sum() + flops_per_pair * pairs)


def number(config: transformers.PretrainedConfig, names: tuple[str, ...]) -> int | None:
    """Return the integer that the configuration has under any of these names.

    It is 0 if the configuration has none of the names, and None if the values disagree or are no
    integers."""
    values = [getattr(config, name, None) for name in names]
    values = [value for value in values if value is not None]
    if not values:
        return 0
    if any(not isinstance(value, int) or value != values[0] for value in values):
        return None
    return values[0]


def consists_of_experts(module: nn.Module, experts: int) -> bool:
    """Return whether a module consists of `experts` experts of the same size.

    They are a list of modules, or stacked along the first dimension of the module's tensors."""
    if isinstance(module, nn.ModuleList):
        sizes = {sum(p.numel() for p in expert.parameters()) for expert in module}
        return len(module) == experts and len(sizes) == 1
    return all(p.shape[0] == experts for p in module.parameters())


def _has_other_experts(model: transformers.PreTrainedModel, routed: dict[str, nn.Module]) -> bool:
    """Return whether the model has experts outside the `routed` modules that are not shared."""
    prefixes = tuple(f"{name}." for name in routed)
    for name, _ in model.named_parameters():
        if name.startswith(prefixes):
            continue
        if any("experts" in part and "shared" not in part for part in name.split(".")):
            return True
    return False
