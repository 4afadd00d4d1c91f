"""Evaluates a policy on held-out problems, during training and from the command line.

This module samples and scores responses. gspo.evaluation.estimates and gspo.evaluation.elo compute
numbers from the scores. All runs and steps have the same problems and random numbers, so policies
can be compared in pairs.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from gspo.data.problems import Problem
from gspo.data.samples import ScoredResponse, is_right
from gspo.evaluation import elo, estimates
from gspo.evaluation.paired import graded_rows
from gspo.evaluation.settings import EvaluationSettings
from gspo.io.errors import SettingError
from gspo.io.nested import finite_or_none, mapped
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.scoring import scored_chunks
from gspo.tasks.base import Task
from gspo.tracking import episodes
from gspo.tracking.tracker import rollout_row

SEED = 0  # the seed of held-out problems and of their samples, in every run
UNBOUNDED_SET_SIZE = 256  # the number of problems of an endless set, if no number is given


@dataclass(frozen=True)
class EvaluationSet:
    """The first problems of an evaluation set, in its order."""

    name: str
    task: Task
    problems: list[Problem]
    # the number of problems left out because their prompts leave no room for a response
    left_out: int = 0
    limit: int = 0  # the most tokens of a response; 0: those of the sampling parameters

    def request(
        self, group_size: int, sampling: Sampling, step: int, seed: int = SEED
    ) -> SamplingRequest:
        """Return the request for `group_size` responses to each problem."""
        if self.limit:
            sampling = replace(sampling, max_new_tokens=self.limit)
        random_key = (seed, "evaluation", self.name)
        return SamplingRequest(self.problems, group_size, sampling, random_key, step)


def load_evaluation_sets(
    task: Task, names: list[str], problems: int | None, seed: int = SEED
) -> list[EvaluationSet]:
    """Load the named evaluation sets of a task, or all of them if the list is empty.

    Each gets at most `problems` problems. None stands for all problems of a finite set, and for
    `UNBOUNDED_SET_SIZE` problems of an endless set. Raises ValueError for a set that the task does
    not have.
    """
    available = task.evaluation_sets()
    unknown = [name for name in names if name not in available]
    if unknown:
        raise SettingError(
            "evaluation.sets", unknown[:1], f"task={task.name} has {', '.join(available)}"
        )
    sets = []
    for name in names or available:
        size = task.size(name)
        count = problems or size or UNBOUNDED_SET_SIZE
        if size is not None:
            count = min(count, size)
        problems_of_set = [task.problem(seed, name, i) for i in range(count)]
        sets.append(EvaluationSet(name, task, problems_of_set))
    return sets


def check_ratings(sets: list[EvaluationSet]) -> None:
    """Raise ValueError for two sets with ratings: the metric eval/elo is of one of them."""
    rated = [s.name for s in sets if all(p.rating is not None for p in s.problems)]
    if len(rated) > 1:
        raise SettingError(
            "evaluation.sets",
            rated,
            "all of them have ratings, and eval/elo is of one set",
            remedy="choose one of them",
        )


def with_room(evaluation_set: EvaluationSet, engine: Engine, max_new_tokens: int) -> EvaluationSet:
    """Leave out the problems whose prompts leave no room for `max_new_tokens` response tokens.

    Raises ValueError if no problem remains.
    """
    fitting = [p for p in evaluation_set.problems if engine.fits(p, max_new_tokens)]
    if not fitting:
        raise ValueError(
            f"up to {max_new_tokens} response tokens leave no room for any prompt of the set "
            f"{evaluation_set.name} in {engine.positions} positions; lower max_new_tokens (in "
            "training rollout.max_new_tokens), or choose other sets=... (in training "
            "evaluation.sets=...)"
        )
    left_out = len(evaluation_set.problems) - len(fitting)
    return replace(evaluation_set, problems=fitting, left_out=left_out)


def evaluate(
    engine: Engine,
    task: Task,
    settings: EvaluationSettings,
    max_new_tokens: int,
    step: int,
    stop: Sequence[str] = (),
) -> tuple[dict[str, float], list[list[ScoredResponse]]]:
    """Sample and score responses to every set. Return the metrics, and the groups of all sets.

    `stop` are the strings that end a response."""
    metrics: dict[str, float] = {}
    all_groups: list[list[ScoredResponse]] = []
    sampling = settings.sampling(max_new_tokens, stop)
    for full_set in load_evaluation_sets(task, settings.sets, settings.problems):
        evaluation_set = with_room(full_set, engine, max_new_tokens)
        request = evaluation_set.request(settings.samples, sampling, step)
        chunks = scored_chunks(engine, task, request)
        groups = list(chain.from_iterable(chunks))
        row_groups = [rows(group) for group in groups]
        result = summarise(row_groups, [settings.samples])
        name = evaluation_set.name
        metrics |= as_metrics(name, result)
        metrics[f"eval/{name}/prompt_too_long"] = float(evaluation_set.left_out)
        all_groups += groups
    return metrics, all_groups


def rows(group: list[ScoredResponse]) -> list[dict]:
    """Return the responses to one problem as rows for `summarise`, ready for JSON."""
    rows_of_group = []
    for r in group:
        row = rollout_row(r)
        row["answer"] = r.score.answer
        row["rating"] = r.problem.rating
        if r.score.reward is None:
            row["reason"] = r.score.reason
        rows_of_group.append(row)
    return rows_of_group


def summarise(groups: list[list[dict]], ks: list[int]) -> dict:
    """Compute the numbers of one set, ready for JSON, from the `rows` of every problem.

    A number can be None. Ungraded responses are counted, and no other number includes them. pass@k
    and maj@k are computed for every k of `ks`. With named rewards, a response is right if each of
    them is 1, and avg@k is the mean of their weighted sums. maj@k is None if no response has an
    answer. Elo is None if a problem has no rating. "episodes" has the metrics of
    gspo.tracking.episodes. It is missing if no response is an episode of several turns.
    """
    responses = list(chain.from_iterable(groups))
    graded = graded_rows(responses)
    verdicts = Counter(r["verdict"] for r in graded)
    # None becomes NaN
    rewards_PK = np.array([[r["reward"] for r in group] for group in groups], dtype=float)
    rights_PK = np.array([[_right(r) for r in group] for group in groups], dtype=float)
    # answers are texts of any length, which an array of objects can hold
    answers_PK = np.array([[r["answer"] for r in group] for group in groups], dtype=object)
    has_answers = any(r["answer"] != "" for r in graded)
    ratings = [group[0]["rating"] for group in groups]

    average = estimates.average(rewards_PK)
    stderr_sampling, stderr_problems = estimates.error_parts(rewards_PK)
    pass_at_k = {}
    majority_at_k = {}
    for k in ks:
        solved = estimates.pass_at_k(rights_PK, k)
        pass_at_k[str(k)] = _estimate(solved)
        if has_answers:
            majority = estimates.majority_at_k(rights_PK, answers_PK, k)
            majority_at_k[str(k)] = _estimate(majority)
    result = {
        "problems": len(groups),
        "problems_left_out": len(groups) - average.problems,
        "samples": rewards_PK.shape[1],
        "ungraded": len(responses) - len(graded),
        "ungraded_because": most_frequent_reason(responses),
        "avg": {
            **_estimate(average),
            "stderr_sampling": stderr_sampling,
            "stderr_problems": stderr_problems,
        },
        "pass": pass_at_k,
        "maj": majority_at_k or None,
        "truncated": _mean(r["finish_reason"] == "length" for r in graded),
        "tokens": _mean(r["length"] for r in graded),
        "verdicts": {verdict: n / len(graded) for verdict, n in sorted(verdicts.items())},
        "elo": None,
    }
    if graded and None not in ratings:
        result["elo"] = _elo(np.array(ratings), rights_PK)
    episode_metrics = episodes.episode_metrics(responses)
    if episode_metrics:
        result["episodes"] = episode_metrics
    return mapped(result, finite_or_none)


def most_frequent_reason(responses: list[dict]) -> str | None:
    """Return the most frequent reason for which responses have no reward, None if there is none."""
    reasons = Counter(str(r["reason"]) for r in responses if r.get("reason"))
    return reasons.most_common(1)[0][0] if reasons else None


def _right(row: dict) -> float | None:
    """Return 1 for a right response and 0 for a wrong one, None for an ungraded one."""
    if row["reward"] is None:
        return None
    return float(is_right(row["reward"], row.get("rewards", {})))


def _estimate(estimate: estimates.Estimate) -> dict:
    return {
        "value": estimate.value,
        "stderr": estimate.stderr,
        "interval_95": [estimate.low, estimate.high],
        "problems": estimate.problems,
    }


def _elo(difficulty_P: np.ndarray, rights_PK: np.ndarray) -> dict:
    """Compute both ratings with their errors, and describe the rated problems.

    Without this description the ratings mean little.
    """
    attempts_P = estimates.graded_counts(rights_PK)
    solved_P = (rights_PK == 1).sum(1)
    used_P = attempts_P > 0
    difficulty_P = difficulty_P[used_P]
    attempts_P = attempts_P[used_P]
    solved_P = solved_P[used_P]
    likely = elo.maximum_likelihood(difficulty_P, solved_P, attempts_P)
    probable = elo.maximum_a_posteriori(difficulty_P, solved_P, attempts_P)
    # JSON has no infinity
    likely_rating: float | str = likely.rating
    likely_stderr: float | None = likely.stderr
    if not math.isfinite(likely.rating):
        likely_rating = f"{likely.rating:+}"
        likely_stderr = None
    bootstrap_stderr: float | None = None
    bootstrap_interval: list[float] | None = None
    # Equal results of all problems, or a single problem, say nothing of other problems.
    if math.isfinite(likely.rating) and len(difficulty_P) > 1:
        resampled = elo.bootstrap(difficulty_P, solved_P, attempts_P)
        bootstrap_stderr = resampled.stderr
        bootstrap_interval = [resampled.low, resampled.high]
    return {
        "map": probable.rating,
        "map_stderr": probable.stderr,
        "map_prior": [elo.PRIOR_MEAN, elo.PRIOR_STD],
        "bootstrap_stderr": bootstrap_stderr,
        "bootstrap_interval_95": bootstrap_interval,
        "ml": likely_rating,
        "ml_stderr": likely_stderr,
        "problems": len(difficulty_P),
        "attempts": int(attempts_P.sum()),
        "window": [float(difficulty_P.min()), float(difficulty_P.max())],
    }


def as_metrics(name: str, result: dict) -> dict[str, float]:
    """Return the numbers that are logged in training, by metric name, without None values."""
    k = str(result["samples"])
    average = result["avg"]
    solved = result["pass"][k]
    metrics = {
        f"eval/{name}/avg@{k}": average["value"],
        f"eval/{name}/stderr": average["stderr"],
        f"eval/{name}/pass@{k}": solved["value"],
    }
    if result["maj"]:
        majority = result["maj"][k]
        metrics[f"eval/{name}/maj@{k}"] = majority["value"]
    metrics[f"eval/{name}/truncated"] = result["truncated"]
    metrics[f"eval/{name}/tokens"] = result["tokens"]
    metrics[f"eval/{name}/ungraded"] = float(result["ungraded"])
    elo_result = result["elo"]
    if elo_result:
        metrics["eval/elo"] = elo_result["map"]
        metrics["eval/elo_stderr"] = elo_result["map_stderr"]
    episode_numbers = result.get("episodes", {})
    for key, value in episode_numbers.items():
        metrics[f"eval/{name}/episode_{key}"] = value
    return {key: value for key, value in metrics.items() if value is not None}


def _mean(values) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else math.nan
