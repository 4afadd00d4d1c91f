"""Held-out evaluation, the same code during training and from the command line: samples of held-out problems, scored,
and the numbers that gspo.evaluation.estimates and gspo.evaluation.elo make of them.

The problems and the random numbers are the same for all runs and steps, so differences between policies are paired.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from gspo.core.ranges import Ranged, ranged
from gspo.core.types import Problem, Response
from gspo.evaluation import elo, estimates
from gspo.rollout.engine import Engine
from gspo.rollout.requests import Sampling
from gspo.rollout.scoring import sample_and_score
from gspo.tasks.base import Task
from gspo.tracking.tracker import rollout_row

SEED = 0  # of held-out problems and of their samples, for every run
MADE = 256  # problems of a set that is made without end, where no number is given


@dataclass
class EvaluationSettings(Ranged, key="evaluation"):
    """What is measured on held-out problems, and when. Empty `sets` stands for all that the task has."""

    every: int = ranged(20, least=1)  # steps; also before the first and after the last
    problems: int = ranged(64, least=2)  # per set; all of a set that has fewer
    samples: int = ranged(2, least=1)  # k, responses per problem
    temperature: float = ranged(1.0, least=0)  # 0 is greedy
    sets: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__post_init__()
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"evaluation.samples={self.samples} with temperature=0: greedy samples are all alike; use 1"
            )


@dataclass(frozen=True)
class HeldOut:
    """The problems of one evaluation set: its first ones, in its own order."""

    name: str
    task: Task
    problems: list[Problem]
    left_out: int = 0  # problems whose prompts leave no room for a response
    limit: int = 0  # tokens of a response; 0: the caller's


def held_out_sets(task: Task, names: list[str], problems: int | None, seed: int = SEED) -> list[HeldOut]:
    """The named sets of a task, or all of them. `problems` None: all of a finite set, `MADE` of an unbounded one.

    Raises ValueError for a set that the task does not have.
    """
    known = task.evaluation_sets()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"evaluation.sets: task {task.name!r} has no set {unknown[0]!r}; it has {', '.join(known)}")
    sets = []
    for name in names or known:
        size = task.size(name)
        wanted = problems or size or MADE
        count = wanted if size is None else min(wanted, size)
        sets.append(HeldOut(name, task, [task.problem(seed, name, i) for i in range(count)]))
    return sets


def with_room(held_out: HeldOut, engine: Engine, max_new_tokens: int) -> HeldOut:
    """The set without the problems whose prompts leave no room for a response in the engine's positions. Raises
    ValueError if none is left."""
    kept = [problem for problem in held_out.problems if engine.fits(problem, max_new_tokens)]
    if not kept:
        raise ValueError(
            f"up to {max_new_tokens} response tokens leave no room for any prompt of the set {held_out.name} in "
            f"{engine.positions} positions; lower max_new_tokens (in training rollout.max_new_tokens), or choose other "
            "sets=... (in training evaluation.sets=...)"
        )
    return replace(held_out, problems=kept, left_out=len(held_out.problems) - len(kept))


def evaluate(
    engine: Engine, task: Task, settings: EvaluationSettings, max_new_tokens: int, step: int
) -> tuple[dict[str, float], list[list[Response]]]:
    """Metrics of every set, and the scored responses behind them."""
    metrics, everything = {}, []
    sampling = Sampling(settings.temperature, max_new_tokens)
    for whole in held_out_sets(task, settings.sets, settings.problems):
        held_out = with_room(whole, engine, max_new_tokens)
        position = (SEED, "evaluation", held_out.name)
        groups, _ = sample_and_score(engine, task, held_out.problems, settings.samples, sampling, position, step)
        metrics |= as_metrics(held_out.name, summarise([rows(group) for group in groups], [settings.samples]))
        metrics[f"eval/{held_out.name}/prompt_too_long"] = float(held_out.left_out)
        everything += groups
    return metrics, everything


def rows(group: list[Response]) -> list[dict]:
    """What is kept of the responses to one problem: all that `summarise` needs, ready for JSON."""
    return [rollout_row(r) | {"answer": r.score.answer, "rating": r.problem.rating} for r in group]


def summarise(groups: list[list[dict]], ks: list[int]) -> dict:
    """The numbers of one set, ready for JSON, from the `rows` of every problem; what cannot be said is None.

    Responses that could not be graded are counted and left out of everything else. pass@k and maj@k for every k of
    `ks`; maj@k where there is an answer to vote for, Elo where every problem has a rating.
    """
    rewards_PK = np.array([[math.nan if r["reward"] is None else r["reward"] for r in group] for group in groups])
    answers_PK = np.array([[r["answer"] for r in group] for group in groups], dtype=object)  # of any length
    graded = [r for group in groups for r in group if r["reward"] is not None]
    sampling, between = estimates.error_parts(rewards_PK)
    result = {
        "problems": len(groups),
        "problems_left_out": len(groups) - estimates.average(rewards_PK).problems,
        "samples": rewards_PK.shape[1],
        "ungraded": int(np.isnan(rewards_PK).sum()),
        "avg": _estimate(estimates.average(rewards_PK)) | {"stderr_sampling": sampling, "stderr_problems": between},
        "pass": {str(k): _estimate(estimates.pass_at_k(rewards_PK, k)) for k in ks},
        "maj": None,
        "truncated": _mean(r["finish_reason"] == "length" for r in graded),
        "tokens": _mean(r["length"] for r in graded),
        "verdicts": {v: n / len(graded) for v, n in sorted(Counter(r["verdict"] for r in graded).items())},
        "elo": None,
    }
    if (answers_PK[~np.isnan(rewards_PK)] != "").any():
        result["maj"] = {str(k): _estimate(estimates.majority_at_k(rewards_PK, answers_PK, k)) for k in ks}
    if graded and all(group[0]["rating"] is not None for group in groups):
        result["elo"] = _elo(np.array([group[0]["rating"] for group in groups]), rewards_PK)
    return _without_nan(result)


def _estimate(estimate: estimates.Estimate) -> dict:
    return {
        "value": estimate.value,
        "stderr": estimate.stderr,
        "interval_95": [estimate.low, estimate.high],
        "problems": estimate.problems,
    }


def _elo(difficulty_P: np.ndarray, rewards_PK: np.ndarray) -> dict:
    """Both ratings, their errors, and what they were measured on: without that they mean little."""
    attempts_P = (~np.isnan(rewards_PK)).sum(1)
    used = attempts_P > 0
    items = (difficulty_P[used], (rewards_PK[used] == 1).sum(1), attempts_P[used])
    likely, probable, resampled = elo.most_likely(*items), elo.most_probable(*items), elo.bootstrap(*items)
    return {
        "map": probable.rating,
        "map_stderr": probable.stderr,
        "map_prior": [elo.MEAN, elo.SPREAD],
        "bootstrap_stderr": resampled.stderr,
        "bootstrap_interval_95": [resampled.low, resampled.high],
        "ml": likely.rating if math.isfinite(likely.rating) else ("+inf" if likely.rating > 0 else "-inf"),
        "ml_stderr": likely.stderr if math.isfinite(likely.stderr) else None,
        "problems": len(items[0]),
        "attempts": int(attempts_P.sum()),
        "window": [float(items[0].min()), float(items[0].max())],
    }


def as_metrics(name: str, result: dict) -> dict[str, float]:
    """The numbers that are followed over training, under their names in the registry; those that are None left out."""
    k = result["samples"]
    elo_result, majority = result["elo"] or {}, result["maj"] or {}
    metrics = {
        f"eval/{name}/avg@{k}": result["avg"]["value"],
        f"eval/{name}/stderr": result["avg"]["stderr"],
        f"eval/{name}/pass@{k}": result["pass"][str(k)]["value"],
        f"eval/{name}/maj@{k}": majority.get(str(k), {}).get("value"),
        f"eval/{name}/truncated": result["truncated"],
        f"eval/{name}/tokens": result["tokens"],
        f"eval/{name}/ungraded": float(result["ungraded"]),
        "eval/elo": elo_result.get("map"),
        "eval/elo_stderr": elo_result.get("map_stderr"),
    }
    return {key: value for key, value in metrics.items() if value is not None}


def _mean(values) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else math.nan


def _without_nan(value):
    """NaN, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
