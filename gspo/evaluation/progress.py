"""The progress bar of an evaluation: problems, the accuracy so far, and the time that is left."""

from __future__ import annotations

from tqdm import tqdm

from gspo.evaluation.paired import Group


class Bar:
    """Draws a bar in the terminal, over the problems of all sets; nothing where the output is no
    terminal.
    """

    def __init__(self, problems: int):
        self.bar = tqdm(total=problems, unit="problem", dynamic_ncols=True, disable=None)
        self.rewards: list[float] = []  # of the set that is under way

    def __call__(self, name: str, groups: list[Group], sampled: bool) -> None:
        """Note the rows of some problems of a set: those that were there already, then those that
        were sampled.
        """
        if not sampled:
            self.rewards = []
            if groups:
                self.bar.write(f"{name}: {len(groups)} problems were there already")
            if not self.bar.disable:
                # they took no time, so they must not count in the estimate of the time that is left
                self.bar.initial += len(groups)
        self.rewards += [
            row["reward"] for group in groups for row in group if row["reward"] is not None
        ]
        if self.rewards:
            self.bar.set_postfix_str(
                f"accuracy {sum(self.rewards) / len(self.rewards):.3f}", refresh=False
            )
        self.bar.set_description(name, refresh=False)
        self.bar.update(len(groups))

    def close(self) -> None:
        """End the bar's line."""
        self.bar.close()
