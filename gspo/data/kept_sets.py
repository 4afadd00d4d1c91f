"""The kept tokens of a batch (gspo.data.kept_tokens), and the logits that they leave.

The softmax over the kept tokens K of a position is

    log pi(y) = z_y / T - log sum_{k in K} exp(z_k / T)

So all other logits are replaced by a number whose exponential is exactly 0. The gradient of their
logits is then exactly 0 too.

Shape suffixes: B responses, T response tokens, M positions, N kept tokens of all positions, C
positions of a chunk, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from gspo.data.batch import to_device
from gspo.data.kept_tokens import KeptTokens

# The logit of an excluded token. Its exponential is 0 in float32. It is finite, because 0 times an
# infinite logit would be NaN in the entropy.
EXCLUDED = -1e30


@dataclass
class KeptSets:
    """The kept tokens of the responses of a batch.

    Parts of a batch share `ids`, so selecting rows copies no list.
    """

    ids: ndarray  # the token IDs of all positions of the whole batch, on the CPU
    starts_BT: Tensor  # int64, the index in `ids` at which a position's kept tokens begin
    counts_BT: Tensor  # int64, how many there are; 0: the whole vocabulary is kept

    def columns(self, counts_M: Tensor, starts_M: Tensor) -> KeptColumns:
        """Return the kept tokens of some positions, given by their counts and starts on the CPU."""
        positions_N = torch.arange(len(counts_M)).repeat_interleave(counts_M)
        ends_M = counts_M.cumsum(0)
        first_M = ends_M - counts_M
        offset_N = torch.arange(len(positions_N)) - first_M[positions_N]
        indices_N = starts_M[positions_N] + offset_N
        ids_N = torch.from_numpy(self.ids[indices_N.numpy()].astype(np.int64))
        return KeptColumns(positions_N, ids_N, counts_M > 0, [0, *ends_M.tolist()])

    def all_columns(self) -> KeptColumns:
        """Return the kept tokens of all positions [B * T]."""
        return self.columns(self.counts_BT.flatten(), self.starts_BT.flatten())


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

    def exclude_others_(self, logits_CV: Tensor, first: int) -> Tensor:
        """Exclude the other tokens of the positions from `first` on, in place.

        Positions at which nothing was excluded keep their logits to the bit."""
        end = first + len(logits_CV)
        kept = slice(self.bounds[first], self.bounds[end])
        rows_N = self.positions_N[kept] - first
        ids_N = self.ids_N[kept]
        kept_logits_N = logits_CV[rows_N, ids_N]
        logits_CV.masked_fill_(self.is_cut_M[first:end, None], EXCLUDED)
        return logits_CV.index_put_((rows_N, ids_N), kept_logits_N)

    def without_others(self, logits_MV: Tensor) -> Tensor:
        """Return the logits of all positions without the other tokens, with autograd's gradient."""
        excluded_MV = self.is_cut_M[:, None].repeat(1, logits_MV.shape[1])
        no = torch.zeros((), dtype=torch.bool, device=logits_MV.device)
        excluded_MV.index_put_((self.positions_N, self.ids_N), no)
        return logits_MV.masked_fill(excluded_MV, EXCLUDED)


def pack_kept(rows: list[KeptTokens | None], real_BT: Tensor) -> KeptSets | None:
    """Pack the kept tokens of responses, None if no response has any.

    `real_BT` marks the tokens of each response."""
    if all(kept is None for kept in rows):
        return None
    lengths = real_BT.sum(1).tolist()
    kept_rows = [
        KeptTokens.whole_vocabulary(length) if kept is None else kept
        for kept, length in zip(rows, lengths, strict=True)
    ]
    counts_N = np.concatenate([kept.counts for kept in kept_rows]).astype(np.int64)
    parts = [kept.ids for kept in kept_rows if len(kept.ids)]
    counts_BT = torch.zeros(real_BT.shape, dtype=torch.int64)
    starts_BT = torch.zeros(real_BT.shape, dtype=torch.int64)
    counts_BT[real_BT] = torch.from_numpy(counts_N)
    starts_BT[real_BT] = torch.from_numpy(counts_N.cumsum() - counts_N)
    ids = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    return KeptSets(ids, starts_BT, counts_BT)
