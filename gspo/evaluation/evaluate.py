"""Evaluates a policy on held-out problems, by the same code during training and from the command
line.

Responses are sampled and scored here; gspo.evaluation.estimates and gspo.evaluation.elo compute
numbers from the scores. The problems and the random numbers are the same for all runs and steps, so
that policies are compared in pairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo.data.samples import Problem, ScoredResponse
from gspo.evaluation import elo, estimates
from gspo.evaluation.settings import EvaluationSettings
from gspo.rollout.engines.base import Engine
from gspo.rollout.scoring import scored_chunks
from gspo.tasks.base import Task
from gspo.tracking import episodes
from gspo.tracking.tracker import rollout_row

SEED = 0  # the seed of held-out problems and of their samples, in every run
UNBOUNDED_SET_SIZE = 256  # how many problems of a set without end are taken if no number is given


@dataclass(frozen=True)
class EvaluationSet:
    """Holds problems of one evaluation set: the first ones, in the order of the set."""

    name: str
    task: Task
    problems: list[Problem]
    # the number of problems left out because their prompts leave no room for a response
    left_out: int = 0
    limit: int = 0  # the most tokens of a response; 0: the limit that the caller gives


def load_evaluation_sets(
    task: Task, names: list[str], problems: int | None, seed: int = SEED
) -> list[EvaluationSet]:
    """Load the named evaluation sets of a task, or with an empty list all of them.

    At most `problems` problems of each are taken; None stands for all problems of a finite set and
    `UNBOUNDED_SET_SIZE` of one without end. Raises ValueError for a set that the task does not
    have.
    """
    available = task.evaluation_sets()
    unknown = [name for name in names if name not in available]
    if unknown:
        raise ValueError(
            f"evaluation.sets: task {task.name!r} has no set {unknown[0]!r}; it has {', '.join(available)}"
        )
    sets = []
    for name in names or available:
        size = task.size(name)
        wanted = problems or size or UNBOUNDED_SET_SIZE
        count = wanted if size is None else min(wanted, size)
        sets.append(EvaluationSet(name, task, [task.problem(seed, name, i) for i in range(count)]))
    return sets


def with_room(evaluation_set: EvaluationSet, engine: Engine, max_new_tokens: int) -> EvaluationSet:
    """Leave out the problems whose prompts leave no room for a response of `max_new_tokens` in the
    model's positions.

    Raises ValueError if no problem is left.
    """
    kept = [problem for problem in evaluation_set.problems if engine.fits(problem, max_new_tokens)]
    if not kept:
        raise ValueError(
            f"up to {max_new_tokens} response tokens leave no room for any prompt of the set {evaluation_set.name} in "
            f"{engine.positions} positions; lower max_new_tokens (in training rollout.max_new_tokens), or choose other "
            "sets=... (in training evaluation.sets=...)"
        )
    return replace(evaluation_set, problems=kept, left_out=len(evaluation_set.problems) - len(kept))


def evaluate(
    engine: Engine,
    task: Task,
    settings: EvaluationSettings,
    max_new_tokens: int,
    step: int,
    stop: Sequence[str] = (),
) -> tuple[dict[str, float], list[list[ScoredResponse]]]:
    """Sample and score responses to every set; `stop` are the strings that end one. Returns the
    metrics and the scored responses, group by group."""
    metrics, everything = {}, []
    sampling = settings.sampling(max_new_tokens, stop)
    for whole in load_evaluation_sets(task, settings.sets, settings.problems):
        evaluation_set = with_room(whole, engine, max_new_tokens)
        position = (SEED, "evaluation", evaluation_set.name)
        chunks = scored_chunks(
            engine,
            task,
            evaluation_set.problems,
            settings.samples,
            sampling,
            position,
            policy_step=step,
        )
        groups = [group for chunk in chunks for group in chunk]
        metrics |= as_metrics(
            evaluation_set.name, summarise([rows(group) for group in groups], [settings.samples])
        )
        metrics[f"eval/{evaluation_set.name}/prompt_too_long"] = float(evaluation_set.left_out)
        everything += groups
    return metrics, everything


def rows(group: list[ScoredResponse]) -> list[dict]:
    """Convert the responses to one problem to what `summarise` needs, ready for JSON."""
    return [rollout_row(r) | {"answer": r.score.answer, "rating": r.problem.rating} for r in group]


def summarise(groups: list[list[dict]], ks: list[int]) -> dict:
    """Compute the numbers of one set, ready for JSON, from the `rows` of every problem. A number
    can be None.

    Responses that could not be graded are counted, and left out of everything else. pass@k and
    maj@k are computed for every k of `ks`; maj@k is None without any answer to vote for, Elo if a
    problem has no rating. "episodes" has the numbers of gspo.tracking.episodes, and is there only
    where responses are episodes of several turns.
    """
    rewards_PK = np.array(
        [[math.nan if r["reward"] is None else r["reward"] for r in group] for group in groups]
    )
    # answers are texts of any length, which an array of objects can hold
    answers_PK = np.array([[r["answer"] for r in group] for group in groups], dtype=object)
    graded = [r for group in groups for r in group if r["reward"] is not None]
    sampling, between = estimates.error_parts(rewards_PK)
    result = {
        "problems": len(groups),
        "problems_left_out": len(groups) - estimates.average(rewards_PK).problems,
        "samples": rewards_PK.shape[1],
        "ungraded": int(np.isnan(rewards_PK).sum()),
        "avg": _estimate(estimates.average(rewards_PK))
        | {"stderr_sampling": sampling, "stderr_problems": between},
        "pass": {str(k): _estimate(estimates.pass_at_k(rewards_PK, k)) for k in ks},
        "maj": None,
        "truncated": _mean(r["finish_reason"] == "length" for r in graded),
        "tokens": _mean(r["length"] for r in graded),
        "verdicts": {
            v: n / len(graded) for v, n in sorted(Counter(r["verdict"] for r in graded).items())
        },
        "elo": None,
    }
    if (answers_PK[~np.isnan(rewards_PK)] != "").any():
        result["maj"] = {
            str(k): _estimate(estimates.majority_at_k(rewards_PK, answers_PK, k)) for k in ks
        }
    if graded and all(group[0]["rating"] is not None for group in groups):
        result["elo"] = _elo(np.array([group[0]["rating"] for group in groups]), rewards_PK)
    if found := episodes.numbers([r for group in groups for r in group]):
        result["episodes"] = found
    return without_nan(result)


def _estimate(estimate: estimates.Estimate) -> dict:
    return {
        "value": estimate.value,
        "stderr": estimate.stderr,
        "interval_95": [estimate.low, estimate.high],
        "problems": estimate.problems,
    }


def _elo(difficulty_P: np.ndarray, rewards_PK: np.ndarray) -> dict:
    """Compute both ratings with their errors, and say what they were measured on, without which
    they mean little.
    """
    used = (~np.isnan(rewards_PK)).any(1)
    difficulty_P, rewards_PK = difficulty_P[used], rewards_PK[used]
    solved_P, attempts_P = (rewards_PK == 1).sum(1), (~np.isnan(rewards_PK)).sum(1)
    likely = elo.most_likely(difficulty_P, solved_P, attempts_P)
    probable = elo.most_probable(difficulty_P, solved_P, attempts_P)
    resampled = elo.bootstrap(difficulty_P, solved_P, attempts_P)
    return {
        "map": probable.rating,
        "map_stderr": probable.stderr,
        "map_prior": [elo.MEAN, elo.SPREAD],
        "bootstrap_stderr": resampled.stderr,
        "bootstrap_interval_95": [resampled.low, resampled.high],
        "ml": likely.rating
        if math.isfinite(likely.rating)
        else ("+inf" if likely.rating > 0 else "-inf"),
        "ml_stderr": likely.stderr if math.isfinite(likely.stderr) else None,
        "problems": len(difficulty_P),
        "attempts": int(attempts_P.sum()),
        "window": [float(difficulty_P.min()), float(difficulty_P.max())],
    }


def as_metrics(name: str, result: dict) -> dict[str, float]:
    """Select the numbers that are logged over training, under their names as metrics, without those
    that are None.
    """
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
    } | {f"eval/{name}/episode_{key}": value for key, value in result.get("episodes", {}).items()}
    return {key: value for key, value in metrics.items() if value is not None}


def _mean(values) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else math.nan


def without_nan(value):
    """Replace NaN, which JSON does not have, by None, however deep in mappings and lists."""
    if isinstance(value, dict):
        return {key: without_nan(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
