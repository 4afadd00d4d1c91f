"""Refuse settings that do not fit episodes, or that need episodes. `checks.check` calls this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspo.io.errors import SettingError

if TYPE_CHECKING:
    from gspo.config.settings import Settings

PER_TURN = "gae, returns, reinforce_pp or turn_normalized"


def check_episodes(s: Settings) -> None:
    """Raise ValueError for the first setting that does not fit the task's episodes."""
    each_turn = s.reward.turns == "each"
    has_episodes = bool(s.task.environments())
    if s.advantage.name == "turn_normalized" and not has_episodes:
        raise SettingError(
            "advantage",
            "turn_normalized",
            f"with task={s.task.name}, its responses have one turn each",
            remedy="use advantage=group_normalized",
        )
    # a mixture may have responses of one turn too
    if s.task.name in s.task.environments() and s.reward.truncated != 0:
        raise SettingError(
            "reward.truncated",
            s.reward.truncated,
            f"with task={s.task.name}, an episode that is cut off keeps the rewards of its turns",
            remedy="leave it out",
        )
    if each_turn and not has_episodes:
        raise SettingError(
            "reward.turns",
            "each",
            f"with task={s.task.name}, its responses have one turn each",
            remedy="leave it out",
        )
    if each_turn and s.reward.weights:
        raise SettingError(
            "reward.turns",
            "each",
            "with reward.weights, the named rewards are of whole episodes, and turns have none",
            remedy="leave out one of the two",
        )
    if each_turn:
        check_rewards_of_turns(s)
    if s.advantage.name == "turn_normalized" and s.rollout.refill_rounds:
        raise SettingError(
            "rollout.refill_rounds",
            s.rollout.refill_rounds,
            "with advantage=turn_normalized, dynamic sampling drops groups whose rewards "
            "are equal, although their turns may differ",
            remedy="use rollout.refill_rounds=0",
        )
    aggregations = {"trainer": s.trainer.aggregation}
    if s.kl.in_loss:
        aggregations["kl"] = s.kl.aggregation
    for key, aggregation in aggregations.items():
        if has_episodes and aggregation.length == 0:
            raise SettingError(
                f"{key}.aggregation.length",
                0,
                f"with task={s.task.name}, the width of the batch counts what the "
                "environment wrote",
                remedy=f"use {key}.aggregation.length=null or a number",
            )
    if has_episodes and s.rollout.token_budget:
        raise SettingError(
            "rollout.token_budget",
            s.rollout.token_budget,
            f"with task={s.task.name}, an episode is played to its end under one policy",
            remedy="use rollout.token_budget=0",
        )


def check_rewards_of_turns(s: Settings) -> None:
    """Refuse rewards of turns if only their sum is read, and shaping that acts on the sum."""
    sums = s.advantage.needs_group and s.advantage.name != "turn_normalized"
    if sums or s.advantage.baseline == "group":
        baseline = " and advantage.baseline=group" if s.advantage.baseline == "group" else ""
        raise SettingError(
            "reward.turns",
            "each",
            f"advantage={s.advantage.name}{baseline} compares the rewards of whole responses",
            remedy=f"use advantage={PER_TURN}",
        )
    for key in ("shift", "scale", "clip"):
        value = getattr(s.reward, key)
        if value not in ("none", None):
            raise SettingError(
                f"reward.{key}",
                value,
                "with reward.turns=each, it acts on whole responses",
                remedy="leave it out",
            )
