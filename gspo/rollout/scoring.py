"""Sampling and grading beside each other: while the engine samples, the verifiers judge what has ended.

Verifiers that run programs or workers wait for other processes, and the engine's arithmetic leaves Python's lock alone,
so the two overlap on a machine with a core to spare. Nothing depends on it: the scores are those of the serial way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from gspo.core.types import Problem, Response
from gspo.rollout.engine import Engine
from gspo.rollout.requests import Sampling
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
    before, waiting = None, []
    thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
    try:
        for start in range(0, len(problems), chunk):
            started, grading = time.perf_counter(), Grading(thread, task, seconds)
            some = problems[start : start + chunk]
            groups = engine.generate(some, samples, sampling, seed, policy_step, record_experts, grading.add)
            seconds.sampling += time.perf_counter() - started
            if before:
                before.wait()
                yield waiting
            before, waiting = grading, groups
        if before:
            before.wait()
            yield waiting
    finally:
        thread.shutdown(cancel_futures=True)


class Grading:
    """The grading of one chunk: whatever has ended while the verifiers were busy is their next batch."""

    def __init__(self, thread: ThreadPoolExecutor, task: Task, seconds: Seconds):
        self.thread, self.task, self.seconds = thread, task, seconds
        self.ended: SimpleQueue[Response] = SimpleQueue()
        self.futures: list[Future[None]] = []

    def add(self, responses: list[Response]) -> None:
        """Responses that have ended, from the sampling thread."""
        for response in responses:
            self.ended.put(response)
        self.futures.append(self.thread.submit(self._grade))

    def _grade(self) -> None:
        batch = []
        while not self.ended.empty():  # this thread alone takes from it
            batch.append(self.ended.get())
        if batch:
            started = time.perf_counter()
            score(self.task, batch)
            self.seconds.scoring += time.perf_counter() - started

    def wait(self) -> None:
        """Until all is graded. Raises what a verifier raised."""
        started = time.perf_counter()
        try:
            for future in self.futures:
                future.result()
        finally:
            self.seconds.waited += time.perf_counter() - started


def at_once(engine: Engine, samples: int) -> int:
    """Problems that the engine samples together, with `samples` responses to each."""
    return max(1, engine.batch_rows // samples)


def score(task: Task, responses: list[Response]) -> None:
    """Give every response its verifier's score."""
    scores = task.score([(r.problem, r.text, r.finish_reason == "stop") for r in responses])
    for response, verdict in zip(responses, scores, strict=True):
        response.score = verdict
