"""Reads the dump of another framework's training step as a step record.

    record = read_dump(Path("logs/exp_001"), step=7)

The layouts were read in the frameworks' sources: NVIDIA-NeMo/RL, algorithms/grpo_sync.py (commit
001f1935), algorithms/grpo.py (002cdc27), utils/logger.py (0275e758), algorithms/loss_functions.py
(005a098a), and PrimeIntellect-ai/prime-rl, trainer/rl/token_export.py and train.py (004274ec).

In both, log-prob i belongs to token i, and the first token has none. Both train a token if it is in
the mask. The first trained token begins the response, and the last one ends it. Untrained tokens in
between are the environment's. Rows with equal prompts are a group. NeMo-RL counts steps from 1. A
step is a rollout batch in both. prime-rl makes a single update of it.

Neither dump holds how an update clipped, nor the log-probs of the old policy. The old policy of a
record is the engine: in prime-rl the objective's ratio is trainer / engine. The updates of NeMo-RL
are not in its dump, so the pass at the start of the step takes their place.

This module does not import torch.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from gspo.data.foreign_dumps import (
    NEMO_RL,
    PRIME_RL,
    Dump,
    dump_lines,
    find_dump,
    parse_row,
    text_only_message,
)
from gspo.data.foreign_rows import Row, Rows, to_record
from gspo.data.step_record import MAX_ROWS, StepRecord
from gspo.io.untrusted import SURROGATES, Unreadable, is_step

MAX_TASK_CHARS = 100
MAX_TOKEN_ID = np.iinfo(np.int32).max
NUMBER_TYPES = frozenset([int, float, type(None)])
FLAG_TYPES = frozenset([bool, int, float])

NO_JSON = "no JSON object"
NOT_TRAINED = "no trained token"

# in NeMo-RL's grpo_sync.py
NO_PASS = "prev_logprobs are 0 everywhere, because loss_fn.force_on_policy_ratio skips the pass"
NEMO_NOTE = (
    "NeMo-RL does not save the log-probs of its updates. The log-probs at the start of the step "
    "take their place, so the ratios show the gap of trainer and engine alone."
)
PRIME_NOTE = (
    "The old policy is the engine, as in prime-rl's loss, so the ratios hold the gap of trainer "
    "and engine too."
)


def read_dump(path: Path, step: int | None) -> StepRecord:
    """Read a dump of NeMo-RL's or prime-rl's that someone else may have written.

    `path` is a file or a folder, in which `step` chooses. Raises FileNotFoundError for a missing
    path. Raises Unreadable for a pickle, for a dump of texts, for an unknown format, for a missing
    step, and for rows that are damaged or exceed a bound. Log-probs, advantages and rewards may be
    infinite or NaN: then the run had such numbers, or the dump lacks them."""
    dump = find_dump(path, step)
    if dump.framework == NEMO_RL:
        return to_record(dump, _read_rows(dump, _nemo_row), [NEMO_NOTE])
    if dump.framework == PRIME_RL:
        return to_record(dump, _read_rows(dump, _prime_row), [PRIME_NOTE])
    raise Unreadable(text_only_message(dump))


def _read_rows(dump: Dump, read_row: Callable[[dict[str, Any]], Row | None]) -> Rows:
    """Read the rows of all files. `read_row` returns None for a row without a trained token."""
    result = Rows()
    for file in dump.files:
        for number, line in enumerate(dump_lines(file), start=1):
            content = parse_row(line)
            if content is None:
                result.omitted[NO_JSON] += 1
                continue
            try:
                # numbers beyond float32 become infinite
                with np.errstate(over="ignore"):
                    row = read_row(content)
            except (ValueError, TypeError, OverflowError) as error:
                raise Unreadable(f"{file}, line {number}: {error}") from None
            if row is None:
                result.omitted[NOT_TRAINED] += 1
                continue
            result.rows.append(row)
            if is_step(content.get("export_step")):
                result.steps.add(content["export_step"])
            if len(result.rows) > MAX_ROWS:
                raise Unreadable(f"{file} has more than {MAX_ROWS:,} rows")
    if not any(row.in_loss for row in result.rows):
        raise Unreadable(f"{dump.files[0]} has no row with a token in the loss")
    if dump.framework == NEMO_RL and not any(row.trainer_logp.any() for row in result.rows):
        raise Unreadable(f"{dump.files[0]}: {NO_PASS}")
    return result


# --------------------------------------------------------------------------------------------------
# NeMo-RL
def _nemo_row(content: dict[str, Any]) -> Row | None:
    """Return a row of NeMo-RL's train_data_step file.

    Logger.log_batched_dict_as_jsonl writes a line for each slice [i:i+1] of the batch, so every
    value is a list with a single element. All rows are padded on the right to the longest, and
    input_lengths has their lengths.
    """
    keys = ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs")
    values = {}
    for key in keys:
        if key not in content:
            raise ValueError(f"it has no {key}, which early versions of NeMo-RL do not write")
        values[key] = _only(content[key])
    # With dynamic sampling the batch of rewards is larger than the batch that is trained on:
    # the other lines are empty. filtered_rewards are the rewards of the rows.
    if values["token_ids"] == []:
        return None
    token_ids = _token_ids(values["token_ids"])
    length = len(token_ids)
    if "input_lengths" in content:
        length = _only(content["input_lengths"])
        if type(length) is not int or not 0 <= length <= len(token_ids):
            raise ValueError(f"input_lengths is {str(length)[:40]!r}")
    sample_mask = _number(_only(content.get("sample_loss_mask", 1)), "sample_loss_mask")
    rewards = content.get("filtered_rewards") or content.get("rewards")
    return _row(
        token_ids[:length],
        _flags(values["token_loss_mask"], "token_loss_mask", len(token_ids))[:length],
        engine_logp=_numbers(values, "generation_logprobs", len(token_ids))[:length],
        trainer_logp=_numbers(values, "prev_logprobs", len(token_ids))[:length],
        advantages=_numbers(values, "advantages", len(token_ids))[:length],
        entropy=None,
        reward=_number(_only(rewards), "rewards"),
        task=NEMO_RL,
        in_loss=sample_mask != 0,
    )


def _only(value: Any) -> Any:
    """Return the element of a list with a single element, and any other value as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


