"""Writes, finds and reads the records of steps (gspo.data.step_record).

A record may be someone else's. So its arrays and its header are checked before anything is computed
from them, and reading runs no code.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy import ndarray

from gspo.data.kept_tokens import KeptTokens
from gspo.data.step_record import (
    MAX_ROWS,
    STATE_TYPES,
    VERSION,
    VERSION_WITH_KEPT,
    VERSIONS,
    Header,
    RecordedUpdate,
    StepRecord,
)
from gspo.io.files import replace_bytes
from gspo.io.nested import mapped
from gspo.io.untrusted import Unreadable, is_step, open_plain_file, parse_json

METADATA_KEY = "gspo"
FOLDER = "steps"
MAX_RECORD_BYTES = 16 << 30
MAX_HEADER_CHARS = 64 << 20
MAX_UPDATES = 10_000
MAX_EXPERTS = 2**15  # of an MoE layer
MAX_COUNT = 2**53  # of rewards
MAX_NAMED_STEPS = 5  # a message names so many recorded steps

Arrays = TypeVar("Arrays", "StepRecord", "RecordedUpdate")


def record_file(run: Path, step: int) -> Path:
    """Return the path of a step's record in a run directory."""
    return run / FOLDER / f"step_{step:06d}.safetensors"


def recorded_steps(run: Path) -> list[int]:
    """Return the recorded steps of a run directory in ascending order."""
    names = [path.stem.removeprefix("step_") for path in (run / FOLDER).glob("step_*.safetensors")]
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 12)


def find_record(run: Path, step: int) -> Path:
    """Return the path of a step's record. Step -1 is the last that was recorded.

    Raises ValueError if the step was not recorded, and names the nearest steps that were."""
    steps = recorded_steps(run)
    if step < 0 and steps:
        step = steps[-1]
    path = record_file(run, step)
    if path.exists():
        return path
    if not steps:
        raise ValueError(
            f"{run} has no record of a step: train with tracking.record_every=N or "
            "tracking.record_last=K"
        )
    nearest = sorted(steps, key=lambda recorded: (abs(recorded - step), recorded))
    names = ", ".join(map(str, nearest[:MAX_NAMED_STEPS]))
    raise ValueError(f"{run} has no record of step {step}; the nearest recorded steps are {names}")


def read_step(run: Path, step: int) -> StepRecord:
    """Read the record of a step of a run directory. Step -1 is the last that was recorded.

    Raises ValueError if the step was not recorded, and if the file holds another step."""
    path = find_record(run, step)
    record = read_record(path)
    if record_file(run, record.header.step) != path:
        raise Unreadable(f"{path} is the record of step {record.header.step}")
    return record


# --------------------------------------------------------------------------------------------------
# writing
def write_record(path: Path, record: StepRecord) -> int:
    """Write a record atomically, and return the size of the file in bytes."""
    from safetensors.numpy import save  # commands that read no record do without it

    arrays = _arrays_of(record, "")
    for number, update in enumerate(record.updates, start=1):
        arrays |= _arrays_of(update, f"update_{number}.")
    content = asdict(record.header)
    if not record.header.named_rewards:
        del content["named_rewards"]
    content["version"] = VERSION if record.kept_counts is None else VERSION_WITH_KEPT
    for name in ("settings", "state"):
        content[name] = mapped(content[name], _spelled)
    header = json.dumps(content, allow_nan=False, default=_plain)
    file_content = save(arrays, {METADATA_KEY: header})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, file_content)
    return len(file_content)


def _arrays_of(part: StepRecord | RecordedUpdate, prefix: str) -> dict[str, ndarray]:
    """Return the arrays of a record or an update by their names in the file."""
    arrays = {}
    for f in fields(part):
        value = getattr(part, f.name)
        if f.metadata and value is not None:
            dtypes = f.metadata["dtypes"]
            if value.dtype not in dtypes:
                value = value.astype(dtypes[-1])
            arrays[f"{prefix}{f.name}"] = np.ascontiguousarray(value)
    return arrays


