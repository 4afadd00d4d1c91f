"""Where the trainer's scored groups come from. The trainer does not know which source it has.

A source is anything with `next(step) -> Rollout` and `update(step)`, which hands it the weights of a finished step. The
plain one samples every batch from the current weights; the dynamic one also replaces groups that carry no signal. Those
that sample ahead of the training are in gspo.rollout.off_policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.core.types import Response
from gspo.rollout.engine import Engine
from gspo.rollout.engine_process import EngineEnded
from gspo.rollout.problem_sampler import Sampler, TrainingProblems, Uniform
from gspo.rollout.route_checks import check_routes
from gspo.rollout.sampler_logprobs import Behaviour, check_engine
from gspo.rollout.scoring import sample_and_score
from gspo.rollout.settings import RolloutSettings, check_sampler
from gspo.tasks.base import Task

GUARD_PROBLEMS = 2  # on which the engine is compared with the trainer after a hand-over of weights


@dataclass
class Rollout:
    """The scored groups of one training step, and what they cost in seconds."""

    groups: list[list[Response]]
    rollout_s: float  # sampling
    score_s: float  # waiting for the verifiers; what they do while the engine samples the next chunk costs nothing
    limit: int  # the largest number of response tokens at this step
    dropped: list[list[Response]] = field(default_factory=list)  # scored too, and paid for, but not trained on
    ungraded: list[Response] = field(default_factory=list)  # the verifier failed on them, not they on it: left out
    filtered: dict[str, float] = field(default_factory=dict)  # counts of what was left out and why; see the sources
    behaviour_s: float = 0.0  # recomputing log-probs under the weights that sampled
    waited_s: float | None = None  # what the trainer waited for all this, where it was done beside the training
    in_flight: int = 0  # responses that are to be continued
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the hand-over of the weights that sampled

    @property
    def responses(self) -> list[Response]:
        """Those that are trained on."""
        return [r for group in self.groups for r in group]

    @property
    def sampled(self) -> list[list[Response]]:
        """All groups, trained on or dropped: rewards of these alone say how good the policy is."""
        return self.groups + self.dropped


@dataclass
class Held:
    """Rollouts by the step that is to train on them; groups that are to be continued, with the draw they come from."""

    rollouts: dict[int, Rollout] = field(default_factory=dict)
    groups: list[tuple[int, list[Response]]] = field(default_factory=list)


class OnPolicySource:
    """Samples each step's batch from the current weights; the sampler says which problems (by default the stream's).

    A response that could not be graded (a failure of the sandbox, not of the response) is left out of its group, so
    groups may differ in size, and a group without any is gone. `filtered` counts such responses as "ungraded", and as
    "prompt_too_long" the problems that were replaced, if there is a limit on prompts. With `behaviour` the responses
    keep what the trainer makes of them under the weights that sampled.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        settings: RolloutSettings,
        seed: int,
        sampler: Sampler | None = None,
        behaviour: Behaviour | None = None,
    ):
        sampler = sampler or Uniform()
        check_sampler(settings, sampler)
        self.engine, self.task, self.settings, self.seed, self.behaviour = engine, task, settings, seed, behaviour
        self.record_experts = settings.routes
        self.policy_step = 0  # the step whose weights the engine has
        self.synced: dict[str, float] = {}  # metrics of their hand-over
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
        """Whether the engine's log-probs and experts are those of the trainer's weights at the step's start, but for
        rounding: sampled from the very tensors, whole and at once."""
        return self.engine.shares_weights

    def next(self, step: int) -> Rollout:
        """The scored groups of a step. Raises RuntimeError if no response of it could be graded; EngineEnded, and is as
        before, if the engine's process has ended."""
        state, held = self.state(), self.held()
        try:
            return self._next(step)
        except EngineEnded:
            self.load_state(state, self.policy_step)
            self.take_back(held)
            raise

    def _next(self, step: int) -> Rollout:
        rollout = self.sample(step)
        if not rollout.groups:
            verdicts = ", ".join(sorted({r.score.verdict for r in rollout.ungraded}))
            raise RuntimeError(
                f"step {step}: no response of the batch could be graded ({verdicts}), so there is nothing to train on; "
                "what its verifier said is in train.log"
            )
        rollout.synced = self.synced
        if self.settings.routes:
            routing = self.engine.policy.routing
            check_routes(rollout.responses, routing.layers, routing.top_k, routing.experts)
        self.remember(rollout.responses, rollout)
        self.engine.rest()
        return rollout

    def remember(self, responses: list[Response], rollout: Rollout) -> None:
        """Keep what the trainer makes of new tokens under the weights that the engine has now."""
        if self.behaviour:
            started = time.perf_counter()
            self.behaviour(responses)
            rollout.behaviour_s += time.perf_counter() - started

    def sample(self, step: int) -> Rollout:
        return self.sample_round(step)

    def update(self, step: int) -> None:
        """Sample from the weights of this finished step from now on. Raises RuntimeError if they did not arrive."""
        self.policy_step = step
        started = time.perf_counter()
        if not self.engine.shares_weights:
            self.engine.load_weights(self.engine.policy.named_tensors())
            self.check(step)
            self.synced["time/sync_s"] = time.perf_counter() - started

    def check(self, step: int) -> None:
        """Raises RuntimeError if the engine's weights are not those of this step."""
        problems = [self.problems.problem(place) for place in range(GUARD_PROBLEMS)]
        difference = check_engine(self.engine, problems, self.settings.tolerance, step)
        self.synced = {} if difference is None else {"mismatch/after_sync": difference}

    def sample_round(self, step: int, refill: int = 0) -> Rollout:
        """Scored groups for `prompts_per_step` problems: the step's own (refill 0) or those of a refill round."""
        problems = self.problems.take(step, refill)
        groups, seconds = sample_and_score(
            self.engine,
            self.task,
            problems,
            self.settings.group_size,
            self.settings.sampling(step),
            self.position(step, refill),
            policy_step=self.policy_step,
            record_experts=self.record_experts,
        )
        ungraded = [r for group in groups for r in group if r.score.reward is None]
        if ungraded:
            groups = without_ungraded(groups)
        self.problems.record(groups)
        rollout = Rollout(groups, seconds.sampling, seconds.waited, self.settings.limit(step), ungraded=ungraded)
        rollout.filtered["ungraded"] = len(ungraded)
        if self.problems.max_prompt_tokens is not None:
            rollout.filtered["prompt_too_long"] = self.problems.skipped(problems)
        return rollout

    def position(self, step: int, refill: int) -> tuple[int | str, ...]:
        """Where the random numbers of a round stand; the engine adds task, problem and sample.

        Where the problem's index occurs once in a run it says all. Where it comes again, in every epoch of a query set
        or after a refill round over a finite set, it must not meet the random numbers of its last visit.
        """
        return (self.seed, "rollout", step, refill) if self.problems.revisits(refill) else (self.seed, "rollout")

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep for the same problems to follow, ready for JSON; often empty."""
        return self.problems.state()

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Put back what `state` gave after `step`, also after a way through JSON."""
        self.policy_step = step
        self.problems.load_state(state)

    def held(self) -> Held:
        """Rollouts that were sampled and not yet trained on, which a checkpoint must keep; here there are none."""
        return Held()

    def take_back(self, held: Held) -> None:
        """Put back what `held` gave."""

    def close(self) -> None:
        self.engine.close()


