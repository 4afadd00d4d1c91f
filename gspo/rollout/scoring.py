"""Sampling and scoring at the same time: while the engine samples, the verifiers score responses that have ended.

Verifiers that run programs wait for other processes, and the engine's arithmetic releases Python's lock, so the two
overlap on a machine with a core to spare. The scores are the same as if all sampling came first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from gspo.core.ranks import Ranks
from gspo.core.types import Problem, Response
from gspo.rollout.engine import Engine
from gspo.rollout.requests import Sampling
from gspo.tasks.base import Task

Groups = list[list[Response]]


@dataclass
class Seconds:
    """Where the time went. Scoring cost nothing beyond `waited`, because it ran while the engine sampled."""

    sampling: float = 0.0  # seconds that the engine sampled
    scoring: float = 0.0  # seconds that the verifiers worked
    waited: float = 0.0  # seconds spent waiting for verifiers, and for other ranks, with nothing left to sample


def scored_chunks(
    engine: Engine,
    task: Task,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    *,
    policy_step: int = 0,
    chunk: int | None = None,
    seconds: Seconds | None = None,
    record_experts: bool = False,
) -> Iterator[Groups]:
    """Sample and score groups of `samples` responses to each problem, and yield them chunk by chunk, in order.

    `chunk` is a number of problems; by default it is as many as the engines of all ranks sample at once, which changes
    neither what they compute nor how fast. Every rank samples and scores its share, and gets the groups of all. Times
    are added to `seconds`. An exception of a verifier is raised here."""
    ranks = engine.ranks
    chunk, seconds = chunk or at_once(engine, samples) * ranks.count, seconds or Seconds()
    before, waiting = None, []
    thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
    try:
        for start in range(0, len(problems), chunk):
            started, grading = time.perf_counter(), Grading(thread, task, seconds)
            some = ranks.own(problems[start : start + chunk])
            groups = engine.generate(
                some, samples, sampling, seed, policy_step, record_experts=record_experts, finished=grading.add
            )
            seconds.sampling += time.perf_counter() - started
            if before:
                yield before.groups(waiting, ranks)
            before, waiting = grading, groups
        if before:
            yield before.groups(waiting, ranks)
    finally:
        thread.shutdown(cancel_futures=True)


class Grading:
    """Scores the responses of one chunk in a thread. Those that end while the verifiers are busy are their next
    batch."""

    def __init__(self, thread: ThreadPoolExecutor, task: Task, seconds: Seconds):
        self.thread, self.task, self.seconds = thread, task, seconds
        self.ended: SimpleQueue[Response] = SimpleQueue()
        self.futures: list[Future[None]] = []

    def add(self, responses: list[Response]) -> None:
        """Take responses that have ended; called by the thread that samples."""
        for response in responses:
            self.ended.put(response)
        self.futures.append(self.thread.submit(self._grade))

    def _grade(self) -> None:
        """Score all responses that have ended and were not scored yet."""
        batch = []
        while not self.ended.empty():  # no other thread takes from this queue
            batch.append(self.ended.get())
        if batch:
            started = time.perf_counter()
            score(self.task, batch)
            self.seconds.scoring += time.perf_counter() - started

    def groups(self, own: Groups, ranks: Ranks) -> Groups:
        """Wait until all responses of this rank's groups are scored, and of the other ranks; return the groups of all.
        Raises what a verifier raised."""
        started = time.perf_counter()
        try:
            for future in self.futures:
                future.result()
            return ranks.merged(own)
        finally:
            self.seconds.waited += time.perf_counter() - started


def at_once(engine: Engine, samples: int) -> int:
    """Return how many problems the engine samples together, with `samples` responses to each."""
    return max(1, engine.batch_rows // samples)


def score(task: Task, responses: list[Response], ranks: Ranks | None = None) -> None:
    """Give every response its verifier's score. With `ranks` all of them have these responses, and each scores its
    share."""
    ranks = ranks or Ranks()
    scores = task.score([(r.problem, r.text, r.finish_reason == "stop") for r in ranks.own(responses)])
    for response, verdict in zip(responses, ranks.merged(scores), strict=True):
        response.score = verdict
