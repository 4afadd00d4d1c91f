"""Refuse options that were changed although nothing reads them under the other settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from gspo.io.errors import SettingError
from gspo.tasks.own_rows import OwnRows

if TYPE_CHECKING:
    from gspo.config.settings import Settings


def check_unread_options(s: Settings, given: Collection[str] | None = None) -> None:
    """Refuse options that differ from their default although nothing reads them.

    `given` names the options, and the groups of options, that this command line has set. None
    stands for all. The others were accepted when the run began, so they are not checked again."""
    for is_unread, key, reason in [*unread_reward_options(s), *unread_options(s)]:
        group, _, name = key.partition(".")
        if given is not None and key not in given and group not in given:
            continue
        settings = getattr(s, group)
        if is_unread and changed(settings, name):
            raise SettingError(key, getattr(settings, name), f"is not read with {reason}")


def unread_reward_options(s: Settings) -> list[tuple[bool, str, str]]:
    """List options of old log-probs, rewards and advantages: (nothing reads it, key, reason)."""
    old_policy_read = (
        s.objective.ratio_to == "old"
        or s.kl.needs_reference
        or (s.correction.name != "none" and s.correction.compares_old)
        or (s.rollout.samples_ahead and s.policy.routing_replay == "r2")
    )
    # the responses of a group differ in their turns, so in the discount of a reward and of a shift
    discounts_turns = s.advantage.name == "turn_normalized" and s.advantage.gamma < 1
    # a baseline of 0 in the tail of the longest response
    has_zero_tail = s.advantage.name == "otb" and s.advantage.zero_tail
    # every advantage is a difference within its group
    mean_removed = s.advantage.needs_group and s.reward.clip is None and not discounts_turns
    mean_removed = mean_removed and not has_zero_tail
    batch_std = s.advantage.std == "batch"
    shift_cancels = mean_removed and not (batch_std and s.reward.shift == "group")
    scale_cancels = (
        (mean_removed or discounts_turns)
        and s.advantage.std != "none"
        and not (batch_std and s.reward.scale == "group")
        and not s.kl.in_reward  # KL is subtracted after the scale
    )
    advantage = f"advantage={s.advantage.name}"
    no_ratio = f"objective={s.objective.name}: it has no ratio to pi_old"
    return [
        (not old_policy_read, "policy.old_logprobs", no_ratio),
        (shift_cancels, "reward.shift", f"{advantage}, which takes the group's mean off"),
        (scale_cancels, "reward.scale", f"{advantage}, which divides by the std"),
        (s.reward.scale == "none", "reward.eps", "reward.scale=none"),
        (not s.reward.overlong_cache, "reward.overlong_penalty", "reward.overlong_cache=0"),
        (s.advantage.baseline == "group", "advantage.gamma", "advantage.baseline=group"),
    ]


def unread_options(s: Settings) -> list[tuple[bool, str, str]]:
    """List options of the other groups: (nothing reads it, key, reason)."""
    is_dense = s.model.is_dense
    no_routers = f"model={s.model.name}: it has no routers"
    same_weights = "rollout=local in float32: it has the same weights"
    options = [
        (is_dense, "rollout.routes", no_routers),
        (not s.rollout.routes, "rollout.routes_floor", "rollout.routes=false"),
        (s.rollout.shares_weights, "rollout.sync_tolerance", same_weights),
        (is_dense, "trainer.consistency_sample", no_routers),
        (s.parallel.mode == "none", "parallel.timeout_minutes", "parallel.mode=none"),
    ]
    for name in ("rollbacks", "rollback_lr"):
        no_rollback = s.monitor.action != "rollback"
        options.append((no_rollback, f"monitor.{name}", f"monitor.action={s.monitor.action}"))
    if isinstance(s.task, OwnRows):
        for name in ("hub_config", "hub_split", "hub_train_split"):
            options.append((not s.task.hub, f"task.{name}", "task.hub=''"))
    # an experiment may set the other settings of its cold start
    for name in ("seed", "warmup_steps", "log_normalizer"):
        options.append((s.cold_start.steps == 0, f"cold_start.{name}", "cold_start.steps=0"))
    if s.kl.needs_reference:
        options.append((s.kl.target is None, "kl.horizon", "kl.target=null (a fixed coefficient)"))
    return options


def changed(settings: Any, key: str) -> bool:
    """Return whether a field of a settings dataclass has another value than its default."""
    default = next((f.default for f in fields(settings) if f.name == key), MISSING)
    return default is not MISSING and getattr(settings, key) != default
