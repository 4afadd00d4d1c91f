"""Attention over sequences of different lengths in one call, for GPUs.

It needs no padding and no mask, and is one launch per layer. PyTorch's `varlen_attn` takes the
concatenated queries of all sequences, and their concatenated keys and values. A sequence may have
more keys than queries. Then the last query sees all keys, the query before it all keys except the
last, and so on. So a response attends to its prompt, whose keys are copied for each response, and
to itself:

    queries   prompt 1 | prompt 2 | response 1          | response 2          | ...
    keys      prompt 1 | prompt 2 | prompt 1 response 1 | prompt 1 response 2 | ...

Shape suffixes: N slots of the flat list, Q queries, U keys, H query heads, J key/value heads, D
head dimension, C sequences, S columns.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gspo.data.batch import to_device
from gspo.io.errors import first_line

MAX_HEAD_DIM = 256  # of FlashAttention-2
# the maximum error of the operator in the trial, relative to the largest number
TRIAL_TOLERANCE = 0.05
# PyTorch's varlen_attn, which returns a tensor unless it is asked for more
Varlen = Callable[..., Any]


class VariableLengths:
    """The slots of queries and keys in the flat list of `filled` tokens.

    `queries_CS` and `keys_CS` hold the slots of each sequence in order, and -1 for columns to leave
    out. They are on the CPU."""

    def __init__(self, queries_CS: Tensor, keys_CS: Tensor, filled: int):
        self.queries_Q, self.query_ends, self.max_queries = _flat(queries_CS)
        self.keys_U, self.key_ends, self.max_keys = _flat(keys_CS)
        all_slots = torch.arange(filled)
        # Without padding and shared prompts nothing needs to be copied.
        self.in_order = torch.equal(self.queries_Q, all_slots) and torch.equal(
            self.keys_U, all_slots
        )

    def to(self, device: torch.device) -> VariableLengths:
        """Move the tensors that a forward pass reads to a device."""
        for name in ("queries_Q", "query_ends", "keys_U", "key_ends"):
            setattr(self, name, to_device(getattr(self, name), device))
        return self

    def attend(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NJD: Tensor,
        v_NJD: Tensor,
    ) -> Tensor:
        """Compute causal attention within every sequence. At padding it is 0."""
        if self.in_order:
            return self._attend(q_NHD, k_NJD, v_NJD)
        mixed_QHD = self._attend(
            q_NHD.index_select(0, self.queries_Q),
            k_NJD.index_select(0, self.keys_U),
            v_NJD.index_select(0, self.keys_U),
        )
        return torch.zeros_like(q_NHD).index_copy(0, self.queries_Q, mixed_QHD)

    def _attend(self, q_QHD: Tensor, k_UJD: Tensor, v_UJD: Tensor) -> Tensor:
        """Compute attention over queries and keys without padding."""
        return varlen_attention(
            q_QHD, k_UJD, v_UJD, self.query_ends, self.key_ends, self.max_queries, self.max_keys
        )


def _flat(slots_CS: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the slots that are not -1 in one list, the sequences' ends, and the maximum length.

    The ends are int32 indices of the list, with a 0 before them."""
    is_token = slots_CS >= 0
    lengths = is_token.sum(1)
    zero = lengths.new_zeros(1)
    ends = torch.cat([zero, lengths.cumsum(0)]).to(torch.int32)
    return slots_CS[is_token], ends, int(lengths.max())


def varlen_attention(
    q_QHD: Tensor,
    k_UJD: Tensor,
    v_UJD: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_queries: int,
    max_keys: int,
) -> Tensor:
    """Compute causal attention within sequences that end at these queries and keys.

    A sequence's last query sees all of its keys."""
    operator = varlen_operator()
    if operator is None:
        raise RuntimeError("this version of PyTorch has no varlen_attn with windows")
    has_gqa_option = "enable_gqa" in inspect.signature(operator).parameters
    options = {"enable_gqa": True} if has_gqa_option else {}
    return operator(
        q_QHD,
        k_UJD,
        v_UJD,
        query_ends,
        key_ends,
        max_queries,
        max_keys,
        window_size=(-1, 0),
        **options,
    )


