"""Expert parallelism: several ranks share a layer's experts, and tokens travel to their experts.

For example, two ranks share a layer of eight experts. Rank 0 has the weights of the first four
experts, rank 1 of the other four. Each rank sorts its tokens by expert. It sends the first half of
that list to rank 0 and the second half to rank 1. Each rank multiplies the tokens that it has
received with its own experts, and sends the products back. So the experts' weights, which are most
of the model, need not be all-gathered for each micro-batch.

transformers has such a dispatch for its own forward. This dispatch works on our forward's list of
tokens, which is already sorted by expert, and with our products.

Shape suffixes: N tokens, W hidden width, K experts per token, E experts, R ranks, P experts of a
rank (E / R).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from gspo.model.forward.kernels import ToExperts, inverse_permutation


@dataclass
class ExpertRanks:
    """The ranks that share a layer's experts.

    Rank r has the experts r E / R to (r + 1) E / R - 1.
    """

    group: dist.ProcessGroup

    def compute(
        self, rows: Tensor, counts_E: Tensor, apply_experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the experts' outputs for rows that are sorted by expert.

        `counts_E` is the number of rows for each expert. `apply_experts` is called with the rows of
        all ranks for this rank's experts, sorted by expert, and their counts [P]. All ranks must
        call this."""
        counts_RP, sent_R, received_R = self.exchange_counts(rows, counts_E)
        received = wait_tensor(all_to_all_single(rows, received_R, sent_R, self.group))
        # The rows arrive sorted by rank, and by expert within a rank.
        expert_P = torch.arange(counts_RP.shape[1], device=rows.device)
        experts = expert_P.repeat(len(counts_RP))
        expert_of_row = experts.repeat_interleave(counts_RP.flatten(), output_size=len(received))
        order = expert_of_row.argsort(stable=True)
        inverse = inverse_permutation(order)
        by_expert = ToExperts.apply(received, order, inverse, 1)
        out = apply_experts(by_expert, counts_RP.sum(0))
        by_rank = ToExperts.apply(out, inverse, order, 1)
        return wait_tensor(all_to_all_single(by_rank, sent_R, received_R, self.group))

    def exchange_counts(
        self, rows: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, list[int], list[int]]:
        """Exchange and return the numbers of rows that the ranks will send each other.

        These are the rows from each rank for each of this rank's experts [R, P], the rows that this
        rank sends to each rank [R], and the rows that it receives from each rank [R]. The planner
        overrides this by a method that reads the number of `rows`."""
        counts_RP = torch.empty_like(counts_E).view(self.group.size(), -1)
        sent_RP = counts_E.view_as(counts_RP)
        dist.all_to_all_single(counts_RP, sent_RP, group=self.group)
        sent_R, received_R = torch.stack([sent_RP.sum(1), counts_RP.sum(1)]).tolist()
        return counts_RP, sent_R, received_R
