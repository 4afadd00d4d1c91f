"""Log-probs that the trainer computes under the weights that sampled, and the guard that engine and
trainer agree.

An engine reports log-probs of its own with every response. This module computes them again in the
trainer's precision: to keep them for a later step (`BehaviourLogprobs`), or to notice an engine
with other weights (`check_engine`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo.data.pack import pack
from gspo.data.samples import Problem, Response
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.requests import Sampling

# responses per problem, and tokens of each, that the guard samples
GUARD_SAMPLES, GUARD_TOKENS = 2, 8
OUTLIER = 1.0  # nats: a larger difference at one token counts as this much


@dataclass
class BehaviourLogprobs:
    """Computes log-probs and experts of responses, in the trainer's precision, under the weights
    that sampled them.

    It is used where responses are trained on later than they were sampled (stale batches, partial
    rollouts), because the trainer no longer has those weights then. With
    policy.old_logprobs=behaviour these log-probs are the old policy's; with
    policy.old_logprobs=engine the gap between engine and trainer is measured against them. With
    `replay_engine` (Routing Replay R3) the tokens go through the experts that the engine chose.
    """

    policy: Policy  # the policy that the engine samples from
    micro_batch_size: int = 64
    replay_engine: bool = False

    def __call__(self, responses: Sequence[Response]) -> None:
        """Set `old_logprobs` and `old_experts` of the tokens that have none yet. Earlier segments
        keep theirs.
        """
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
            r.old_logprobs = _continued(r.old_logprobs, logprobs)
            if scored.experts_BSLK is not None:
                start = batch.prompt_width - len(r.prompt_ids)
                experts = scored.experts_BSLK[
                    i, start : batch.prompt_width + len(r.token_ids)
                ].numpy()
                # The last token of a segment predicts the first of the next one, so its experts are
                # the next pass's.
                r.old_experts = _continued(
                    r.old_experts[:-1] if r.old_experts is not None else None, experts
                )


def _continued(before: np.ndarray | None, now: np.ndarray) -> np.ndarray:
    """Return `now` with its first entries replaced by those of `before`."""
    return now.copy() if before is None else np.concatenate([before, now[len(before) :]])


def check_engine(
    engine: Engine, problems: list[Problem], tolerance: float, step: int
) -> float | None:
    """Compare the engine's log-probs with the trainer's on a few sampled tokens, after the engine
    has loaded weights.

    Returns the mean of min(|difference|, 1) over the tokens, in nats; of several ranks, each of
    which checks its own engine, the largest. It is bounded because in bfloat16 a single token whose
    router chooses otherwise can be 20 nats away. A weight that did not arrive, or a cache that
    belongs to the weights before, shows here before it shows in a reward. Returns None where the
    engine computes with the policy's own tensors.

    Raises RuntimeError if the difference exceeds `tolerance` or is no number.
    """
    if engine.shares_weights:
        return None
    policy = engine.policy
    sampling = Sampling(policy.temperature, engine.room(problems, GUARD_TOKENS))
    groups = engine.generate(problems, GUARD_SAMPLES, sampling, (0, "sync"), step)
    batch = pack([r for group in groups for r in group], policy.pad_id)
    own_BT = policy.score(batch, len(batch)).logp_BT
    differences = (own_BT - batch.engine_logp_BT)[batch.mask_BT].abs()
    found = engine.ranks.all_gather(float(differences.clamp(max=OUTLIER).mean()))
    # of the rank whose engine is the furthest
    difference = max(found, key=lambda value: (math.isnan(value), value))
    if not difference <= tolerance:
        raise RuntimeError(
            f"after step {step} the engine's log-probs are {difference:.2g} nats from the trainer's on "
            f"{int(batch.mask_BT.sum())} tokens (rollout.sync_tolerance={tolerance:g}): its weights are not the "
            "trainer's, or it computes something else; if the gap is its precision, raise the tolerance"
        )
    return difference
