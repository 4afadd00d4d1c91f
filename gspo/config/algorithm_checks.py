"""Refuse objectives, corrections, advantages and samplings that do not fit each other.

The checks know objectives, advantage estimators and KL terms by class attributes of theirs, such as
`objective.sequence_level`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspo.algorithm.aggregation import LENGTH_WEIGHTED
from gspo.io.errors import SettingError

if TYPE_CHECKING:
    from gspo.config.settings import Settings


def check_algorithm(s: Settings) -> None:
    """Raise SettingError for the first part of the algorithm that does not fit the others."""
    check_objective(s)
    check_truncation(s)
    check_credit(s)
    check_advantage_inputs(s)


def starts_at_one(s: Settings) -> bool:
    """Return whether the first mini-batch has ratios of 1, apart from rounding."""
    if s.policy.old_logprobs == "behaviour":
        return not s.rollout.samples_ahead
    return s.policy.old_logprobs == "step_start"


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
            remedy="use seq-mean-token-mean, objective=luspo, or set allow_length_weighting=true",
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
            f"with objective={objective.name}, its ratio is to the behaviour policy already",
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
    """Refuse top_p, top_k and min_p with a ratio to the engine's log-probs.

    Tokens are drawn from the truncated distribution. Without rollout.keep_mask, engine and trainer
    both report log-probs of the full one. So their ratio measures the mismatch of engine and
    trainer, but is no importance weight of the sampled token. Truncating one side alone would
    multiply the ratio by the probability that the truncation keeps. With rollout.keep_mask both
    sides have log-probs of the truncated distribution."""
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
        truncated = f"but rollout.{rule}={value} draws tokens from a truncated distribution"
        if s.correction.name != "none" and s.correction.compares_engine:
            raise SettingError(
                "correction",
                s.correction.name,
                f"weighs by the engine's whole distribution, {truncated}",
                remedy=f"set rollout.keep_mask=true, leave rollout.{rule} out, or use correction=none",
            )
        if s.objective.ratio_to == "engine":
            raise SettingError(
                "objective",
                s.objective.name,
                f"divides by the engine's whole distribution, {truncated}",
                remedy=f"set rollout.keep_mask=true, leave rollout.{rule} out, or use another objective",
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
    check_token_advantages(s)
    if s.reward.overlong_cache >= s.rollout.max_new_tokens:
        raise SettingError(
            "reward.overlong_cache",
            s.reward.overlong_cache,
            f"must be below rollout.max_new_tokens={s.rollout.max_new_tokens}",
        )


def check_token_advantages(s: Settings) -> None:
    """Refuse an advantage per token for an objective with one advantage per response."""
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


def check_advantage_inputs(s: Settings) -> None:
    """Refuse rewards and old log-probs that are not what the advantage estimator is made for."""
    advantage = f"with advantage={s.advantage.name}"
    if s.advantage.needs_raw_rewards:
        reason = f"{advantage}, the verifier's own rewards are compared, and nothing else"
        truncated = s.reward.truncated
        truncated_fits = truncated is None or s.advantage.permits_reward(truncated)
        shaped = [
            (s.reward.shift != "none", "reward.shift", s.reward.shift),
            (s.reward.scale != "none", "reward.scale", s.reward.scale),
            (s.reward.clip is not None, "reward.clip", s.reward.clip),
            (s.reward.overlong_cache > 0, "reward.overlong_cache", s.reward.overlong_cache),
            (s.reward.turns == "each", "reward.turns", s.reward.turns),
            (s.kl.in_reward, "kl", s.kl.name),
            (not truncated_fits, "reward.truncated", truncated),
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
    environments = s.task.environments().values()
    if s.reward.weights and not all(task.names_rewards for task in environments):
        raise SettingError(
            "reward.weights",
            s.reward.weights,
            f"with task={s.task.name}, an episode has a single reward",
            remedy="leave it out, or set names_rewards in the class of your own task, whose "
            "environments give Outcome.rewards",
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