# --------------------------------------------------------------------------------------------------
# prime-rl
def _prime_row(content: dict[str, Any]) -> Row | None:
    """Return a row of prime-rl's token export.

    TokenExporter.export writes a line for each sequence of a packed batch, without its padding.
    loss_mask joins the masks of all losses, and `losses` has each of them per token. Versions
    before it have rl_weights, null for 1. Each token has the reward of its rollout.
    """
    if "token_ids" not in content or "loss_mask" not in content:
        raise ValueError("it has no token_ids or no loss_mask")
    token_ids = _token_ids(content["token_ids"])
    length = len(token_ids)
    trained = _flags(content["loss_mask"], "loss_mask", length)
    if "losses" in content:
        trained = trained & _in_policy_loss(content["losses"], length)
    elif "rl_weights" in content:
        weights = _numbers(content, "rl_weights", length)
        trained = trained & (np.isnan(weights) | (weights != 0))
    rewards = np.full(length, math.nan)
    if "rewards" in content:
        rewards = _numbers(content, "rewards", length, np.float64)
    first = int(trained.argmax()) if length else 0
    env_name = content.get("env_name") or PRIME_RL
    if not isinstance(env_name, str):
        raise ValueError(f"env_name is {str(env_name)[:40]!r}")
    return _row(
        token_ids,
        trained,
        engine_logp=_numbers(content, "inference_logprobs", length),
        trainer_logp=_numbers(content, "trainer_logprobs", length),
        advantages=_numbers(content, "advantages", length),
        entropy=_numbers(content, "entropy", length) if "entropy" in content else None,
        reward=float(rewards[first]) if length else math.nan,
        task=SURROGATES.sub("?", env_name[:MAX_TASK_CHARS]),
        in_loss=True,
    )


def _in_policy_loss(losses: Any, length: int) -> ndarray:
    """Return which tokens are in prime-rl's loss "rl": bool [S]."""
    _check_list(losses, "losses", length)
    in_loss = np.zeros(length, dtype=bool)
    for i, of_token in enumerate(losses):
        channel = of_token.get("rl") if isinstance(of_token, dict) else None
        if isinstance(channel, dict):
            in_loss[i] = channel.get("mask") is True
    return in_loss


# --------------------------------------------------------------------------------------------------
# values of a row
def _row(token_ids: ndarray, trained: ndarray, **values: Any) -> Row | None:
    """Return a row with the arrays of its response, None if no token is trained."""
    trained = trained.copy()
    # the first token has no log-prob
    trained[:1] = False
    positions = np.flatnonzero(trained)
    if len(positions) == 0:
        return None
    begin = int(positions[0])
    end = int(positions[-1]) + 1
    trained = trained[begin:end]
    for name, value in values.items():
        if isinstance(value, ndarray):
            values[name] = np.where(trained, value[begin:end], 0.0).astype(np.float32)
    return Row(token_ids[:begin].copy(), token_ids[begin:end].copy(), trained, **values)


def _check_list(value: Any, key: str, length: int) -> None:
    """Raise ValueError if a value is no list of this length."""
    if not isinstance(value, list):
        raise ValueError(f"{key} is {str(value)[:40]!r}, not a list")
    if len(value) != length:
        raise ValueError(f"{key} has {len(value)} entries for {length} tokens")


def _token_ids(value: Any) -> ndarray:
    """Return token IDs: int32 [S]."""
    if not isinstance(value, list):
        raise ValueError(f"token_ids is {str(value)[:40]!r}, not a list")
    if any(type(token) is not int or not 0 <= token <= MAX_TOKEN_ID for token in value):
        raise ValueError(f"token_ids has an entry that is no integer from 0 to {MAX_TOKEN_ID:,}")
    return np.array(value, dtype=np.int32)


def _numbers(content: dict[str, Any], key: str, length: int, dtype: type = np.float32) -> ndarray:
    """Return the numbers of all tokens: [S]. A number is NaN if the dump has null for it."""
    if key not in content:
        raise ValueError(f"it has no {key}")
    value = content[key]
    _check_list(value, key, length)
    if not NUMBER_TYPES.issuperset(map(type, value)):
        raise ValueError(f"{key} has an entry that is no number")
    return np.array(value, dtype=np.float64).astype(dtype)


def _number(value: Any, key: str) -> float:
    """Return a number, NaN for null."""
    if type(value) not in NUMBER_TYPES:
        raise ValueError(f"{key} is {str(value)[:40]!r}, not a number")
    return math.nan if value is None else float(value)


def _flags(value: Any, key: str, length: int) -> ndarray:
    """Return a mask: bool [S]. Its entries are true and false, or 1 and 0."""
    _check_list(value, key, length)
    if not FLAG_TYPES.issuperset(map(type, value)) or any(entry not in (0, 1) for entry in value):
        raise ValueError(f"{key} has an entry that is neither 0 nor 1")
    return np.array(value, dtype=bool)