class DynamicSource(OnPolicySource):
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups whose rewards are all equal are replaced by others.

    The step's own groups come first, and those with signal keep their place: without any to replace this is the plain
    source. Each place of a group without signal goes to the next group with signal of up to `refill_rounds` further
    rounds. Places that stay open keep their own group, which adds no gradient, so a step always has P groups. Equal
    means the verifier's rewards, before any shaping.

    `filtered` counts groups, beside "prompt_too_long": "zero_variance" dropped for want of signal, "surplus" dropped
    because P were there, "filled" trained on without signal; and "refill_rounds" that were sampled.
    """

    def sample(self, step: int) -> Rollout:
        rollout = self.sample_round(step)
        groups = rollout.groups
        places = [i for i, group in enumerate(groups) if not has_signal(group)]
        refills, flat, rounds = [], [], 0
        while len(refills) < len(places) and rounds < self.settings.refill_rounds:
            more = self.sample_round(step, rounds + 1)
            if not more.groups and not more.ungraded:  # the training set has no problem left that the step has not met
                break
            rounds += 1
            refills += [group for group in more.groups if has_signal(group)]
            flat += [group for group in more.groups if not has_signal(group)]
            rollout.ungraded += more.ungraded
            rollout.rollout_s += more.rollout_s
            rollout.score_s += more.score_s
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
    """The largest number of tokens of a training prompt, None for no bound, and what sets it: the user's limit, or the
    room that the longest response leaves in the engine's positions."""
    wanted, limit, positions = settings.max_prompt_tokens, settings.longest_limit, engine.positions
    if positions is None or (wanted is not None and wanted + limit <= positions):
        return wanted, ""
    room = positions - limit
    return room, f"rollout.max_new_tokens={limit} leaves {room} of {positions} positions for a prompt"


def without_ungraded(groups: list[list[Response]]) -> list[list[Response]]:
    """The groups with their graded responses alone; those without any are gone."""
    graded = [[r for r in group if r.score.reward is not None] for group in groups]
    return [group for group in graded if group]


def has_signal(group: list[Response]) -> bool:
    """Whether a group's rewards differ; else all its advantages are 0."""
    rewards = [response.score.reward for response in group]
    return min(rewards) != max(rewards)
