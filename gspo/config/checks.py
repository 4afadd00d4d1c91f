"""Refuses combinations of settings that cannot work or would mean something else than they say.

Every refusal is one line that names the key, the value and what to do. `check` runs before a model
loads. What it must know of an objective, an advantage estimator or a KL term are class attributes
of these, such as `objective.sequence_level`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from gspo.algorithm.aggregation import LENGTH_WEIGHTED
from gspo.config.episodes import check_episodes
from gspo.rollout.settings import check_sampler

if TYPE_CHECKING:
    from gspo.config.settings import Settings


def check(s: Settings) -> None:
    """Raise ValueError for the first combination of settings that cannot work."""
    check_updates(s)
    check_replay(s)
    check_optimizer(s)
    check_stop_strings(s)
    check_router(s)
    check_lora(s)
    check_head(s)
    check_objective(s)
    check_truncation(s)
    check_credit(s)
    check_kl(s)
    check_episodes(s)
    check_dead_options(s)
    if s.cold_start.steps and not s.task.has_demonstrations:
        raise ValueError(
            f"cold_start.steps={s.cold_start.steps} with task={s.task.name}: it has no "
            "demonstrations; start from a trained model, model=hf model.path=... cold_start.steps=0"
        )
    check_sampler(s.rollout, s.sampler)
    longest = getattr(s.rollout, "max_model_len", None)
    if longest and longest <= s.rollout.longest_limit:
        raise ValueError(
            f"rollout.max_model_len={longest} leaves no room for a prompt beside "
            f"rollout.max_new_tokens={s.rollout.longest_limit}"
        )
    unknown = set(s.evaluation.sets) - set(s.task.evaluation_sets())
    if unknown:
        raise ValueError(
            f"evaluation.sets={sorted(unknown)}: task={s.task.name} has "
            f"{', '.join(s.task.evaluation_sets())}"
        )


def check_training_set(s: Settings) -> None:
    """Read the training set, before a model loads. Raises ValueError if it is missing or smaller
    than the query set.
    """
    size = s.task.size("train")
    if size and s.rollout.query_set > size:
        raise ValueError(
            f"rollout.query_set={s.rollout.query_set} exceeds the {size} training problems of "
            f"task={s.task.name}: some would be in it twice; use at most {size}, or 0 for all of "
            "them epoch by epoch"
        )


def check_updates(s: Settings) -> None:
    """Refuse mini-batches that cut groups apart, and a single update on which no objective could
    act.
    """
    updates = s.trainer.minibatches * s.trainer.epochs
    if s.rollout.prompts_per_step % s.trainer.minibatches:
        raise ValueError(
            f"trainer.minibatches={s.trainer.minibatches} does not divide rollout.prompts_per_step="
            f"{s.rollout.prompts_per_step}: mini-batches are made of whole groups"
        )
    on_policy = updates == 1 and starts_at_one(s)
    if on_policy and not s.allow_on_policy and s.objective.ratio_to == "old":
        raise ValueError(
            f"trainer.minibatches=1 with policy.old_logprobs={s.policy.old_logprobs}: every ratio "
            f"is 1, so objective={s.objective.name} cannot clip and all objectives are the same; "
            "use more mini-batches, or say allow_on_policy=true"
        )


def samples_ahead(s: Settings) -> bool:
    """Tell whether responses may be older than the step that trains on them."""
    return bool(s.rollout.staleness or s.rollout.token_budget)


def starts_at_one(s: Settings) -> bool:
    """Tell whether the first mini-batch has ratios of 1, rounding aside."""
    return s.policy.old_logprobs == "step_start" or (
        s.policy.old_logprobs == "behaviour" and not samples_ahead(s)
    )


def shares_weights(s: Settings) -> bool:
    """Tell whether the engine computes with the trainer's own weights, in the trainer's precision."""
    exact = s.rollout.dtype == "float32" and s.rollout.quantization == "none"
    return s.rollout.name == "local" and exact


def check_replay(s: Settings) -> None:
    """Refuse Routing Replay where there is no routing, where it would change nothing and where its
    record has gaps.
    """
    replay, ahead = s.policy.routing_replay, samples_ahead(s)
    if replay == "none":
        return
    if s.model.is_dense:
        raise ValueError(
            f"policy.routing_replay={replay} needs an MoE model; model={s.model.name} is dense"
        )
    # r2 replays the old policy's experts, r3 those of the engine: are these the ones that the
    # router chooses anyway?
    changes_nothing = (
        starts_at_one(s) or not ahead if replay == "r2" else shares_weights(s) and not ahead
    )
    if s.trainer.minibatches * s.trainer.epochs == 1 and changes_nothing:
        raise ValueError(
            f"policy.routing_replay={replay} changes nothing with one update per rollout batch "
            "(trainer.minibatches=1)"
        )
    if s.rollout.token_budget and (replay == "r3" or s.policy.old_logprobs != "step_start"):
        raise ValueError(
            f"policy.routing_replay={replay} with rollout.token_budget={s.rollout.token_budget} "
            f"and policy.old_logprobs={s.policy.old_logprobs}: each policy routes anew what stands "
            "before its own segment, so a cut response has no one record of experts; use "
            "routing_replay=none, or r2 with old_logprobs=step_start"
        )


def check_optimizer(s: Settings) -> None:
    """Refuse moments of 8 bits where weights are spread: bitsandbytes' states are not known to come
    apart.
    """
    if s.optim.name != "adamw" and s.parallel.mode == "shard":
        raise ValueError(
            f"optim.name={s.optim.name} with parallel.mode=shard: its state was never spread over "
            "processes; use optim.name=adamw, whose moments are spread"
        )


def check_stop_strings(s: Settings) -> None:
    """Refuse stop strings where vLLM is to return the experts of every token."""
    if s.rollout.stop and s.rollout.routes and s.rollout.name != "local":
        raise ValueError(
            f"rollout.stop={s.rollout.stop} with rollout={s.rollout.name} and rollout.routes=true "
            "(r3 sets it): vLLM keeps no experts of a response that it breaks off; use one of the "
            "two, or rollout=local"
        )


def check_router(s: Settings) -> None:
    """Refuse settings of the routers where there is none, or where a frozen one would ignore them."""
    given = {
        "policy.freeze_router=true": s.policy.freeze_router,
        f"optim.router_lr_factor={s.optim.router_lr_factor:g}": s.optim.router_lr_factor != 1,
        f"trainer.router_aux_loss_coef={s.trainer.router_aux_loss_coef:g}": s.trainer.router_aux_loss_coef
        != 0,
    }
    chosen = [setting for setting, is_chosen in given.items() if is_chosen]
    if chosen and s.model.is_dense:
        raise ValueError(f"{chosen[0]} needs an MoE model; model={s.model.name} is dense")
    if s.policy.freeze_router and len(chosen) > 1:
        raise ValueError(
            f"{chosen[1]} is not read with policy.freeze_router=true, which leaves the routers as "
            "they are"
        )


def check_head(s: Settings) -> None:
    """Refuse a head in bfloat16 where nothing else is: the setting would be ignored."""
    if s.policy.head_dtype == "bfloat16" and s.policy.precision == s.rollout.dtype == "float32":
        raise ValueError(
            "policy.head_dtype=bfloat16 is not read with policy.precision=float32 and "
            "rollout.dtype=float32; set policy.precision=bfloat16, or leave it out"
        )


def check_lora(s: Settings) -> None:
    """Refuse an adapter's settings where there is none, and what an adapter cannot go together
    with.
    """
    lora, given = s.policy.lora, f"policy.lora.rank={s.policy.lora.rank}"
    if not lora.rank:
        for key in ("targets", "alpha"):
            if changed(lora, key):
                raise ValueError(
                    f"policy.lora.{key}={getattr(lora, key)} is not read with {given}; choose a "
                    "rank, or leave it"
                )
        return
    if lora.targets == "experts" and s.model.is_dense:
        raise ValueError(
            f"policy.lora.targets=experts needs an MoE model; model={s.model.name} is dense"
        )
    routers = "an adapter leaves the routers as they are"
    impossible = {
        "policy.freeze_router=true": (s.policy.freeze_router, routers),
        f"optim.router_lr_factor={s.optim.router_lr_factor:g}": (
            s.optim.router_lr_factor != 1,
            routers,
        ),
        f"trainer.router_aux_loss_coef={s.trainer.router_aux_loss_coef:g}": (
            s.trainer.router_aux_loss_coef,
            routers,
        ),
        "parallel.mode=shard": (
            s.parallel.mode == "shard",
            "weights that are spread take no adapter; use replicate",
        ),
    }
    if s.policy.old_logprobs == "behaviour" and s.policy.precision == "bfloat16":
        copied = (
            "policy.old_logprobs=behaviour are then computed by the copy that samples, into which "
            "the adapter is merged: in policy.precision=bfloat16 these are not the trainer's; use "
            "rollout.overlap=false"
        )
        impossible["rollout.overlap=true"] = (s.rollout.overlap, copied)
    if s.kl.needs_reference:
        same = "the reference is the model with its adapter off, which does not change; use kl.refresh_every=0"
        impossible[f"kl.refresh_every={s.kl.refresh_every}"] = (s.kl.refresh_every, same)
    for setting, (chosen, why) in impossible.items():
        if chosen:
            raise ValueError(f"{setting} with {given}: {why}")


def check_objective(s: Settings) -> None:
    """Refuse an aggregation or a correction that does not fit the objective."""
    mode = s.trainer.aggregation.mode
    if s.objective.fixed_aggregation and mode != s.objective.aggregation:
        raise ValueError(
            f"trainer.aggregation.mode={mode} with objective={s.objective.name}: its loss is one "
            "number per response, with its length weight if it has one; use "
            f"{s.objective.aggregation}"
        )
    if s.objective.sequence_level and mode in LENGTH_WEIGHTED and not s.allow_length_weighting:
        raise ValueError(
            f"trainer.aggregation.mode={mode} weighs responses by their length, but "
            f"objective={s.objective.name} has one ratio per response; use seq-mean-token-mean, "
            "objective=luspo, or say allow_length_weighting=true"
        )
    if s.correction.name != "none" and s.policy.old_logprobs == "engine":
        raise ValueError(
            f"correction={s.correction.name} with policy.old_logprobs=engine: both log-probs are "
            "the engine's, so every weight is 1; use policy.old_logprobs=step_start"
        )
    if s.correction.name != "none" and s.objective.ratio_to == "engine":
        raise ValueError(
            f"correction={s.correction.name} with objective={s.objective.name}: its ratio is to "
            "the sampling policy already"
        )


def check_truncation(s: Settings) -> None:
    """Refuse truncated sampling where the engine's log-probs are taken for those of what was
    sampled.

    They are of the whole distribution, as the trainer's are, so a ratio of the two says how far
    engine and trainer are apart, but not how likely the token was to be drawn. Log-probs of the
    truncated distribution would make that ratio the probability that was kept, on top of the
    mismatch."""
    for rule, value in s.rollout.rules.items():
        truncated = f"rollout.{rule}={value}, by which tokens are drawn from a truncated one; leave that out, or use"
        if s.correction.name != "none":
            raise ValueError(
                f"correction={s.correction.name} weighs by the engine's whole distribution, with "
                f"{truncated} correction=none"
            )
        if s.objective.ratio_to == "engine":
            raise ValueError(
                f"objective={s.objective.name} divides by the engine's whole distribution, with "
                f"{truncated} another objective"
            )


def check_credit(s: Settings) -> None:
    """Refuse groups, advantages and penalties that do not fit each other or the objective."""
    group_of_one = s.advantage.group_of_one
    if s.rollout.group_size == 1 and s.advantage.needs_group and group_of_one == "zero":
        raise ValueError(
            f"rollout.group_size=1 leaves advantage={s.advantage.name} nothing to compare with; "
            "use at least 2, or an advantage without group baseline"
        )
    if s.rollout.group_size == 1 and s.advantage.baseline == "group":
        raise ValueError(
            "rollout.group_size=1 with advantage.baseline=group: the group's mean is the reward "
            "itself"
        )
    if s.rollout.group_size > 1 and group_of_one != "zero":
        raise ValueError(
            f"advantage.group_of_one={group_of_one} is not read with "
            f"rollout.group_size={s.rollout.group_size}"
        )
    each_turn = s.reward.turns == "each"
    rewards_or_discounts_tokens = s.kl.in_reward or s.advantage.gamma < 1 or each_turn
    sums_later_rewards = not s.advantage.needs_group and s.advantage.baseline == "none"
    tokens_differ = s.advantage.per_token or (rewards_or_discounts_tokens and sums_later_rewards)
    if tokens_differ and s.objective.sequence_level and not s.objective.token_advantages:
        raise ValueError(
            f"objective={s.objective.name} has one advantage per response, "
            f"advantage={s.advantage.name} with kl={s.kl.name} and "
            f"advantage.gamma={s.advantage.gamma}{' and reward.turns=each' * each_turn} gives one "
            "per token; use objective=gspo_token"
        )
    if s.reward.overlong_cache >= s.rollout.max_new_tokens:
        raise ValueError(
            f"reward.overlong_cache={s.reward.overlong_cache} must be below rollout.max_new_tokens="
            f"{s.rollout.max_new_tokens}"
        )


def check_kl(s: Settings) -> None:
    """Refuse weights on the KL term where no correction computes any."""
    if s.kl.in_loss and s.kl.weighted and s.correction.name == "none":
        raise ValueError(
            "kl.weighted=true with correction=none: there are no weights to multiply by"
        )


def check_dead_options(s: Settings) -> None:
    """Refuse options that were given another value than their default although nothing reads them."""
    for unread, key, because in [*dead_reward_options(s), *dead_options(s)]:
        group, _, name = key.partition(".")
        if unread and changed(getattr(s, group), name):
            raise ValueError(f"{key}={getattr(getattr(s, group), name)} is not read with {because}")


Dead = tuple[bool, str, str]  # (whether nothing reads it, dotted key, the reason)


def dead_reward_options(s: Settings) -> list[Dead]:
    """List the options of old log-probs, rewards and advantages that can be dead, each with the
    reason.
    """
    old_policy_read = (
        s.objective.ratio_to == "old" or s.kl.needs_reference or s.correction.name != "none"
    )
    old_policy_read |= samples_ahead(s) and s.policy.routing_replay == "r2"
    # by how many turns a reward is discounted differs within a group, and so does what a shift adds
    # to its return
    discounts_turns = s.advantage.name == "turn_normalized" and s.advantage.gamma < 1
    # every advantage is a difference within its group
    mean_removed = s.advantage.needs_group and s.reward.clip is None and not discounts_turns
    batch_std = s.advantage.std == "batch"
    shift_cancels = mean_removed and not (batch_std and s.reward.shift == "group")
    scale_cancels = (
        (mean_removed or discounts_turns)
        and s.advantage.std != "none"
        and not (batch_std and s.reward.scale == "group")
    )
    scale_cancels = scale_cancels and not s.kl.in_reward  # KL is taken off after the scale
    advantage = f"advantage={s.advantage.name}"
    return [
        (
            not old_policy_read,
            "policy.old_logprobs",
            f"objective={s.objective.name}: it has no ratio to pi_old",
        ),
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
        (
            shares_weights(s),
            "rollout.sync_tolerance",
            "rollout=local in float32: it has the same weights",
        ),
        (dense, "trainer.consistency_sample", no_routers),
    ]
    if s.kl.needs_reference:
        found.append((s.kl.target is None, "kl.horizon", "kl.target=null (a fixed coefficient)"))
    return found


def changed(settings: Any, key: str) -> bool:
    """Tell whether a field of a settings dataclass has another value than its default."""
    default = next((f.default for f in fields(settings) if f.name == key), MISSING)
    return default is not MISSING and getattr(settings, key) != default


def check_processes(s: Settings, count: int) -> None:
    """Raise ValueError for settings that so many processes cannot have."""
    if s.rollout.name == "vllm":
        if not s.rollout.own_process:
            raise ValueError(
                f"rollout.own_process=false with {count} processes: vLLM would take itself for one "
                "of them; set rollout.own_process=true"
            )
        if count % (size := s.rollout.tensor_parallel_size):
            raise ValueError(
                f"rollout.tensor_parallel_size={size} does not divide the {count} processes, of "
                "which so many share a vLLM"
            )
    if (size := s.parallel.shard_size) and count % size:
        raise ValueError(f"parallel.shard_size={size} does not divide the {count} processes")
    if (size or count) % s.parallel.experts:
        of = f"parallel.shard_size={size}" if size else f"the {count} processes"
        raise ValueError(f"parallel.experts={s.parallel.experts} does not divide {of}")
    if s.rollout.prompts_per_step < count:
        raise ValueError(
            f"rollout.prompts_per_step={s.rollout.prompts_per_step} is less than the {count} "
            "processes"
        )
