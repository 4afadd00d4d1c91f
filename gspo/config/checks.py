"""Refuse combinations of settings that cannot work, or that would not do as they say.

Every refusal is one line that names the key, the value and a remedy. `check` runs before a model
loads. It knows objectives, advantage estimators and KL terms by class attributes of theirs, such as
`objective.sequence_level`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo.algorithm.aggregation import LENGTH_WEIGHTED
from gspo.config.episodes import check_episodes
from gspo.config.unread_options import changed, check_unread_options
from gspo.io.errors import SettingError
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
    check_advantage_inputs(s)
    check_episodes(s)
    check_probe(s)
    check_unread_options(s)
    if s.cold_start.steps and not s.task.has_demonstrations:
        raise SettingError(
            "cold_start.steps",
            s.cold_start.steps,
            f"task={s.task.name} has no demonstrations",
            remedy="start from a trained model, model=hf model.path=... cold_start.steps=0",
        )
    check_sampler(s.rollout, s.sampler)
    longest = getattr(s.rollout, "max_model_len", None)
    if longest and longest <= s.rollout.longest_limit:
        raise SettingError(
            "rollout.max_model_len",
            longest,
            f"leaves no room for a prompt beside rollout.max_new_tokens={s.rollout.longest_limit}",
        )
    unknown = set(s.evaluation.sets) - set(s.task.evaluation_sets())
    if unknown:
        raise SettingError(
            "evaluation.sets",
            sorted(unknown),
            f"task={s.task.name} has {', '.join(s.task.evaluation_sets())}",
        )


def check_training_set(s: Settings) -> None:
    """Read the training set, before a model loads.

    Raises ValueError if it is missing or smaller than the query set."""
    size = s.task.size("train")
    if size and s.rollout.query_set > size:
        raise SettingError(
            "rollout.query_set",
            s.rollout.query_set,
            f"exceeds the {size} training problems of task={s.task.name}: some would be in "
            "it twice",
            remedy=f"use at most {size}, or 0 for all of them epoch by epoch",
        )


def check_updates(s: Settings) -> None:
    """Refuse mini-batches that split groups, and a single update in which no objective clips."""
    updates = s.trainer.minibatches * s.trainer.epochs
    if s.rollout.prompts_per_step % s.trainer.minibatches:
        raise SettingError(
            "trainer.minibatches",
            s.trainer.minibatches,
            f"does not divide rollout.prompts_per_step={s.rollout.prompts_per_step}: "
            "mini-batches are made of whole groups",
        )
    on_policy = updates == 1 and starts_at_one(s)
    if on_policy and not s.allow_on_policy and s.objective.ratio_to == "old":
        raise SettingError(
            "trainer.minibatches",
            1,
            f"with policy.old_logprobs={s.policy.old_logprobs}, every ratio is 1, so "
            f"objective={s.objective.name} cannot clip and all objectives are the same",
            remedy="use more mini-batches, or say allow_on_policy=true",
        )


def starts_at_one(s: Settings) -> bool:
    """Return whether the first mini-batch has ratios of 1, apart from rounding."""
    if s.policy.old_logprobs == "behaviour":
        return not s.rollout.samples_ahead
    return s.policy.old_logprobs == "step_start"


def check_replay(s: Settings) -> None:
    """Refuse Routing Replay without routing, without effect, or with gaps in the record."""
    replay = s.policy.routing_replay
    if replay == "none":
        return
    if s.model.is_dense:
        raise needs_experts(s, "policy.routing_replay", replay)
    # r2 replays the experts of the old policy, r3 the experts of the engine. Does the router
    # choose the same experts anyway?
    if replay == "r2":
        changes_nothing = starts_at_one(s) or not s.rollout.samples_ahead
    else:
        changes_nothing = s.rollout.shares_weights and not s.rollout.samples_ahead
    if s.trainer.minibatches * s.trainer.epochs == 1 and changes_nothing:
        raise SettingError(
            "policy.routing_replay",
            replay,
            "changes nothing with one update per rollout batch (trainer.minibatches=1)",
        )
    if s.rollout.token_budget and (replay == "r3" or s.policy.old_logprobs != "step_start"):
        raise SettingError(
            "policy.routing_replay",
            replay,
            f"with rollout.token_budget={s.rollout.token_budget} and "
            f"policy.old_logprobs={s.policy.old_logprobs}, each policy routes anew what "
            "stands before its own segment, so a cut response has no one record of experts",
            remedy="use routing_replay=none, or r2 with old_logprobs=step_start",
        )


def check_optimizer(s: Settings) -> None:
    """Refuse moments of 8 bits for sharded weights: bitsandbytes' state was never sharded."""
    if s.optim.name != "adamw" and s.parallel.mode == "shard":
        raise SettingError(
            "optim.name",
            s.optim.name,
            "with parallel.mode=shard, its state was never spread over processes",
            remedy="use optim.name=adamw, whose moments are spread",
        )


