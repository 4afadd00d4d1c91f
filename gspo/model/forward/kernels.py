"""Operations of the network with their own backward passes, which save memory traffic.

They give autograd's numbers in fewer passes over memory. For small models most time goes to
launching operations and to elementwise memory traffic, not to arithmetic.
tests/unit/model/test_network.py compares every function with its plain form, forward and backward.

Shape suffixes: N tokens, W hidden width, H heads, D head dimension, I expert or MLP width, E
experts, K experts per token, M predicted tokens, V vocabulary.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gspo.model.forward.kept_softmax import KeptColumns

# the maximum number of logits in memory at once: 16 MiB in float32, on a GPU 512 MiB
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}
# whether the head's float32 product is a sum of bfloat16 products: on a GPU, float32 products are
# 15 times slower
SPLITS = {"cpu": False, "cuda": True}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y = x / sqrt(mean(x^2) + eps) * weight, with the mean over the last dimension.

    The mean is computed in float32. y has the type of x. `weight` has the last dimension of x, or
    several last dimensions."""
    if x.is_cuda:
        return fused_rms_norm(x, weight, eps)
    if torch.is_grad_enabled():
        return RMSNorm.apply(x, weight, eps)
    # rounded in the same places as in RMSNorm
    return ((x * _inverse_rms(x, eps)).to(x.dtype) * weight).to(x.dtype)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm` by PyTorch's kernel: one launch on a GPU, and one in the backward.

    It rounds once, to the type of x. Autocast is off here, because with it the kernel would compute
    in and return float32."""
    with torch.autocast(x.device.type, enabled=False):
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight.to(x.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) in float32, with the last dimension kept as 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class RMSNorm(Function):
    """`rms_norm` with its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _inverse_rms(x, eps)
        unit = (x * scale).to(x.dtype)
        ctx.save_for_backward(unit, weight, scale)
        return (unit * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, weight, scale = ctx.saved_tensors
        by_unit = grad.float() * unit
        first_dims = tuple(range(unit.dim() - weight.dim()))
        grad_weight = by_unit.sum(first_dims).to(weight.dtype)
        # the mean of gradient * weight * unit
        if weight.dim() == 1:
            mean = (by_unit @ weight.float()).unsqueeze(-1)
            mean.div_(weight.numel())
        else:
            mean = by_unit.mul_(weight).mean(-1, keepdim=True)
        grad_x = grad.float() * weight
        grad_x.addcmul_(unit, mean, value=-1).mul_(scale)
        return grad_x.to(unit.dtype), grad_weight, None


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Apply the rotary position embedding to x [N, H, D] in the interleaved layout.

    The two numbers of a pair are side by side. As one complex number they are multiplied by
    `rotation` [N, 1, D / 2], which is exp(i angle). The backward rotates by the opposite angle."""
    return Rotate.apply(x, rotation) if torch.is_grad_enabled() else _rotated(x, rotation)


class Rotate(Function):
    """`rotate` with its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        return _rotated(x, rotation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rotation,) = ctx.saved_tensors
        return _rotated(grad, rotation.conj()), None


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Multiply the pairs of x, as complex numbers, by `rotation`."""
    pairs = x.float().unflatten(-1, (-1, 2))
    pairs = torch.view_as_complex(pairs)
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def swiglu(h: Tensor) -> Tensor:
    """Return silu(gate) * up. h holds gate and up side by side in its last dimension."""
    if torch.is_grad_enabled():
        return SwiGLU.apply(h)
    gate, up = h.chunk(2, -1)
    return F.silu(gate).mul_(up)


class SwiGLU(Function):
    """`swiglu` with its gradient."""

    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        gate, up = h.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        gate, up = h.chunk(2, -1)
        out = torch.empty_like(h)
        left, right = out.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=left)
        torch.ops.aten.silu.out(gate, out=right).mul_(grad)
        return out


class Rounded(Function):
    """The given tensor `rounded` as weight.to(rounded.dtype).

    The gradient reaches the weight in the weight's own type."""

    @staticmethod
    def forward(ctx, weight: Tensor, rounded: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return rounded.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the inverse of a permutation: inverse[order[i]] = i."""
    index = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, index)


class ToExperts(Function):
    """Copies of the rows of x [N, W], sorted by expert [N K, W].

    `order` sorts the pairs (token, k) by expert, and `inverse` is its inverse permutation. The
    gradient of a row is the sum over its K copies. It is computed by a gather instead of autograd's
    scatter."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        order: Tensor,
        inverse: Tensor,
        top_k: int,
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse)
        grad_x = rows.unflatten(0, (-1, ctx.top_k)).sum(1)
        return grad_x, None, None, None


class FromExperts(Function):
    """The sums of the experts' outputs per token: y_n = sum_k weight_nk out[inverse[n K + k]].

    `out` [N K, W] is sorted by expert. `order` and `inverse` are as in ToExperts."""

    @staticmethod
    def forward(
        ctx,
        out: Tensor,
        weights: Tensor,
        order: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(out, weights, order, inverse)
        rows = out.index_select(0, inverse).unflatten(0, weights.shape)
        y = rows[:, 0] * weights[:, :1]
        for k in range(1, weights.shape[1]):
            y.addcmul_(rows[:, k], weights[:, k : k + 1])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, weights, order, inverse = ctx.saved_tensors
        rows = out.index_select(0, inverse).unflatten(0, weights.shape)
        grad_weights = rows.mul_(grad.unsqueeze(1)).sum(-1)
        sorted_weights = weights.flatten().index_select(0, order).unsqueeze(1)
        grad_out = grad.index_select(0, order // weights.shape[1]).mul_(sorted_weights)
        return grad_out, grad_weights, None, None


class TokenLogProbs(Function):
    """The values log softmax(x W^T / temperature) at the target tokens, and the softmax's entropy.

    Both are [M] and float32. No tensor of M x V is made: the logits exist for one chunk of tokens
    at a time, in the forward and again in the backward.

        d logp_m / d logits_mv = (1[v = y_m] - p_mv) / temperature
        d H_m    / d logits_mv = -p_mv (log p_mv + H_m) / temperature

    The logits have the precision of x, and everything after them is float32. With `split` x is
    float32. Then the logits have its precision, although all products are of bfloat16 matrices (see
    `parts`).

    With `kept` the softmax of each token runs over its kept tokens only. Then p_mv and the gradient
    of logits_mv are exactly 0 for every other token v.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        split: bool = False,
        kept: KeptColumns | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        # the backward gets None instead of zeros for an output that is not in the loss
        ctx.set_materialize_grads(False)
        logp = []
        entropies = []
        head = parts(weight.to(x.dtype).t(), split)
        first = 0
        for rows, tokens in _chunks(x, targets, len(weight)):
            logits = _logits(parts(rows, split), head, temperature)
            norm = logits.logsumexp(-1)
            chunk_entropy = None
            if entropy:
                # log Z - sum_v p_v logits_v
                p = (logits - norm.unsqueeze(-1)).exp_()
                chunk_entropy = norm - torch.linalg.vecdot(p, logits)
            if kept:
                norm, chunk_entropy = kept.normalizers(logits, first, norm, chunk_entropy)
            first += len(rows)
            logp.append(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - norm)
            if chunk_entropy is not None:
                entropies.append(chunk_entropy)
        ctx.save_for_backward(x, weight, targets)
        ctx.temperature = temperature
        ctx.split = split
        ctx.kept = kept
        return torch.cat(logp), torch.cat(entropies) if entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros(len(x), device=x.device)
        grad_x = []
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        head = parts(weight.to(x.dtype).t(), ctx.split)
        multiply = float32_product if ctx.split else torch.matmul
        size = chunk_rows(x, len(weight))
        # d loss / d logits is p_v (slope + entropy_slope (log p_v + H)), minus slope at the target
        slopes = (grad / -ctx.temperature).split(size)
        entropy_slopes = [None] * len(slopes)
        if grad_entropy is not None:
            entropy_slopes = (grad_entropy / -ctx.temperature).split(size)
        chunks = _chunks(x, targets, len(weight))
        first = 0
        for chunk, slope, entropy_slope in zip(chunks, slopes, entropy_slopes, strict=True):
            rows, tokens = chunk
            row_parts = parts(rows, ctx.split)
            logits = _logits(row_parts, head, ctx.temperature)
            if ctx.kept:
                ctx.kept.exclude_others_(logits, first)
            first += len(rows)
            grad_logits = _times_p(logits, slope, entropy_slope)
            grad_logits.scatter_add_(-1, tokens.unsqueeze(-1), -slope.unsqueeze(-1))
            # Gradients are multiplied as in every other layer: their rounding averages out, but the
            # rounding of log-probs does not.
            grad_logits = grad_logits.to(head[0].dtype)
            grad_x.append(multiply(grad_logits, head[0].t()))
            if grad_weight is not None:
                grad_weight.add_(multiply(grad_logits.t(), row_parts[0]))
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return torch.cat(grad_x), grad_weight, None, None, None, None, None


@torch.no_grad()
def sums_of_squares(
    x: Tensor,
    weight: Tensor,
    temperature: float,
    split: bool = False,
    kept: KeptColumns | None = None,
) -> Tensor:
    """Return sum_v p_v^2 of softmax(x W^T / temperature). Shape [M], float32.

    As in TokenLogProbs the logits exist for one chunk of tokens at a time, and with `kept` the
    softmax runs over the kept tokens. It is a pass of its own over the vocabulary, because hardly
    any run needs it."""
    head = parts(weight.to(x.dtype).t(), split)
    sums = []
    first = 0
    for rows in x.split(chunk_rows(x, len(weight))):
        logits = _logits(parts(rows, split), head, temperature)
        if kept:
            logits = kept.exclude_others_(logits, first)
        first += len(rows)
        p = logits.softmax(-1)
        sums.append(torch.linalg.vecdot(p, p))
    return torch.cat(sums)


def parts(x: Tensor, split: bool) -> tuple[Tensor, ...]:
    """Return x, or with `split` two bfloat16 matrices whose sum is x up to 2^-17 of it."""
    if not split:
        return (x,)
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)


def head_product(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """Return a @ b in float32, for matrices in `parts`.

    For two matrices in two parts each it is a_1 b_1 + (a_1 b_2 + a_2 b_1). The missing a_2 b_2 is
    2^-16 of the result. If a and b were rounded to bfloat16 instead, the mean log-ratio of a
    response of 512 tokens would change by 2e-4 at logits of 20. This is most of GSPO's clip range.
    With the parts it changes by 1e-6 (tests/unit/model/test_head.py)."""
    if len(a) == 1:
        return (a[0] @ b[0]).float()
    small = float32_product(a[0], b[1])
    small.add_(float32_product(a[1], b[0]))
    return small.add_(float32_product(a[0], b[0]))


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32, for matrices of any precision.

    Products of bfloat16 numbers are exact in float32, so only the sums are rounded."""
    if a.dtype == b.dtype == torch.bfloat16 and SPLITS.get(a.device.type, False):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _times_p(logits: Tensor, slope: Tensor, entropy_slope: Tensor | None) -> Tensor:
    """Return p_v (slope + entropy_slope (log p_v + H)) for every token [M, V], in place."""
    p = logits.softmax(-1)
    if entropy_slope is None:
        return p.mul_(slope.unsqueeze(-1))
    # log p_v + H = logits_v - sum_u p_u logits_u
    mean = torch.linalg.vecdot(p, logits).unsqueeze(-1)
    logits.sub_(mean).mul_(entropy_slope.unsqueeze(-1))
    return logits.add_(slope.unsqueeze(-1)).mul_(p)


def chunk_rows(x: Tensor, vocabulary: int) -> int:
    """Return the maximum number of tokens whose logits are in memory at once."""
    max_logits = CHUNK.get(x.device.type, CHUNK["cpu"])
    return max(1, max_logits // vocabulary)


def _chunks(x: Tensor, targets: Tensor, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut hidden states and target tokens into chunks of `chunk_rows` tokens."""
    size = chunk_rows(x, vocabulary)
    return zip(x.split(size), targets.split(size), strict=True)


def _logits(rows: tuple[Tensor, ...], head: tuple[Tensor, ...], temperature: float) -> Tensor:
    """Return the logits of tokens divided by the temperature, in float32."""
    logits = head_product(rows, head)
    return logits if temperature == 1 else logits.div_(temperature)


@contextmanager
def head_as_on(device_type: str) -> Generator[None]:
    """Within this context, a CPU computes the head's logits as another type of device does.

    gspo.planning.memory passes tensors without content through the network, on the CPU.
    """
    chunk = CHUNK["cpu"]
    splits = SPLITS["cpu"]
    CHUNK["cpu"] = CHUNK[device_type]
    SPLITS["cpu"] = SPLITS[device_type]
    try:
        yield
    finally:
        CHUNK["cpu"] = chunk
        SPLITS["cpu"] = splits
