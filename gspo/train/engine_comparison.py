"""Compares the engine with the old policy, and ends a run whose engine chooses other experts."""

from torch import Tensor

from gspo.data.batch import OldPolicyBatch
from gspo.train import diagnostics, routing
from gspo.train.accumulator import MetricAccumulator


class EngineComparison:
    """Compares the engine's log-probs and experts with the old policy's.

    The agreements of the experts stay on their device until an update reads them.
    """

    def __init__(self, routes_floor: float):
        self.routes_floor = routes_floor
        self.agreements: list[Tensor] = []  # measured, and not compared with the floor yet

    def measure(self, batch: OldPolicyBatch, accumulator: MetricAccumulator) -> None:
        """Measure the mismatch of log-probs, and the agreement of the experts if both are known."""
        diagnostics.measure_mismatch(batch, accumulator)
        if batch.engine_experts_BSLK is not None and batch.experts_BSLK is not None:
            agreement = routing.engine_agreement(
                batch.experts_BSLK, batch.engine_experts_BSLK, batch, accumulator
            )
            self.agreements.append(agreement)

    def check(self, agreements: list[float]) -> None:
        """Raise RuntimeError if the engine's experts agree too little with the trainer's.

        The engine then returned the experts of other tokens, or it has other weights. `agreements`
        holds the values of `self.agreements` as floats. `self.agreements` is empty afterwards.
        """
        self.agreements.clear()
        for agreement in agreements:
            if agreement < self.routes_floor:
                raise RuntimeError(
                    f"routing/engine_agreement={agreement:.3f} is below "
                    f"rollout.routes_floor={self.routes_floor}: the engine returned the experts of "
                    "other tokens, or its weights are far from the trainer's; set "
                    "rollout.routes=false, or lower rollout.routes_floor"
                )