@cache
def varlen_operator() -> Varlen | None:
    """Return PyTorch's operator, None if this version has no operator with windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def is_flash_attention_size(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int
) -> bool:
    """Return whether FlashAttention supports this type and size on a GPU of this capability.

    A capability of None stands for a CPU."""
    if capability is None or capability < (8, 0) or dtype not in (torch.bfloat16, torch.float16):
        return False
    return head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


@cache
def uses_varlen(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    head_dim: int,
) -> bool:
    """Return whether attention on this device is computed by `varlen_attention`.

    If the operator fails in a trial on a few tokens, it is not used, and a warning says why."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if not is_flash_attention_size(capability, dtype, head_dim):
        return False
    problem = varlen_problem(device, dtype, heads, key_heads, head_dim)
    if problem:
        warnings.warn(
            f"attention runs in padded rectangles, which is slower: varlen_attn {problem}",
            stacklevel=2,
        )
    return not problem


def varlen_problem(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    head_dim: int,
) -> str:
    """Return why the operator cannot be used, "" if it can be used.

    For two short sequences, its outputs and gradients are compared with `by_formula`."""
    if varlen_operator() is None:
        return f"is missing in PyTorch {torch.__version__}"
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, head_dim, generator=generator).to(device, dtype)

    # The first sequence has 3 queries and 5 keys, the second has 2 of each.
    q_QHD = random(5, heads)
    k_UJD = random(7, key_heads)
    v_UJD = random(7, key_heads)
    slope_QHD = random(5, heads)
    query_ends = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    key_ends = torch.tensor([0, 5, 7], dtype=torch.int32, device=device)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_formula(q, k, v, ((3, 5), (2, 2)))

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, query_ends, key_ends, 3, 5)

    in_float64 = [x.double() for x in (q_QHD, k_UJD, v_UJD)]
    expected = _with_gradients(formula, in_float64, slope_QHD)
    try:
        computed = _with_gradients(operator, [q_QHD, k_UJD, v_UJD], slope_QHD)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"refuses: {first_line(error)}"
    differences = []
    for ours, exact in zip(computed, expected, strict=True):
        difference = (ours - exact).abs().max() / exact.abs().max()
        differences.append(float(difference))
    difference = max(differences)
    if difference < TRIAL_TOLERANCE:
        return ""
    return f"computes something else: off by {difference:.2g}"


def _with_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], slope: Tensor
) -> list[Tensor]:
    """Return a function's value, and the gradients of sum(value * slope), in float64."""
    inputs = [x.requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = function(*inputs)
        loss = (out * slope.to(out.dtype)).sum()
        gradients = torch.autograd.grad(loss, inputs)
    return [x.detach().double() for x in (out, *gradients)]


def by_formula(
    q_QHD: Tensor,
    k_UJD: Tensor,
    v_UJD: Tensor,
    lengths: tuple[tuple[int, int], ...],
) -> Tensor:
    """Compute `varlen_attention` sequence by sequence.

    `lengths` are the numbers of queries and keys of each sequence."""
    queries_per_key = q_QHD.shape[1] // k_UJD.shape[1]
    k_UHD = k_UJD.repeat_interleave(queries_per_key, 1)
    v_UHD = v_UJD.repeat_interleave(queries_per_key, 1)
    queries = [pair[0] for pair in lengths]
    keys = [pair[1] for pair in lengths]
    mixed = []
    for q, k, v in zip(q_QHD.split(queries), k_UHD.split(keys), v_UHD.split(keys), strict=True):
        everything = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        is_later = everything.triu(len(k) - len(q) + 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        mixed.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(mixed)
