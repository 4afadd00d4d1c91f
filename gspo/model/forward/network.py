"""Our own forward pass over the weights of a transformers model, which the supported families train
and sample with.

transformers' modules hold the weights. The arithmetic between them is here and works on a flat list
of tokens, so that padding costs nothing outside attention, routing is an argument instead of a
hook, and decoding, scoring and training differ in their attention alone:

    h = norm(x)    q, k, v = W h    q, k = rotate(norm(q)), rotate(norm(k))    x += W_o attend(q, k,
                   v)
    h = norm(x)    x += mlp(h)      or      x += sum over the router's K experts e of  w_e
                   expert_e(h)

Other architectures run through their own forward. Before our forward is used it is compared with
the model's own on a few tokens: a model that computes something else is not supported, whatever its
name.

Shape suffixes: N tokens, W hidden width, H query heads, J key/value heads, D head dimension, L MoE
layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gspo.data.batch import NOT_RECORDED
from gspo.model.forward.grouped import (
    Groups,
    KeptCasts,
    Way,
    into_blocks,
    is_aligned,
    multiply_in_blocks,
    way_to_multiply,
)
from gspo.model.forward.kernels import (
    FromExperts,
    ToExperts,
    float32_product,
    rms_norm,
    rotate,
    swiglu,
)
from gspo.model.forward.low_rank import Factors, factors_of_experts, unwrapped
from gspo.model.forward.packed_weights import LayerWeights, Product, prepare_layer
from gspo.model.forward.packing import attention
from gspo.model.routing_replay import gate_weights
from gspo.model.sharding.dtensors import (
    architecture,
    expert_ranks,
    full_tensor,
    is_sharded,
    local_tensor,
    run_unsharded,
)

FAMILIES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
)
PROBE_TOKENS = 12  # how many tokens both forwards are compared on
# The largest difference between their logits, as a share of the largest logit, by precision.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# (layer, q_NHD, k_NJD, v_NJD) -> mixed_NHD
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Network:
    """Our forward over the layers of a model for which `is_supported` is true."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        checkpointing: bool = False,
        head_dtype: torch.dtype = torch.float32,
    ):
        self.body, self.output = model.model, model.lm_head
        # of the product that makes logits; bfloat16: that of the layers
        self.head_dtype = head_dtype
        # keep only the layers' inputs, and compute the rest again in the backward
        self.checkpointing = checkpointing
        self._frozen: list[LayerWeights] | None = None  # set within `frozen`
        self._casts: KeptCasts | None = None  # set within `casts_kept`
        # set within `frozen` where a CPU needs a copy of the head
        self._float32_head: Tensor | None = None
        self._rotation_table = torch.empty(0, 0)

    @property
    def head(self) -> Tensor:
        """The weight [V, W] that makes logits of hidden states."""
        return self.output.weight

    @contextmanager
    def frozen(self, copy_experts: bool = False) -> Iterator[None]:
        """Within this context the weights must not change and there is no gradient, which makes
        forwards faster.

        `copy_experts` also copies the experts' weights into a faster layout, which pays for many
        forwards."""
        with torch.no_grad():
            before = self._frozen
            self._frozen = [prepare_layer(layer, True, copy_experts) for layer in self.body.layers]
            if copy_experts and self.head_dtype == torch.float32 and not self.head.is_cuda:
                self._float32_head = self.head.float()
            try:
                yield
            finally:
                self._frozen = before
                self._float32_head = None

    @contextmanager
    def casts_kept(self) -> Iterator[None]:
        """Within this context, in which no optimizer may step, the experts' weights are rounded to
        the precision of the products once instead of in every pass.

        That takes no more memory than a pass that learns, which keeps them too. With checkpointing
        it would, and there every pass rounds for itself."""
        before = self._casts
        self._casts = None if self.checkpointing else before or KeptCasts()
        try:
            yield
        finally:
            self._casts = before

    def logits(self, hidden_NW: Tensor) -> Tensor:
        """Return the head's logits of hidden states [N, V], without gradient: float32 if
        `head_dtype` is.
        """
        if self.head_dtype != torch.float32 or hidden_NW.dtype == torch.float32:
            return F.linear(hidden_NW, self.head)
        head = self.head if self._float32_head is None else self._float32_head
        return float32_product(hidden_NW, head.t())

    def __call__(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        longest: int,
        attend: Attend,
        replay_NLK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers over a flat list of tokens.

        Returns the normalised last hidden states [N, W], which are the head's input, and the
        routers' own choice of experts [N, L, K] (int64; None for dense models). With `replay_NLK`
        the tokens go to those experts instead, and the own choice is returned all the same.
        `longest` must exceed all positions."""
        x_NW = self.body.embed_tokens(tokens_N)
        rotation = self._rotations(longest, x_NW.device).index_select(0, positions_N).unsqueeze(1)
        own, checkpointing = [], self.checkpointing and torch.is_grad_enabled()
        for i, layer in enumerate(self.body.layers):
            replay_NK = (
                None if replay_NLK is None or not _sparse(layer) else replay_NLK[:, len(own)]
            )
            compute = (
                partial(checkpoint, self._layer, use_reentrant=False)
                if checkpointing
                else self._layer
            )
            x_NW, own_NK = run_unsharded(
                layer, compute, i, layer, x_NW, rotation, attend, replay_NK
            )
            if own_NK is not None:
                own.append(own_NK)
        return _norm(self.body.norm, x_NW), torch.stack(own, 1) if own else None

    def _layer(
        self,
        i: int,
        layer: nn.Module,
        x_NW: Tensor,
        rotation: Tensor,
        attend: Attend,
        replay_NK: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one layer; returns the hidden states and the router's own choice (None for a dense
        layer).
        """
        weights = self._frozen[i] if self._frozen else prepare_layer(layer, freeze=False)
        q_NHD, k_NJD, v_NJD = heads(
            layer.self_attn, weights, _norm(layer.input_layernorm, x_NW), rotation
        )
        x_NW = x_NW + weights.out(attend(i, q_NHD, k_NJD, v_NJD).flatten(1))
        h_NW = _norm(layer.post_attention_layernorm, x_NW)
        if not _sparse(layer):
            if weights.down is None:
                return x_NW + layer.mlp(h_NW), None
            return x_NW + weights.down(swiglu(weights.gate_up(h_NW))), None
        weights_NK, experts_NK, own_NK = route(layer.mlp.gate, h_NW, replay_NK)
        own = layer.mlp.experts
        return x_NW + run_unsharded(
            own, experts, own, h_NW, weights_NK, experts_NK, weights, self._casts
        ), own_NK

    @torch.no_grad()
    def _rotations(self, longest: int, device: torch.device) -> Tensor:
        """Return exp(i angle) of the rotary embedding at every position, [positions, D / 2]."""
        if len(self._rotation_table) < longest or self._rotation_table.device != device:
            positions = torch.arange(2 * longest, device=device).unsqueeze(0)
            cos, sin = self.body.rotary_emb(torch.empty(0, device=device), positions)
            half = cos.shape[-1] // 2  # both halves of a head rotate by the same angles
            self._rotation_table = torch.complex(
                cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
            )
        return self._rotation_table


def heads(
    attention: nn.Module, weights: LayerWeights, h_NW: Tensor, rotation: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v by head. q and k are rotated, and normalised before that where the family
    does so: each head by itself, or all heads together."""
    dim = attention.head_dim
    q_width, k_width = attention.q_proj.out_features, attention.k_proj.out_features
    qk, v = weights.qkv(h_NW).split((q_width + k_width, k_width), -1)
    if len(weights.norms) == 2:
        pairs = zip(qk.split((q_width, k_width), -1), weights.norms, strict=True)
        qk = torch.cat([rms_norm(x, w, attention.q_norm.variance_epsilon) for x, w in pairs], -1)
    qk = qk.unflatten(-1, (-1, dim))
    if len(weights.norms) == 1:
        qk = rms_norm(qk, weights.norms[0], attention.q_norm.variance_epsilon)
    q, k = rotate(qk, rotation).split((q_width // dim, k_width // dim), 1)
    return q, k, v.unflatten(-1, (-1, dim))


def route(
    router: nn.Module, h_NW: Tensor, replay_NK: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate weights, the experts that the tokens go to, and the router's own choice, [N, K]
    each.

    A replay changes the first two; where it holds NOT_RECORDED the own choice stays."""
    # rounded logits would send tokens to other experts
    with torch.autocast(h_NW.device.type, enabled=False):
        logits_NE, weights_NK, own_NK = router(h_NW)
    if replay_NK is None:
        return weights_NK, own_NK, own_NK
    experts_NK = torch.where(replay_NK == NOT_RECORDED, own_NK, replay_NK.to(own_NK.dtype))
    return gate_weights(router, logits_NE, experts_NK).to(weights_NK.dtype), experts_NK, own_NK


def experts(
    own: nn.Module,
    h_NW: Tensor,
    weights_NK: Tensor,
    experts_NK: Tensor,
    layer_weights: LayerWeights | None = None,
    casts: KeptCasts | None = None,
) -> Tensor:
    """Return sum_k w_k W_down (silu(W_gate h) * W_up h), with the matrices of the token's k-th
    expert.

    Tokens are sorted by expert, so that each expert is one matrix product over the tokens that go
    to it."""
    own, wrappers = unwrapped(own)
    device, top_k = h_NW.device, experts_NK.shape[1]
    kind = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else h_NW.dtype
    )
    h_NW, weights_NK = h_NW.to(kind), weights_NK.to(kind)
    merged = layer_weights.merged if layer_weights else None
    # What is gathered from ranks, or merged with an adapter, is only there for a moment.
    cast = casts if casts and not merged and not is_sharded(own) else Tensor.to
    up, down = (cast(local_tensor(x), kind) for x in merged or (own.gate_up_proj, own.down_proj))
    if layer_weights and len(h_NW) < layer_weights.all_experts_below:
        return _all_experts(up, layer_weights.all_down, h_NW, weights_NK, experts_NK)
    adapters = [
        None if merged else factors_of_experts(wrappers, name)
        for name in ("gate_up_proj", "down_proj")
    ]
    ranks = expert_ranks(own)
    matrices = [up, down, *(matrix for pair in adapters if pair for matrix in pair)]
    way = way_to_multiply(h_NW, matrices, top_k)
    if way == "all" and not ranks and not any(adapters):
        return _all_experts(up, down.transpose(1, 2).flatten(0, 1), h_NW, weights_NK, experts_NK)
    flat = experts_NK.flatten()
    # a GPU sorts 16 bits in a quarter of the passes
    order = flat.to(torch.int16).argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    counts_E = flat.new_zeros(own.num_experts).scatter_add_(
        0, flat, torch.ones_like(flat)
    )  # bincount would wait for a GPU
    apply_experts = partial(_each_expert, up, down, adapters, layer_weights, way)
    rows = ToExperts.apply(h_NW, order, places, top_k)
    out = ranks.compute(rows, counts_E, apply_experts) if ranks else apply_experts(rows, counts_E)
    return FromExperts.apply(out, weights_NK, order, places)


def _each_expert(
    up: Tensor,
    down: Tensor,
    adapters: list[Factors | None],
    layer_weights: LayerWeights | None,
    way: Way,
    rows: Tensor,
    counts_E: Tensor,
) -> Tensor:
    """Apply every expert to its rows, which are sorted by expert."""
    if layer_weights and layer_weights.experts is not None:
        return _one_by_one(rows, counts_E.tolist(), *layer_weights.experts)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    groups = Groups(ends_E, None if way == "grouped" else into_blocks(ends_E, len(rows)))
    inner = swiglu(_adapted(rows, up, adapters[0], groups))
    return _adapted(inner, down, adapters[1], groups)


def _adapted(rows: Tensor, weight: Tensor, adapter: Factors | None, groups: Groups) -> Tensor:
    """Multiply each expert's rows by the transpose of its own matrix, and of its adapter's two
    where there is one.
    """
    out = _grouped(rows, weight, groups)
    if adapter is None:
        return out
    b, a = (x.to(rows.dtype) for x in adapter)
    return out + _grouped(_grouped(rows, a, groups), b, groups)


def _grouped(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Multiply each expert's rows by the transpose of its own matrix; `weight` is [E, out, in]."""
    if groups.blocks:
        return multiply_in_blocks(rows, weight, groups.blocks)
    if is_aligned(rows.dtype, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=groups.ends_E)
    counts = groups.ends_E.diff(prepend=groups.ends_E.new_zeros(1)).tolist()
    return torch.cat(
        [F.linear(some, own) for some, own in zip(rows.split(counts), weight, strict=True)]
    )


@contextmanager
def grouped_product_replaced(by: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Within this context, `by` multiplies each expert's rows by the expert's matrix [E, out, in].

    gspo.planning.memory passes tensors without content, which PyTorch's grouped product refuses.
    """
    global _grouped
    original = _grouped

    def replacement(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return by(rows, weight)

    _grouped = replacement
    try:
        yield
    finally:
        _grouped = original


def _one_by_one(
    rows: Tensor, counts: list[int], ups: list[Product], downs: list[Product]
) -> Tensor:
    """Apply each expert to its rows, with matrices in the layout for many products."""
    by_expert = zip(rows.split(counts), ups, downs, strict=True)
    return torch.cat([down(swiglu(up(some))) for some, up, down in by_expert if len(some)])


def _all_experts(
    up: Tensor, all_down: Tensor, h_NW: Tensor, weights_NK: Tensor, experts_NK: Tensor
) -> Tensor:
    """Compute what `experts` does for a handful of tokens: every expert sees all of them, which
    costs less than sorting them."""
    gates_NE = h_NW.new_zeros(len(h_NW), len(up)).scatter_(1, experts_NK, weights_NK)
    inner_NEI = swiglu(F.linear(h_NW, up.flatten(0, 1)).unflatten(-1, (len(up), -1)))
    gates_NE1 = gates_NE.unsqueeze(-1)
    inner_NEI = inner_NEI * gates_NE1 if torch.is_grad_enabled() else inner_NEI.mul_(gates_NE1)
    return inner_NEI.flatten(1) @ all_down


def rounding(device: torch.device, precision: torch.dtype) -> AbstractContextManager:
    """Within this context matrix products are in this precision."""
    return (
        nullcontext()
        if precision == torch.float32
        else torch.autocast(device.type, dtype=precision)
    )


def _norm(own: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm layer of transformers with our kernel."""
    return rms_norm(x, own.weight, own.variance_epsilon)


def _sparse(layer: nn.Module) -> bool:
    """Return whether a layer is an MoE layer."""
    return hasattr(layer.mlp, "experts")


def causal(layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
    """Compute causal attention within one sequence."""
    return attention(*(x.unsqueeze(0) for x in (q_NHD, k_NJD, v_NJD)))


def is_supported(
    model: transformers.PreTrainedModel, precision: torch.dtype = torch.float32
) -> bool:
    """Return whether `Network` computes what this model does: its family is one of FAMILIES, no
    setting changes the family's arithmetic, and both give the same logits on a few tokens. Weights
    that are spread over ranks are compared in the `precision` in which they multiply; others in
    their own."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    plain = (
        architecture(model) in FAMILIES
        and config._attn_implementation == "sdpa"
        and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or [])
        and not (
            getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        )
        and getattr(config, "clip_qkv", None) is None
        and getattr(config, "hidden_act", "silu") == "silu"
        and rope.get("rope_type", "default") in ("default", "llama3")
        and model.lm_head.bias is None
    )
    return plain and _same_logits(model, precision if is_sharded(model) else torch.float32)


@torch.no_grad()
def _same_logits(model: transformers.PreTrainedModel, precision: torch.dtype) -> bool:
    """Return whether both forwards give the same logits on most tokens. On single ones they may
    differ, because rounding may swap two experts of nearly equal weight."""
    tokens_N = torch.arange(min(PROBE_TOKENS, model.config.vocab_size), device=model.device)
    network, positions_N = Network(model), torch.arange(len(tokens_N), device=model.device)
    with rounding(model.device, precision):
        hidden_NW, _ = run_unsharded(model, network, tokens_N, positions_N, len(tokens_N), causal)
        theirs_NV = model(input_ids=tokens_N[None], use_cache=False).logits[0].float()
    if is_sharded(model):
        model.reshard()  # a pass without gradient leaves the root's weights gathered
    ours_NV = F.linear(hidden_NW.to(model.dtype), full_tensor(model.lm_head.weight))
    tolerance = max(PROBE_TOLERANCE[model.dtype], PROBE_TOLERANCE[precision]) * max(
        1.0, float(theirs_NV.abs().max())
    )
    return bool((ours_NV - theirs_NV).abs().amax(-1).median() <= tolerance)
