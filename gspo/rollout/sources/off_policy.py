"""Rollout sources whose responses are older than the weights: partial rollouts, stale batches.

The settings and the seed determine which weights sample which token. Speed does not matter, so a
run can be repeated exactly.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from gspo.data.problems import Problem
from gspo.data.samples import Response, ScoredResponse
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.cuda_streams import SideThread
from gspo.rollout.scoring import score
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import (
    NothingGraded,
    PendingRollouts,
    Rollout,
    RolloutSource,
)
from gspo.rollout.sources.behaviour_logprobs import BehaviourLogprobs
from gspo.rollout.sources.on_policy import DynamicSource, OnPolicySource, without_ungraded
from gspo.rollout.sources.problem_sampler import Sampler
from gspo.tasks.base import Task


class PartialSource(OnPolicySource):
    """Partial rollouts: no step waits for its longest responses (Kimi k1.5, arXiv:2501.12599,
    section 2.6.2).

    The source keeps `rollout.in_flight` groups under way. A step has three parts:

    1. The source begins new problems until this number of groups is under way.
    2. Every unfinished response gets up to `rollout.token_budget` further tokens under the current
       weights.
    3. The P oldest groups in which every response has ended are trained on. While fewer than P
       groups have ended, further rounds of 2. follow under the same weights.

    So a response consists of segments, each sampled by the policy of one step.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        settings: RolloutSettings,
        seed: int,
        sampler: Sampler | None = None,
        behaviour_logprobs: BehaviourLogprobs | None = None,
    ):
        super().__init__(engine, task, settings, seed, sampler, behaviour_logprobs)
        # groups under way, the oldest first, each with the number of its problem's draw
        self.under_way: list[tuple[int, list[Response]]] = []
        self.drawn = 0  # how many batches of problems were drawn from the sampler
        self.not_begun: list[Problem] = []  # problems of the last draw that were not begun yet

    def sample(self, step: int) -> Rollout:
        """Sample until enough groups have ended, and return the oldest of these groups."""
        rollout = Rollout([], rollout_s=0.0, score_s=0.0, limit=self.settings.limit(step))
        begun = self._draw_problems(self.settings.in_flight - len(self.under_way), rollout)
        while True:
            self._round(begun, step, rollout)
            begun = []
            complete = [i for i, (_, group) in enumerate(self.under_way) if scored_group(group)]
            if len(complete) >= self.settings.prompts_per_step:
                break
        oldest = complete[: self.settings.prompts_per_step]
        groups = [scored_group(self.under_way[i][1]) for i in oldest]
        self.under_way = [entry for i, entry in enumerate(self.under_way) if i not in oldest]
        rollout.ungraded = [r for group in groups for r in group if r.score.reward is None]
        rollout.groups = without_ungraded(groups) if rollout.ungraded else groups
        rollout.filtered["ungraded"] = len(rollout.ungraded)
        rollout.num_unfinished = sum(
            r.finish_reason == "budget" for _, group in self.under_way for r in group
        )
        self.problems.record(rollout.groups)
        return rollout

    def _draw_problems(self, count: int, rollout: Rollout) -> list[tuple[int, Problem]]:
        """Return the next `count` problems, each with the number of its draw."""
        begun = []
        for _ in range(count):
            if not self.not_begun:
                self.drawn += 1
                self.not_begun = self.problems.take(self.drawn)
                if self.problems.max_prompt_tokens is not None:
                    skipped = rollout.filtered.get("prompt_too_long", 0)
                    skipped += self.problems.skipped(self.not_begun)
                    rollout.filtered["prompt_too_long"] = skipped
            begun.append((self.drawn, self.not_begun.pop(0)))
        return begun

    def _round(self, begun: list[tuple[int, Problem]], step: int, rollout: Rollout) -> None:
        """Sample up to `token_budget` tokens of each response under way, and score ended responses.

        The unfinished responses are continued first. Then the problems in `begun` are begun."""
        started = time.perf_counter()
        ranks = self.engine.ranks
        sampled: list[Response] = []
        # one draw at a time: the random key of a query set's problem depends on the draw
        for draw in sorted({draw for draw, group in self.under_way if not scored_group(group)}):
            groups = [group for d, group in self.under_way if d == draw]
            cut = [r for group in groups for r in group if r.finish_reason == "budget"]
            request = self.request([], step, self.random_key(draw, 0))
            extended = ranks.unshard(self.engine.extend(ranks.shard(cut), request))
            replacements = iter(extended)
            for group in groups:
                for i, r in enumerate(group):
                    if r.finish_reason == "budget":
                        group[i] = next(replacements)
            sampled += extended
        for draw in sorted({draw for draw, _ in begun}):
            problems = [problem for d, problem in begun if d == draw]
            request = self.request(ranks.shard(problems), step, self.random_key(draw, 0))
            groups = ranks.unshard(self.engine.generate(request))
            self.under_way += [(draw, group) for group in groups]
            sampled += [r for group in groups for r in group]
        rollout.rollout_s += time.perf_counter() - started
        self.keep_behaviour_logprobs(sampled, rollout)
        started = time.perf_counter()
        ended = [
            (group, i)
            for _, group in self.under_way
            for i, r in enumerate(group)
            if r.finish_reason != "budget" and not isinstance(r, ScoredResponse)
        ]
        scored = score(self.task, [group[i] for group, i in ended], ranks)
        for (group, i), response in zip(ended, scored, strict=True):
            group[i] = response
        rollout.score_s += time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        """Return the sampler's state, the number of draws, and the drawn problems not begun yet."""
        waiting = [problem.index for problem in self.not_begun]
        return {"problems": super().state(), "drawn": self.drawn, "waiting": waiting}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the result of `state` after `step`."""
        super().load_state(state["problems"], step)
        self.drawn = state["drawn"]
        self.not_begun = [
            self.task.problem(self.seed, "train", index) for index in state["waiting"]
        ]

    def pending(self) -> PendingRollouts:
        """Return the groups under way."""
        return PendingRollouts(groups=[(draw, list(group)) for draw, group in self.under_way])

    def restore_pending(self, pending: PendingRollouts) -> None:
        """Restore the result of `pending`."""
        self.under_way = pending.groups


def scored_group(group: list[Response]) -> list[ScoredResponse]:
    """Return a group if all its responses have been scored, else an empty list."""
    scored = [r for r in group if isinstance(r, ScoredResponse)]
    return scored if len(scored) == len(group) else []


class StaleSource:
    """Returns batches that the policy of k = `staleness` steps ago sampled (asynchronous training).

    For example, with k = 2 the batch of step 10 was sampled from the weights after step 7. In
    general batch s is sampled from the weights after step s - 1 - k. The first k + 1 batches are
    sampled from the weights at the start. So k batches wait between two steps. With `overlap` a
    thread of its own samples the next batch while the trainer works, from a copy of the weights
    (engines release Python's lock while they compute). That changes no number.

    `inner` is the source that samples, `trained` the trainer's policy. With `overlap` the engine of
    `inner` must sample from a copy of that policy.
    """

    def __init__(self, inner: OnPolicySource, trained: Policy, staleness: int, overlap: bool):
        if overlap and inner.engine.policy is trained:
            raise ValueError(
                "an engine that samples beside the training needs a copy of the policy"
            )
        self.inner = inner
        self.engine = inner.engine
        self.task = inner.task
        self.settings = inner.settings
        self.trained = trained
        self.staleness = staleness
        self.side_thread = SideThread(trained.device) if overlap else None
        # by the step that will train on them
        self.batches: dict[int, Rollout | Future[Rollout]] = {}
        self.sampled = 0  # the newest step whose batch was sampled, or is being sampled
        # seconds that a checkpoint waited for batches: counted with the next rollout
        self.waited = 0.0

    def start_recording_experts(self) -> None:
        """Let every response from now on hold the experts that the engine chose."""
        self.inner.start_recording_experts()

    def next(self, step: int) -> Rollout:
        """Return the scored groups of a step. Raises the exception of sampling them."""
        # `update` may have begun some of them already
        for due_step in range(self.sampled + 1, step + self.staleness + 1):
            self._begin_batch(due_step)
        started = time.perf_counter()
        rollout = _result(self.batches[step])
        del self.batches[step]  # a failed batch stays, so that a checkpoint knows of it
        if self.side_thread:
            rollout.waited_s = self.waited + time.perf_counter() - started
            self.waited = 0.0
        return rollout

    def update(self, step: int) -> None:
        """Sample from the weights after a step from now on.

        With `overlap` the next batch is the first."""
        if not self.side_thread:
            self.inner.update(step)
            return
        weights = {name: tensor.clone() for name, tensor in self.trained.named_tensors()}
        due_step = step + self.staleness + 1
        sample = partial(self._load_and_sample, due_step, step, weights)
        self.batches[due_step] = self.side_thread.submit(sample, weights.values())
        self.sampled = due_step

    def check(self, step: int) -> None:
        """Raise RuntimeError if the engine's weights are not the trainer's after this step."""
        self.inner.check(step)

    def _begin_batch(self, due_step: int) -> None:
        """Sample the batch of a step, or let the thread begin to."""
        if self.side_thread:
            self.batches[due_step] = self.side_thread.submit(partial(self.inner.next, due_step))
        else:
            self.batches[due_step] = self.inner.next(due_step)
        self.sampled = due_step

    def _load_and_sample(self, due_step: int, step: int, weights: dict[str, Tensor]) -> Rollout:
        """Load the weights after a step into the engine, and sample the batch of `due_step`.

        The thread calls this."""
        self.inner.engine.policy.load_tensors(weights.items())
        weights.clear()  # the next step's copy would come beside this one
        self.inner.update(step)
        return self.inner.next(due_step)

    def state(self) -> dict[str, Any]:
        """Wait for the batch that is being sampled, and return the state of the inner source."""
        self._finished_batches()
        return self.inner.state()

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the result of `state` after `step`."""
        self.inner.load_state(state, step)
        self.sampled = step

    def pending(self) -> PendingRollouts:
        """Return the batches that wait for their step, and the groups under way."""
        return PendingRollouts(self._finished_batches(), self.inner.pending().groups)

    def restore_pending(self, pending: PendingRollouts) -> None:
        """Restore the result of `pending`."""
        self.batches = dict(pending.rollouts)
        self.sampled = max([self.sampled, *pending.rollouts])
        self.inner.restore_pending(pending)

    def _finished_batches(self) -> dict[int, Rollout]:
        """Wait for the batch that is being sampled, and return all batches.

        If no response of a batch could be graded, this batch and all later batches are left out,
        and a resumed run samples them again from newer weights. Any other exception of sampling is
        raised. If it were suppressed, a resumed run would needlessly sample the batch again."""
        started = time.perf_counter()
        finished = {}
        with suppress(NothingGraded):  # the step that needs the batch raises it
            for step, rollout in sorted(self.batches.items()):
                finished[step] = _result(rollout)
        self.waited += time.perf_counter() - started
        return finished

    def close(self) -> None:
        """End the thread, and close the engine."""
        if self.side_thread:
            self.side_thread.close()
        self.inner.close()


def _result(rollout: Rollout | Future[Rollout]) -> Rollout:
    """Wait for a batch that is being sampled. Raises the exception of sampling it."""
    return rollout.result() if isinstance(rollout, Future) else rollout


def make_source(
    engine: Engine,
    task: Task,
    settings: RolloutSettings,
    sampler: Sampler,
    seed: int,
    behaviour_logprobs: BehaviourLogprobs | None = None,
    trained: Policy | None = None,
) -> RolloutSource:
    """Return the source that the settings choose.

    `trained` is the trainer's policy. It must be given if the engine samples from a copy of it."""
    source_class = OnPolicySource
    if settings.token_budget:
        source_class = PartialSource
    elif settings.refill_rounds:
        source_class = DynamicSource
    source = source_class(engine, task, settings, seed, sampler, behaviour_logprobs)
    if not settings.staleness:
        return source
    return StaleSource(source, trained or engine.policy, settings.staleness, settings.overlap)
