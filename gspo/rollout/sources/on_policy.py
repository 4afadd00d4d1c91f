"""Rollout sources that sample every batch from the current weights, also with dynamic sampling.

Dynamic sampling replaces groups whose rewards are all equal, because they carry no gradient.
Sources that sample from older weights are in gspo.rollout.sources.off_policy.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gspo.data.problems import Problem
from gspo.data.samples import Response, ScoredResponse, all_same
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.requests import RandomKey, SamplingRequest
from gspo.rollout.engines.route_checks import check_routes
from gspo.rollout.episodes.episode import Seconds
from gspo.rollout.scoring import scored_chunks
from gspo.rollout.settings import RolloutSettings, check_sampler
from gspo.rollout.sources.base import NothingGraded, PendingRollouts, Rollout
from gspo.rollout.sources.behaviour_logprobs import BehaviourLogprobs, check_engine
from gspo.rollout.sources.handover import HandoverCheck
from gspo.rollout.sources.problem_sampler import Sampler, TrainingProblems, Uniform
from gspo.tasks.base import Task

MAX_REASONS = 3  # how many reasons a message names
# problems on which engine and trainer are compared after a load of weights
CHECK_PROBLEMS = 2


class OnPolicySource:
    """Samples each step's batch from the current weights, on problems that the sampler chooses.

    A response that could not be graded (because the sandbox failed, not the response) is left out
    of its group. So groups may differ in size. A group without any graded response is left out
    altogether. `Rollout.filtered` counts such responses as "ungraded". If prompts have a limit, it
    counts replaced problems as "prompt_too_long". With `behaviour_logprobs` every response also
    keeps the log-probs that the trainer computes under the weights that sampled it. Without
    `sampler` the problems are those of the stream, in its order.
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
        self.engine = engine
        self.task = task
        self.settings = settings
        self.seed = seed
        self.behaviour_logprobs = behaviour_logprobs
        self.record_experts = settings.routes
        # the step after which the trainer had the weights that the engine has now
        self.policy_step = 0
        self.synced: dict[str, float] = {}  # metrics of loading those weights into the engine
        self.handover = HandoverCheck(engine, engine_rounding(engine, settings))
        max_prompt_tokens, limited_by = longest_prompt(engine, settings)
        self.problems = TrainingProblems(
            task,
            seed,
            sampler,
            settings.prompts_per_step,
            settings.query_set,
            settings.refresh_every,
            max_prompt_tokens,
            prompt_length=lambda prompt: len(engine.policy.encode_prompt(prompt)),
            limited_by=limited_by,
        )

    def start_recording_experts(self) -> None:
        """Let every response from now on hold the experts that the engine chose."""
        self.record_experts = True

    def next(self, step: int) -> Rollout:
        """Return the scored groups of a step.

        Raises NothingGraded if no response could be graded, and EngineEnded if the engine's process
        has ended. Then the source is in its state before the call."""
        state = self.state()
        pending = self.pending()
        try:
            return self._next(step)
        except (EngineEnded, NothingGraded):
            self.load_state(state, self.policy_step)
            self.restore_pending(pending)
            raise

    def _next(self, step: int) -> Rollout:
        """Do the same as `next`, without restoring the source after an exception."""
        rollout = self.sample(step)
        if not rollout.groups:
            raise NothingGraded(f"step {step}: {self.why_ungraded(rollout.ungraded)}")
        rollout.synced = self.synced
        if self.settings.routes:
            routing = self.engine.policy.routing
            check_routes(rollout.responses, routing.layers, routing.top_k, routing.experts)
        self.keep_behaviour_logprobs(rollout.responses, rollout)
        self.handover.record(rollout.groups)
        self.engine.rest()
        return rollout

    def why_ungraded(self, responses: list[ScoredResponse]) -> str:
        """Return in words why no response could be graded: the reasons, the commonest first."""
        counts = Counter(r.score.reason or r.score.verdict for r in responses)
        reasons = [f"{reason} ({count} times)" for reason, count in counts.most_common(MAX_REASONS)]
        first = self.task.in_words(responses[0].problem)
        return (
            f"none of {len(responses)} responses could be graded, so there is nothing to train "
            f"on: {'; '.join(reasons)}. The first was to {first}"
        )

    def keep_behaviour_logprobs(self, responses: Sequence[Response], rollout: Rollout) -> None:
        """Store the trainer's log-probs of new tokens under the engine's present weights."""
        if self.behaviour_logprobs:
            started = time.perf_counter()
            self.behaviour_logprobs(responses)
            rollout.behaviour_s += time.perf_counter() - started

    def sample(self, step: int) -> Rollout:
        """Sample and score the groups of a step. Subclasses override this."""
        return self.sample_round(step)

    def update(self, step: int) -> None:
        """Sample from the weights after this step from now on.

        Raises RuntimeError if they did not arrive in the engine."""
        self.policy_step = step
        started = time.perf_counter()
        if not self.engine.shares_weights:
            self.engine.load_weights(self.engine.policy.named_tensors())
            self.check(step)
            self.synced["time/sync_s"] = time.perf_counter() - started

    def check(self, step: int) -> None:
        """Raise RuntimeError if the engine's weights are not the trainer's after this step."""
        problems = [self.problems.problem(position) for position in range(CHECK_PROBLEMS)]
        precision = str(self.engine.policy.precision).removeprefix("torch.")
        difference = check_engine(self.engine, problems, self.settings.tolerance(precision), step)
        self.synced = {} if difference is None else {"mismatch/after_sync": difference}
        self.synced |= self.handover.check(step)

    def sample_round(self, step: int, refill: int = 0) -> Rollout:
        """Sample and score groups for the `prompts_per_step` problems of a round.

        Round 0 has the step's own problems. Further rounds have the problems of refill rounds."""
        problems = self.problems.take(step, refill)
        request = self.request(problems, step, self.random_key(step, refill))
        seconds = Seconds()
        chunks = scored_chunks(self.engine, self.task, request, seconds)
        groups = [group for chunk in chunks for group in chunk]
        ungraded = [r for group in groups for r in group if r.score.reward is None]
        if ungraded:
            groups = without_ungraded(groups)
        self.problems.record(groups)
        rollout = Rollout(
            groups,
            rollout_s=seconds.sampling,
            score_s=seconds.waited,
            limit=self.settings.limit(step),
            ungraded=ungraded,
            environment_s=seconds.environments,
        )
        rollout.filtered["ungraded"] = len(ungraded)
        if self.problems.max_prompt_tokens is not None:
            rollout.filtered["prompt_too_long"] = self.problems.skipped(problems)
        return rollout

    def request(
        self, problems: Sequence[Problem], step: int, random_key: RandomKey
    ) -> SamplingRequest:
        """Return the request for groups of responses to these problems, as a step samples them."""
        return SamplingRequest(
            problems,
            self.settings.group_size,
            self.settings.sampling(step),
            random_key,
            self.policy_step,
            self.record_experts,
        )

    def random_key(self, step: int, refill: int) -> RandomKey:
        """Return the key of a round's random numbers.

        The engine appends task, problem and sample to it. A problem that occurs once in a run needs
        no more. A problem may be visited again, in the next epoch of a query set or after a refill
        round over a finite set. It must not meet the random numbers of its last visit, so the key
        then holds step and refill round too.
        """
        if self.problems.revisits(refill):
            return (self.seed, "rollout", step, refill)
        return (self.seed, "rollout")

    def state(self) -> dict[str, Any]:
        """Return the state of sampler and check of hand-overs, ready for JSON and often empty."""
        state = self.problems.state()
        handover = self.handover.state()
        return state | {"handover": handover} if handover else state

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the result of `state` after `step`, also if JSON has stored it meanwhile."""
        self.policy_step = step
        self.handover.load_state(state.get("handover", {}))
        self.problems.load_state(state)

    def pending(self) -> PendingRollouts:
        """Return no rollouts: each batch is trained on at once."""
        return PendingRollouts()

    def restore_pending(self, pending: PendingRollouts) -> None:
        """Restore the result of `pending`."""

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def engine_rounding(engine: Engine, settings: RolloutSettings) -> str:
    """Return what rounds in the engine and not in the trainer, in the words of HandoverCheck."""
    policy = engine.policy
    if policy.precision != torch.float32 or settings.quantization != "none":
        return "otherwise"
    if settings.dtype == "float32":
        return "nothing"
    # an adapter is merged into the weights before they are rounded, and not in the trainer
    return "otherwise" if policy.adapter else settings.dtype


class DynamicSource(OnPolicySource):
    """Dynamic sampling: replaces groups whose rewards are all equal (DAPO, arXiv:2503.14476).

    For example, 2 of a step's 32 groups have all rewards 1. Another round of problems is sampled,
    and its first two groups with different rewards replace them. Up to `refill_rounds` further
    rounds are sampled. A group that is not replaced stays, although it adds no gradient. Further
    groups with different rewards also replace groups in which no response could be graded. If no
    group needs to be replaced, no round is added. Rewards are compared as the verifier gave them,
    before any shaping.

    `Rollout.filtered` has these counts in addition to those of the plain source:

    zero_variance  groups dropped because all their rewards were equal
    surplus        groups dropped because there were P groups already
    filled         groups trained on although all their rewards are equal
    refill_rounds  rounds that were sampled
    """

    def sample(self, step: int) -> Rollout:
        """Sample the step's groups, and replace groups whose rewards are all equal."""
        rollout = self.sample_round(step)
        groups = rollout.groups
        to_replace = [i for i, group in enumerate(groups) if not has_signal(group)]
        num_missing = count_ungraded_groups(rollout)
        num_needed = len(to_replace) + num_missing
        varied_groups: list[list[ScoredResponse]] = []  # of refill rounds
        equal_groups: list[list[ScoredResponse]] = []  # dropped, because their rewards are equal
        refill_rounds = 0
        while len(varied_groups) < num_needed and refill_rounds < self.settings.refill_rounds:
            refill = self.sample_round(step, refill_rounds + 1)
            # the step has met every problem of the training set already
            if not refill.groups and not refill.ungraded:
                break
            refill_rounds += 1
            varied_groups += [group for group in refill.groups if has_signal(group)]
            equal_groups += [group for group in refill.groups if not has_signal(group)]
            add_round(rollout, refill)
        num_replaced = min(len(to_replace), len(varied_groups))
        for i, group in zip(to_replace, varied_groups, strict=False):
            equal_groups.append(groups[i])
            groups[i] = group
        unused_groups = varied_groups[num_replaced:]
        groups += unused_groups[:num_missing]
        surplus = unused_groups[num_missing:]
        rollout.dropped = equal_groups + surplus
        rollout.filtered |= {
            "zero_variance": len(equal_groups),
            "surplus": len(surplus),
            "filled": len(to_replace) - num_replaced,
            "refill_rounds": refill_rounds,
        }
        return rollout


