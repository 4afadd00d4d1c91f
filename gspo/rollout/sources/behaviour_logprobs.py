"""Log-probs that the trainer computes under the weights that sampled.

An engine reports log-probs of its own with every response. This module computes them again in the
trainer's precision: to keep them for a later step (`BehaviourLogprobs`), or to detect an engine
that has other weights (`check_engine`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine, policy_logprobs
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.settings import RolloutSettings

# `check_engine` samples short responses. `check_on_prompts` reads prompts.
CHECK_GROUP_SIZE = 2  # responses per problem
CHECK_TOKENS = 8  # tokens of a response
CHECK_PROMPTS = 4
CHECK_PROMPT_TOKENS = 128  # the first tokens of a prompt
# nats: prompts have unlikely tokens, whose log-probs depend more on the precision
MIN_PROMPT_TOLERANCE = 0.3
MAX_TOKEN_DIFFERENCE = 1.0  # nats: a larger difference at one token counts as this much


@dataclass
class BehaviourLogprobs:
    """Computes log-probs and experts of responses under the weights that sampled them.

    It is used if responses are trained on later than they were sampled (stale batches, partial
    rollouts), because the trainer no longer has those weights then. With
    policy.old_logprobs=behaviour these log-probs are the old policy's. With
    policy.old_logprobs=engine the gap between engine and trainer is measured against them. With
    `replay_engine` (Routing Replay R3) the tokens go through the experts that the engine chose.
    """

    policy: Policy  # the policy that the engine samples from
    micro_batch_size: int = 64
    replay_engine: bool = False

    def __call__(self, responses: Sequence[Response]) -> None:
        """Set `old_logprobs` and `old_experts` of tokens that have none yet."""
        fresh = [
            r for r in responses if r.old_logprobs is None or len(r.old_logprobs) < len(r.token_ids)
        ]
        if not fresh:
            return
        batch = pack(fresh, self.policy.pad_id)
        if self.replay_engine:
            batch = replace(batch, replay_BSLK=batch.engine_experts_BSLK)
        scored = self.policy.score(batch, self.micro_batch_size)
        for i, r in enumerate(fresh):
            logprobs = scored.logp_BT[i, : len(r.token_ids)].numpy()
            r.old_logprobs = _keep_earlier(r.old_logprobs, logprobs)
            if scored.experts_BSLK is None:
                continue
            first = batch.prompt_width - len(r.prompt_ids)
            end = batch.prompt_width + len(r.token_ids)
            experts = scored.experts_BSLK[i, first:end].numpy()
            # the last token of a segment predicts the first token of the next segment, so its
            # experts are those of the next pass
            earlier = None if r.old_experts is None else r.old_experts[:-1]
            r.old_experts = _keep_earlier(earlier, experts)


def _keep_earlier(earlier: np.ndarray | None, values: np.ndarray) -> np.ndarray:
    """Return `values` with its first entries replaced by `earlier`."""
    if earlier is None:
        return values.copy()
    return np.concatenate([earlier, values[len(earlier) :]])


def check_on_prompts(engine: Engine, problems: list[Problem], settings: RolloutSettings) -> None:
    """Raise ValueError if an engine that has loaded the policy's weights computes something else.

    It compares the log-probs of tokens of the first problems' prompts, in the same mean as
    `check_engine`. Nothing is sampled, so the check holds at any temperature."""
    if engine.shares_weights:
        return
    policy = engine.policy
    prompts = [
        policy.encode_prompt(problem.prompt)[:CHECK_PROMPT_TOKENS]
        for problem in problems[:CHECK_PROMPTS]
    ]
    firsts = [prompt[:1] for prompt in prompts if len(prompt) > 1]
    others = [prompt[1:] for prompt in prompts if len(prompt) > 1]
    engine_logprobs = engine.logprobs_of(firsts, others) if firsts else None
    if engine_logprobs is None:
        return
    differences = [
        abs(ours - theirs)
        for ours_of_row, theirs_of_row in zip(
            policy_logprobs(policy, firsts, others), engine_logprobs, strict=True
        )
        for ours, theirs in zip(ours_of_row, theirs_of_row, strict=True)
    ]
    bounded = [min(difference, MAX_TOKEN_DIFFERENCE) for difference in differences]
    tolerance = settings.tolerance(str(policy.precision).removeprefix("torch."))
    if settings.dtype != "float32":
        tolerance = max(tolerance, MIN_PROMPT_TOLERANCE)
    difference = sum(bounded) / len(bounded)
    if not difference <= tolerance:
        raise ValueError(
            f"the log-probs of rollout={settings.name} are {difference:.2g} nats from the model's on "
            f"{len(bounded)} tokens of prompts ({tolerance:g} are accepted): its weights are not the "
            "model's, or it computes something else. Start it anew"
        )


def check_engine(
    engine: Engine, problems: list[Problem], tolerance: float, step: int
) -> float | None:
    """Compare the engine's log-probs with the trainer's on a few sampled tokens.

    It follows each load of weights. It detects a weight that did not arrive, and a cache of the
    previous weights, if that changes log-probs by more than `tolerance`. Smaller changes are left
    to gspo.rollout.sources.handover.

    Returns the mean of min(|difference|, 1) over the tokens, in nats. It is bounded because in
    bfloat16 a single token whose router chooses otherwise can differ by 20 nats. Each rank checks
    its own engine, and the largest mean of all ranks is returned. Returns None if the engine
    computes with the policy's own tensors.

    Raises RuntimeError if the difference exceeds `tolerance` or is NaN.
    """
    if engine.shares_weights:
        return None
    policy = engine.policy
    sampling = Sampling(policy.temperature, engine.room(problems, CHECK_TOKENS))
    request = SamplingRequest(problems, CHECK_GROUP_SIZE, sampling, (0, "sync"), step)
    groups = engine.generate(request)
    batch = pack([r for group in groups for r in group], policy.pad_id)
    trainer_logp_BT = policy.score(batch, len(batch)).logp_BT
    differences = (trainer_logp_BT - batch.engine_logp_BT)[batch.mask_BT].abs()
    rank_difference = float(differences.clamp(max=MAX_TOKEN_DIFFERENCE).mean())
    rank_differences = engine.ranks.all_gather(rank_difference)
    # NaN counts as the largest
    difference = max(rank_differences, key=lambda value: (math.isnan(value), value))
    if not difference <= tolerance:
        raise RuntimeError(
            f"after step {step} the engine's log-probs are {difference:.2g} nats from the "
            f"trainer's on {int(batch.mask_BT.sum())} tokens "
            f"(rollout.sync_tolerance={tolerance:g}): its weights are not the trainer's, or it "
            "computes something else; if the gap is its precision, raise the tolerance"
        )
    return difference
