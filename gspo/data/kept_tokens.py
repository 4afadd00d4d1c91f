"""The kept tokens of a response: the tokens that could be drawn at each of its positions.

top_p, top_k and min_p exclude tokens before each draw. For example, a response of three tokens from
a vocabulary of 50,000, whose first position kept two tokens, and whose second kept only one:

    counts   2 1 0               0 stands for the whole vocabulary
    ids      17 4032 9           the token IDs, position after position

A real policy keeps few tokens: 8 on average at top_p=0.97, and a single one at nearly half of the
positions. So a list is much smaller than a mask of the vocabulary.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

UINT16_VOCABULARY = 2**16  # larger vocabularies need int32 for their token IDs


@dataclass(eq=False)
class KeptTokens:
    """The kept tokens of T positions.

    A position of the environment, and a position whose whole vocabulary is kept, has no list.
    """

    counts: ndarray  # [T] int32, the number of kept tokens; 0: the whole vocabulary
    ids: ndarray  # [sum of counts] uint16 or int32, their token IDs, position after position

    @staticmethod
    def whole_vocabulary(positions: int) -> KeptTokens:
        """Return the kept tokens of positions at which nothing is excluded."""
        return KeptTokens(np.zeros(positions, np.int32), np.zeros(0, np.uint16))

    @staticmethod
    def of_lists(lists: list[list[int]], vocabulary: int) -> KeptTokens:
        """Return the kept tokens of positions whose token IDs are listed."""
        counts = np.array([len(ids) for ids in lists], np.int32)
        ids = np.array([token for ids in lists for token in ids], id_dtype(vocabulary))
        return KeptTokens(counts, ids)

    def __len__(self) -> int:
        return len(self.counts)

    def followed_by(self, later: KeptTokens) -> KeptTokens:
        """Return the kept tokens of these positions and of the positions after them."""
        counts = np.concatenate([self.counts, later.counts])
        parts = [part for part in (self.ids, later.ids) if len(part)]
        return KeptTokens(counts, np.concatenate(parts) if parts else later.ids)

    def first(self, positions: int) -> KeptTokens:
        """Return the kept tokens of the first positions."""
        counts = self.counts[:positions]
        return KeptTokens(counts, self.ids[: int(counts.sum())])

    def fault(self, token_ids: Sequence[int] | ndarray) -> str:
        """Return in words why these are not the kept tokens of a response, "" if they are."""
        if len(self.counts) != len(token_ids):
            return f"has kept tokens at {len(self.counts)} positions, and {len(token_ids)} tokens"
        if self.counts.min(initial=0) < 0 or self.counts.sum() != len(self.ids):
            return f"has {len(self.ids)} kept tokens, and its counts do not add up to that"
        position_of_id = np.repeat(np.arange(len(token_ids)), self.counts)
        is_sampled = self.ids == np.asarray(token_ids)[position_of_id]
        # a set may hold a token only once, so the sampled token is found once at each position
        times_found = np.bincount(position_of_id[is_sampled], minlength=len(token_ids))
        wrong = np.flatnonzero((times_found != 1) & (self.counts > 0))
        if len(wrong):
            first = int(wrong[0])
            return (
                f"sampled token {token_ids[first]} at position {first}, which is found "
                f"{times_found[first]} times among the kept tokens there"
            )
        return ""


def id_dtype(vocabulary: int) -> type[np.integer]:
    """Return the smallest integer type that holds the token IDs of a vocabulary."""
    return np.uint16 if vocabulary <= UINT16_VOCABULARY else np.int32
