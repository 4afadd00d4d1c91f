"""The options by which a user completes the logs of other frameworks.

Every command that reads runs has them, and `load_runs`. They apply to all runs of other frameworks
among the sources, and never to runs of this repository.
"""

from dataclasses import dataclass

from gspo.io.arguments import ArgumentsError, option
from gspo.tracking.frameworks.known import TABLES, table_of

# for a command in which they have no effect: each option, and the reason
NOT_FOREIGN = "it does not read logs of other frameworks"
REFUSED = dict.fromkeys(("framework", "objective", "updates_per_batch"), NOT_FOREIGN)


@dataclass(frozen=True, kw_only=True)
class ForeignOptions:
    """What a user says of runs of other frameworks. "" and 0 leave it to the log."""

    framework: str = option(
        "", "the framework that wrote the logs: trl, verl, ...; empty: found by the metric names"
    )
    objective: str = option(
        "", "the objective of such a run: gspo, grpo, ...; clip fractions depend on it"
    )
    updates_per_batch: int = option(
        0, "optimizer steps per rollout batch of such a run, if its log counts them", least=1
    )

    def __post_init__(self) -> None:
        """Raise ArgumentsError for a framework without a table, and for a wrong number."""
        if self.framework:
            try:
                table_of(self.framework)
            except ValueError:
                remedy = f"choose one of {', '.join(TABLES)}"
                raise ArgumentsError("framework", self.framework, remedy=remedy) from None
        updates = self.updates_per_batch
        if type(updates) is not int or updates < 0:
            problem = "must be a whole number of at least 1"
            raise ArgumentsError("updates_per_batch", updates, problem)

    def given(self) -> dict[str, str | int]:
        """Return the options that the user has set, by their names."""
        values = {
            "framework": self.framework,
            "objective": self.objective,
            "updates_per_batch": self.updates_per_batch,
        }
        return {name: value for name, value in values.items() if value}

    def without_effect(self) -> str:
        """Return the message for sources without a run of another framework."""
        words = " ".join(f"{name}={value}" for name, value in self.given().items())
        return f"{words}: none of these is a run of another framework; leave it out"


NOTHING_SAID = ForeignOptions()
