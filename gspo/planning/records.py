"""How many bytes the record of a step takes (gspo.data.step_record), if all responses are longest."""

import numpy as np
from transformers import PretrainedConfig

from gspo.config.settings import Settings
from gspo.data.kept_tokens import id_dtype
from gspo.model.cost import EXPERTS, TOP_K, number
from gspo.planning.memory import Work

INT8_MAX = 127
KEPT_TOKENS = 8  # at a position, on average: prime-rl measured this at top_p=0.97


def record_bytes(settings: Settings, config: PretrainedConfig, work: Work) -> int:
    """Return the bytes of the record of a step, or 0 if no step is recorded.

    The header and the texts of its tokens are left out. Every layer counts as an MoE layer if the
    model has experts."""
    tracking = settings.tracking
    if not (tracking.record_every or tracking.record_last):
        return 0
    epochs = settings.trainer.epochs
    has_critic = settings.advantage.needs_values
    # of a response token: two masks, then log-probs of engine and old policy, and the advantage
    token = 2 + 3 * 4
    # in each epoch: log-prob, weight, entropy, clip
    token += epochs * (3 * 4 + 1)
    if settings.kl.needs_reference:
        token += 4
    if settings.correction.has_rollout_weights:
        token += 4
    if settings.advantage.needs_sum_pi_squared:
        token += 4
    if tracking.record_after:
        token += 4
    if has_critic:
        token += 2 * 4 + epochs * 4
    if settings.rollout.keep_mask:
        vocabulary = config.get_text_config().vocab_size
        token += 4 + KEPT_TOKENS * np.dtype(id_dtype(vocabulary)).itemsize
    token_id = 4
    top_k = number(config, TOP_K)
    if top_k and tracking.record_experts:
        experts = number(config, EXPERTS) or 0
        choices = top_k * config.get_text_config().num_hidden_layers
        choice_bytes = choices * (1 if experts <= INT8_MAX + 1 else 2)
        # those of the old policy at every token, often those of the engine too, and of the updates
        token_id += 2 * choice_bytes
        token += epochs * choice_bytes
    responses = settings.rollout.prompts_per_step * settings.rollout.group_size
    return responses * (work.response * (token + token_id) + work.prompt * token_id)
