"""The softmax over the kept tokens of each position (gspo.data.kept_tokens).

With the kept tokens K of a position

    log pi(y) = z_y / T - log sum_{k in K} exp(z_k / T)

In the backward pass all other logits are replaced by a number whose exponential is exactly 0. So
the gradient of these logits is exactly 0.

Shape suffixes: M positions, N kept tokens of all positions, C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gspo.data.batch import KeptSets, to_device

# The logit of an excluded token. Its exponential is 0 in float32. It is finite, because 0 times an
# infinite logit would be NaN in the entropy.
EXCLUDED = -1e30


def columns_at(kept: KeptSets, counts_M: Tensor, starts_M: Tensor) -> KeptColumns:
    """Return the kept tokens of some positions, given by their counts and starts on the CPU."""
    positions_N = torch.arange(len(counts_M)).repeat_interleave(counts_M)
    ends_M = counts_M.cumsum(0)
    first_M = ends_M - counts_M
    offset_N = torch.arange(len(positions_N)) - first_M[positions_N]
    indices_N = starts_M[positions_N] + offset_N
    ids_N = torch.from_numpy(kept.ids[indices_N.numpy()].astype(np.int64))
    return KeptColumns(positions_N, ids_N, counts_M > 0, [0, *ends_M.tolist()])


def all_columns(kept: KeptSets) -> KeptColumns:
    """Return the kept tokens of all positions [B * T]."""
    return columns_at(kept, kept.counts_BT.flatten(), kept.starts_BT.flatten())


class KeptColumns:
    """The kept tokens of M positions, as columns of their logits [M, V].

    positions_N   the position of each kept token, in ascending order
    ids_N         its token ID
    is_cut_M      whether tokens were excluded at a position
    bounds        the kept tokens of position m lie at bounds[m] to bounds[m + 1], on the CPU
    """

    def __init__(self, positions_N: Tensor, ids_N: Tensor, is_cut_M: Tensor, bounds: list[int]):
        self.positions_N = positions_N
        self.ids_N = ids_N
        self.is_cut_M = is_cut_M
        self.bounds = bounds

    def to(self, device: torch.device) -> KeptColumns:
        """Copy the tensors to a device."""
        positions_N = to_device(self.positions_N, device)
        ids_N = to_device(self.ids_N, device)
        return KeptColumns(positions_N, ids_N, to_device(self.is_cut_M, device), self.bounds)

    def _entries(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return rows and columns of the kept tokens of the positions from `first` to `end`."""
        kept = slice(self.bounds[first], self.bounds[end])
        return self.positions_N[kept] - first, self.ids_N[kept]

    def normalizers(
        self, logits_CV: Tensor, first: int, norm_C: Tensor, entropy_C: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return log sum exp and the entropy over the kept tokens of the positions from `first` on.

        `norm_C` and `entropy_C` are those over the whole vocabulary. Positions at which nothing was
        excluded keep them. Only the logits of kept tokens are read: on a CPU, exp is 20 times
        slower for logits that are excluded."""
        end = first + len(logits_CV)
        is_cut_C = self.is_cut_M[first:end]
        rows_N, ids_N = self._entries(first, end)
        logits_N = logits_CV[rows_N, ids_N]
        zeros_C = torch.zeros_like(norm_C)
        max_C = zeros_C.scatter_reduce(0, rows_N, logits_N, "amax", include_self=False)
        sum_C = zeros_C.index_add(0, rows_N, (logits_N - max_C[rows_N]).exp())
        kept_norm_C = max_C + sum_C.log()
        if entropy_C is not None:
            p_N = (logits_N - kept_norm_C[rows_N]).exp()
            mean_logit_C = zeros_C.index_add(0, rows_N, p_N * logits_N)
            entropy_C = torch.where(is_cut_C, kept_norm_C - mean_logit_C, entropy_C)
        return torch.where(is_cut_C, kept_norm_C, norm_C), entropy_C

    def exclude_others_(self, logits_CV: Tensor, first: int) -> Tensor:
        """Exclude the other tokens of the positions from `first` on, in place.

        Positions at which nothing was excluded keep their logits to the bit."""
        end = first + len(logits_CV)
        rows_N, ids_N = self._entries(first, end)
        kept_logits_N = logits_CV[rows_N, ids_N]
        logits_CV.masked_fill_(self.is_cut_M[first:end, None], EXCLUDED)
        return logits_CV.index_put_((rows_N, ids_N), kept_logits_N)

    def without_others(self, logits_MV: Tensor) -> Tensor:
        """Return the logits of all positions without the other tokens, with autograd's gradient."""
        excluded_MV = self.is_cut_M[:, None].repeat(1, logits_MV.shape[1])
        no = torch.zeros((), dtype=torch.bool, device=logits_MV.device)
        excluded_MV.index_put_((self.positions_N, self.ids_N), no)
        return logits_MV.masked_fill(excluded_MV, EXCLUDED)