def _spelled(value: Any) -> Any:
    """Return a number that JSON cannot hold as its name: "inf", "-inf" or "nan".

    Numbers of this package are finite, but settings of a user's own class need not be.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _plain(value: object) -> object:
    """Return a value that JSON does not know as one that it knows."""
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


# --------------------------------------------------------------------------------------------------
# reading
def read_record(path: Path) -> StepRecord:
    """Read a record that someone else may have written.

    Raises Unreadable if it is damaged or too large, if another version wrote it, or if its parts
    contradict each other. Log-probs, advantages and rewards may be infinite or NaN: then the run
    had such numbers."""
    from safetensors import SafetensorError, safe_open

    with open_plain_file(path) as file:
        size = file.seek(0, 2)
    if size > MAX_RECORD_BYTES:
        raise Unreadable(
            f"{path} is larger than {MAX_RECORD_BYTES:,} bytes, the most that is read of it"
        )
    try:
        with safe_open(path, framework="np") as file:
            header = _read_header(file.metadata() or {})
            names = set(file.keys())
            arrays = {name: file.get_tensor(name) for name in names}
        record = _to_record(header, arrays)
        _check_rows(record)
    except (SafetensorError, ValueError, TypeError, OverflowError) as error:
        raise Unreadable(f"{path} is no record of a step: {error}") from None
    return record


def _read_header(metadata: Mapping[str, str]) -> Header:
    """Return the header of a file's metadata. Raises ValueError for another version or type."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise ValueError("it is another safetensors file")
    if len(text) > MAX_HEADER_CHARS:
        raise ValueError(f"its header has more than {MAX_HEADER_CHARS:,} characters")
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("its header is no mapping")
    version = content.get("version")
    if version not in VERSIONS:
        raise ValueError(
            f"it has version {str(version)[:20]}, and versions {VERSIONS[0]} to {VERSIONS[-1]} are "
            "read here"
        )
    kinds = get_type_hints(Header)
    values = {}
    for f in fields(Header):
        if f.name not in content:
            if f.default is MISSING and f.default_factory is MISSING:
                raise ValueError(f"its header has no {f.name}")
            continue
        value = content[f.name]
        if not has_type(value, kinds[f.name]):
            raise ValueError(f"{f.name} in its header is {str(value)[:40]!r}")
        values[f.name] = value
    header = Header(**values)
    if not is_step(header.step):
        raise ValueError(f"its step is {header.step}")
    _check_state(header.state)
    return header


def _check_state(state: dict[str, Any]) -> None:
    """Raise ValueError for a state whose values have other types than those of Trainer.loss_state.

    Other keys are permitted, and each key may be missing."""
    for name, kind in STATE_TYPES.items():
        if name in state and not has_type(state[name], kind):
            raise ValueError(f"{name} in its state is {str(state[name])[:40]!r}")
    if len(state.get("entropy_coef") or (None, None)) != 2:
        raise ValueError("entropy_coef in its state has not two numbers")
    moments = state.get("rewards", {})
    if set(moments) - {"count", "mean", "squares"} or not 0 <= moments.get("count", 0) < MAX_COUNT:
        raise ValueError(f"rewards in its state is {str(moments)[:40]!r}")
    if not 0 <= state.get("experts", 0) <= MAX_EXPERTS:
        raise ValueError(f"experts in its state is {state['experts']}")


def _is_finite(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)


def has_type(value: object, kind: Any) -> bool:
    """Return whether a value of JSON has a type such as dict[str, list[int]] or float | None."""
    if kind is Any:
        return True
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is dict:
        return isinstance(value, dict) and all(
            has_type(item, arguments[1]) for item in value.values()
        )
    if origin is list:
        return isinstance(value, list) and all(has_type(item, arguments[0]) for item in value)
    if arguments:  # a union
        return any(has_type(value, argument) for argument in arguments)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _to_record(header: Header, arrays: dict[str, ndarray]) -> StepRecord:
    """Make a record of its arrays. Raises ValueError for a missing, unknown or misshapen array."""
    sizes: dict[str, int] = {}
    parts = _checked(StepRecord, arrays, "", sizes)
    updates = []
    while f"update_{len(updates) + 1}.rows" in arrays and len(updates) < MAX_UPDATES:
        prefix = f"update_{len(updates) + 1}."
        # b and n differ from update to update
        update_sizes = {name: sizes[name] for name in "LK" if name in sizes}
        update_arrays = _checked(RecordedUpdate, arrays, prefix, update_sizes)
        sizes |= {name: update_sizes[name] for name in "LK" if name in update_sizes}
        updates.append(RecordedUpdate(**update_arrays))
    if arrays:
        raise ValueError(f"it has an unknown array {min(arrays)[:40]!r}")
    return StepRecord(header=header, updates=updates, **parts)


