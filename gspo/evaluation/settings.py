"""The settings under `evaluation`: the held-out problems of a run, and their sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gspo.io.errors import SettingError
from gspo.io.ranges import ranged
from gspo.rollout.engines.requests import Sampling
from gspo.rollout.engines.truncation import Truncation


@dataclass
class EvaluationSettings(Truncation, key="evaluation"):
    """The settings of a run's evaluations on held-out problems.

    top_p, top_k and min_p may differ from the ones of training: nothing is trained on these
    responses, so they need no importance ratio.
    """

    # steps between evaluations; also before the first, after the last. 0: none at all
    every: int = ranged(20, least=0)
    problems: int = ranged(64, least=2)  # problems per set; all problems of a set that has fewer
    samples: int = ranged(2, least=1)  # k, the number of responses per problem
    temperature: float = ranged(1.0, least=0)  # 0 is greedy
    # the evaluation sets of the task; empty: all of them
    sets: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__post_init__()
        if self.temperature == 0 and self.samples > 1:
            raise SettingError(
                "evaluation.samples",
                self.samples,
                "with temperature=0, greedy samples are all alike",
                remedy="use 1",
            )
        self.refuse_greedy(self.temperature, "evaluation.")

    def sampling(self, max_new_tokens: int, stop: Sequence[str] = ()) -> Sampling:
        """Return the sampling parameters; `stop` are the strings that end a response."""
        return Sampling(
            self.temperature,
            max_new_tokens,
            stop=tuple(stop),
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )
