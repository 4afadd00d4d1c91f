"""Compares every kernel of the network, forward and backward, with float64 on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

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
# The largest error, as a share of the result's largest number. A sum in float32 has about a hundred
# terms here.
BOUNDS = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
CLIP_RANGE = 3e-4  # of GSPO, as in the paper
Arithmetic = Callable[..., Tensor]


def kernels_against_float64(bench: Bench) -> Iterator[Finding]:
    """Compare every kernel in float32, and on a GPU in bfloat16.

    Memory that a kernel does not write contains NaN."""
    dtypes = [torch.float32]
    if bench.on_gpu and bench.bfloat16:
        dtypes.append(torch.bfloat16)
    with poisoned_memory():
        for dtype in dtypes:
            for name, ours, plain, inputs in cases():
                largest = error(bench, ours, plain, inputs, dtype)
                yield at_most(f"{name}, {short(dtype)}", largest, BOUNDS[dtype])


@contextmanager
def poisoned_memory() -> Generator[None]:
    """Fill new tensors with NaN in this context. A read before the first write then shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic  # its attribute is made at import
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # The deterministic mode is only needed to fill new tensors. Attention's backward pass
            # has no deterministic kernel on a GPU, and PyTorch would warn about it.
            warnings.filterwarnings("ignore", "[^.]*defaults to a non-deterministic algorithm")
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        settings.fill_uninitialized_memory = filled


