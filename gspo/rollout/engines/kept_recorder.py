"""Records the kept tokens of responses while the in-process engine decodes them.

Shape suffixes: R rows, T tokens of a row, N kept tokens, V vocabulary.
"""

import numpy as np
from numpy import ndarray
from torch import Tensor

from gspo.data.batch import to_cpu
from gspo.data.kept_tokens import KeptTokens, id_dtype


class KeptRecorder:
    """The kept tokens of all rows, on the CPU, until the rows end.

    A GPU must finish its work before it can tell how many tokens were kept. So recording waits for
    it at every token.
    """

    def __init__(self, num_rows: int, max_tokens: int):
        self.counts_RT = np.zeros((num_rows, max_tokens), np.int32)
        # the row of each kept token, and its ID, in the order of the tokens of a row
        self.rows: list[ndarray] = []
        self.ids: list[ndarray] = []

    def add(self, t: int, indices_R: Tensor, kept_RV: Tensor) -> None:
        """Add the kept tokens at the t-th token. `indices_R` are the rows of `kept_RV`, on the CPU.

        If the whole vocabulary is kept, nothing is listed."""
        vocabulary = kept_RV.shape[1]
        positions, ids = to_cpu(*kept_RV.nonzero(as_tuple=True))
        position_N = positions.numpy()
        counts = np.bincount(position_N, minlength=len(kept_RV))
        is_cut = counts < vocabulary
        is_listed_N = is_cut[position_N]
        rows = indices_R.numpy()
        self.counts_RT[rows, t] = np.where(is_cut, counts, 0)
        self.rows.append(rows[position_N[is_listed_N]].astype(np.int32))
        self.ids.append(ids.numpy()[is_listed_N].astype(id_dtype(vocabulary)))

    def take(self, rows: list[int], lengths: list[int]) -> list[KeptTokens]:
        """Return and forget the kept tokens of rows that have ended, of so many tokens each.

        Rows that have ended may have been fed further tokens, whose kept tokens are left out."""
        if not rows or not self.rows:
            return [KeptTokens.whole_vocabulary(length) for length in lengths]
        row_N = np.concatenate(self.rows)
        id_N = np.concatenate(self.ids)
        is_taken = np.zeros(len(self.counts_RT), bool)
        is_taken[rows] = True
        is_taken_N = is_taken[row_N]
        self.rows = [row_N[~is_taken_N]]
        self.ids = [id_N[~is_taken_N]]
        row_N = row_N[is_taken_N]
        id_N = id_N[is_taken_N]
        # row after row, and the tokens of a row in their order
        order_N = row_N.argsort(kind="stable")
        row_N = row_N[order_N]
        id_N = id_N[order_N]
        kept = []
        for row, length in zip(rows, lengths, strict=True):
            counts = self.counts_RT[row, :length].copy()
            begin = int(np.searchsorted(row_N, row))
            kept.append(KeptTokens(counts, id_N[begin : begin + int(counts.sum())].copy()))
        return kept
