"""Sources whose responses are older than the trainer's weights: partial rollouts, staleness with or without overlap.

Both are functions of the seed: which weights sample which token does not depend on how fast anything runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from gspo.core.types import Problem, Response
from gspo.model.policy import Policy
from gspo.rollout.engine import Engine
from gspo.rollout.on_policy import DynamicSource, Held, OnPolicySource, Rollout, without_ungraded
from gspo.rollout.problem_sampler import Sampler
from gspo.rollout.requests import Sampling
from gspo.rollout.sampler_logprobs import Behaviour
from gspo.rollout.scoring import score
from gspo.rollout.settings import RolloutSettings
from gspo.tasks.base import Task


class PartialSource(OnPolicySource):
    """Partial rollouts: no step waits for its longest responses (Kimi k1.5, arXiv:2501.12599, section 2.6.2).

    `in_flight` groups are held. At each step new problems fill up their number; then every unfinished response gets
    up to `token_budget` further tokens under the current weights; then the oldest P groups in which every response has
    ended are trained on. Further rounds follow, under the same weights, while there are fewer than P. A token's
    policy step is that of its segment, and so are its log-probs.
    """

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.flying: list[tuple[int, list[Response]]] = []  # groups with the draw they come from, the oldest first
        self.drawn = 0  # batches of problems taken from the sampler
        self.waiting: list[Problem] = []  # of the last draw, not begun yet

    @property
    def exact(self) -> bool:
        return False

    def sample(self, step: int) -> Rollout:
        rollout = Rollout([], 0.0, 0.0, self.settings.limit(step))
        begun = self._begin(self.settings.in_flight - len(self.flying), rollout)
        while True:
            self._round(begun, step, rollout)
            begun = []
            whole = [i for i, (_, group) in enumerate(self.flying) if ended(group)][: self.settings.prompts_per_step]
            if len(whole) == self.settings.prompts_per_step:
                break
        groups = [self.flying[i][1] for i in whole]
        self.flying = [held for i, held in enumerate(self.flying) if i not in whole]
        rollout.ungraded = [r for group in groups for r in group if r.score.reward is None]
        rollout.groups = without_ungraded(groups) if rollout.ungraded else groups
        rollout.filtered["ungraded"] = len(rollout.ungraded)
        rollout.in_flight = sum(r.finish_reason == "budget" for _, group in self.flying for r in group)
        self.problems.record(rollout.groups)
        return rollout

    def _begin(self, count: int, rollout: Rollout) -> list[tuple[int, Problem]]:
        """The next `count` problems with the draws that they come from."""
        begun = []
        for _ in range(count):
            if not self.waiting:
                self.drawn += 1
                self.waiting = self.problems.take(self.drawn)
                if self.problems.max_prompt_tokens is not None:
                    skipped = self.problems.skipped(self.waiting)
                    rollout.filtered["prompt_too_long"] = rollout.filtered.get("prompt_too_long", 0) + skipped
            begun.append((self.drawn, self.waiting.pop(0)))
        return begun

    def _round(self, begun: list[tuple[int, Problem]], step: int, rollout: Rollout) -> None:
        """Up to `token_budget` tokens for every unfinished response and for the groups that begin."""
        started = time.perf_counter()
        settings = self.settings
        sampling = Sampling(settings.temperature, settings.limit(step), settings.token_budget)
        touched: list[Response] = []
        # draw by draw, because the random numbers of a query set's problem depend on the visit
        for draw in sorted({draw for draw, group in self.flying if not ended(group)}):
            mine = [g for d, g in self.flying if d == draw]
            cut = [(group, i) for group in mine for i, r in enumerate(group) if r.finish_reason == "budget"]
            parts = (sampling, self.position(draw, 0), self.policy_step, settings.routes)
            further = self.engine.extend([group[i] for group, i in cut], *parts)
            for (group, i), response in zip(cut, further, strict=True):
                group[i] = response
            touched += further
        for draw in sorted({draw for draw, _ in begun}):
            problems = [problem for d, problem in begun if d == draw]
            parts = (sampling, self.position(draw, 0), self.policy_step, settings.routes)
            groups = self.engine.generate(problems, settings.group_size, *parts)
            self.flying += [(draw, group) for group in groups]
            touched += [r for group in groups for r in group]
        rollout.rollout_s += time.perf_counter() - started
        self.remember(touched, rollout)
        started = time.perf_counter()
        score(self.task, [r for r in touched if r.finish_reason != "budget"])
        rollout.score_s += time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        waiting = [problem.index for problem in self.waiting]
        return {"problems": super().state(), "drawn": self.drawn, "waiting": waiting}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        super().load_state(state["problems"], step)
        self.drawn = state["drawn"]
        self.waiting = [self.task.problem(self.seed, "train", index) for index in state["waiting"]]

    def held(self) -> Held:
        return Held(groups=[(draw, list(group)) for draw, group in self.flying])

    def take_back(self, held: Held) -> None:
        self.flying = held.groups


def ended(group: list[Response]) -> bool:
    return all(r.finish_reason != "budget" for r in group)


class StaleSource:
    """Batches that the policy of `staleness` rollout batches ago sampled, as in asynchronous training.

    Step s gets a batch under the weights of step s - 1 - k, k = staleness (the first k + 1 steps those of the start).
    k batches are therefore held. With `overlap` the next one is sampled by a thread of its own while the trainer works,
    from a copy of the weights; engines leave Python's lock alone while they compute. The numbers are the same.

    `inner` samples; `trained` is the trainer's policy. With overlap the inner engine must sample from another one.
    """

    def __init__(self, inner: OnPolicySource, trained: Policy, staleness: int, overlap: bool):
        if overlap and inner.engine.policy is trained:
            raise ValueError("an engine that samples beside the training needs a copy of the policy")
        self.inner, self.trained, self.staleness = inner, trained, staleness
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="rollout") if overlap else None
        self.pending: dict[int, Rollout | Future[Rollout]] = {}  # by the step that trains on them
        self.sampled = 0  # the newest step that has its batch, or is about to
        self.waited = 0.0  # seconds that a checkpoint waited for batches; of the next rollout's

    exact = False

    @property
    def engine(self) -> Engine:
        return self.inner.engine

    @property
    def task(self) -> Task:
        return self.inner.task

    @property
    def settings(self) -> RolloutSettings:
        return self.inner.settings

    def next(self, step: int) -> Rollout:
        """The scored groups of a step; raises here what sampling them raised."""
        for due in range(self.sampled + 1, step + self.staleness + 1):  # else `update` has begun it
            self._begin(due, None)
        started = time.perf_counter()
        rollout = _result(self.pending.pop(step))
        if self.thread:
            rollout.waited_s = self.waited + time.perf_counter() - started
            self.waited = 0.0
        return rollout

    def update(self, step: int) -> None:
        """Hand over the weights of a finished step: to the engine, or for the batch that the thread samples next."""
        if not self.thread:
            self.inner.update(step)
            return
        weights = {name: tensor.clone() for name, tensor in self.trained.named_tensors()}
        self._begin(step + self.staleness + 1, (step, weights))

    def check(self, step: int) -> None:
        """Of the engine, before anything is sampled."""
        self.inner.check(step)

    def _begin(self, due: int, new: tuple[int, dict[str, Tensor]] | None) -> None:
        self.pending[due] = self.thread.submit(self._sample, due, new) if self.thread else self._sample(due, new)
        self.sampled = due

    def _sample(self, due: int, new: tuple[int, dict[str, Tensor]] | None) -> Rollout:
        if new:
            step, weights = new
            self.inner.engine.policy.load_tensors(weights.items())
            self.inner.update(step)
        return self.inner.next(due)

    def state(self) -> dict[str, Any]:
        self._whole()
        return self.inner.state()

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        self.inner.load_state(state, step)
        self.sampled = step

    def held(self) -> Held:
        return Held(self._whole(), self.inner.held().groups)

    def take_back(self, held: Held) -> None:
        self.pending = dict(held.rollouts)
        self.sampled = max([self.sampled, *held.rollouts])
        self.inner.take_back(held)

    def _whole(self) -> dict[int, Rollout]:
        """The batches that are there once what is under way has ended. Raises here what sampling one of them raised: a
        checkpoint without it would have it sampled again from newer weights."""
        started = time.perf_counter()
        whole = {step: _result(rollout) for step, rollout in sorted(self.pending.items())}
        self.waited += time.perf_counter() - started
        return whole

    def close(self) -> None:
        if self.thread:
            self.thread.shutdown(cancel_futures=True)
        self.inner.close()


def _result(rollout: Rollout | Future[Rollout]) -> Rollout:
    return rollout.result() if isinstance(rollout, Future) else rollout


def make_source(
    engine: Engine,
    task: Task,
    settings: RolloutSettings,
    sampler: Sampler,
    seed: int,
    behaviour: Behaviour | None = None,
    trained: Policy | None = None,
) -> OnPolicySource | StaleSource:
    """The source that the settings ask for. `trained` is the trainer's policy where the engine samples from a copy."""
    if settings.token_budget:
        kind = PartialSource
    else:
        kind = DynamicSource if settings.refill_rounds else OnPolicySource
    source = kind(engine, task, settings, seed, sampler, behaviour)
    if not settings.staleness:
        return source
    return StaleSource(source, trained or engine.policy, settings.staleness, settings.overlap)
