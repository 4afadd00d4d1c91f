"""Compares every kernel of the network, forward and backward, with float64 on the CPU."""

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.checking.bench import Bench, relative_error
from gspo.checking.machine import short
from gspo.checking.report import OK, SKIP, Finding, Findings, at_most
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


def kernels_against_float64(bench: Bench) -> Findings:
    """Compare every kernel in float32, and on a GPU in bfloat16.

    Memory that a kernel does not write contains NaN."""
    dtypes = [torch.float32]
    if bench.on_gpu and bench.bfloat16:
        dtypes.append(torch.bfloat16)
    with poisoned_memory():
        for dtype in dtypes:
            bound = BOUNDS[dtype]
            for name, ours, plain, inputs in cases():
                largest = error(bench, ours, plain, inputs, dtype)
                yield at_most(f"{name}, {short(dtype)}", largest, bound)


@contextmanager
def poisoned_memory() -> Generator[None]:
    """Fill new tensors with NaN in this context. A read before the first write then shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic  # its attribute is made at import
    fills = settings.fill_uninitialized_memory
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
        settings.fill_uninitialized_memory = fills


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
    rotation_inputs = [normal(96, 4, 16)]
    yield "rotary embedding", our_rotation, plain_rotation, rotation_inputs
    swiglu_inputs = [normal(96, 64)]
    yield "gated unit", swiglu, plain_swiglu, swiglu_inputs
    causal_inputs = [normal(3, 21, 4, 16), normal(3, 21, 2, 16)]
    yield "attention, causal", causal_attention, plain_causal, causal_inputs
    masked_inputs = [normal(3, 21, 4, 16), normal(3, 21, 2, 16)]
    yield "attention, masked", masked_attention, plain_masked, masked_inputs
    hidden = normal(64, 32)
    up = normal(8, 32, 32) * 0.3
    down = normal(8, 32, 16) * 0.3
    yield "experts, some without tokens", our_experts, plain_experts, [hidden, up, down]
    hidden = normal(80, 32)
    head = normal(300, 32) * 0.5
    yield "log-probs of tokens", our_logprobs, plain_logprobs, [hidden, head]


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
    our_gradient = gradient.to(our_result)
    plain_gradients = torch.autograd.grad(plain_result, plain_inputs, gradient)
    our_gradients = torch.autograd.grad(our_result, our_inputs, our_gradient)
    expected = [plain_result.detach(), *plain_gradients]
    computed = [our_result.detach(), *our_gradients]
    return relative_error([x.cpu().double() for x in computed], expected)


# -------------------------------------------------------------------------------------------------
# our kernels and plain arithmetic
def our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    mean_square = x.square().mean(-1, keepdim=True)
    scale = (mean_square + EPS).rsqrt()
    return x * scale * weight


def rotation(x: Tensor) -> Tensor:
    """Return the rotation of every position and pair of x [N, H, D], in float64."""
    positions = torch.arange(len(x), dtype=torch.float64)
    pairs = torch.arange(1, x.shape[-1] // 2 + 1)
    angles = torch.outer(positions, pairs) / 7
    radii = torch.ones_like(angles)
    return torch.polar(radii, angles).unsqueeze(1)


def our_rotation(x: Tensor) -> Tensor:
    factors = rotation(x).to(torch.complex64)
    return rotate(x, factors.to(x.device))


def plain_rotation(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    rotated = pairs * rotation(x)
    return torch.view_as_real(rotated).flatten(-2)


def plain_swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def causal_attention(q: Tensor, k: Tensor) -> Tensor:
    values = k * 0.5
    return attention(q, k, values)


def plain_attention(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    queries_per_key = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2)
    keys = k.repeat_interleave(queries_per_key, 2).transpose(1, 2)
    values = keys * 0.5
    products = queries @ keys.mT
    scores = products / q.shape[-1] ** 0.5 + mask.to(q.dtype)
    weights = scores.softmax(-1)
    results = weights @ values
    return results.transpose(1, 2).flatten(0, 1)


def causal_mask(width: int) -> Tensor:
    """Return a mask to add to the scores: 0 if a query may attend to a key, else -inf."""
    blocked = torch.full((width, width), -torch.inf)
    return blocked.triu(1)


def padded_mask(width: int) -> Tensor:
    """Return a causal mask of three rows. The second row begins with two columns of padding."""
    mask = causal_mask(width).repeat(3, 1, 1, 1)
    mask[1, :, 2:, :2] = -torch.inf
    return mask


def masked_attention(q: Tensor, k: Tensor) -> Tensor:
    values = k * 0.5
    mask = padded_mask(q.shape[1])
    return attention(q, k, values, mask.to(q.device))


def plain_causal(q: Tensor, k: Tensor) -> Tensor:
    mask = causal_mask(q.shape[1])
    return plain_attention(q, k, mask)


def plain_masked(q: Tensor, k: Tensor) -> Tensor:
    mask = padded_mask(q.shape[1])
    return plain_attention(q, k, mask)


def choices(tokens: int) -> tuple[Tensor, Tensor]:
    """Return gate weights and experts, [tokens, 2] each. Experts 0, 3 and 7 of 8 get no token."""
    generator = torch.Generator().manual_seed(7)
    used_experts = torch.tensor([1, 2, 4, 5, 6])
    pairs = []
    for _ in range(tokens):
        order = torch.randperm(len(used_experts), generator=generator)
        pairs.append(used_experts[order[:2]])
    weights = torch.rand(tokens, 2, generator=generator)
    return weights, torch.stack(pairs)


@dataclass
class ExpertWeights:
    """The experts of a layer, with the attribute names of transformers."""

    gate_up_proj: Tensor
    down_proj: Tensor
    num_experts: int


def our_experts(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts = choices(len(h))
    layer = ExpertWeights(up, down, len(up))
    return run_experts(layer, h, weights.to(h), experts.to(h.device))


def plain_experts(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts = choices(len(h))
    result = torch.zeros_like(h)
    for i, token in enumerate(h):
        for gate, expert in zip(weights[i], experts[i], strict=True):
            gated = plain_swiglu(token @ up[expert].T)
            output = gated @ down[expert].T
            result[i] += gate * output
    return result


def targets(x: Tensor, head: Tensor) -> Tensor:
    return torch.arange(len(x)) * 37 % len(head)


def select(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-prob of each row's token."""
    columns = tokens.unsqueeze(-1)
    return logprobs.gather(-1, columns).squeeze(-1)