def count_ungraded_groups(rollout: Rollout) -> int:
    """Return the number of groups in which no response could be graded."""
    graded = {(group[0].problem.task, group[0].problem.index) for group in rollout.groups}
    ungraded = {(r.problem.task, r.problem.index) for r in rollout.ungraded}
    return len(ungraded - graded)


def add_round(rollout: Rollout, refill: Rollout) -> None:
    """Add the seconds, the counts and the ungraded responses of a refill round to a step's."""
    rollout.ungraded += refill.ungraded
    rollout.rollout_s += refill.rollout_s
    rollout.score_s += refill.score_s
    rollout.environment_s += refill.environment_s
    for key, count in refill.filtered.items():
        rollout.filtered[key] += count


def longest_prompt(engine: Engine, settings: RolloutSettings) -> tuple[int | None, str]:
    """Return how many tokens a training prompt may have (None: no bound), and the reason in words.

    The reason is "" if the limit is the user's own. Otherwise it says how much room the longest
    response leaves in the engine's positions."""
    user_limit = settings.max_prompt_tokens
    response_limit = settings.longest_limit
    positions = engine.positions
    if positions is None or (user_limit is not None and user_limit + response_limit <= positions):
        return user_limit, ""
    room = positions - response_limit
    reason = (
        f"responses of up to {response_limit} tokens (rollout.max_new_tokens, rollout.extend) "
        f"leave {room} of {positions} positions for a prompt"
    )
    return room, reason


def without_ungraded(groups: list[list[ScoredResponse]]) -> list[list[ScoredResponse]]:
    """Return the groups without ungraded responses, and without groups that are then empty."""
    graded = [[r for r in group if r.score.reward is not None] for group in groups]
    return [group for group in graded if group]


def has_signal(group: list[ScoredResponse]) -> bool:
    """Return whether a group's rewards differ.

    If they do not, all advantages of an estimator that compares them are 0."""
    return not all_same([response.reward for response in group])