def check_stop_strings(s: Settings) -> None:
    """Refuse stop strings if vLLM must return the experts of every token."""
    if s.rollout.stop and s.rollout.routes and s.rollout.name != "local":
        raise SettingError(
            "rollout.stop",
            s.rollout.stop,
            f"with rollout={s.rollout.name} and rollout.routes=true (r3 sets it), vLLM "
            "keeps no experts of a response that it breaks off",
            remedy="use one of the two, or rollout=local",
        )


def check_router(s: Settings) -> None:
    """Refuse settings of routers for a model without routers, or with frozen routers."""
    not_read = "is not read with policy.freeze_router=true, which leaves the routers as they are"
    for key, value, default in [
        ("policy.freeze_router", s.policy.freeze_router, False),
        ("optim.router_lr_factor", s.optim.router_lr_factor, 1),
        ("trainer.router_aux_loss_coef", s.trainer.router_aux_loss_coef, 0),
    ]:
        if value != default and s.model.is_dense:
            raise needs_experts(s, key, value)
        if value != default and s.policy.freeze_router and key != "policy.freeze_router":
            raise SettingError(key, value, not_read)


def needs_experts(s: Settings, key: str, value: Any) -> SettingError:
    """Return the error of a setting that a dense model does not read."""
    return SettingError(key, value, f"needs an MoE model; model={s.model.name} is dense")


def check_head(s: Settings) -> None:
    """Refuse a head in bfloat16 if nothing else is: the setting would be ignored."""
    if s.policy.head_dtype == "bfloat16" and s.policy.precision == s.rollout.dtype == "float32":
        raise SettingError(
            "policy.head_dtype",
            "bfloat16",
            "is not read with policy.precision=float32 and rollout.dtype=float32",
            remedy="set policy.precision=bfloat16, or leave it out",
        )


def check_lora(s: Settings) -> None:
    """Refuse settings of an adapter without an adapter, and settings that exclude an adapter."""
    lora = s.policy.lora
    rank = f"policy.lora.rank={lora.rank}"
    if not lora.rank:
        for key in ("targets", "alpha"):
            if changed(lora, key):
                raise SettingError(
                    f"policy.lora.{key}",
                    getattr(lora, key),
                    f"is not read with {rank}",
                    remedy="choose a rank, or leave it",
                )
        return
    if lora.targets == "experts" and s.model.is_dense:
        raise needs_experts(s, "policy.lora.targets", "experts")
    routers = "an adapter leaves the routers as they are"
    sharded = "weights that are spread take no adapter; use replicate"
    merged = (
        "policy.old_logprobs=behaviour are then computed by the copy that samples, into which the "
        "adapter is merged: in policy.precision=bfloat16 these are not the trainer's; "
        "use rollout.overlap=false"
    )
    fixed = (
        "the reference is the model with its adapter off, which does not change; "
        "use kl.refresh_every=0"
    )
    rounds_copy = s.policy.old_logprobs == "behaviour" and s.policy.precision == "bfloat16"
    refresh = s.kl.needs_reference and s.kl.refresh_every
    lr_factor = s.optim.router_lr_factor
    aux_loss = s.trainer.router_aux_loss_coef
    excluded = [
        (s.policy.freeze_router, "policy.freeze_router", True, routers),
        (lr_factor != 1, "optim.router_lr_factor", lr_factor, routers),
        (aux_loss != 0, "trainer.router_aux_loss_coef", aux_loss, routers),
        (s.parallel.mode == "shard", "parallel.mode", "shard", sharded),
        (s.rollout.overlap and rounds_copy, "rollout.overlap", True, merged),
        (refresh, "kl.refresh_every", refresh, fixed),
    ]
    for is_chosen, key, value, reason in excluded:
        if is_chosen:
            raise SettingError(key, value, f"with {rank}, {reason}")


def check_objective(s: Settings) -> None:
    """Refuse an aggregation, a correction or weights that do not fit the objective."""
    mode = s.trainer.aggregation.mode
    if s.objective.fixed_aggregation and mode != s.objective.aggregation:
        raise SettingError(
            "trainer.aggregation.mode",
            mode,
            f"with objective={s.objective.name}, its loss is one number per response, with "
            "its length weight if it has one",
            remedy=f"use {s.objective.aggregation}",
        )
    if s.objective.sequence_level and mode in LENGTH_WEIGHTED and not s.allow_length_weighting:
        raise SettingError(
            "trainer.aggregation.mode",
            mode,
            f"weighs responses by their length, but objective={s.objective.name} has one "
            "ratio per response",
            remedy="use seq-mean-token-mean, objective=luspo, or say allow_length_weighting=true",
        )
    check_correction(s)
    if s.kl.in_loss and s.kl.weighted and not s.correction.has_rollout_weights:
        raise SettingError(
            "kl.weighted",
            True,
            f"with correction={s.correction.name}, there are no weights to multiply by",
        )