def head_splits(device: torch.device) -> bool:
    """Return whether the head splits float32 products on this kind of device."""
    return kernels.SPLITS.get(device.type, False)


def our_logprobs(x: Tensor, head: Tensor) -> Tensor:
    # If the layers are in bfloat16, the trainer's head gets their float32 sums and splits the
    # product.
    split = x.dtype == torch.bfloat16 and head_splits(x.device)
    tokens = targets(x, head).to(x.device)
    logp, entropy = TokenLogProbs.apply(x.float(), head, tokens, 0.7, True, split)
    return logp + 0.3 * entropy


def plain_logprobs(x: Tensor, head: Tensor) -> Tensor:
    logits = x @ head.T / 0.7
    logprobs = logits.log_softmax(-1)
    products = logprobs.exp() * logprobs
    entropy = -products.sum(-1)
    logp = select(logprobs, targets(x, head))
    return logp + 0.3 * entropy


# -------------------------------------------------------------------------------------------------
# the head
def head_precision(bench: Bench) -> Findings:
    """Measure the error of a response's mean log-ratio against float64.

    The logits have the magnitude of public models' logits."""
    tokens = 512
    width = 256
    vocabulary = 4096
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, width, generator=generator) * 0.45
    old_hidden = torch.randn(tokens, width, generator=generator)
    change = torch.randn(tokens, width, generator=generator) * 3e-4
    new_hidden = old_hidden + change
    probabilities = (old_hidden @ head.T).softmax(-1)
    token_ids = probabilities.multinomial(1, generator=generator).squeeze(-1)
    device = bench.device
    head_on_device = head.to(device)
    ids_on_device = token_ids.to(device)

    def exact(hidden: Tensor) -> Tensor:
        logits = hidden.double() @ head.double().T
        return select(logits.log_softmax(-1), token_ids)

    def ours(hidden: Tensor, dtype: torch.dtype, split: bool) -> Tensor:
        hidden = hidden.to(device, dtype)
        logp, _ = TokenLogProbs.apply(hidden, head_on_device, ids_on_device, 1.0, False, split)
        return logp.cpu().double()

    expected = exact(new_hidden) - exact(old_hidden)

    def error_of(dtype: torch.dtype, split: bool) -> float:
        computed = ours(new_hidden, dtype, split) - ours(old_hidden, dtype, split)
        mean_error = (computed - expected).mean()
        return float(mean_error.abs())

    error_float32 = error_of(torch.float32, head_splits(device))
    bound = 0.1 * CLIP_RANGE
    yield at_most("mean log-ratio's error, float32 head", error_float32, bound)
    name = "mean log-ratio's error, bfloat16 head"
    if not bench.bfloat16:
        yield Finding(SKIP, name, "this GPU has no bfloat16")
        return
    error_bfloat16 = error_of(torch.bfloat16, split=False)
    yield Finding(OK, name, f"{error_bfloat16:.3g}", f"GSPO's range is {CLIP_RANGE:g}")