def _checked(
    kind: type[Arrays], arrays: dict[str, ndarray], prefix: str, sizes: dict[str, int]
) -> dict[str, ndarray]:
    """Take the arrays of a record or an update out of `arrays`.

    `sizes` has the known size of each dimension, and gets those of new dimensions. Raises
    ValueError for an array that is missing, or has another dtype or shape."""
    parts = {}
    for f in fields(kind):
        if not f.metadata:
            continue
        name = f"{prefix}{f.name}"
        value = arrays.pop(name, None)
        if value is None:
            if f.default is MISSING:
                raise ValueError(f"the array {name} is missing")
            continue
        dimensions = f.metadata["dimensions"]
        if str(value.dtype) not in f.metadata["dtypes"] or value.ndim != len(dimensions):
            raise ValueError(f"the array {name} is {value.dtype} with shape {value.shape}")
        for dimension, size in zip(dimensions, value.shape, strict=True):
            if sizes.setdefault(dimension, size) != size:
                raise ValueError(f"the array {name} has shape {value.shape}, but {sizes} is known")
        parts[f.name] = value
    return parts


def _check_rows(record: StepRecord) -> None:
    """Raise ValueError if lengths, groups, rows or the header's lists contradict each other."""
    header = record.header
    rows = len(record)
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"it has {rows} responses")
    for name in ("tasks", "finish_reasons", "verdicts"):
        if len(getattr(header, name)) != rows:
            raise ValueError(f"it has {rows} responses, but {len(getattr(header, name))} {name}")
    for name, values in header.named_rewards.items():
        if len(values) != rows or not all(_is_finite(value) for value in values):
            raise ValueError(
                f"the reward {name[:40]!r} is not a number of each of {rows} responses"
            )
    lengths = record.response_lengths.astype(np.int64)
    prompt_lengths = record.prompt_lengths.astype(np.int64)
    if lengths.min() < 1 or prompt_lengths.min() < 1:
        raise ValueError("a prompt or a response has no token")
    if lengths.sum() != len(record.trained):
        raise ValueError(f"its responses have {lengths.sum()} tokens, not {len(record.trained)}")
    if lengths.sum() + prompt_lengths.sum() != len(record.token_ids):
        raise ValueError("the lengths of its prompts do not add up")
    if record.token_ids.min() < 0:
        raise ValueError("it has a negative token ID")
    if (record.trained & ~record.sampled).any():
        raise ValueError("it trains on tokens that the policy did not write")
    if not np.logical_or.reduceat(record.sampled, record.ends - lengths).all():
        raise ValueError("it has a response without a token of the policy")
    _check_kept(record)
    steps_of_groups = np.diff(record.groups, prepend=0)
    if record.groups[0] != 0 or not np.isin(steps_of_groups, (0, 1)).all():
        raise ValueError("its responses are not sorted by group")
    for number, update in enumerate(record.updates, start=1):
        if not len(update.rows):
            raise ValueError(f"update {number} has no rows")
        if not 0 <= update.rows.min() <= update.rows.max() < rows:
            raise ValueError(f"update {number} has rows beyond the {rows} responses")
        if len(np.unique(update.rows)) != len(update.rows):
            raise ValueError(f"update {number} has a row twice")
        if lengths[update.rows].sum() != len(update.logp):
            raise ValueError(f"update {number} has {len(update.logp)} tokens for its rows")
    for row, turns in header.turns.items():
        if not (row.isascii() and row.isdecimal()) or len(row) > 9 or int(row) >= rows:
            raise ValueError(f"it has turns of a row {row[:20]!r}")
        for turn in turns:
            known = len(turn) == 3 and turn[0] in ("policy", "environment")
            if not known or type(turn[1]) is not int or not _is_finite(turn[2]):
                raise ValueError(f"it has a turn {str(turn)[:40]}")
        if sum(turn[1] for turn in turns) != lengths[int(row)] or min(t[1] for t in turns) < 0:
            raise ValueError(f"the turns of row {row} do not add up")


def _check_kept(record: StepRecord) -> None:
    """Raise ValueError if the kept tokens are not those of the responses."""
    if (record.kept_counts is None) != (record.kept_ids is None):
        raise ValueError("it has only one of the arrays kept_counts and kept_ids")
    if record.kept_counts is None or record.kept_ids is None:
        return
    kept = KeptTokens(record.kept_counts, record.kept_ids)
    if len(kept.ids) and kept.ids.min() < 0:
        raise ValueError("it has a negative token ID among its kept tokens")
    if (record.kept_counts[~record.sampled] != 0).any():
        raise ValueError("it has kept tokens where the policy wrote no token")
    response_ids = [record.prompt_and_response(row)[1] for row in range(len(record))]
    fault = kept.fault(np.concatenate(response_ids))
    if fault:
        raise ValueError(f"its response {fault}")