def cases() -> Iterator[tuple[str, Arithmetic, Arithmetic, list[Tensor]]]:
    """Yield (name, our kernel, plain arithmetic, inputs).

    Both functions accept the inputs on any device and in any precision."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    norm_inputs = [normal(96, 64), normal(64)]
    yield "norm", our_norm, plain_norm, norm_inputs
    head_norm_inputs = [normal(96, 6, 16), normal(6, 16)]
    yield "norm of each head", our_norm, plain_norm, head_norm_inputs
    yield "rotary embedding", our_rotation, plain_rotation, [normal(96, 4, 16)]
    yield "gated unit", swiglu, plain_swiglu, [normal(96, 64)]
    causal_inputs = [normal(3, 21, 4, 16), normal(3, 21, 2, 16)]
    yield "attention, causal", our_attention, plain_attention, causal_inputs
    masked_inputs = [normal(3, 21, 4, 16), normal(3, 21, 2, 16)]
    yield "attention, masked", masked_attention, plain_masked, masked_inputs
    expert_inputs = [normal(64, 32), normal(8, 32, 32) * 0.3, normal(8, 32, 16) * 0.3]
    yield "experts, some without tokens", our_experts, plain_experts, expert_inputs
    head_inputs = [normal(80, 32), normal(300, 32) * 0.5]
    yield "log-probs of tokens", our_logprobs, plain_logprobs, head_inputs


def error(
    bench: Bench, ours: Arithmetic, plain: Arithmetic, inputs: list[Tensor], dtype: torch.dtype
) -> float:
    """Return the largest error of result and gradients, as a share of the largest number."""
    rounded = [x.to(dtype) for x in inputs]
    plain_inputs = [x.double().requires_grad_() for x in rounded]
    our_inputs = [x.to(bench.device).requires_grad_() for x in rounded]
    plain_result = plain(*plain_inputs)
    our_result = ours(*our_inputs)
    # a random gradient of the result, the same on both sides
    generator = torch.Generator().manual_seed(6)
    gradient = torch.randn(plain_result.shape, generator=generator, dtype=torch.float64)
    plain_loss = (plain_result * gradient).sum()
    our_loss = (our_result * gradient.to(our_result)).sum()
    expected = [plain_result, *torch.autograd.grad(plain_loss, plain_inputs)]
    computed = [our_result, *torch.autograd.grad(our_loss, our_inputs)]
    errors = [
        (a.detach().cpu().double() - b).abs().max() / b.abs().max()
        for a, b in zip(computed, expected, strict=True)
    ]
    return float(torch.stack(errors).detach().max())  # NaN if one of them is NaN


# -------------------------------------------------------------------------------------------------
# our kernels and plain arithmetic
def our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotation(x: Tensor) -> Tensor:
    """Return the rotation of every position and pair of x [N, H, D], in float64."""
    positions = torch.arange(len(x), dtype=torch.float64)[:, None]
    pairs = torch.arange(1, x.shape[-1] // 2 + 1)
    angles = positions * pairs / 7
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
    queries = q.transpose(1, 2)
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2)
    if mask is None:
        mask = causal_mask(q.shape[1]).to(q.dtype)
    scores = queries @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
    return (scores.softmax(-1) @ (keys * 0.5)).transpose(1, 2).flatten(0, 1)


def causal_mask(width: int) -> Tensor:
    """Return a mask to add to the scores: 0 if a query may attend to a key, else -inf."""
    return torch.zeros(width, width).masked_fill(torch.ones(width, width).triu(1) > 0, -torch.inf)


def padded_mask(width: int) -> Tensor:
    """Return a causal mask of three rows. The second row begins with two columns of padding."""
    mask = causal_mask(width).expand(3, 1, width, width).clone()
    mask[1, :, 2:, :2] = -torch.inf
    return mask


def masked_attention(q: Tensor, k: Tensor) -> Tensor:
    return attention(q, k, k * 0.5, padded_mask(q.shape[1]).to(q.device))


def plain_masked(q: Tensor, k: Tensor) -> Tensor:
    return plain_attention(q, k, padded_mask(q.shape[1]).to(q.dtype))


def choices(tokens: int) -> tuple[Tensor, Tensor]:
    """Return gate weights and experts, [tokens, 2] each. Experts 0, 3 and 7 of 8 get no token."""
    generator = torch.Generator().manual_seed(7)
    used_experts = torch.tensor([1, 2, 4, 5, 6])
    indices = torch.stack(
        [torch.randperm(len(used_experts), generator=generator)[:2] for _ in range(tokens)]
    )
    return torch.rand(tokens, 2, generator=generator), used_experts[indices]


class ExpertWeights(torch.nn.Module):
    """The experts of a layer, with the attribute names of transformers."""

    def __init__(self, up: Tensor, down: Tensor):
        super().__init__()
        self.num_experts = len(up)
        self.gate_up_proj = up
        self.down_proj = down


def our_experts(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts = choices(len(h))
    return run_experts(ExpertWeights(up, down), h, weights.to(h), experts.to(h.device))


def plain_experts(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts = choices(len(h))
    rows = []
    for token, gates, token_experts in zip(h, weights.to(h), experts.tolist(), strict=True):
        outputs = [plain_swiglu(token @ up[e].T) @ down[e].T for e in token_experts]
        rows.append(sum(gate * output for gate, output in zip(gates, outputs, strict=True)))
    return torch.stack(rows)


def targets(count: int, vocabulary: int) -> Tensor:
    return torch.arange(count) * 37 % vocabulary


def our_logprobs(x: Tensor, head: Tensor) -> Tensor:
    # If the layers are in bfloat16, the trainer's head gets their float32 sums and splits the
    # product.
    split = x.dtype == torch.bfloat16 and kernels.SPLITS.get(x.device.type, False)
    tokens = targets(len(x), len(head)).to(x.device)
    logp, entropy = TokenLogProbs.apply(x.float(), head, tokens, 0.7, True, split)
    return logp + 0.3 * entropy


def plain_logprobs(x: Tensor, head: Tensor) -> Tensor:
    logprobs = (x @ head.T / 0.7).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets(len(x), len(head))[:, None]).squeeze(-1) + 0.3 * entropy


# -------------------------------------------------------------------------------------------------
# the head
def head_precision(bench: Bench) -> Iterator[Finding]:
    """Measure the error of a response's mean log-ratio against float64.

    The logits have the magnitude of public models' logits."""
    tokens = 512
    width = 256
    vocabulary = 4096
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, width, generator=generator) * 0.45
    old_hidden = torch.randn(tokens, width, generator=generator)
    new_hidden = old_hidden + torch.randn(tokens, width, generator=generator) * 3e-4
    probabilities = (old_hidden @ head.T).softmax(-1)
    token_ids = probabilities.multinomial(1, generator=generator).squeeze(-1)

    def exact(hidden: Tensor) -> Tensor:
        logprobs = (hidden.double() @ head.double().T).log_softmax(-1)
        return logprobs.gather(-1, token_ids[:, None]).squeeze(-1)

    def ours(hidden: Tensor, dtype: torch.dtype, split: bool) -> Tensor:
        hidden = hidden.to(bench.device, dtype)
        weight = head.to(bench.device)
        ids = token_ids.to(bench.device)
        return TokenLogProbs.apply(hidden, weight, ids, 1.0, False, split)[0].cpu().double()

    expected = exact(new_hidden) - exact(old_hidden)
    split = kernels.SPLITS.get(bench.device.type, False)
    computed = ours(new_hidden, torch.float32, split) - ours(old_hidden, torch.float32, split)
    error_float32 = float((computed - expected).mean().abs())
    yield at_most("mean log-ratio's error, float32 head", error_float32, 0.1 * CLIP_RANGE)
    name = "mean log-ratio's error, bfloat16 head"
    if not bench.bfloat16:
        yield Finding(SKIP, name, "this GPU has no bfloat16")
        return
    computed = ours(new_hidden, torch.bfloat16, False) - ours(old_hidden, torch.bfloat16, False)
    error_bfloat16 = float((computed - expected).mean().abs())
    yield Finding(OK, name, f"{error_bfloat16:.3g}", f"GSPO's range is {CLIP_RANGE:g}")
