"""Warn of settings that work and are seldom meant, before a run and after its first steps.

Unlike the refusals of gspo.config.checks these are only warnings. Each is a line that names key
and value and a remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspo.config.unread_options import changed
from gspo.data.samples import ScoredResponse, all_same
from gspo.tracking.rounding import (
    LARGEST_MISMATCH,
    ROUNDING_SHARE,
    floor_in_words,
    mismatch_in_words,
)

if TYPE_CHECKING:
    from gspo.config.settings import Settings

# a larger share of responses that are cut off causes a warning
MAX_TRUNCATED_SHARE = 0.5
# a wider clip range is meant for the ratio of a token, not for the ratio of a response
MAX_SEQUENCE_CLIP_RANGE = 0.05


def warnings(s: Settings) -> list[str]:
    """Return warnings of settings that are seldom meant, for the start of a run."""
    lines = []
    updates = s.trainer.minibatches * s.trainer.epochs
    k1_in_loss = s.kl.in_loss and s.kl.estimator == "k1" and s.kl.gradient == "own"
    if k1_in_loss and s.kl.times_ratio == "none":
        lines.append(
            "kl.estimator=k1 in the loss: its expected gradient is zero; k2 or k3 pull towards "
            "the reference"
        )
    if s.policy.old_logprobs == "engine" and updates == 1:
        lines.append(
            "policy.old_logprobs=engine with one update: the ratio is the engine's mismatch alone"
        )
    unbounded = s.objective.ratio_to == "none" and s.kl.name == "none"
    if s.advantage.name == "nsr" and s.advantage.negative_weight and unbounded:
        lines.append(
            f"advantage=nsr with objective={s.objective.name} and kl=none: nothing bounds how far "
            "the log-probs of wrong responses fall; use an objective that clips, or kl=loss"
        )
    if s.objective.ratio_to == "none" and updates > 1:
        lines.append(
            f"objective={s.objective.name} has no ratio: with several updates per batch it takes "
            "stale samples for fresh"
        )
    if s.policy.lora.rank and not changed(s.optim, "lr"):
        lines.append(
            f"optim.lr={s.optim.lr:g} with policy.lora.rank={s.policy.lora.rank}: that is meant "
            "for all weights; an adapter learns with about ten times as much (docs/algorithms.md)"
        )
    uncorrected = s.policy.old_logprobs == "step_start" and s.correction.name == "none"
    if s.rollout.samples_ahead and s.objective.ratio_to == "old" and uncorrected:
        lines.append(
            f"rollout.staleness={s.rollout.staleness}, "
            f"rollout.token_budget={s.rollout.token_budget} with policy.old_logprobs=step_start: "
            "ratios start at 1, so the clip does not see how old the responses are; use "
            "policy.old_logprobs=behaviour or engine"
        )
    if s.rollout.rules and not s.rollout.keep_mask:
        rules = ", ".join(f"rollout.{rule}={value}" for rule, value in s.rollout.rules.items())
        lines.append(
            f"{rules}: tokens are drawn from the truncated distribution, while log-probs, ratios "
            "and KL are of the whole one, so importance sampling holds for neither exactly; "
            "rollout.keep_mask=true takes all of them over the tokens that could be drawn"
        )
    lines += warnings_of_schedules(s)
    return lines


def warnings_of_schedules(s: Settings) -> list[str]:
    """Return warnings of settings about steps and updates that the run does not reach."""
    lines = []
    total_updates = s.steps * s.trainer.minibatches * s.trainer.epochs
    decayed = s.optim.warmup_updates + s.optim.decay_updates
    # a trial of a few steps with the default need not be warned
    if total_updates <= s.optim.warmup_updates and changed(s.optim, "warmup_updates"):
        lines.append(
            f"optim.warmup_updates={s.optim.warmup_updates}: the run makes {total_updates} updates, so "
            "the learning rate never reaches optim.lr"
        )
    elif s.optim.decay != "none" and not s.optim.final_lr_factor and decayed < total_updates:
        lines.append(
            f"optim.decay_updates={s.optim.decay_updates}: the learning rate is 0 from update {decayed} "
            f"of {total_updates} on, and those updates change nothing; plan the decay for the whole run "
            "with optim.decay_updates, or keep some of it with optim.final_lr_factor"
        )
    late = [step for step in s.profile.steps if step > s.steps]
    if late:
        lines.append(
            f"profile.steps={s.profile.steps}: step {min(late)} lies beyond steps={s.steps}"
        )
    late = [step for step in s.rollout.extend if step > s.steps]
    if late:
        lines.append(
            f"rollout.extend={s.rollout.extend}: step {min(late)} lies beyond steps={s.steps} and "
            "does not act"
        )
    return lines


def nothing_to_learn(
    s: Settings, metrics: dict[str, float], responses: list[ScoredResponse], step: int
) -> list[str]:
    """Return the reasons why one of the first steps had (nearly) nothing to learn from.

    Each reason is a line with a remedy."""
    lines = []
    truncated_share = metrics.get("length/truncated", 0.0)
    if truncated_share >= MAX_TRUNCATED_SHARE:
        if all(response.turns for response in responses):
            earned = "each episode kept the rewards of its turns"
        elif s.reward.truncated is None:
            earned = "the reward function sees no end of theirs"
        else:
            earned = f"each earned {s.reward.truncated:g} without being judged"
        lines.append(
            f"{truncated_share:.1%} of the responses were cut off at {s.rollout.limit(step)} tokens "
            f"(rollout.max_new_tokens, rollout.extend), and {earned}: raise the limit"
        )
    if s.advantage.learns_from_equal_rewards:
        return lines
    has_reward_function = bool(getattr(s.task, "reward", ""))  # the user's
    rewards = [r.reward for r in responses]
    no_group_differs = metrics.get("group/zero_variance") == 1
    if all_same(rewards) and rewards[0] == 0:
        function = "look at task.reward, " if has_reward_function else ""
        lines.append(
            "every response earned 0, so there is nothing to learn from; "
            "rollouts/step_000001.jsonl shows some, and the prompts "
            f"(prompt.format={s.prompt.format}: {s.prompt_used}). If they are not cut off, "
            f"{function}change prompt.format, or choose easier problems than task={s.task.name}, "
            "or a stronger model"
        )
    elif all_same(rewards):
        function = "look at task.reward, or " if has_reward_function else ""
        lines.append(
            f"every response earned {rewards[0]:g}, so there is nothing to learn; "
            f"{function}choose harder problems than task={s.task.name}"
        )
    elif s.advantage.needs_group and s.rollout.group_size > 1 and no_group_differs:
        lines.append(
            f"in no group of rollout.group_size={s.rollout.group_size} responses did the rewards "
            "differ, so the step had no gradient: raise it, or choose problems that the model "
            "solves sometimes"
        )
    return lines


def rounding_floor(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Warn, with a remedy, if rounding moves sequence ratios by a good part of their clip range."""
    share = metrics.get("ratio/floor_of_range", 0.0)
    if share <= ROUNDING_SHARE:
        return []
    if s.policy.head_dtype == "bfloat16":
        remedy = "policy.head_dtype=bfloat16 rounds the logits: use policy.head_dtype=float32"
    elif s.policy.old_logprobs == "engine":
        remedy = (
            "policy.old_logprobs=engine divides by the engine's rounding: "
            "use policy.old_logprobs=step_start"
        )
    elif s.policy.precision == "bfloat16":
        remedy = "policy.precision=bfloat16 rounds the layers: use float32, or a wider clip range"
    else:
        remedy = (
            "engine and trainer round differently: "
            "use policy.old_pass=always, or a wider clip range"
        )
    return [f"{floor_in_words(share, metrics['ratio/floor_outside'])}. {remedy}"]