def check_correction(s: Settings) -> None:
    """Refuse a correction that the objective cannot use, or that would do nothing."""
    correction = s.correction
    objective = s.objective
    if correction.name == "none":
        return
    compares_both = correction.compares_old and correction.compares_engine
    if compares_both and s.policy.old_logprobs == "engine":
        raise SettingError(
            "correction",
            s.correction.name,
            "with policy.old_logprobs=engine, both log-probs are the engine's, so every "
            "weight is 1",
            remedy="use policy.old_logprobs=step_start",
        )
    if correction.compares_old and objective.ratio_to == "engine":
        raise SettingError(
            "correction",
            correction.name,
            f"with objective={objective.name}, its ratio is to the sampling policy already",
        )
    joint_ratio = objective.sequence_level or objective.joint_ratio
    if correction.acts == "minibatch" and joint_ratio:
        raise SettingError(
            "correction",
            correction.name,
            f"with objective={objective.name}, a ratio is of several tokens, of which some would "
            "be missing",
            remedy="use an objective with one ratio per token",
        )
    is_token_weight = (
        correction.acts == "rollout" and correction.level == "token" and not correction.normalize
    )
    if objective.includes_correction and correction.weighs and not is_token_weight:
        raise SettingError(
            "correction",
            correction.name,
            f"with objective={objective.name}, token weights become a factor of its product of "
            "ratios, and this correction has none",
            remedy="use correction=tis or mis with level=token and normalize=false, or opsm",
        )


def check_truncation(s: Settings) -> None:
    """Refuse truncated sampling if a ratio takes the engine's log-probs for the sampled ones.

    The log-probs of both are of the full distribution. So a ratio of the two measures the mismatch
    of engine and trainer, but not how likely the token was to be drawn. Log-probs of the truncated
    distribution on one side would multiply it by the probability that the truncation keeps. With
    rollout.keep_mask both sides have log-probs of the truncated distribution."""
    if s.rollout.keep_mask:
        if not s.rollout.rules:
            raise SettingError(
                "rollout.keep_mask",
                True,
                "changes nothing, because no token is excluded",
                remedy="set rollout.top_p, top_k or min_p, or leave it out",
            )
        return
    for rule, value in s.rollout.rules.items():
        truncated = f"with rollout.{rule}={value}, by which tokens are drawn from a truncated one"
        if s.correction.name != "none" and s.correction.compares_engine:
            raise SettingError(
                "correction",
                s.correction.name,
                f"weighs by the engine's whole distribution, {truncated}",
                remedy="set rollout.keep_mask=true, leave that out, or use correction=none",
            )
        if s.objective.ratio_to == "engine":
            raise SettingError(
                "objective",
                s.objective.name,
                f"divides by the engine's whole distribution, {truncated}",
                remedy="set rollout.keep_mask=true, leave that out, or use another objective",
            )


def check_credit(s: Settings) -> None:
    """Refuse groups, advantages and penalties that do not fit each other or the objective."""
    group_of_one = s.advantage.group_of_one
    if s.rollout.group_size == 1 and s.advantage.needs_group and group_of_one == "zero":
        raise SettingError(
            "rollout.group_size",
            1,
            f"leaves advantage={s.advantage.name} nothing to compare with",
            remedy="use at least 2, or an advantage without group baseline",
        )
    if s.rollout.group_size == 1 and s.advantage.baseline == "group":
        raise SettingError(
            "rollout.group_size",
            1,
            "with advantage.baseline=group, the group's mean is the reward itself",
        )
    if s.rollout.group_size > 1 and group_of_one != "zero":
        raise SettingError(
            "advantage.group_of_one",
            group_of_one,
            f"is not read with rollout.group_size={s.rollout.group_size}",
        )
    each_turn = s.reward.turns == "each"
    rewards_or_discounts_tokens = s.kl.in_reward or s.advantage.gamma < 1 or each_turn
    sums_later_rewards = not s.advantage.needs_group and s.advantage.baseline == "none"
    tokens_differ = s.advantage.per_token or (rewards_or_discounts_tokens and sums_later_rewards)
    turns = " and reward.turns=each" if each_turn else ""
    if tokens_differ and s.objective.sequence_level and not s.objective.token_advantages:
        raise SettingError(
            "objective",
            s.objective.name,
            f"has one advantage per response, advantage={s.advantage.name} with "
            f"kl={s.kl.name} and advantage.gamma={s.advantage.gamma}{turns} gives one per "
            "token",
            remedy="use objective=gspo_token",
        )
    if s.reward.overlong_cache >= s.rollout.max_new_tokens:
        raise SettingError(
            "reward.overlong_cache",
            s.reward.overlong_cache,
            f"must be below rollout.max_new_tokens={s.rollout.max_new_tokens}",
        )


