"""Sampling and scoring at the same time: while the engine samples, the verifiers score responses
that have ended.

Verifiers that run programs wait for other processes, and the engine's arithmetic releases Python's
lock, so the two overlap on a machine with a core to spare. The scores are the same as if all
sampling came first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

from gspo.data.samples import Problem, Response, ScoredResponse
from gspo.distributed.ranks import Ranks
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.process import EngineEnded
from gspo.rollout.engines.requests import Sampling
from gspo.rollout.episodes.episode import Seconds
from gspo.rollout.episodes.sampling import play
from gspo.tasks.base import Task

Groups = list[list[Response]]
ScoredGroups = list[list[ScoredResponse]]
# groups, and what has to be done before they are scored
Waiting = deque[tuple[Groups, list[Future[None]]]]


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
) -> Iterator[ScoredGroups]:
    """Sample and score groups of `samples` responses to each problem, and yield them chunk by
    chunk, in order.

    `chunk` is a number of problems; by default it is as many as the engines of all ranks sample at
    once, which changes neither what they compute nor how fast. Every rank samples and scores its
    share, and gets the groups of all. Times are added to `seconds`. An exception of a verifier is
    raised here."""
    ranks = engine.ranks
    chunk, seconds = chunk or at_once(engine, samples) * ranks.world_size, seconds or Seconds()
    before, waiting = None, []
    thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
    try:
        for start in range(0, len(problems), chunk):
            started, grading = time.perf_counter(), Grading(thread, task, seconds)
            some = ranks.shard(problems[start : start + chunk])
            groups = sample(
                engine,
                task,
                some,
                samples,
                sampling,
                seed,
                policy_step,
                record_experts,
                grading.add,
                seconds,
            )
            seconds.sampling += time.perf_counter() - started
            if before:
                yield before.groups(waiting, ranks)
            before, waiting = grading, groups
        if before:
            yield before.groups(waiting, ranks)
    finally:
        thread.shutdown(cancel_futures=True)


def sample(
    engine: Engine,
    task: Task,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    policy_step: int = 0,
    record_experts: bool = False,
    finished: Callable[[list[Response]], None] | None = None,
    seconds: Seconds | None = None,
) -> Groups:
    """Sample groups of `samples` responses to each problem: episodes where a problem is played in
    an environment.
    """
    if task.environments():
        return play(
            engine,
            task,
            problems,
            samples,
            sampling,
            seed,
            policy_step=policy_step,
            record_experts=record_experts,
            finished=finished,
            seconds=seconds,
        )
    return engine.generate(
        problems,
        samples,
        sampling,
        seed,
        policy_step,
        record_experts=record_experts,
        finished=finished,
    )


def stream(
    engine: Engine,
    task: Task,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    policy_step: int,
    finished: Callable[[list[Response]], None],
) -> Iterator[Groups]:
    """Sample as `sample` does, and yield groups as soon as they are whole; episodes chunk by chunk."""
    if not task.environments():
        yield from engine.stream(problems, samples, sampling, seed, policy_step, finished=finished)
        return
    for chunk in engine.chunks(problems, samples):
        yield sample(engine, task, chunk, samples, sampling, seed, policy_step, finished=finished)


def scored_stream(
    engine: Engine,
    task: Task,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    *,
    policy_step: int = 0,
) -> Iterator[ScoredGroups]:
    """Sample and score as `scored_chunks` does, and yield scored groups as soon as the engine's
    stream gives them. The engine waits for the verifiers only if they are a whole batch behind it.

    Where Ctrl-C or the end of the engine ends the sampling, groups that are whole are still scored
    and yielded before KeyboardInterrupt or EngineEnded is raised. An exception of a verifier is
    raised here."""
    thread, ended = ThreadPoolExecutor(1, thread_name_prefix="scoring"), None
    grading = Grading(thread, task, Seconds())
    waiting: Waiting = deque()
    try:
        try:
            for groups in stream(
                engine, task, problems, samples, sampling, seed, policy_step, grading.add
            ):
                waiting.append((groups, grading.taken()))
                while waiting and (
                    all(f.done() for f in waiting[0][1]) or count(waiting) > engine.batch_rows
                ):
                    yield first_scored(waiting, grading)
        except (KeyboardInterrupt, EngineEnded) as error:
            ended = error
        while waiting:
            yield first_scored(waiting, grading)
        if ended:
            raise ended
    finally:
        thread.shutdown(cancel_futures=True)


def count(waiting: Waiting) -> int:
    """Count the responses that wait for their scores."""
    return sum(len(group) for groups, _ in waiting for group in groups)


def first_scored(waiting: Waiting, grading: Grading) -> ScoredGroups:
    """Wait until the first groups are scored, and return them. Raises what a verifier raised."""
    groups, futures = waiting[0]
    for future in futures:
        future.result()
    waiting.popleft()
    return grading.pop_scored(groups)


class Grading:
    """Scores the responses of one chunk in a thread. Those that end while the verifiers are busy
    are their next batch."""

    def __init__(self, thread: ThreadPoolExecutor, task: Task, seconds: Seconds):
        self.thread, self.task, self.seconds = thread, task, seconds
        self.ended: SimpleQueue[Response] = SimpleQueue()
        self.futures: list[Future[None]] = []
        self.scored: dict[int, ScoredResponse] = {}  # by the id() of the response

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
            for response, scored in zip(batch, score(self.task, batch), strict=True):
                self.scored[id(response)] = scored
            self.seconds.scoring += time.perf_counter() - started

    def taken(self) -> list[Future[None]]:
        """Return what scores the responses that were added since the last call of this method."""
        taken, self.futures = self.futures, []
        return taken

    def pop_scored(self, groups: Groups) -> ScoredGroups:
        """Return groups, all of whose responses have been scored, with their scores."""
        return [[self.scored.pop(id(response)) for response in group] for group in groups]

    def groups(self, own: Groups, ranks: Ranks) -> ScoredGroups:
        """Wait until all responses of this rank's groups are scored, and of the other ranks; return
        the groups of all. Raises what a verifier raised."""
        started = time.perf_counter()
        try:
            for future in self.futures:
                future.result()
            return ranks.unshard(self.pop_scored(own))
        finally:
            self.seconds.waited += time.perf_counter() - started


def at_once(engine: Engine, samples: int) -> int:
    """Return how many problems the engine samples together, with `samples` responses to each."""
    return max(1, engine.batch_rows // samples)


def score(
    task: Task, responses: Sequence[Response], ranks: Ranks | None = None
) -> list[ScoredResponse]:
    """Return responses with their verifier's scores; episodes have theirs from their environments.

    With `ranks` all of them have these responses, and each scores its share."""
    ranks = ranks or Ranks()
    unscored = [r for r in responses if not isinstance(r, ScoredResponse)]
    is_asked = task.truncated_reward is None
    share = task.score(
        [(r.problem, r.text, is_asked or r.finish_reason == "stop") for r in ranks.shard(unscored)]
    )
    scores = iter(ranks.unshard(share))
    scored = []
    for response in responses:
        if not isinstance(response, ScoredResponse):
            verdict = next(scores)
            if verdict.verdict == "truncated" and not is_asked:
                verdict = replace(verdict, reward=task.truncated_reward)
            response = response.scored(verdict)
        scored.append(response)
    return scored
