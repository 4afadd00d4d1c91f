"""Every kernel of the network, forward and backward, against the same arithmetic on the CPU in
float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.checking.bench import Bench
from gspo.checking.machine import short
from gspo.checking.report import OK, SKIP, Finding, at_most
from gspo.model.forward import kernels
from gspo.model.forward.experts import run_experts
from gspo.model.forward.kernels import TokenLogProbs, rms_norm, rotate, swiglu
from gspo.model.forward.packing import attention

EPS = 1e-6
# The largest error, as a share of the largest number of the result. float32 adds some hundred
# numbers here.
BOUNDS = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
CLIP_RANGE = 3e-4  # of GSPO, as in the paper
Arithmetic = Callable[..., Tensor]


def kernels_against_float64(bench: Bench) -> Iterator[Finding]:
    """Compare every kernel in float32, and on a GPU in bfloat16. Memory that a kernel does not
    write holds NaN.
    """
    kinds = [torch.float32]
    if bench.on_gpu and bench.bfloat16:
        kinds.append(torch.bfloat16)
    with poisoned_memory():
        for dtype in kinds:
            for name, ours, plain, inputs in cases():
                yield at_most(
                    f"{name}, {short(dtype)}",
                    error(bench, ours, plain, inputs, dtype),
                    BOUNDS[dtype],
                )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within this context new tensors hold NaN until they are written, so that what is read too
    early shows.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # Only the filling of new tensors is wanted of the deterministic mode. Attention's
            # backward pass has no deterministic way on a GPU, and PyTorch would say so here.
            warnings.filterwarnings("ignore", "[^.]*defaults to a non-deterministic algorithm")
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def cases() -> Iterator[tuple[str, Arithmetic, Arithmetic, list[Tensor]]]:
    """Yield (name, our kernel, plain arithmetic, inputs). Both take the inputs on any device, in
    any precision.
    """
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    yield "norm", lambda x, w: rms_norm(x, w, EPS), plain_norm, [normal(96, 64), normal(64)]
    yield (
        "norm of each head",
        lambda x, w: rms_norm(x, w, EPS),
        plain_norm,
        [normal(96, 6, 16), normal(6, 16)],
    )
    yield "rotary embedding", our_rotation, plain_rotation, [normal(96, 4, 16)]
    yield "gated unit", swiglu, plain_swiglu, [normal(96, 64)]
    yield (
        "attention, causal",
        our_attention,
        plain_attention,
        [normal(3, 21, 4, 16), normal(3, 21, 2, 16)],
    )
    yield (
        "attention, masked",
        masked_attention,
        plain_masked,
        [normal(3, 21, 4, 16), normal(3, 21, 2, 16)],
    )
    expert_inputs = [normal(64, 32), normal(8, 32, 32) * 0.3, normal(8, 32, 16) * 0.3]
    yield "experts, some without tokens", our_experts, plain_experts, expert_inputs
    yield (
        "log-probs of tokens",
        our_logprobs,
        plain_logprobs,
        [normal(80, 32), normal(300, 32) * 0.5],
    )


def error(
    bench: Bench, ours: Arithmetic, plain: Arithmetic, inputs: list[Tensor], dtype: torch.dtype
) -> float:
    """Return the largest error of result and gradients, each as a share of its largest number."""
    rounded = [x.to(dtype) for x in inputs]
    exact = [x.double().requires_grad_() for x in rounded]
    own = [x.to(bench.device).requires_grad_() for x in rounded]
    want, got = plain(*exact), ours(*own)
    slope = torch.randn(want.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    wanted = [want, *torch.autograd.grad((want * slope).sum(), exact)]
    found = [got, *torch.autograd.grad((got * slope.to(got)).sum(), own)]
    errors = [
        (a.detach().cpu().double() - b).abs().max() / b.abs().max()
        for a, b in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(errors).detach().max())  # NaN if any is


# -------------------------------------------------------------------------------------------------
# plain arithmetic
def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotation(x: Tensor) -> Tensor:
    """Return the rotation of every position and pair of x [N, H, D], in float64."""
    angles = (
        torch.arange(len(x), dtype=torch.float64)[:, None]
        * torch.arange(1, x.shape[-1] // 2 + 1)
        / 7
    )
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def our_rotation(x: Tensor) -> Tensor:
    return rotate(x, rotation(x).to(torch.complex64).to(x.device))


def plain_rotation(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation(x)).flatten(-2)


def plain_swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def our_attention(q: Tensor, k: Tensor) -> Tensor:
    return attention(q, k, k * 0.5)


def plain_attention(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    queries, keys = (
        q.transpose(1, 2),
        k.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2),
    )
    if mask is None:
        mask = causal_mask(q.shape[1]).to(q.dtype)
    scores = queries @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
    return (scores.softmax(-1) @ (keys * 0.5)).transpose(1, 2).flatten(0, 1)


def causal_mask(width: int) -> Tensor:
    """Return what is added to the scores: 0 where a query may look, else -inf."""
    return torch.zeros(width, width).masked_fill(torch.ones(width, width).triu(1) > 0, -torch.inf)


def padded_mask(width: int) -> Tensor:
    """Return a causal mask in which the first two columns of the second row of the batch are
    padding.
    """
    mask = causal_mask(width).expand(3, 1, width, width).clone()
    mask[1, :, 2:, :2] = -torch.inf
    return mask


def masked_attention(q: Tensor, k: Tensor) -> Tensor:
    return attention(q, k, k * 0.5, padded_mask(q.shape[1]).to(q.device))


def plain_masked(q: Tensor, k: Tensor) -> Tensor:
    return plain_attention(q, k, padded_mask(q.shape[1]).to(q.dtype))


def choices(tokens: int) -> tuple[Tensor, Tensor]:
    """Return gate weights and experts, [tokens, 2] each. Experts 0, 3 and 7 of the eight get no
    token.
    """
    generator = torch.Generator().manual_seed(7)
    used = torch.tensor([1, 2, 4, 5, 6])
    picked = torch.stack(
        [torch.randperm(len(used), generator=generator)[:2] for _ in range(tokens)]
    )
    return torch.rand(tokens, 2, generator=generator), used[picked]


class Experts(torch.nn.Module):
    """The experts of a layer, with the names of transformers."""

    def __init__(self, up: Tensor, down: Tensor):
        super().__init__()
        self.num_experts = len(up)
        self.gate_up_proj = up
        self.down_proj = down


def our_experts(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, chosen = choices(len(h))
    return run_experts(Experts(up, down), h, weights.to(h), chosen.to(h.device))


def plain_experts(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, chosen = choices(len(h))
    rows = []
    for token, gates, own in zip(h, weights.to(h), chosen.tolist(), strict=True):
        rows.append(
            sum(
                g * (plain_swiglu(token @ up[e].T) @ down[e].T)
                for g, e in zip(gates, own, strict=True)
            )
        )
    return torch.stack(rows)


def targets(count: int, vocabulary: int) -> Tensor:
    return torch.arange(count) * 37 % vocabulary


def our_logprobs(x: Tensor, head: Tensor) -> Tensor:
    # Where the layers are in bfloat16, the trainer's head takes their float32 sums and multiplies
    # in parts.
    split = x.dtype == torch.bfloat16 and kernels.SPLITS.get(x.device.type, False)
    tokens = targets(len(x), len(head)).to(x.device)
    logp, entropy = TokenLogProbs.apply(x.float(), head, tokens, 0.7, True, split)
    return logp + 0.3 * entropy


def plain_logprobs(x: Tensor, head: Tensor) -> Tensor:
    logprobs = (x @ head.T / 0.7).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets(len(x), len(head))[:, None]).squeeze(-1) + 0.3 * entropy


# ---------------------------------------------------------------------------------------------------------
# the head
def head_precision(bench: Bench) -> Iterator[Finding]:
    """Measure the error of a response's mean log-ratio, with logits as large as public models',
    against float64.
    """
    tokens, width, vocabulary = 512, 256, 4096
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, width, generator=generator) * 0.45
    hidden = torch.randn(tokens, width, generator=generator)
    moved = hidden + torch.randn(tokens, width, generator=generator) * 3e-4
    chosen = (hidden @ head.T).softmax(-1).multinomial(1, generator=generator).squeeze(-1)

    def exact(x: Tensor) -> Tensor:
        return (
            (x.double() @ head.double().T).log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
        )

    def ours(x: Tensor, dtype: torch.dtype, split: bool) -> Tensor:
        own, on_device = x.to(bench.device, dtype), chosen.to(bench.device)
        return (
            TokenLogProbs.apply(own, head.to(bench.device), on_device, 1.0, False, split)[0]
            .cpu()
            .double()
        )

    true = exact(moved) - exact(hidden)
    split = kernels.SPLITS.get(bench.device.type, False)
    found = ours(moved, torch.float32, split) - ours(hidden, torch.float32, split)
    yield at_most(
        "mean log-ratio's error, float32 head", float((found - true).mean().abs()), 0.1 * CLIP_RANGE
    )
    if not bench.bfloat16:
        yield Finding(SKIP, "mean log-ratio's error, bfloat16 head", "this GPU has no bfloat16")
        return
    rounded = ours(moved, torch.bfloat16, False) - ours(hidden, torch.bfloat16, False)
    off = float((rounded - true).mean().abs())
    yield Finding(
        OK, "mean log-ratio's error, bfloat16 head", f"{off:.3g}", f"GSPO's range is {CLIP_RANGE:g}"
    )
