"""Remarks on settings that work and are seldom meant, and on what the first steps of a run show of
them.

Unlike what gspo.config.checks refuses, these only warn: each is one line that names key and value
and what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspo.config.checks import changed, samples_ahead
from gspo.data.samples import ScoredResponse, all_same
from gspo.tracking.rounding import (
    LARGEST_MISMATCH,
    ROUNDING_SHARE,
    floor_in_words,
    mismatch_in_words,
)

if TYPE_CHECKING:
    from gspo.config.settings import Settings

MANY = 0.5  # the share of responses that are cut off from which on a warning is given
# a wider clip range is meant for the ratio of a token, not for that of a response
WIDE_FOR_A_SEQUENCE = 0.05


def warnings(s: Settings) -> list[str]:
    """Describe settings that are allowed but often not meant; they are shown once, at the start of
    a run.
    """
    found = []
    if (
        s.kl.in_loss
        and s.kl.estimator == "k1"
        and s.kl.gradient == "own"
        and s.kl.times_ratio == "none"
    ):
        found.append(
            "kl.estimator=k1 in the loss: its expected gradient is zero; k2 or k3 pull towards the reference"
        )
    if s.policy.old_logprobs == "engine" and s.trainer.minibatches * s.trainer.epochs == 1:
        found.append(
            "policy.old_logprobs=engine with one update: the ratio is the engine's mismatch alone"
        )
    if s.objective.ratio_to == "none" and s.trainer.minibatches * s.trainer.epochs > 1:
        found.append(
            f"objective={s.objective.name} has no ratio: with several updates per batch it takes stale samples for "
            "fresh"
        )
    if s.policy.lora.rank and not changed(s.optim, "lr"):
        found.append(
            f"optim.lr={s.optim.lr:g} with policy.lora.rank={s.policy.lora.rank}: that is meant for all weights; an "
            "adapter learns with about ten times as much (docs/algorithms.md)"
        )
    uncorrected = s.policy.old_logprobs == "step_start" and s.correction.name == "none"
    if samples_ahead(s) and s.objective.ratio_to == "old" and uncorrected:
        found.append(
            f"rollout.staleness={s.rollout.staleness}, rollout.token_budget={s.rollout.token_budget} with "
            "policy.old_logprobs=step_start: ratios start at 1, so the "
            "clip does not see how old the responses are; behaviour and engine let it"
        )
    if rules := s.rollout.rules:
        said = ", ".join(f"rollout.{rule}={value}" for rule, value in rules.items())
        found.append(
            f"{said}: tokens are drawn from the truncated distribution, while log-probs, ratios and KL are of the "
            "whole one, so importance sampling holds for neither exactly"
        )
    late = [step for step in s.profile.steps if step > s.steps]
    if late:
        found.append(
            f"profile.steps={s.profile.steps}: step {min(late)} lies beyond steps={s.steps}"
        )
    late = [step for step in s.rollout.extend if step > s.steps]
    if late:
        found.append(
            f"rollout.extend={s.rollout.extend}: step {min(late)} lies beyond steps={s.steps} and does not act"
        )
    return found


def nothing_to_learn(
    s: Settings, metrics: dict[str, float], responses: list[ScoredResponse], step: int
) -> list[str]:
    """Explain why one of the first steps had (nearly) nothing to learn from: a line for each
    reason, with what to change."""
    found = []
    cut = metrics.get("length/truncated", 0.0)
    if cut >= MANY:
        asked = s.reward.truncated is None
        earned = (
            "the reward function sees no end of theirs"
            if asked
            else f"each earned {s.reward.truncated:g} unasked"
        )
        found.append(
            f"{cut:.1%} of the responses were cut off at rollout.max_new_tokens={s.rollout.limit(step)}, and {earned}: "
            "raise it"
        )
    shown = f"rollouts/step_000001.jsonl shows some, and the prompts (prompt.format={s.prompt.format}: {s.prompt_used})"
    is_own = bool(getattr(s.task, "reward", ""))  # the reward function is the user's
    rewards = [r.score.reward for r in responses]
    if all_same(rewards) and rewards[0] == 0:
        function = "look at task.reward, " if is_own else ""
        found.append(
            f"every response earned 0, so there is nothing to learn from; {shown}. If they are not cut off, {function}"
            f"change prompt.format, or choose easier problems than task={s.task.name}, or a stronger model"
        )
    elif all_same(rewards):
        function = "look at task.reward, or " if is_own else ""
        found.append(
            f"every response earned {rewards[0]:g}, so there is nothing to learn; {function}choose harder problems "
            f"than task={s.task.name}"
        )
    elif (
        metrics.get("group/zero_variance") == 1
        and s.advantage.needs_group
        and s.rollout.group_size > 1
    ):
        found.append(
            f"in no group of rollout.group_size={s.rollout.group_size} responses did the rewards differ, so the step "
            "had no gradient: raise it, or choose problems that the model solves sometimes"
        )
    return found


def rounding_floor(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Say that rounding moves the sequence ratios by a good part of their clip range, if a step's
    metrics show that, and what to change."""
    share = metrics.get("ratio/floor_of_range", 0.0)
    if share <= ROUNDING_SHARE:
        return []
    if s.policy.head_dtype == "bfloat16":
        remedy = f"policy.head_dtype={s.policy.head_dtype} rounds the logits: use policy.head_dtype=float32"
    elif s.policy.old_logprobs == "engine":
        remedy = "policy.old_logprobs=engine divides by the engine's rounding: use policy.old_logprobs=step_start"
    elif s.policy.precision == "bfloat16":
        remedy = f"policy.precision={s.policy.precision} rounds the layers: use float32, or a wider clip range"
    else:
        remedy = "engine and trainer round differently: use policy.old_pass=always, or a wider clip range"
    return [f"{floor_in_words(share, metrics['ratio/floor_outside'])}. {remedy}"]