def cut_off_pays(s: Settings, responses: list[ScoredResponse]) -> list[str]:
    """Warn if a response that ended by itself earned less than a response that was cut off."""
    truncated = s.reward.truncated
    # an episode that is cut off keeps the rewards of its turns
    responses = [r for r in responses if not r.turns]
    if truncated is None or not any(r.score.verdict == "truncated" for r in responses):
        return []
    ended = [r.reward for r in responses if r.score.verdict != "truncated"]
    if not ended or min(ended) >= truncated:
        return []
    return [
        f"a response that is cut off earns reward.truncated={truncated:g}, which is more than the "
        f"{min(ended):g} of one that ended, so being cut off is learned: set reward.truncated to "
        "the lowest reward, or to null to have the reward function asked"
    ]


def engine_mismatch(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Warn, with a remedy, if engine and trainer compute different log-probs."""
    mismatch = metrics.get("mismatch/logp_abs", 0.0)
    if mismatch <= LARGEST_MISMATCH:
        return []
    if s.rollout.samples_ahead:
        remedy = (
            f"responses wait for rollout.staleness={s.rollout.staleness} steps: "
            "lower it, or lower optim.lr"
        )
    elif s.rollout.quantization != "none":
        remedy = (
            f"rollout.quantization={s.rollout.quantization} rounds the engine's weights: use none"
        )
    elif s.rollout.dtype != "float32":
        remedy = (
            f"rollout.dtype={s.rollout.dtype} rounds in the engine: use float32, or correction=tis"
        )
    elif s.rollout.name == "local":
        remedy = "sampling and training compute different log-probs: please report it"
    else:
        remedy = (
            "the engine does not compute what the model computes: use rollout=local, and report it"
        )
    return [f"{mismatch_in_words(mismatch)}. {remedy}"]


def warnings_after(s: Settings, metrics: dict[str, float]) -> list[str]:
    """Return warnings of settings that the metrics of a trained step show to be wrong."""
    if "clip/token_active" not in metrics:  # no response token was trained on
        return []
    if not s.objective.clips_sequence_ratio:
        return []
    if max(s.objective.clip_low, s.objective.clip_high) <= MAX_SEQUENCE_CLIP_RANGE:
        return []
    return [
        f"objective.clip_low={s.objective.clip_low:g}, clip_high={s.objective.clip_high:g} is a "
        f"token ratio's range: {s.objective.name} averages log-ratios over the response. In this "
        f"step it clipped {metrics['clip/token_active']:.2%} of the tokens; mean |log s| was "
        f"{metrics['ratio/sequence_log_abs']:.1e} (the paper clips 15 % with 3e-4, 4e-4)"
    ]
