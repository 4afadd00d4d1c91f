"""Samples and scores at the same time: verifiers score the responses that have ended already.

Verifiers that run programs wait for other processes, and the engine's arithmetic releases Python's
lock. So on a machine with a core to spare the two overlap. The scores are the same as if all
sampling came first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from gspo.data.samples import Response, ScoredResponse
from gspo.distributed.ranks import Ranks
from gspo.rollout.engines.base import Engine, Groups, OnFinished
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.requests import SamplingRequest
from gspo.rollout.episodes.episode import Seconds
from gspo.rollout.episodes.sampling import play
from gspo.tasks.base import Task

ScoredGroups = list[list[ScoredResponse]]
# groups, and the futures that must be done before the groups are scored
Unscored = deque[tuple[Groups, list[Future[None]]]]


def scored_chunks(
    engine: Engine, task: Task, request: SamplingRequest, seconds: Seconds | None = None
) -> Iterator[ScoredGroups]:
    """Sample and score the responses of a request, and yield their groups chunk by chunk, in order.

    A chunk has as many problems as the engines of all ranks sample at once. Each rank samples and
    scores its share of a chunk, and gets the groups of all ranks. Times are added to `seconds`. An
    exception of a verifier is raised here."""
    ranks = engine.ranks
    seconds = seconds or Seconds()
    chunk_size = engine.problems_at_once(request.group_size) * ranks.world_size
    thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
    # the chunk before, which is scored while the engine samples this chunk
    previous: tuple[Grading, Groups] | None = None
    try:
        for start in range(0, len(request.problems), chunk_size):
            started = time.perf_counter()
            grading = Grading(thread, task, seconds)
            share = request.with_problems(ranks.shard(request.problems[start : start + chunk_size]))
            groups = sample(engine, task, share, grading.add, seconds)
            seconds.sampling += time.perf_counter() - started
            if previous:
                yield gathered(*previous, ranks)
            previous = grading, groups
        if previous:
            yield gathered(*previous, ranks)
    finally:
        thread.shutdown(cancel_futures=True)


def sample(
    engine: Engine,
    task: Task,
    request: SamplingRequest,
    on_finished: OnFinished | None = None,
    seconds: Seconds | None = None,
) -> Groups:
    """Sample the responses of a request, in episodes if the task has environments."""
    if task.environments():
        return play(engine, task, request, on_finished, seconds)
    return engine.generate(request, on_finished)


def stream(
    engine: Engine, task: Task, request: SamplingRequest, on_finished: OnFinished
) -> Iterator[Groups]:
    """Sample as `sample` does, but yield groups as soon as they are complete.

    Episodes are yielded chunk by chunk."""
    if not task.environments():
        yield from engine.stream(request, on_finished)
        return
    for chunk in engine.chunks(request):
        yield sample(engine, task, chunk, on_finished)


def scored_stream(engine: Engine, task: Task, request: SamplingRequest) -> Iterator[ScoredGroups]:
    """Sample and score the responses of a request, and yield groups in the order of `stream`.

    The engine waits for the verifiers only if they are more than a whole batch behind it. If Ctrl-C
    or the end of the engine ends the sampling, complete groups are still scored and yielded before
    KeyboardInterrupt or EngineEnded is raised. An exception of a verifier is raised here."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
    grading = Grading(thread, task, Seconds())
    unscored: Unscored = deque()
    interruption: BaseException | None = None
    try:
        try:
            for groups in stream(engine, task, request, grading.add):
                unscored.append((groups, grading.pop_futures()))
                while unscored and (
                    all(future.done() for future in unscored[0][1])
                    or count_responses(unscored) > engine.batch_rows
                ):
                    yield pop_scored(unscored, grading)
        except (KeyboardInterrupt, EngineEnded) as error:
            interruption = error
        while unscored:
            yield pop_scored(unscored, grading)
        if interruption:
            raise interruption
    finally:
        thread.shutdown(cancel_futures=True)


def count_responses(unscored: Unscored) -> int:
    """Count the responses that wait for their scores."""
    return sum(len(group) for groups, _ in unscored for group in groups)


def pop_scored(unscored: Unscored, grading: Grading) -> ScoredGroups:
    """Wait until the first groups are scored, and return them. Raises a verifier's exception."""
    groups, futures = unscored[0]
    for future in futures:
        future.result()
    unscored.popleft()
    return grading.pop_scored(groups)


class Grading:
    """Scores responses in a thread, batch by batch.

    The responses that end while the verifiers are busy form the next batch. The seconds of scoring
    are added to `seconds`."""

    def __init__(self, thread: ThreadPoolExecutor, task: Task, seconds: Seconds):
        self.thread = thread
        self.task = task
        self.seconds = seconds
        self.ended: SimpleQueue[Response] = SimpleQueue()
        self.futures: list[Future[None]] = []
        self.scored: dict[int, ScoredResponse] = {}  # by the id() of the response

    def add(self, responses: list[Response]) -> None:
        """Let the thread score responses that have ended. The thread that samples calls this."""
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

    def pop_futures(self) -> list[Future[None]]:
        """Return the futures that score the responses added since the last call of this method."""
        futures = self.futures
        self.futures = []
        return futures

    def pop_scored(self, groups: Groups) -> ScoredGroups:
        """Return groups, all of whose responses have been scored, with their scores."""
        return [[self.scored.pop(id(response)) for response in group] for group in groups]


def gathered(grading: Grading, groups: Groups, ranks: Ranks) -> ScoredGroups:
    """Wait until this rank's groups are scored, and return the groups of all ranks.

    Raises the exception of a verifier."""
    started = time.perf_counter()
    try:
        for future in grading.futures:
            future.result()
        return ranks.unshard(grading.pop_scored(groups))
    finally:
        grading.seconds.waited += time.perf_counter() - started


def score(
    task: Task, responses: Sequence[Response], ranks: Ranks | None = None
) -> list[ScoredResponse]:
    """Return the responses with their verifier's scores.

    Episodes have scores from their environments. All `ranks` must have these responses. Each scores
    its share."""
    ranks = ranks or Ranks()
    unscored = [r for r in responses if not isinstance(r, ScoredResponse)]
    # without a reward for truncated responses, the verifier judges them like complete ones
    judges_truncated = task.truncated_reward is None
    answers = [
        (r.problem, r.text, judges_truncated or r.finish_reason == "stop")
        for r in ranks.shard(unscored)
    ]
    scores = iter(ranks.unshard(task.score(answers)))
    scored = []
    for response in responses:
        if not isinstance(response, ScoredResponse):
            response_score = next(scores)
            if response_score.verdict == "truncated" and not judges_truncated:
                response_score = response_score.truncated(
                    task.truncated_reward, task.reward_weights
                )
            else:
                response_score = response_score.weighted(task.reward_weights)
            response = response.scored(response_score)
        scored.append(response)
    return scored
