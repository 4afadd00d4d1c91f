"""Sampling and grading beside each other: while the engine samples, the verifiers judge what has ended.

Verifiers that run programs or workers wait for other processes, and the engine's arithmetic leaves Python's lock alone,
so the two overlap on a machine with a core to spare. Nothing depends on it: the scores are those of the serial way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from gspo.records import Problem, Response
from gspo.rollout.engine import Engine
from gspo.rollout.rows import Sampling
from gspo.tasks.base import Task

Groups = list[list[Response]]


@dataclass
class Seconds:
    """Where the time went. What the verifiers took beyond `waited` was hidden behind sampling."""

    sampling: float = 0.0  # the engine
    scoring: float = 0.0  # the verifiers
    waited: float = 0.0  # for the verifiers, with nothing left to sample


def sample_and_score(
    engine: Engine,
    task: Task,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    policy_step: int = 0,
    chunk: int | None = None,
    record_experts: bool = False,
) -> tuple[Groups, Seconds]:
    """Scored groups of `samples` responses to each problem, and what they cost; see `scored_chunks`."""
    groups, seconds = [], Seconds()
    parts = (engine, task, problems, samples, sampling, seed, policy_step, chunk, seconds, record_experts)
    for scored in scored_chunks(*parts):
        groups += scored
    return groups, seconds


def scored_chunks(
    engine: Engine,
    task: Task,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    policy_step: int = 0,
    chunk: int | None = None,
    seconds: Seconds | None = None,
    record_experts: bool = False,
) -> Iterator[Groups]:
    """The same chunk by chunk, in order. `chunk` is a number of problems; by default as many as the engine samples at
    once, which changes neither what it computes nor how fast. An exception of a verifier is raised here."""
    chunk, seconds = chunk or at_once(engine, samples), seconds or Seconds()
    before: list[Future[None]] = []
    waiting: Groups = []
    with ThreadPoolExecutor(1, thread_name_prefix="scoring") as thread:
        for start in range(0, len(problems), chunk):
            started = time.perf_counter()
            some = problems[start : start + chunk]
            grading: list[Future[None]] = []

            def grade(responses: list[Response], grading: list[Future[None]] = grading) -> None:
                grading.append(thread.submit(_score, task, responses, seconds))

            groups = engine.generate(some, samples, sampling, seed, policy_step, record_experts, grade)
            seconds.sampling += time.perf_counter() - started
            if waiting:
                _wait(before, seconds)
                yield waiting
            before, waiting = grading, groups
        if waiting:
            _wait(before, seconds)
            yield waiting


def at_once(engine: Engine, samples: int) -> int:
    """Problems that the engine samples together, with `samples` responses to each."""
    return max(1, engine.batch_rows // samples)


def score(task: Task, responses: list[Response]) -> None:
    """Give every response its verifier's score."""
    scores = task.score([(r.problem, r.text, r.finish_reason == "stop") for r in responses])
    for response, verdict in zip(responses, scores, strict=True):
        response.score = verdict


def _score(task: Task, responses: list[Response], seconds: Seconds) -> None:
    started = time.perf_counter()
    score(task, responses)
    seconds.scoring += time.perf_counter() - started


def _wait(grading: list[Future[None]], seconds: Seconds) -> None:
    started = time.perf_counter()
    try:
        for future in grading:
            future.result()
    finally:
        seconds.waited += time.perf_counter() - started