def cut_off_pays(s: Settings, responses: list[ScoredResponse]) -> list[str]:
    """Say that a response which ended by itself earned less than one that was cut off, if that is
    so.
    """
    truncated = s.reward.truncated
    if truncated is None or not any(r.score.verdict == "truncated" for r in responses):
        return []
    ended = [r.score.reward for r in responses if r.score.verdict != "truncated"]
    if not ended or min(ended) >= truncated:
        return []
    return [
        f"a response that is cut off earns reward.truncated={truncated:g}, which is more than the {min(ended):g} of "
        "one that ended, so being cut off is learned: set reward.truncated to the lowest reward, or to null to have "
        "the reward function asked"
    ]


def engine_mismatch(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Say that the engine computes something else than the trainer, if a step's metrics show that,
    and what to change."""
    off = metrics.get("mismatch/logp_abs", 0.0)
    if off <= LARGEST_MISMATCH:
        return []
    if samples_ahead(s):
        remedy = f"responses wait for rollout.staleness={s.rollout.staleness} steps: lower it, or lower optim.lr"
    elif s.rollout.quantization != "none":
        remedy = (
            f"rollout.quantization={s.rollout.quantization} rounds the engine's weights: use none"
        )
    elif s.rollout.dtype != "float32":
        remedy = (
            f"rollout.dtype={s.rollout.dtype} rounds in the engine: use float32, or correction=tis"
        )
    else:
        remedy = (
            "the engine does not compute what the model computes: use rollout=local, and report it"
        )
    return [f"{mismatch_in_words(off)}. {remedy}"]


def warnings_after(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Describe what the metrics of a trained step show to be wrong with the settings, in a line
    each.
    """
    if "clip/token_active" not in metrics:  # no response token was trained on
        return []
    if (
        not s.objective.clips_sequence_ratio
        or max(s.objective.clip_low, s.objective.clip_high) <= WIDE_FOR_A_SEQUENCE
    ):
        return []
    return [
        f"objective.clip_low={s.objective.clip_low:g}, clip_high={s.objective.clip_high:g} is a token ratio's range: "
        f"{s.objective.name} averages log-ratios over the response. In this step it clipped "
        f"{metrics['clip/token_active']:.2%} of the tokens; mean |log s| was {metrics['ratio/sequence_log_abs']:.1e} "
        "(the paper clips 15 % with 3e-4, 4e-4)"
    ]
