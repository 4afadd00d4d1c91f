"""Refuses combinations of settings that cannot work or would mean something else than they say, and warns of others.

Every refusal is one line that names the key, the value and what to do. `check` runs before a model loads. What it must
know of an objective, an advantage estimator or a KL term are class attributes of these, such as
`objective.sequence_level`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from gspo.algorithm.aggregation import LENGTH_WEIGHTED
from gspo.rollout.settings import check_sampler

if TYPE_CHECKING:
    from gspo.config.settings import Settings

NEARLY_ALL = 0.9  # the share of responses that are cut off from which on a warning is given
WIDE_FOR_A_SEQUENCE = 0.05  # a wider clip range is meant for the ratio of a token, not for that of a response


def check(s: Settings) -> None:
    """Raise ValueError for the first combination of settings that cannot work."""
    check_updates(s)
    check_replay(s)
    check_router(s)
    check_objective(s)
    check_credit(s)
    check_kl(s)
    check_dead_options(s)
    if s.cold_start.steps and not s.task.has_demonstrations:
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
    """Read the training set, before a model loads. Raises ValueError if it is missing or smaller than the query set."""
    size = s.task.size("train")
    if size and s.rollout.query_set > size:
        raise ValueError(
            f"rollout.query_set={s.rollout.query_set} exceeds the {size} training problems of task={s.task.name}: some "
            f"would be in it twice; use at most {size}, or 0 for all of them epoch by epoch"
        )


def check_updates(s: Settings) -> None:
    """Refuse mini-batches that cut groups apart, and a single update on which no objective could act."""
    updates = s.trainer.minibatches * s.trainer.epochs
    if s.rollout.prompts_per_step % s.trainer.minibatches:
        raise ValueError(
            f"trainer.minibatches={s.trainer.minibatches} does not divide rollout.prompts_per_step="
            f"{s.rollout.prompts_per_step}: mini-batches are made of whole groups"
        )
    on_policy = updates == 1 and starts_at_one(s)
    if on_policy and not s.allow_on_policy and s.objective.ratio_to == "old":
        raise ValueError(
            f"trainer.minibatches=1 with policy.old_logprobs={s.policy.old_logprobs}: every ratio is 1, so "
            f"objective={s.objective.name} cannot clip and all objectives are the same; "
            "use more mini-batches, or say allow_on_policy=true"
        )


def samples_ahead(s: Settings) -> bool:
    """Tell whether responses may be older than the step that trains on them."""
    return bool(s.rollout.staleness or s.rollout.token_budget)


def starts_at_one(s: Settings) -> bool:
    """Tell whether the first mini-batch has ratios of 1, rounding aside."""
    return s.policy.old_logprobs == "step_start" or (s.policy.old_logprobs == "behaviour" and not samples_ahead(s))


def shares_weights(s: Settings) -> bool:
    """Tell whether the engine computes with the trainer's own weights, in the trainer's precision."""
    exact = s.rollout.dtype == "float32" and s.rollout.quantization == "none"
    return s.rollout.name == "local" and exact


def check_replay(s: Settings) -> None:
    """Refuse Routing Replay where there is no routing, where it would change nothing and where its record has gaps."""
    replay, ahead = s.policy.routing_replay, samples_ahead(s)
    if replay == "none":
        return
    if s.model.is_dense:
        raise ValueError(f"policy.routing_replay={replay} needs an MoE model; model={s.model.name} is dense")
    # r2 replays the old policy's experts, r3 those of the engine: are these the ones that the router chooses anyway?
    changes_nothing = starts_at_one(s) or not ahead if replay == "r2" else shares_weights(s) and not ahead
    if s.trainer.minibatches * s.trainer.epochs == 1 and changes_nothing:
        raise ValueError(
            f"policy.routing_replay={replay} changes nothing with one update per rollout batch (trainer.minibatches=1)"
        )
    if s.rollout.token_budget and (replay == "r3" or s.policy.old_logprobs != "step_start"):
        raise ValueError(
            f"policy.routing_replay={replay} with rollout.token_budget={s.rollout.token_budget} and policy.old_logprobs"
            f"={s.policy.old_logprobs}: each policy routes anew what stands before its own segment, so a cut "
            "response has no one record of experts; use routing_replay=none, or r2 with old_logprobs=step_start"
        )


def check_router(s: Settings) -> None:
    """Refuse settings of the routers where there is none, or where a frozen one would ignore them."""
    given = {
        "policy.freeze_router=true": s.policy.freeze_router,
        f"optim.router_lr_factor={s.optim.router_lr_factor:g}": s.optim.router_lr_factor != 1,
        f"trainer.router_aux_loss_coef={s.trainer.router_aux_loss_coef:g}": s.trainer.router_aux_loss_coef != 0,
    }
    chosen = [setting for setting, is_chosen in given.items() if is_chosen]
    if chosen and s.model.is_dense:
        raise ValueError(f"{chosen[0]} needs an MoE model; model={s.model.name} is dense")
    if s.policy.freeze_router and len(chosen) > 1:
        raise ValueError(
            f"{chosen[1]} is not read with policy.freeze_router=true, which leaves the routers as they are"
        )


def check_objective(s: Settings) -> None:
    """Refuse an aggregation or a correction that does not fit the objective."""
    mode = s.trainer.aggregation.mode
    if s.objective.fixed_aggregation and mode != s.objective.aggregation:
        raise ValueError(
            f"trainer.aggregation.mode={mode} with objective={s.objective.name}: its loss is one number per response, "
            f"with its length weight if it has one; use {s.objective.aggregation}"
        )
    if s.objective.sequence_level and mode in LENGTH_WEIGHTED and not s.allow_length_weighting:
        raise ValueError(
            f"trainer.aggregation.mode={mode} weighs responses by their length, but objective={s.objective.name} has "
            "one ratio per response; use seq-mean-token-mean, objective=luspo, or say allow_length_weighting=true"
        )
    if s.correction.name != "none" and s.policy.old_logprobs == "engine":
        raise ValueError(
            f"correction={s.correction.name} with policy.old_logprobs=engine: both log-probs are the engine's, so "
            "every weight is 1; use policy.old_logprobs=step_start"
        )
    if s.correction.name != "none" and s.objective.ratio_to == "engine":
        raise ValueError(
            f"correction={s.correction.name} with objective={s.objective.name}: its ratio is to the sampling policy "
            "already"
        )


def check_credit(s: Settings) -> None:
    """Refuse groups, advantages and penalties that do not fit each other or the objective."""
    group_of_one = s.advantage.group_of_one
    if s.rollout.group_size == 1 and s.advantage.needs_group and group_of_one == "zero":
        raise ValueError(
            f"rollout.group_size=1 leaves advantage={s.advantage.name} nothing to compare with; use at least 2, or an "
            "advantage without group baseline"
        )
    if s.rollout.group_size == 1 and s.advantage.baseline == "group":
        raise ValueError("rollout.group_size=1 with advantage.baseline=group: the group's mean is the reward itself")
    if s.rollout.group_size > 1 and group_of_one != "zero":
        raise ValueError(
            f"advantage.group_of_one={group_of_one} is not read with rollout.group_size={s.rollout.group_size}"
        )
    rewards_or_discounts_tokens = s.kl.in_reward or s.advantage.gamma < 1
    sums_later_rewards = not s.advantage.needs_group and s.advantage.baseline == "none"
    tokens_differ = s.advantage.per_token or (rewards_or_discounts_tokens and sums_later_rewards)
    if tokens_differ and s.objective.sequence_level and not s.objective.token_advantages:
        raise ValueError(
            f"objective={s.objective.name} has one advantage per response, advantage={s.advantage.name} with kl="
            f"{s.kl.name} and advantage.gamma={s.advantage.gamma} gives one per token; use objective=gspo_token"
        )
    if s.reward.overlong_cache >= s.rollout.max_new_tokens:
        raise ValueError(
            f"reward.overlong_cache={s.reward.overlong_cache} must be below rollout.max_new_tokens="
            f"{s.rollout.max_new_tokens}"
        )


def check_kl(s: Settings) -> None:
    """Refuse weights on the KL term where no correction computes any."""
    if s.kl.in_loss and s.kl.weighted and s.correction.name == "none":
        raise ValueError("kl.weighted=true with correction=none: there are no weights to multiply by")


def check_dead_options(s: Settings) -> None:
    """Refuse options that were given another value than their default although nothing reads them."""
    for unread, key, because in [*dead_reward_options(s), *dead_options(s)]:
        group, _, name = key.partition(".")
        if unread and changed(getattr(s, group), name):
            raise ValueError(f"{key}={getattr(getattr(s, group), name)} is not read with {because}")


Dead = tuple[bool, str, str]  # (whether nothing reads it, dotted key, the reason)


def dead_reward_options(s: Settings) -> list[Dead]:
    """List the options of old log-probs, rewards and advantages that can be dead, each with the reason."""
    old_policy_read = s.objective.ratio_to == "old" or s.kl.needs_reference or s.correction.name != "none"
    old_policy_read |= samples_ahead(s) and s.policy.routing_replay == "r2"
    mean_removed = s.advantage.needs_group and s.reward.clip is None  # every advantage is a difference within its group
    batch_std = s.advantage.std == "batch"
    shift_cancels = mean_removed and not (batch_std and s.reward.shift == "group")
    scale_cancels = mean_removed and s.advantage.std != "none" and not (batch_std and s.reward.scale == "group")
    scale_cancels = scale_cancels and not s.kl.in_reward  # KL is taken off after the scale
    advantage = f"advantage={s.advantage.name}"
    return [
        (not old_policy_read, "policy.old_logprobs", f"objective={s.objective.name}: it has no ratio to pi_old"),
        (shift_cancels, "reward.shift", f"{advantage}, which takes the group's mean off"),
        (scale_cancels, "reward.scale", f"{advantage}, which divides by the std"),
        (s.reward.scale == "none", "reward.eps", "reward.scale=none"),
        (not s.reward.overlong_cache, "reward.overlong_penalty", "reward.overlong_cache=0"),
        (s.advantage.baseline == "group", "advantage.gamma", "advantage.baseline=group"),
    ]


def dead_options(s: Settings) -> list[Dead]:
    """List the options of routing, synchronisation and KL that can be dead, each with the reason."""
    dense = s.model.is_dense
    no_routers = f"model={s.model.name}: it has no routers"
    found = [
        (dense, "rollout.routes", no_routers),
        (not s.rollout.routes, "rollout.routes_floor", "rollout.routes=false"),
        (shares_weights(s), "rollout.sync_tolerance", "rollout=local in float32: it has the same weights"),
        (dense, "trainer.consistency_sample", no_routers),
    ]
    if s.kl.needs_reference:
        found.append((s.kl.target is None, "kl.horizon", "kl.target=null (a fixed coefficient)"))
    return found


def changed(settings: Any, key: str) -> bool:
    """Tell whether a field of a settings dataclass has another value than its default."""
    default = next((f.default for f in fields(settings) if f.name == key), MISSING)
    return default is not MISSING and getattr(settings, key) != default


def warnings(s: Settings) -> list[str]:
    """Describe settings that are allowed but often not meant; they are shown once, at the start of a run."""
    found = []
    if s.kl.in_loss and s.kl.estimator == "k1" and s.kl.gradient == "own" and s.kl.times_ratio == "none":
        found.append("kl.estimator=k1 in the loss: its expected gradient is zero; k2 or k3 pull towards the reference")
    if s.policy.old_logprobs == "engine" and s.trainer.minibatches * s.trainer.epochs == 1:
        found.append("policy.old_logprobs=engine with one update: the ratio is the engine's mismatch alone")
    if s.objective.ratio_to == "none" and s.trainer.minibatches * s.trainer.epochs > 1:
        found.append(
            f"objective={s.objective.name} has no ratio: with several updates per batch it takes stale samples for "
            "fresh"
        )
    uncorrected = s.policy.old_logprobs == "step_start" and s.correction.name == "none"
    if samples_ahead(s) and s.objective.ratio_to == "old" and uncorrected:
        found.append(
            f"rollout.staleness={s.rollout.staleness}, rollout.token_budget={s.rollout.token_budget} with "
            "policy.old_logprobs=step_start: ratios start at 1, so the "
            "clip does not see how old the responses are; behaviour and engine let it"
        )
    late = [step for step in s.profile.steps if step > s.steps]
    if late:
        found.append(f"profile.steps={s.profile.steps}: step {min(late)} lies beyond steps={s.steps}")
    late = [step for step in s.rollout.extend if step > s.steps]
    if late:
        found.append(
            f"rollout.extend={s.rollout.extend}: step {min(late)} lies beyond steps={s.steps} and does not act"
        )
    return found


def nothing_to_learn(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Explain why the first step had (nearly) nothing to learn from: a line for each reason, with what to change."""
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
    """Describe what the metrics of a trained step show to be wrong with the settings, in a line each."""
    if "clip/token_active" not in metrics:  # no response token was trained on
        return []
    if not s.objective.clips_sequence_ratio or max(s.objective.clip_low, s.objective.clip_high) <= WIDE_FOR_A_SEQUENCE:
        return []
    return [
        f"objective.clip_low={s.objective.clip_low:g}, clip_high={s.objective.clip_high:g} is a token ratio's range: "
        f"{s.objective.name} averages log-ratios over the response. In this step it clipped "
        f"{metrics['clip/token_active']:.2%} of the tokens; mean |log s| was {metrics['ratio/sequence_log_abs']:.1e} "
        "(the paper clips 15 % with 3e-4, 4e-4)"
    ]


def check_processes(s: Settings, count: int) -> None:
    """Raise ValueError for settings that so many processes cannot have."""
    if s.rollout.name == "vllm":
        if not s.rollout.own_process:
            raise ValueError(
                f"rollout.own_process=false with {count} processes: vLLM would take itself for one of them; set "
                "rollout.own_process=true"
            )
        if count % (size := s.rollout.tensor_parallel_size):
            raise ValueError(
                f"rollout.tensor_parallel_size={size} does not divide the {count} processes, of which so many share a "
                "vLLM"
            )
    if (size := s.parallel.shard_size) and count % size:
        raise ValueError(f"parallel.shard_size={size} does not divide the {count} processes")
    if (size or count) % s.parallel.experts:
        of = f"parallel.shard_size={size}" if size else f"the {count} processes"
        raise ValueError(f"parallel.experts={s.parallel.experts} does not divide {of}")
    if s.rollout.prompts_per_step < count:
        raise ValueError(f"rollout.prompts_per_step={s.rollout.prompts_per_step} is less than the {count} processes")
