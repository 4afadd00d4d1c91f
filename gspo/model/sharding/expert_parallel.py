"""Deals a layer's experts to several ranks, and sends every token to the ranks that have its
experts.

For example, two ranks share a layer of eight experts. Rank 0 has the weights of the first four,
rank 1 those of the other four. Each sorts its tokens by expert and sends the second half of that
list to rank 1, the first to rank 0; each multiplies what it has received with its own experts, and
sends the products back. So the experts' weights, which are most of the model, need not be gathered
for each micro-batch; tokens travel instead.

transformers has such a dispatch for its own forward. This one works on the list of tokens of ours,
sorted by expert already, and with our products.

Shape suffixes: N tokens, W hidden width, K experts per token, E experts, R ranks, P experts of a
rank (E / R).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from gspo.model.forward.kernels import ToExperts


@dataclass
class ExpertRanks:
    """The ranks to which a layer's experts are dealt: rank r has the experts r E / R to (r + 1) E /
    R - 1.
    """

    group: dist.ProcessGroup

    def compute(
        self, rows: Tensor, counts_E: Tensor, apply_experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return what the experts make of rows that are sorted by expert, of which `counts_E` says
        how many go to each. All ranks must call this. `apply_experts` is called with the rows of
        all ranks for this rank's experts, sorted in the same way, and with their numbers."""
        counts_RP, sent, received = self.numbers(rows, counts_E)
        here = wait_tensor(all_to_all_single(rows, received, sent, self.group))
        # They came sorted by rank, and those of a rank by expert.
        own_P = torch.arange(counts_RP.shape[1], device=rows.device).repeat(len(counts_RP))
        order = own_P.repeat_interleave(counts_RP.flatten(), output_size=len(here)).argsort(
            stable=True
        )
        places = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=rows.device)
        )
        out = apply_experts(ToExperts.apply(here, order, places, 1), counts_RP.sum(0))
        return wait_tensor(
            all_to_all_single(ToExperts.apply(out, places, order, 1), sent, received, self.group)
        )

    def numbers(self, rows: Tensor, counts_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return how many rows each rank sends here for each of this rank's experts, [R, P], how
        many of `rows` go to each rank, and how many come from each."""
        counts_RP = torch.empty_like(counts_E).view(self.group.size(), -1)
        dist.all_to_all_single(counts_RP, counts_E.view_as(counts_RP), group=self.group)
        sent, received = torch.stack(
            [counts_E.view_as(counts_RP).sum(1), counts_RP.sum(1)]
        ).tolist()
        return counts_RP, sent, received
