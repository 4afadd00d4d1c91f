"""The progress bar of an evaluation: problems, the accuracy so far, and the remaining time."""

from itertools import chain

from tqdm import tqdm

from gspo.evaluation.paired import Group, graded_rows


class Bar:
    """A bar over the problems of all sets. It draws nothing if the output is no terminal."""

    def __init__(self, problems: int):
        self.bar = tqdm(total=problems, unit="problem", dynamic_ncols=True, disable=None)
        self.rewards: list[float] = []  # of the current set

    def __call__(self, name: str, groups: list[Group], sampled: bool) -> None:
        """Count the rows of some problems of a set.

        The first call for a set has the rows of earlier runs, and `sampled` is False."""
        if not sampled:
            self.rewards = []
            if groups:
                self.bar.write(f"{name}: {len(groups)} problems were there already")
            if not self.bar.disable:
                # they took no time, so they must not count in the estimate of the remaining time
                self.bar.initial += len(groups)
        rows = list(chain.from_iterable(groups))
        self.rewards += [row["reward"] for row in graded_rows(rows)]
        if self.rewards:
            accuracy = sum(self.rewards) / len(self.rewards)
            self.bar.set_postfix_str(f"accuracy {accuracy:.3f}", refresh=False)
        self.bar.set_description(name, refresh=False)
        self.bar.update(len(groups))

    def close(self) -> None:
        """End the bar's line."""
        self.bar.close()
