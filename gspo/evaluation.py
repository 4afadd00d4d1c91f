"""Held-out evaluation: avg@k and pass@k with standard errors, and an Elo rating on the rated set.

The problems and the random numbers are the same for all runs and steps, so differences between policies are paired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from gspo.records import Response
from gspo.rollout.engine import LocalEngine, Sampling
from gspo.rollout.source import score
from gspo.tasks.base import Task

SEED = 0  # of held-out problems and of their samples, for every run
LOGISTIC = math.log(10) / 400  # Elo's scale: 400 points are a factor of 10 in the odds


@dataclass
class EvaluationSettings:
    """What is measured on held-out problems, and when. Empty `sets` stands for all that the task has."""

    every: int = 20  # steps; also before the first and after the last
    problems: int = 64  # per set
    samples: int = 2  # k, responses per problem
    temperature: float = 1.0
    sets: list[str] = field(default_factory=list)

    def __post_init__(self):
        for key, least in (("every", 1), ("problems", 2), ("samples", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"evaluation.{key}={getattr(self, key)} must be at least {least}")
        if not self.temperature >= 0:
            raise ValueError(f"evaluation.temperature={self.temperature} must be 0 (greedy) or positive")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"evaluation.samples={self.samples} with temperature=0: greedy samples are all alike; use 1"
            )


def evaluate(
    engine: LocalEngine, task: Task, settings: EvaluationSettings, max_new_tokens: int, step: int
) -> tuple[dict[str, float], list[list[Response]]]:
    """Metrics of every set, and the scored responses behind them."""
    known = task.evaluation_sets()
    unknown = [name for name in settings.sets if name not in known]
    if unknown:
        raise ValueError(f"evaluation.sets: task {task.name!r} has no set {unknown[0]!r}; it has {', '.join(known)}")
    metrics, everything = {}, []
    for name in settings.sets or known:
        problems = [task.problem(SEED, name, i) for i in range(settings.problems)]
        sampling = Sampling(settings.temperature, max_new_tokens)
        groups = engine.generate(problems, settings.samples, sampling, (SEED, "evaluation", name), policy_step=step)
        score(task, [r for group in groups for r in group])
        rewards_PK = np.array([[r.score.reward for r in group] for group in groups])
        metrics |= summarise(name, rewards_PK)
        if all(p.rating is not None for p in problems):
            solved = (rewards_PK == 1).sum(1)
            rating, error = elo([(p.rating, int(c), settings.samples) for p, c in zip(problems, solved, strict=True)])
            metrics |= {"eval/elo": rating, "eval/elo_stderr": error}
        everything += groups
    return metrics, everything


def summarise(name: str, rewards_PK: np.ndarray) -> dict[str, float]:
    """avg@k, the standard error of it over problems, and the share of problems that one of the k samples solved.

    The standard error is that of the mean over problems of each problem's mean: it holds both the spread between
    problems and the sampling noise within them.
    """
    problems, samples = rewards_PK.shape
    means_P = rewards_PK.mean(1)
    return {
        f"eval/{name}/avg@{samples}": float(means_P.mean()),
        f"eval/{name}/stderr": float(means_P.std(ddof=1) / math.sqrt(problems)),
        f"eval/{name}/pass@{samples}": float((rewards_PK == 1).any(1).mean()),
    }


def elo(solves: list[tuple[float, int, int]], mean: float = 1500.0, spread: float = 700.0) -> tuple[float, float]:
    """Rating and its standard error from (problem rating d, solved, attempts), by maximum a posteriori.

        P(solve | R, d) = 1 / (1 + 10^((d - R)/400)),    R ~ N(mean, spread^2)

    Newton's method on the concave log posterior; the standard error is the curvature's. The prior keeps the rating
    finite where everything or nothing is solved.
    """
    rating = mean
    for _ in range(200):
        slope, curvature = (mean - rating) / spread**2, -1 / spread**2
        for difficulty, solved, attempts in solves:
            p = 1 / (1 + math.exp(LOGISTIC * (difficulty - rating)))
            slope += LOGISTIC * (solved - attempts * p)
            curvature -= LOGISTIC**2 * attempts * p * (1 - p)
        step = max(-300.0, min(300.0, -slope / curvature))
        rating += step
        if abs(step) < 1e-6:
            break
    return rating, (-curvature) ** -0.5
