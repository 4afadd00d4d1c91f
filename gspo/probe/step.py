"""Measures a training step: all updates on a rollout batch.

Shape suffixes: B responses, T response tokens, S all positions, L MoE layers, K experts per token.
"""

import torch
from torch import Tensor

from gspo.algorithm.objectives import Objective
from gspo.distributed.ranks import Ranks
from gspo.probe.logprobs import add_ratios, check_objective, loss_inputs
from gspo.probe.routing import add_routing
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator


class StepProbe:
    """Accumulates the metrics of a training step over its micro-batches.

    Means are over all tokens or responses of the step, however it is cut. `objective` defines what
    is clipped. Without it there are no clip fractions. Raises ValueError for an objective that
    needs more than these log-probs, see gspo.probe.logprobs.

        probe = StepProbe(GSPO(clip_low=3e-4, clip_high=4e-4))
        probe.add_logprobs(logp, old_logp, advantages, mask, update_number=1)   # each micro-batch
        probe.result()
    """

    def __init__(self, objective: Objective | None = None):
        if objective:
            check_objective(objective)
            if objective.needs_statistic:
                raise ValueError(
                    f"StepProbe cannot measure objective={objective.name}: it clips by a statistic "
                    "of a whole mini-batch, and a step is measured in micro-batches; call "
                    "clip_shares with the mini-batch"
                )
        self.objective = objective
        self.is_empty = True
        self._accumulator = MetricAccumulator()

    @torch.no_grad()
    def add_logprobs(
        self,
        logp_BT: Tensor,
        old_logp_BT: Tensor | None,
        advantages: Tensor,
        mask_BT: Tensor,
        *,
        update_number: int,
    ) -> None:
        """Add the log-probs of a micro-batch, see gspo.probe.logprobs.

        `update_number` counts the updates of the step from 1. In the first the current policy is
        the old policy, so its distance from ratio 1 is rounding. If `old_logp_BT` is None there was
        no pass under the old policy: all ratios are 1, and no rounding is measured.
        """
        has_old_pass = old_logp_BT is not None
        if old_logp_BT is None:
            old_logp_BT = logp_BT
        inputs = loss_inputs(logp_BT, old_logp_BT, advantages, mask_BT)
        self.is_empty = False
        bound = Objective.log_ratio_bound
        if self.objective:
            bound = self.objective.log_ratio_bound
            outputs = self.objective(inputs)
            diagnostics.measure_clips(outputs, inputs, update_number, self._accumulator)
            if update_number == 1 and has_old_pass:
                diagnostics.measure_rounding_floor(self.objective, inputs, self._accumulator)
        add_ratios(inputs, bound, self._accumulator)

    @torch.no_grad()
    def add_routing(
        self,
        experts_BSLK: Tensor,
        old_experts_BSLK: Tensor | None,
        response_BS: Tensor,
        num_experts: int,
        *,
        update_number: int,
        old_response_BS: Tensor | None = None,
    ) -> None:
        """Add the experts of a micro-batch, see gspo.probe.routing.

        old_response_BS   the response tokens of the old pass, if its padding differs"""
        self.is_empty = False
        add_routing(
            experts_BSLK,
            old_experts_BSLK,
            response_BS,
            num_experts,
            self._accumulator,
            update_number=update_number,
            old_response_BS=old_response_BS,
        )

    def result(self, ranks: Ranks | None = None) -> dict[str, float]:
        """Return all metrics of the step by name, over all `ranks`."""
        return self._accumulator.result(ranks)
