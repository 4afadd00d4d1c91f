"""Attention over sequences of different lengths in one call, for GPUs: no padding, no mask, one
launch per layer.

PyTorch's `varlen_attn` takes the queries of all sequences one after the other, and their keys and
values likewise. A sequence may have more keys than queries. Then the last query sees all keys, the
one before it all but the last, and so on. So a response attends to its prompt, whose keys are
gathered for each response, and to itself:

    queries   prompt 1 | prompt 2 | response 1          | response 2          | ...
    keys      prompt 1 | prompt 2 | prompt 1 response 1 | prompt 1 response 2 | ...

Shape suffixes: N places of the flat list, Q queries, U keys, H query heads, J key/value heads, D
head dimension, C sequences.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gspo.data.batch import to_device

LARGEST_HEAD = 256  # of FlashAttention-2
Varlen = Callable[..., Tensor]


class VariableLengths:
    """The places of queries and keys in the flat list. `queries_CS` and `keys_CS` hold them by
    sequence and in order, with -1 at places to leave out. They lie on the CPU, and `to` moves what
    a forward pass reads."""

    def __init__(self, queries_CS: Tensor, keys_CS: Tensor, filled: int):
        self.queries_Q, self.query_ends, self.most_queries = _flat(queries_CS)
        self.keys_U, self.key_ends, self.most_keys = _flat(keys_CS)
        everything = torch.arange(filled)
        # Without padding and shared prompts nothing needs to be gathered.
        self.in_order = torch.equal(self.queries_Q, everything) and torch.equal(
            self.keys_U, everything
        )

    def to(self, device: torch.device) -> VariableLengths:
        """Move what a forward pass reads to a device."""
        for name in ("queries_Q", "query_ends", "keys_U", "key_ends"):
            setattr(self, name, to_device(getattr(self, name), device))
        return self

    def attend(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Compute causal attention within every sequence. At padding it is 0."""
        if self.in_order:
            return self._attend(q_NHD, k_NJD, v_NJD)
        q_QHD = q_NHD.index_select(0, self.queries_Q)
        mixed_QHD = self._attend(
            q_QHD, k_NJD.index_select(0, self.keys_U), v_NJD.index_select(0, self.keys_U)
        )
        return torch.zeros_like(q_NHD).index_copy(0, self.queries_Q, mixed_QHD)

    def _attend(self, q_QHD: Tensor, k_UJD: Tensor, v_UJD: Tensor) -> Tensor:
        """Compute attention over queries and keys without padding."""
        return varlen_attention(
            q_QHD, k_UJD, v_UJD, self.query_ends, self.key_ends, self.most_queries, self.most_keys
        )


def _flat(places_CS: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the places that are not -1 as one list, the ends of the sequences in it with a 0
    before them (int32), and the length of the longest."""
    real = places_CS >= 0
    lengths = real.sum(1)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return places_CS[real], ends, int(lengths.max())


def varlen_attention(
    q_QHD: Tensor,
    k_UJD: Tensor,
    v_UJD: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
) -> Tensor:
    """Compute causal attention within sequences that end at these queries and keys. Each sequence's
    last query sees all of its keys."""
    operator = varlen_operator()
    shared = {"enable_gqa": True} if "enable_gqa" in inspect.signature(operator).parameters else {}
    return operator(
        q_QHD,
        k_UJD,
        v_UJD,
        query_ends,
        key_ends,
        most_queries,
        most_keys,
        window_size=(-1, 0),
        **shared,
    )


@cache
def varlen_operator() -> Varlen | None:
    """Return PyTorch's operator, None if this version has none that knows windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def suits(capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether FlashAttention computes this type and size on a GPU of this capability; None
    stands for a CPU.
    """
    if capability is None or capability < (8, 0) or dtype not in (torch.bfloat16, torch.float16):
        return False
    return head_dim <= LARGEST_HEAD and head_dim % 8 == 0


@cache
def is_used(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> bool:
    """Return whether attention on this device goes by variable lengths. The operator is tried once
    on a few tokens: one that is missing, refuses them or computes something else is not used, which
    a warning says."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if not suits(capability, dtype, head_dim):
        return False
    reason = why_not(device, dtype, heads, key_heads, head_dim)
    if reason:
        warnings.warn(
            f"attention runs in padded rectangles, which is slower: varlen_attn {reason}",
            stacklevel=2,
        )
    return not reason


def why_not(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> str:
    """Return why the operator cannot be used, "" if it can: its outputs and gradients for two short
    sequences are those of the formula."""
    if varlen_operator() is None:
        return f"is missing in PyTorch {torch.__version__}"
    generator = torch.Generator().manual_seed(0)
    lengths = ((3, 5), (2, 2))  # queries and keys of each sequence
    sizes = ((5, heads), (7, key_heads), (7, key_heads), (5, heads))
    q, k, v, slope = (
        torch.randn(*size, head_dim, generator=generator).to(device, dtype) for size in sizes
    )
    query_ends, key_ends = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 5], [0, 5, 7])
    )
    exact = [x.double() for x in (q, k, v)]
    expected = _with_gradients(lambda *x: by_formula(*x, lengths), exact, slope)
    try:
        computed = _with_gradients(
            lambda *x: varlen_attention(*x, query_ends, key_ends, 3, 5), [q, k, v], slope
        )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"refuses: {str(error).splitlines()[0]}"
    differences = [
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(computed, expected, strict=True)
    ]
    return (
        "" if max(differences) < 0.05 else f"computes something else: off by {max(differences):.2g}"
    )


def _with_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], slope: Tensor
) -> list[Tensor]:
    """Return the function's value, and the gradients of the sum of value times `slope`, in float64."""
    inputs = [x.requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = function(*inputs)
        gradients = torch.autograd.grad((out * slope.to(out.dtype)).sum(), inputs)
    return [x.detach().double() for x in (out, *gradients)]


def by_formula(
    q_QHD: Tensor, k_UJD: Tensor, v_UJD: Tensor, lengths: tuple[tuple[int, int], ...]
) -> Tensor:
    """Return what `varlen_attention` computes, sequence by sequence; `lengths` are each one's
    queries and keys.
    """
    shared = q_QHD.shape[1] // k_UJD.shape[1]
    k_UHD, v_UHD = k_UJD.repeat_interleave(shared, 1), v_UJD.repeat_interleave(shared, 1)
    queries, keys = [pair[0] for pair in lengths], [pair[1] for pair in lengths]
    mixed = []
    for q, k, v in zip(q_QHD.split(queries), k_UHD.split(keys), v_UHD.split(keys), strict=True):
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(
            len(k) - len(q) + 1
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        mixed.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        )
    return torch.cat(mixed)
