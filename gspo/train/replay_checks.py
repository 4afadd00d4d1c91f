"""Checks that a recorded step holds all that a replay needs."""

import numpy as np

from gspo.data.batch import NOT_RECORDED
from gspo.data.step_record import StepRecord
from gspo.io.errors import SettingError
from gspo.train.settings import Algorithm, TrainerSettings

# A padded batch may have this many positions. A larger one needs a token in at least one of
# MAX_PADDING_FACTOR positions.
MAX_CELLS = 2**27
MAX_PADDING_FACTOR = 50


def check_advantages(record: StepRecord, algorithm: Algorithm, recorded_advantages: bool) -> None:
    """Raise ValueError if the record lacks the rewards or the advantages that are needed."""
    if not recorded_advantages and np.isnan(record.rewards).any():
        raise SettingError(
            "advantage",
            algorithm.advantage.name,
            "needs rewards, which this record does not hold",
            remedy="leave advantage=... out, so that the recorded advantages are taken",
        )
    weights = algorithm.reward.weights
    if weights and not recorded_advantages and not record.header.named_rewards:
        raise SettingError(
            "reward.weights",
            weights,
            "this record has a single reward of each response, and none with these names",
            remedy="leave it out",
        )
    advantage = algorithm.advantage
    missing = ""
    if advantage.needs_named_rewards and not record.header.named_rewards:
        missing = "several named rewards of each response, and this record holds one"
    elif advantage.needs_sum_pi_squared and record.sum_pi_squared is None:
        missing = "sum_v pi_v^2 of every token, which only runs with this advantage record"
    if missing and not recorded_advantages:
        raise SettingError("advantage", advantage.name, f"needs {missing}")
    if recorded_advantages and np.isnan(record.advantages).all():
        raise SettingError(
            "advantage",
            problem="this record holds no advantages",
            remedy="compute them from the rewards, for example advantage=group_normalized",
        )


def check_record(
    record: StepRecord, algorithm: Algorithm, settings: TrainerSettings, old_logprobs: str
) -> None:
    """Raise ValueError if the record lacks tensors that the loss needs."""
    if algorithm.kl.needs_reference and record.ref_logp is None:
        raise SettingError(
            "kl",
            algorithm.kl.name,
            "needs log-probs of the reference policy, which this record does not hold",
            remedy="set kl=none",
        )
    needs_engine = algorithm.objective.ratio_to == "engine"
    if needs_engine and np.isnan(record.engine_logp).all():
        raise SettingError(
            "objective",
            algorithm.objective.name,
            "divides by the engine's log-probs, which this record does not hold",
            remedy="choose an objective whose ratio is to the old policy, such as objective=gspo",
        )
    has_values = record.old_values is not None
    has_values = has_values and all(update.values is not None for update in record.updates)
    if algorithm.advantage.needs_values and not has_values:
        raise SettingError(
            "advantage",
            algorithm.advantage.name,
            "needs the values of a critic, which this record does not hold",
            remedy="choose an advantage without critic, such as advantage=group_normalized",
        )
    if settings.entropy_coefficient() and any(u.entropy is None for u in record.updates):
        raise SettingError(
            "trainer.entropy_coef",
            settings.entropy_coef,
            "needs the entropy of every token, which this record does not hold",
            remedy="set trainer.entropy_coef=0 and trainer.entropy_target=null",
        )
    is_dump = record.header.source != "gspo"
    if is_dump and algorithm.correction.name != "none" and algorithm.correction.compares_old:
        raise SettingError(
            "correction",
            algorithm.correction.name,
            "this record does not tell the old policy from the engine, so nothing can be corrected",
            remedy="set correction=none",
        )
    recorded = record.header.settings.get("policy", {}).get("old_logprobs")
    # every record holds the engine's log-probs
    if recorded and old_logprobs not in (recorded, "engine"):
        raise SettingError(
            "policy.old_logprobs",
            old_logprobs,
            f"this record holds the old policy's log-probs of policy.old_logprobs={recorded}",
            remedy=f"set policy.old_logprobs={recorded} or engine",
        )
    check_experts(record)
    check_padding(record)


def check_experts(record: StepRecord) -> None:
    """Raise ValueError for an expert beyond the number of experts that the header has."""
    experts = int(record.header.state.get("experts", 0))
    arrays = [record.old_experts, record.engine_experts, *(u.experts for u in record.updates)]
    for array in arrays:
        if array is None or array.size == 0:
            continue
        smallest = int(array.min())
        largest = int(array.max())
        if smallest < NOT_RECORDED or largest >= experts:
            raise ValueError(f"the record has experts {smallest} to {largest} of {experts} experts")


def check_padding(record: StepRecord) -> None:
    """Raise ValueError if a batch of all rows would be padding almost everywhere.

    A small file whose rows differ much in length could otherwise take all memory."""
    width = int(record.prompt_lengths.max()) + int(record.response_lengths.max())
    cells = len(record) * width
    if cells > MAX_CELLS and cells > MAX_PADDING_FACTOR * len(record.token_ids):
        raise ValueError(
            f"the record has {len(record):,} rows of up to {width:,} tokens, but only "
            f"{len(record.token_ids):,} tokens: such a batch is too large to replay"
        )
