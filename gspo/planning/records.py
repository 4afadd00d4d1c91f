"""Plans the size of a step's record (gspo.data.step_record) with responses of full length."""

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
    # bytes per response token: two masks, then log-probs of engine and old policy, and the
    # advantage
    per_response_token = 2 + 3 * 4
    # in each epoch: log-prob, weight, entropy, clip
    per_response_token += epochs * (3 * 4 + 1)
    if settings.kl.needs_reference:
        per_response_token += 4
    if settings.correction.has_rollout_weights:
        per_response_token += 4
    if settings.advantage.needs_sum_pi_squared:
        per_response_token += 4
    if tracking.record_after:
        per_response_token += 4
    if has_critic:
        per_response_token += 2 * 4 + epochs * 4
    if settings.rollout.keep_mask:
        vocabulary = config.get_text_config().vocab_size
        per_response_token += 4 + KEPT_TOKENS * np.dtype(id_dtype(vocabulary)).itemsize
    per_token = 4  # bytes per token of prompt and response: the token ID
    top_k = number(config, TOP_K)
    if top_k and tracking.record_experts:
        experts = number(config, EXPERTS) or 0
        choices = top_k * config.get_text_config().num_hidden_layers
        choice_bytes = choices * (1 if experts <= INT8_MAX + 1 else 2)
        # experts of the old policy at every token, often the engine's too, and those of the updates
        per_token += 2 * choice_bytes
        per_response_token += epochs * choice_bytes
    responses = settings.rollout.prompts_per_step * settings.rollout.group_size
    response_bytes = work.response * (per_response_token + per_token)
    return responses * (response_bytes + work.prompt * per_token)
