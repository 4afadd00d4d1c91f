"""Rollout sources that sample every batch from the current weights: the plain one, and dynamic
sampling.

Dynamic sampling replaces groups whose rewards are all equal, because they carry no gradient.
Sources that sample from older weights are in gspo.rollout.sources.off_policy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.data.samples import Response, ScoredResponse, all_same
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.process import EngineEnded
from gspo.rollout.engines.route_checks import check_routes
from gspo.rollout.episodes.episode import Seconds
from gspo.rollout.scoring import scored_chunks
from gspo.rollout.settings import RolloutSettings, check_sampler
from gspo.rollout.sources.base import NothingGraded, PendingRollouts, Rollout
from gspo.rollout.sources.problem_sampler import Sampler, TrainingProblems, Uniform
from gspo.rollout.sources.sampler_logprobs import BehaviourLogprobs, check_engine
from gspo.tasks.base import Task

MOST_REASONS = 3  # how many reasons a message names
# how many problems the engine is compared with the trainer on after it has loaded new weights
GUARD_PROBLEMS = 2


class OnPolicySource:
    """Samples each step's batch from the current weights, on problems that the sampler chooses.

    A response that could not be graded (because the sandbox failed, not the response) is left out
    of its group. So groups may differ in size, and a group in which nothing could be graded is left
    out altogether. `Rollout.filtered` counts such responses as "ungraded". Where prompts have a
    limit it also counts, as "prompt_too_long", the problems that were replaced. With
    `behaviour_logprobs` every response also keeps the log-probs that the trainer computes under the
    weights that sampled it. Without `sampler` the problems are those of the stream, in its order.
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
        sampler = sampler or Uniform()
        check_sampler(settings, sampler)
        self.engine, self.task, self.settings, self.seed = engine, task, settings, seed
        self.behaviour_logprobs = behaviour_logprobs
        self.record_experts = settings.routes
        # the step after which the trainer had the weights that the engine has now
        self.policy_step = 0
        self.synced: dict[str, float] = {}  # metrics of loading those weights into the engine
        longest, limited_by = longest_prompt(engine, settings)
        self.problems = TrainingProblems(
            task,
            seed,
            sampler,
            settings.prompts_per_step,
            settings.query_set,
            settings.refresh_every,
            longest,
            prompt_length=lambda prompt: len(engine.policy.encode_prompt(prompt)),
            limited_by=limited_by,
        )

    @property
    def exact(self) -> bool:
        """Whether the engine's log-probs and experts equal, up to rounding, those of the trainer's
        weights at the start of the step: true where the engine computes with the policy's own
        tensors."""
        return self.engine.shares_weights

    def next(self, step: int) -> Rollout:
        """Return the scored groups of a step. Raises NothingGraded if no response of it could be
        graded. Raises EngineEnded if the engine's process has ended; then the source is as it was
        before the call."""
        state, pending = self.state(), self.pending()
        try:
            return self._next(step)
        except EngineEnded:
            self.load_state(state, self.policy_step)
            self.restore_pending(pending)
            raise

    def _next(self, step: int) -> Rollout:
        """Do what `next` does, but leave the source as it is when the engine's process ends."""
        rollout = self.sample(step)
        if not rollout.groups:
            raise NothingGraded(f"step {step}: {self.why_ungraded(rollout.ungraded)}")
        rollout.synced = self.synced
        if self.settings.routes:
            routing = self.engine.policy.routing
            check_routes(rollout.responses, routing.layers, routing.top_k, routing.experts)
        self.keep_behaviour_logprobs(rollout.responses, rollout)
        self.engine.rest()
        return rollout

    def why_ungraded(self, responses: list[ScoredResponse]) -> str:
        """Return in words why none of these responses could be graded: the reasons, the commonest
        first.
        """
        counts = Counter(r.score.reason or r.score.verdict for r in responses)
        reasons = [
            f"{reason} ({count} times)" for reason, count in counts.most_common(MOST_REASONS)
        ]
        first = self.task.in_words(responses[0].problem)
        return (
            f"none of {len(responses)} responses could be graded, so there is nothing to train on: "
            f"{'; '.join(reasons)}. The first was to {first}"
        )

    def keep_behaviour_logprobs(self, responses: Sequence[Response], rollout: Rollout) -> None:
        """Store, with new tokens, the log-probs that the trainer computes under the weights that
        the engine has now.
        """
        if self.behaviour_logprobs:
            started = time.perf_counter()
            self.behaviour_logprobs(responses)
            rollout.behaviour_s += time.perf_counter() - started

    def sample(self, step: int) -> Rollout:
        """Sample and score the groups of a step; subclasses say how."""
        return self.sample_round(step)

    def update(self, step: int) -> None:
        """Sample from the weights after this step from now on. Raises RuntimeError if they did not
        arrive in the engine."""
        self.policy_step = step
        started = time.perf_counter()
        if not self.engine.shares_weights:
            self.engine.load_weights(self.engine.policy.named_tensors())
            self.check(step)
            self.synced["time/sync_s"] = time.perf_counter() - started

    def check(self, step: int) -> None:
        """Raise RuntimeError if the engine's weights are not those that the trainer had after this
        step.
        """
        problems = [self.problems.problem(place) for place in range(GUARD_PROBLEMS)]
        precision = str(self.engine.policy.precision).removeprefix("torch.")
        difference = check_engine(self.engine, problems, self.settings.tolerance(precision), step)
        self.synced = {} if difference is None else {"mismatch/after_sync": difference}

    def sample_round(self, step: int, refill: int = 0) -> Rollout:
        """Sample and score groups for `prompts_per_step` problems: the step's own (refill 0), or
        those of a refill round."""
        problems, seconds = self.problems.take(step, refill), Seconds()
        chunks = scored_chunks(
            self.engine,
            self.task,
            problems,
            self.settings.group_size,
            self.settings.sampling(step),
            self.position(step, refill),
            policy_step=self.policy_step,
            seconds=seconds,
            record_experts=self.record_experts,
        )
        groups = [group for chunk in chunks for group in chunk]
        ungraded = [r for group in groups for r in group if r.score.reward is None]
        if ungraded:
            groups = without_ungraded(groups)
        self.problems.record(groups)
        rollout = Rollout(
            groups, seconds.sampling, seconds.waited, self.settings.limit(step), ungraded=ungraded
        )
        rollout.environment_s = seconds.environments
        rollout.filtered["ungraded"] = len(ungraded)
        if self.problems.max_prompt_tokens is not None:
            rollout.filtered["prompt_too_long"] = self.problems.skipped(problems)
        return rollout

    def position(self, step: int, refill: int) -> tuple[int | str, ...]:
        """Return the position of a round's random numbers; the engine appends task, problem and
        sample to it.

        A problem that occurs once in a run needs no more than that. A problem that is visited
        again, in the next epoch of a query set or after a refill round over a finite set, must not
        meet the random numbers of its last visit, so the position then holds step and refill round
        too.
        """
        return (
            (self.seed, "rollout", step, refill)
            if self.problems.revisits(refill)
            else (self.seed, "rollout")
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep so that the same problems follow; ready for JSON,
        often empty.
        """
        return self.problems.state()

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore what `state` returned after `step`, also if it has been written to JSON and read
        again.
        """
        self.policy_step = step
        self.problems.load_state(state)

    def pending(self) -> PendingRollouts:
        """Return what was sampled and not yet trained on: nothing, for each batch is trained on at
        once.
        """
        return PendingRollouts()

    def restore_pending(self, pending: PendingRollouts) -> None:
        """Restore what `pending` returned."""

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


class DynamicSource(OnPolicySource):
    """Dynamic sampling (DAPO, arXiv:2503.14476): replaces groups whose rewards are all equal by
    further groups.

    For example, 2 of a step's 32 groups have all rewards 1. Another round of problems is sampled,
    and its first two groups with different rewards take their places. Up to `refill_rounds` further
    rounds are sampled. A place that stays open keeps its own group, which adds no gradient, so a
    step always has P groups. Where no group needs replacing, this is the plain source. Rewards are
    compared as the verifier gave them, before any shaping.

    `Rollout.filtered` counts, beside what the plain source counts: groups dropped because all their
    rewards were equal ("zero_variance"), groups dropped because P were there already ("surplus"),
    groups trained on although all their rewards are equal ("filled"), and the rounds that were
    sampled ("refill_rounds").
    """

    def sample(self, step: int) -> Rollout:
        """Sample the step's groups, and replace those without signal by groups of further rounds."""
        rollout = self.sample_round(step)
        groups = rollout.groups
        places = [i for i, group in enumerate(groups) if not has_signal(group)]
        refills, flat, rounds = [], [], 0
        while len(refills) < len(places) and rounds < self.settings.refill_rounds:
            more = self.sample_round(step, rounds + 1)
            # the step has met every problem of the training set already
            if not more.groups and not more.ungraded:
                break
            rounds += 1
            refills += [group for group in more.groups if has_signal(group)]
            flat += [group for group in more.groups if not has_signal(group)]
            rollout.ungraded += more.ungraded
            rollout.rollout_s += more.rollout_s
            rollout.score_s += more.score_s
            rollout.environment_s += more.environment_s
            for key, count in more.filtered.items():
                rollout.filtered[key] += count
        used = min(len(places), len(refills))
        surplus = refills[used:]
        for place, group in zip(places[:used], refills[:used], strict=True):
            flat.append(groups[place])
            groups[place] = group
        rollout.dropped = flat + surplus
        rollout.filtered |= {
            "zero_variance": len(flat),
            "surplus": len(surplus),
            "filled": len(places) - used,
            "refill_rounds": rounds,
        }
        return rollout


def longest_prompt(engine: Engine, settings: RolloutSettings) -> tuple[int | None, str]:
    """Return the largest number of tokens that a training prompt may have (None: no bound), and in
    words what sets it: "" for the user's own limit, else how much room the longest response leaves
    in the engine's positions."""
    wanted, limit, positions = settings.max_prompt_tokens, settings.longest_limit, engine.positions
    if positions is None or (wanted is not None and wanted + limit <= positions):
        return wanted, ""
    room = positions - limit
    return (
        room,
        f"rollout.max_new_tokens={limit} leaves {room} of {positions} positions for a prompt",
    )


def without_ungraded(groups: list[list[ScoredResponse]]) -> list[list[ScoredResponse]]:
    """Return the groups without their ungraded responses; a group without any graded response is
    left out.
    """
    graded = [[r for r in group if r.score.reward is not None] for group in groups]
    return [group for group in graded if group]


def has_signal(group: list[ScoredResponse]) -> bool:
    """Return whether a group's rewards differ. If they do not, all its advantages are 0."""
    return not all_same([response.reward for response in group])
