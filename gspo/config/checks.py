"""Combinations of settings that cannot work or would mean something else than they say; and warnings.

Every refusal is one line that names the key, the value and what to do. `check` runs before a model loads.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from gspo.algorithm.aggregation import LENGTH_WEIGHTED
from gspo.algorithm.kl import KLInLoss, KLInReward, Penalized
from gspo.algorithm.objectives import DPPO, GMPO, LUSPO, SAPO, GSPOToken, Objective, Reinforce
from gspo.model.loading import TinyDense
from gspo.rollout.settings import check_sampler
from gspo.tasks.benchmark import Benchmark
from gspo.tasks.gym_problems import GymProblems

if TYPE_CHECKING:
    from gspo.config.settings import Settings

NEARLY_ALL = 0.9  # of the responses
WIDE_FOR_A_SEQUENCE = 0.05  # a clip range of a sequence ratio above this is a token ratio's


def check(s: Settings) -> None:
    """Raises ValueError."""
    check_updates(s)
    check_replay(s)
    check_objective(s)
    check_credit(s)
    check_kl(s)
    check_dead_options(s)
    if s.cold_start.steps and isinstance(s.task, Benchmark | GymProblems):
        raise ValueError(
            f"cold_start.steps={s.cold_start.steps} with task={s.task.name}: it has no demonstrations; start from a "
            "trained model, model=hf model.path=... cold_start.steps=0"
        )
    check_sampler(s.rollout, s.sampler)
    unknown = set(s.evaluation.sets) - set(s.task.evaluation_sets())
    if unknown:
        raise ValueError(
            f"evaluation.sets={sorted(unknown)}: task={s.task.name} has {', '.join(s.task.evaluation_sets())}"
        )


def check_training_set(s: Settings) -> None:
    """What reading the training set shows, before a model loads. Raises ValueError if it is not there, or too small."""
    size = s.task.size("train")
    if size and s.rollout.query_set > size:
        raise ValueError(
            f"rollout.query_set={s.rollout.query_set} exceeds the {size} training problems of task={s.task.name}: some "
            f"would be in it twice; use at most {size}, or 0 for all of them epoch by epoch"
        )


def has_sequence_ratio(objective: Objective) -> bool:
    return objective.sequence_level or (isinstance(objective, SAPO) and objective.level == "sequence")


def check_updates(s: Settings) -> None:
    updates = s.trainer.minibatches * s.trainer.epochs
    if s.rollout.prompts_per_step % s.trainer.minibatches:
        raise ValueError(
            f"trainer.minibatches={s.trainer.minibatches} does not divide rollout.prompts_per_step="
            f"{s.rollout.prompts_per_step}: mini-batches are made of whole groups"
        )
    on_policy = updates == 1 and starts_at_one(s)
    if on_policy and not s.allow_on_policy and not isinstance(s.objective, Reinforce | DPPO):
        raise ValueError(
            f"trainer.minibatches=1 with policy.old_logprobs={s.policy.old_logprobs}: every ratio is 1, so "
            f"objective={s.objective.name} cannot clip and all objectives are the same; "
            "use more mini-batches, or say allow_on_policy=true"
        )


def samples_ahead(s: Settings) -> bool:
    """Whether responses may be older than the step that trains on them."""
    return bool(s.rollout.staleness or s.rollout.token_budget)


def starts_at_one(s: Settings) -> bool:
    """Whether the first mini-batch has ratios of 1, rounding aside."""
    return s.policy.old_logprobs == "step_start" or (s.policy.old_logprobs == "behaviour" and not samples_ahead(s))


def check_replay(s: Settings) -> None:
    replay, ahead = s.policy.routing_replay, samples_ahead(s)
    if replay == "none":
        return
    if isinstance(s.model, TinyDense):
        raise ValueError(f"policy.routing_replay={replay} needs an MoE model; model={s.model.name} is dense")
    same_engine = s.rollout.name == "local" and s.rollout.dtype == "float32" and not ahead
    idle = starts_at_one(s) or not ahead if replay == "r2" else same_engine
    if s.trainer.minibatches * s.trainer.epochs == 1 and idle:
        raise ValueError(
            f"policy.routing_replay={replay} changes nothing with one update per rollout batch (trainer.minibatches=1)"
        )
    if s.rollout.token_budget and (replay == "r3" or s.policy.old_logprobs != "step_start"):
        raise ValueError(
            f"policy.routing_replay={replay} with rollout.token_budget={s.rollout.token_budget} and policy.old_logprobs"
            f"={s.policy.old_logprobs}: each policy routes anew what stands before its own segment, so a cut "
            "response has no one record of experts; use routing_replay=none, or r2 with old_logprobs=step_start"
        )


def check_objective(s: Settings) -> None:
    mode = s.trainer.aggregation.mode
    if isinstance(s.objective, LUSPO | GMPO) and mode != "seq-mean-token-mean":
        raise ValueError(
            f"trainer.aggregation.mode={mode} with objective={s.objective.name}: its loss is one number per response, "
            "with its length weight if it has one; use seq-mean-token-mean"
        )
    if has_sequence_ratio(s.objective) and mode in LENGTH_WEIGHTED and not s.allow_length_weighting:
        raise ValueError(
            f"trainer.aggregation.mode={mode} weighs responses by their length, but objective={s.objective.name} has "
            "one ratio per response; use seq-mean-token-mean, objective=luspo, or say allow_length_weighting=true"
        )
    if s.correction.name != "none" and s.policy.old_logprobs == "engine":
        raise ValueError(
            f"correction={s.correction.name} with policy.old_logprobs=engine: both log-probs are the engine's, so "
            "every weight is 1; use policy.old_logprobs=step_start"
        )
    if s.correction.name != "none" and isinstance(s.objective, DPPO):
        raise ValueError(
            f"correction={s.correction.name} with objective=dppo: its ratio is to the sampling policy already"
        )


def check_credit(s: Settings) -> None:
    group_of_one = getattr(s.advantage, "group_of_one", "zero")
    if s.rollout.group_size == 1 and s.advantage.needs_group and group_of_one == "zero":
        raise ValueError(
            f"rollout.group_size=1 leaves advantage={s.advantage.name} nothing to compare with; use at least 2, or an "
            "advantage without group baseline"
        )
    if s.rollout.group_size == 1 and getattr(s.advantage, "baseline", "none") == "group":
        raise ValueError("rollout.group_size=1 with advantage.baseline=group: the group's mean is the reward itself")
    if s.rollout.group_size > 1 and group_of_one != "zero":
        raise ValueError(
            f"advantage.group_of_one={group_of_one} is not read with rollout.group_size={s.rollout.group_size}"
        )
    by_token = isinstance(s.kl, KLInReward) or getattr(s.advantage, "gamma", 1.0) < 1  # a discount tells tokens apart
    of_returns = not s.advantage.needs_group and getattr(s.advantage, "baseline", "none") == "none"
    differs = s.advantage.per_token or (by_token and of_returns)
    if differs and has_sequence_ratio(s.objective) and not isinstance(s.objective, GSPOToken):
        raise ValueError(
            f"objective={s.objective.name} has one advantage per response, advantage={s.advantage.name} with kl="
            f"{s.kl.name} and advantage.gamma={getattr(s.advantage, 'gamma', 1.0)} gives one per token; "
            "use objective=gspo_token"
        )
    if s.reward.overlong_cache >= s.rollout.max_new_tokens:
        raise ValueError(
            f"reward.overlong_cache={s.reward.overlong_cache} must be below rollout.max_new_tokens="
            f"{s.rollout.max_new_tokens}"
        )


def check_kl(s: Settings) -> None:
    if isinstance(s.kl, KLInLoss) and s.kl.weighted and s.correction.name == "none":
        raise ValueError("kl.weighted=true with correction=none: there are no weights to multiply by")


def check_dead_options(s: Settings) -> None:
    """Options that were changed and that nothing would read."""
    annulled = s.advantage.needs_group and s.reward.clip is None
    std = getattr(s.advantage, "std", "none")  # what the advantage divides by
    by_batch = std == "batch"
    shift_cancels = annulled and not (by_batch and s.reward.shift == "group")
    scale_cancels = annulled and std != "none" and not (by_batch and s.reward.scale == "group")
    scale_cancels = scale_cancels and not isinstance(s.kl, KLInReward)  # KL is taken off after the scale
    unused_old = isinstance(s.objective, Reinforce | DPPO) and not isinstance(s.kl, Penalized)
    unused_old &= s.correction.name == "none" and not (samples_ahead(s) and s.policy.routing_replay == "r2")
    dead: list[tuple] = [
        (unused_old, "policy", s.policy, "old_logprobs", f"objective={s.objective.name}: it has no ratio to pi_old"),
        (shift_cancels, "reward", s.reward, "shift", f"advantage={s.advantage.name}, which takes the group's mean off"),
        (scale_cancels, "reward", s.reward, "scale", f"advantage={s.advantage.name}, which divides by the std"),
        (s.reward.scale == "none", "reward", s.reward, "eps", "reward.scale=none"),
        (not s.reward.overlong_cache, "reward", s.reward, "overlong_penalty", "reward.overlong_cache=0"),
        (
            getattr(s.advantage, "baseline", "none") == "group",
            "advantage",
            s.advantage,
            "gamma",
            "advantage.baseline=group",
        ),
    ]
    dense = isinstance(s.model, TinyDense)
    dead.append((dense, "rollout", s.rollout, "routes", f"model={s.model.name}: it has no routers"))
    dead.append((not s.rollout.routes, "rollout", s.rollout, "routes_floor", "rollout.routes=false"))
    shared = s.rollout.name == "local" and s.rollout.dtype == "float32"
    dead.append((shared, "rollout", s.rollout, "sync_tolerance", "rollout=local in float32: it has the same weights"))
    dead.append((dense, "trainer", s.trainer, "consistency_sample", f"model={s.model.name}: it has no routers"))
    if isinstance(s.kl, Penalized):
        dead.append((s.kl.target is None, "kl", s.kl, "horizon", "kl.target=null (a fixed coefficient)"))
    for unread, group, settings, key, because in dead:
        if unread and changed(settings, key):
            raise ValueError(f"{group}.{key}={getattr(settings, key)} is not read with {because}")


def changed(settings: Any, key: str) -> bool:
    """Whether a field of a settings dataclass has another value than its default."""
    default = next((f.default for f in fields(settings) if f.name == key), MISSING)
    return default is not MISSING and getattr(settings, key) != default


def warnings(s: Settings) -> list[str]:
    """What may be meant and often is not; said once at the start of a run."""
    found = []
    if isinstance(s.kl, KLInLoss) and s.kl.estimator == "k1" and s.kl.gradient == "own" and s.kl.times_ratio == "none":
        found.append("kl.estimator=k1 in the loss: its expected gradient is zero; k2 or k3 pull towards the reference")
    if s.policy.old_logprobs == "engine" and s.trainer.minibatches * s.trainer.epochs == 1:
        found.append("policy.old_logprobs=engine with one update: the ratio is the engine's mismatch alone")
    if isinstance(s.objective, Reinforce) and s.trainer.minibatches * s.trainer.epochs > 1:
        found.append(
            "objective=reinforce has no ratio: with several updates per batch it takes stale samples for fresh"
        )
    clips = not isinstance(s.objective, Reinforce | DPPO)
    if samples_ahead(s) and clips and s.policy.old_logprobs == "step_start" and s.correction.name == "none":
        found.append(
            f"rollout.staleness={s.rollout.staleness}, rollout.token_budget={s.rollout.token_budget} with "
            "policy.old_logprobs=step_start: ratios start at 1, so the "
            "clip does not see how old the responses are; behaviour and engine let it"
        )
    late = [step for step in s.rollout.extend if step > s.steps]
    if late:
        found.append(
            f"rollout.extend={s.rollout.extend}: step {min(late)} lies beyond steps={s.steps} and does not act"
        )
    return found


def nothing_to_learn(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Why the first step had nothing, or nearly nothing, to learn from: a line for each reason, with what to change."""
    found, cut = [], metrics.get("length/truncated", 0.0)
    if cut >= NEARLY_ALL:
        found.append(
            f"{cut:.1%} of the responses were cut off at rollout.max_new_tokens={s.rollout.limit(1)}, and a response "
            "that is cut off earns nothing: raise it"
        )
    if metrics.get("group/zero_variance") != 1:
        return found
    first = f"rollouts/step_000001.jsonl shows them, and the prompts (prompt.format={s.prompt.format}: {s.prompt_used})"
    if metrics["reward/mean"] == 0:
        found.append(
            f"every response earned 0, so there is nothing to learn from; {first}. If they are not cut off, change "
            f"prompt.format, or choose easier problems than task={s.task.name}, or a stronger model"
        )
    elif metrics["reward/mean"] == 1:
        found.append(
            f"every response earned 1, so there is nothing to learn; choose harder problems than task={s.task.name}"
        )
    elif s.advantage.needs_group and s.rollout.group_size > 1:
        found.append(
            f"in no group of rollout.group_size={s.rollout.group_size} responses did the rewards differ, so the step "
            "had no gradient: raise it, or choose problems that the model solves sometimes"
        )
    return found


def warnings_after(s: Settings, metrics: dict[str, float]) -> list[str]:
    """What a trained step shows."""
    if "clip/token_active" not in metrics:  # no response token was trained on
        return []
    clip = max(getattr(s.objective, "clip_low", 0.0), getattr(s.objective, "clip_high", 0.0))
    if not s.objective.sequence_level or isinstance(s.objective, GMPO) or clip <= WIDE_FOR_A_SEQUENCE:
        return []
    return [
        f"objective.clip_low={s.objective.clip_low:g}, clip_high={s.objective.clip_high:g} is a token ratio's range: "
        f"{s.objective.name} averages log-ratios over the response. In this step it clipped "
        f"{metrics['clip/token_active']:.2%} of the tokens; mean |log s| was {metrics['ratio/sequence_log_abs']:.1e} "
        "(the paper clips 15 % with 3e-4, 4e-4)"
    ]
