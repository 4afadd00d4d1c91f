"""Adds this repository's metrics to the logs of TRL's GRPOTrainer.

    from gspo.probe.trl import ProbedGRPOTrainer

    trainer = ProbedGRPOTrainer(...)    # the arguments of GRPOTrainer

The metrics have the names of docs/metrics.md behind "gspo/". They are of a whole rollout batch,
and stand in the row of its last optimizer step. docs/probe.md explains them.

Shape suffixes: B responses, T response tokens, S all positions, L MoE layers, K experts per token.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from gspo.algorithm.objectives import GRPO, GSPO, Objective
from gspo.distributed.ranks import Ranks
from gspo.probe.routing import RoutingProbe, routers_of
from gspo.probe.step import StepProbe

logger = logging.getLogger(__name__)

PREFIX = "gspo/"
# the old policy's experts in TRL's batch, so that TRL shuffles and splits them with the rows
OLD_EXPERTS = "gspo_old_experts"
# the values of `loss_type` that clip as PPO does
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass
class Pass:
    """The results of a forward pass over a batch."""

    logp_BT: Tensor
    experts_BSLK: Tensor | None


class ProbedGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer that also logs clip fractions, ratios and routing by our definitions.

    It trains as GRPOTrainer does, and runs no forward pass more.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._objective = clipped_objective(self)
        self._routing = RoutingProbe(self.model) if routers_of(self.model) else None
        if self._routing is None:
            logger.warning("the model has no router: the probe measures log-probs alone")
        self._step_probe = StepProbe(self._objective)
        self._passes: list[Pass] = []
        self._first_update = 0  # the optimizer step before the first update on the rollout batch
        self.add_callback(ProbeCallback(self))

    def log_rollout_batch(self) -> None:
        """Hand the metrics of the rollout batch to TRL, which logs them in its next row."""
        if self._step_probe.is_empty:
            return
        metrics = self._step_probe.result(Processes())
        for name, value in metrics.items():
            self._metrics["train"][PREFIX + name].append(value)
        self._step_probe = StepProbe(self._objective)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self.log_rollout_batch()
        self._first_update = self.state.global_step
        self._passes = []
        batch = super()._generate_and_score_completions(inputs)
        # otherwise TRL made no pass under the old policy, and the ratios are 1
        if "old_per_token_logps" in batch and self._passes[0].experts_BSLK is not None:
            batch[OLD_EXPERTS] = self._passes[0].experts_BSLK.to("cpu")
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.model.training or model is self.ref_model:
            return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
        experts_BSLK = None
        if self._routing:
            with self._routing.recording():
                result = super()._get_per_token_logps_and_entropies(
                    model, input_ids, *args, **kwargs
                )
            experts_BSLK = self._routing.experts(input_ids)
        else:
            result = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
        self._passes.append(Pass(result[0].detach(), experts_BSLK))
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._passes = []
        loss = super()._compute_loss(model, inputs)
        if self.model.training:
            if not self._passes:
                raise RuntimeError(
                    "the probe found no forward pass in the loss: it is tried with TRL 1.16, and "
                    "this version computes log-probs in another method"
                )
            self._measure(inputs, self._passes[0])
        return loss

    def _measure(self, inputs: dict[str, Any], current: Pass) -> None:
        """Add a micro-batch to the metrics of the rollout batch."""
        update_number = 1 + self.state.global_step - self._first_update
        mask_BT = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask_BT = mask_BT * inputs["tool_mask"]
        logp_BT = current.logp_BT.float()
        old_logp_BT = inputs.get("old_per_token_logps")
        if old_logp_BT is not None:
            old_logp_BT = old_logp_BT.float()
        self._step_probe.add_logprobs(
            logp_BT, old_logp_BT, inputs["advantages"], mask_BT, update_number=update_number
        )
        if self._routing and current.experts_BSLK is not None:
            no_response_BS = torch.zeros_like(inputs["prompt_mask"])
            response_BS = torch.cat([no_response_BS, mask_BT], dim=1)
            self._step_probe.add_routing(
                current.experts_BSLK,
                inputs.get(OLD_EXPERTS),
                response_BS,
                self._routing.num_experts,
                update_number=update_number,
            )


class ProbeCallback(TrainerCallback):
    """Hands the metrics to TRL after the last update on a rollout batch.

    ProbedGRPOTrainer adds it to itself.
    """

    def __init__(self, trainer: ProbedGRPOTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the metrics before TRL writes the row of this optimizer step."""
        micro_batches = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        if self.trainer._step % micro_batches == 0:
            self.trainer.log_rollout_batch()


class Processes(Ranks):
    """The processes of accelerate, for the sums over all of them."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, ordered by rank."""
        return gather_object([value])


def clipped_objective(trainer: GRPOTrainer) -> Objective | None:
    """Return the objective that clips as the trainer's loss does, None for a loss without clip."""
    if trainer.loss_type not in CLIPPED_LOSSES:
        return None
    kind = GSPO if trainer.importance_sampling_level == "sequence" else GRPO
    return kind(
        clip_low=trainer.epsilon_low,
        clip_high=trainer.epsilon_high,
        dual_clip=trainer.args.delta,
    )