def check_advantage_inputs(s: Settings) -> None:
    """Refuse rewards and old log-probs that are not what the advantage estimator is made for."""
    advantage = f"with advantage={s.advantage.name}"
    if s.advantage.needs_raw_rewards:
        reason = f"{advantage}, the verifier's own rewards are compared, and nothing else"
        shaped = [
            (s.reward.shift != "none", "reward.shift", s.reward.shift),
            (s.reward.scale != "none", "reward.scale", s.reward.scale),
            (s.reward.clip is not None, "reward.clip", s.reward.clip),
            (s.reward.overlong_cache > 0, "reward.overlong_cache", s.reward.overlong_cache),
            (s.reward.turns == "each", "reward.turns", s.reward.turns),
            (s.kl.in_reward, "kl", s.kl.name),
        ]
        for is_set, key, value in shaped:
            if is_set:
                raise SettingError(key, value, reason, remedy="leave it out")
    if s.advantage.needs_named_rewards and len(s.reward.weights) < 2:
        raise SettingError(
            "reward.weights",
            s.reward.weights,
            f"{advantage}, there must be at least two named rewards",
            remedy="return them from the reward function and weigh each by its name, for example "
            "reward.weights={correct: 1, format: 0.5}, or use advantage=group_normalized",
        )
    if s.reward.weights and s.task.environments():
        raise SettingError(
            "reward.weights",
            s.reward.weights,
            f"with task={s.task.name}, an episode has a single reward",
            remedy="leave it out",
        )
    if s.advantage.learns_from_equal_rewards and s.rollout.refill_rounds:
        raise SettingError(
            "rollout.refill_rounds",
            s.rollout.refill_rounds,
            f"{advantage}, dynamic sampling drops groups whose rewards are equal, from which it "
            "learns",
            remedy="use rollout.refill_rounds=0",
        )
    if s.advantage.needs_sum_pi_squared and s.policy.old_logprobs != "step_start":
        raise SettingError(
            "policy.old_logprobs",
            s.policy.old_logprobs,
            f"{advantage}, log-probs and sum_v pi_v^2 must be of the same policy",
            remedy="use policy.old_logprobs=step_start",
        )
    if s.advantage.needs_sum_pi_squared and s.rollout.keep_mask:
        raise SettingError(
            "rollout.keep_mask",
            True,
            f"{advantage}, sum_v pi_v^2 is over the whole vocabulary",
            remedy="leave it out, or use advantage=group_normalized",
        )


def check_probe(s: Settings) -> None:
    """Refuse the measurement of the gradient's noise for weights that are sharded."""
    if s.tracking.snr_every and s.parallel.mode == "shard":
        raise SettingError(
            "tracking.snr_every",
            s.tracking.snr_every,
            "with parallel.mode=shard, no process has the gradient of two halves of a batch",
            remedy="use parallel.mode=replicate or 0",
        )


def check_processes(s: Settings, count: int) -> None:
    """Raise ValueError for settings that `count` processes cannot have."""
    if s.rollout.name == "vllm":
        if not s.rollout.own_process:
            raise SettingError(
                "rollout.own_process",
                False,
                f"with {count} processes, vLLM would take itself for one of them",
                remedy="set rollout.own_process=true",
            )
        size = s.rollout.tensor_parallel_size
        if count % size:
            raise SettingError(
                "rollout.tensor_parallel_size",
                size,
                f"does not divide the {count} processes, of which so many share a vLLM",
            )
    shard_size = s.parallel.shard_size
    if shard_size and count % shard_size:
        raise SettingError(
            "parallel.shard_size", shard_size, f"does not divide the {count} processes"
        )
    if (shard_size or count) % s.parallel.experts:
        shard = f"parallel.shard_size={shard_size}" if shard_size else f"the {count} processes"
        raise SettingError("parallel.experts", s.parallel.experts, f"does not divide {shard}")
    if s.rollout.prompts_per_step < count:
        raise SettingError(
            "rollout.prompts_per_step",
            s.rollout.prompts_per_step,
            f"is less than the {count} processes",
        )
