"""Our own forward pass over the weights of a transformers model, for training and sampling.

transformers' modules hold the weights. The arithmetic is here and works on a flat list of tokens.
So padding costs nothing outside attention, and routing is an argument instead of a hook. Decoding,
scoring and training differ only in `attend`. A layer computes:

    h = norm(x)
    q, k, v = W h
    q, k = rotate(norm(q)), rotate(norm(k))
    x += W_o attend(q, k, v)
    h = norm(x)
    x += mlp(h)      or      x += sum over the router's K experts e of  w_e expert_e(h)
                                   + shared_mlp(h)     (in some families)

Models outside FAMILIES run through their own forward. Before our forward is used it is compared
with the model's own forward on a few tokens. If they differ, the model is not supported.

Shape suffixes: N tokens, W hidden width, H query heads, J key/value heads, D head dimension, L MoE
layers, K experts per token, E experts.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gspo.model.forward.experts import run_experts
from gspo.model.forward.grouped import CastCache
from gspo.model.forward.kernels import float32_product, rms_norm, rotate, swiglu
from gspo.model.forward.layers import (
    Attention,
    Layer,
    Norm,
    Router,
    body,
    has_shared_experts,
    is_moe,
    output_head,
)
from gspo.model.forward.packed_weights import LayerWeights, prepare_layer
from gspo.model.forward.packing import attention
from gspo.model.routers import replayed
from gspo.model.sharding.dtensors import (
    architecture,
    full_tensor,
    is_sharded,
    reshard,
    run_unsharded,
)

FAMILIES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
    "Glm4MoeForCausalLM",
)
# the number of tokens on which both forwards are compared
PROBE_TOKENS = 12
# The maximum difference between their logits, as a share of the largest logit, by precision.
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
        self.body = body(model)
        self.output = output_head(model)
        # of the product that makes logits; bfloat16: the precision of the layers
        self.head_dtype = head_dtype
        # keep only the layers' inputs, and compute the rest again in the backward
        self.checkpointing = checkpointing
        # set within `frozen`
        self._frozen: list[LayerWeights] | None = None
        # set within `frozen` if a CPU needs a copy of the head
        self._float32_head: Tensor | None = None
        # set within `cached_casts`
        self._casts: CastCache | None = None
        self._rotation_table = torch.empty(0, 0)

    @property
    def head(self) -> Tensor:
        """The weight [V, W] of the output head."""
        return self.output.weight

    @property
    def head_dim(self) -> int:
        """The number of dimensions of an attention head (D)."""
        return self.body.layers[0].self_attn.head_dim

    @contextmanager
    def frozen(self, copy_experts: bool = False) -> Generator[None]:
        """Make forwards in this context faster. They have no gradient. The weights must not change.

        `copy_experts` also copies the experts' weights into a faster layout. This is worth it for
        many forwards."""
        with torch.no_grad():
            outer = self._frozen
            outer_head = self._float32_head
            self._frozen = [prepare_layer(layer, True, copy_experts) for layer in self.body.layers]
            if copy_experts and self.head_dtype == torch.float32 and not self.head.is_cuda:
                self._float32_head = self.head.float()
            try:
                yield
            finally:
                self._frozen = outer
                self._float32_head = outer_head

    @contextmanager
    def cached_casts(self) -> Generator[None]:
        """Round the experts' weights once for all passes in this context. No optimizer may step.

        This takes no more memory than a pass with gradient, which keeps the rounded weights too.
        With checkpointing it would take more, so then every pass rounds them again."""
        outer = self._casts
        self._casts = None if self.checkpointing else outer or CastCache()
        try:
            yield
        finally:
            self._casts = outer

    def logits(self, hidden_NW: Tensor) -> Tensor:
        """Return the logits of hidden states [N, V], without gradient, in `head_dtype`."""
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
        routers' choice of experts [N, L, K] (int64; None for dense models). With `replay_NLK` the
        tokens go to these experts instead, and the routers' choice is returned all the same.
        `longest` must exceed all positions."""
        x_NW = self.body.embed_tokens(tokens_N)
        rotations = self._rotations(longest, x_NW.device)
        rotation = rotations.index_select(0, positions_N).unsqueeze(1)
        compute = self._layer
        if self.checkpointing and torch.is_grad_enabled():
            compute = partial(checkpoint, self._layer, use_reentrant=False)
        chosen: list[Tensor] = []
        for i, layer in enumerate(self.body.layers):
            replay_NK = None
            if replay_NLK is not None and is_moe(layer):
                replay_NK = replay_NLK[:, len(chosen)]
            x_NW, chosen_NK = run_unsharded(
                layer, compute, i, layer, x_NW, rotation, attend, replay_NK
            )
            if chosen_NK is not None:
                chosen.append(chosen_NK)
        return _norm(self.body.norm, x_NW), torch.stack(chosen, 1) if chosen else None

    def _layer(
        self,
        i: int,
        layer: Layer,
        x_NW: Tensor,
        rotation: Tensor,
        attend: Attend,
        replay_NK: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one layer. Returns the hidden states and the router's choice (None if dense)."""
        weights = self._frozen[i] if self._frozen else prepare_layer(layer, freeze=False)
        # Tensors without a name are freed as soon as they are used.
        q_NHD, k_NJD, v_NJD = project_heads(
            layer.self_attn, weights, _norm(layer.input_layernorm, x_NW), rotation
        )
        x_NW = x_NW + weights.out(attend(i, q_NHD, k_NJD, v_NJD).flatten(1))
        h_NW = _norm(layer.post_attention_layernorm, x_NW)
        if not is_moe(layer):
            if weights.gate_up is None or weights.down is None:
                return x_NW + layer.mlp(h_NW), None
            return x_NW + weights.down(swiglu(weights.gate_up(h_NW))), None
        weights_NK, experts_NK, chosen_NK = route(layer.mlp.gate, h_NW, replay_NK)
        module = layer.mlp.experts
        mlp_NW = run_unsharded(
            module, run_experts, module, h_NW, weights_NK, experts_NK, weights, self._casts
        )
        if has_shared_experts(layer.mlp):
            mlp_NW = mlp_NW + layer.mlp.shared_experts(h_NW)
        return x_NW + mlp_NW, chosen_NK

    @torch.no_grad()
    def _rotations(self, longest: int, device: torch.device) -> Tensor:
        """Return exp(i angle) of the rotary embedding at every position, [positions, D / 2]."""
        if len(self._rotation_table) < longest or self._rotation_table.device != device:
            positions = torch.arange(2 * longest, device=device).unsqueeze(0)
            cos, sin = self.body.rotary_emb(torch.empty(0, device=device), positions)
            # both halves of a head rotate by the same angles
            half = cos.shape[-1] // 2
            # the other pairs of a head do not rotate
            resting = self.head_dim // 2 - half
            cos = F.pad(cos[0, :, :half], (0, resting), value=1.0).contiguous()
            sin = F.pad(sin[0, :, :half], (0, resting)).contiguous()
            self._rotation_table = torch.complex(cos, sin)
        return self._rotation_table


def project_heads(
    attention: Attention,
    weights: LayerWeights,
    h_NW: Tensor,
    rotation: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v by head, with q and k rotated.

    Some families normalise q and k before: each head by itself, or all heads together."""
    dim = attention.head_dim
    q_width = attention.q_proj.out_features
    k_width = attention.k_proj.out_features
    qk, v = weights.qkv(h_NW).split((q_width + k_width, k_width), -1)
    if len(weights.norms) == 2:
        eps = weights.norm_epsilon
        q_norm, k_norm = weights.norms
        q, k = qk.split((q_width, k_width), -1)
        qk = torch.cat([rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)], -1)
    qk = qk.unflatten(-1, (-1, dim))
    if len(weights.norms) == 1:
        qk = rms_norm(qk, weights.norms[0], weights.norm_epsilon)
    q, k = rotate(qk, rotation).split((q_width // dim, k_width // dim), 1)
    return q, k, v.unflatten(-1, (-1, dim))


def route(router: Router, h_NW: Tensor, replay_NK: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate weights, the experts that the tokens go to, and the router's choice, [N, K] each.

    A replay changes the first two. At NOT_RECORDED the token keeps the router's choice."""
    # rounded logits would send tokens to other experts
    with torch.autocast(h_NW.device.type, enabled=False):
        logits_NE, weights_NK, chosen_NK = router(h_NW)
    if replay_NK is None:
        return weights_NK, chosen_NK, chosen_NK
    new_weights_NK, experts_NK = replayed(router, logits_NE, weights_NK, chosen_NK, replay_NK)
    return new_weights_NK, experts_NK, chosen_NK


def autocast_to(device: torch.device, precision: torch.dtype) -> AbstractContextManager:
    """Return a context in which matrix products have this precision."""
    if precision == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision)


def _norm(norm: Norm, x: Tensor) -> Tensor:
    """Apply a norm layer of transformers with our kernel."""
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def causal_attention(
    layer: int,
    q_NHD: Tensor,
    k_NJD: Tensor,
    v_NJD: Tensor,
) -> Tensor:
    """Compute causal attention within one sequence."""
    return attention(*(x.unsqueeze(0) for x in (q_NHD, k_NJD, v_NJD)))


def is_supported(
    model: transformers.PreTrainedModel, precision: torch.dtype = torch.float32
) -> bool:
    """Return whether `Network` computes the same as the model's own forward.

    The model's family must be one of FAMILIES, and no setting may change the family's arithmetic.
    Both forwards must give the same logits on a few tokens. Sharded weights are compared in
    `precision`, in which they are multiplied, and other weights in their own precision."""
    if architecture(model) not in FAMILIES or not has_known_arithmetic(model.config):
        return False
    if output_head(model).bias is not None:
        return False
    return _same_logits(model, precision if is_sharded(model) else torch.float32)


def has_known_arithmetic(config: transformers.PretrainedConfig) -> bool:
    """Return whether no setting of a model of FAMILIES changes the family's arithmetic."""
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = getattr(config, "layer_types", None) or []
    uses_window = getattr(config, "use_sliding_window", True)
    return (
        config._attn_implementation == "sdpa"
        and all(kind == "full_attention" for kind in layer_types)
        and not (getattr(config, "sliding_window", None) and uses_window)
        and getattr(config, "clip_qkv", None) is None
        and getattr(config, "hidden_act", "silu") == "silu"
        and rope.get("rope_type", "default") in ("default", "llama3")
    )


@torch.no_grad()
def _same_logits(model: transformers.PreTrainedModel, precision: torch.dtype) -> bool:
    """Return whether both forwards give the same logits on most tokens.

    On single tokens they may differ: rounding may swap two experts of nearly equal weight."""
    tokens_N = torch.arange(min(PROBE_TOKENS, model.config.vocab_size), device=model.device)
    positions_N = torch.arange(len(tokens_N), device=model.device)
    with autocast_to(model.device, precision):
        hidden_NW, _ = run_unsharded(
            model, Network(model), tokens_N, positions_N, len(tokens_N), causal_attention
        )
        theirs_NV = model(input_ids=tokens_N[None], use_cache=False).logits[0].float()
    # a pass without gradient leaves the root's weights unsharded
    reshard(model)
    ours_NV = F.linear(hidden_NW.to(model.dtype), full_tensor(output_head(model).weight))
    tolerance = max(PROBE_TOLERANCE[model.dtype], PROBE_TOLERANCE[precision])
    largest_logit = max(1.0, float(theirs_NV.abs().max()))
    difference = (ours_NV - theirs_NV).abs().amax(-1).median()
    return bool(difference <= tolerance * largest_logit)
