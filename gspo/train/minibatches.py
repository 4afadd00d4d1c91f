"""Choose the rows of each mini-batch, and each rank's share of them.

Shape suffix: N row indices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.data.seeding import permutation
from gspo.distributed.ranks import Ranks


def split_into_minibatches(
    group_sizes: Sequence[int], minibatches: int, epochs: int, seed: int, step: int
) -> list[list[Tensor]]:
    """Return the rows of each mini-batch, epoch by epoch.

    The rows are numbered group by group. Mini-batches are made of whole groups, whose order is
    random in each epoch. An epoch has fewer than `minibatches` mini-batches if there are fewer
    groups, because too many could not be graded.
    """
    groups = torch.arange(sum(group_sizes)).split(list(group_sizes))
    count = min(minibatches, len(groups))
    rows_by_epoch = []
    for epoch in range(epochs):
        order = permutation(len(groups), seed, "minibatches", step, epoch)
        rows_by_minibatch = []
        for split in torch.from_numpy(order).tensor_split(count):
            rows = [groups[i] for i in split]
            rows_by_minibatch.append(torch.cat(rows))
        rows_by_epoch.append(rows_by_minibatch)
    return rows_by_epoch


def local_rows(minibatches: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the rows of this rank in ascending order: its share of every mini-batch."""
    shares = []
    for rows_N in minibatches:
        share = ranks.shard_rows(len(rows_N))
        shares.append(rows_N[share])
    return torch.cat(shares).sort().values
