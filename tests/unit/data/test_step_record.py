"""Records of steps are read as they were written, and hostile files are refused in one line."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gspo.data import step_record_files
from gspo.data.step_record import Header, RecordedUpdate, StepRecord, smallest_experts
from gspo.data.step_record_files import (
    METADATA_KEY,
    find_record,
    read_record,
    read_step,
    record_file,
    recorded_steps,
    write_record,
)
from gspo.io.untrusted import Unreadable


def example() -> StepRecord:
    """Two responses to a problem and one to another; the second is an episode."""
    header = Header(
        step=7,
        label="a run",
        limit=5,
        tasks=["math"] * 3,
        finish_reasons=["stop", "stop", "length"],
        verdicts=["correct", "wrong", "truncated"],
        turns={"1": [["policy", 1, 0.5], ["environment", 1, 0.0], ["policy", 1, 0.0]]},
        vocabulary={"5": "a", "6": "</script>"},
        metrics={"reward/mean": 0.5, "optim/loss": None},
    )
    floats = np.arange(6, dtype=np.float32)
    update = RecordedUpdate(
        rows=np.array([2, 0], np.int32),
        logp=-floats[:3],
        weight=np.ones(3, np.float32),
        clipped=np.array([0, 1, 3], np.uint8),
        experts=np.zeros((3, 2, 1), np.int8),
    )
    return StepRecord(
        header=header,
        updates=[update],
        prompt_lengths=np.array([2, 2, 1], np.int32),
        response_lengths=np.array([1, 3, 2], np.int32),
        groups=np.array([0, 0, 1], np.int32),
        problems=np.array([10, 10, 2**40], np.int64),
        samples=np.array([0, 1, 0], np.int32),
        policy_steps=np.array([6, 6, 6], np.int32),
        rewards=np.array([1.0, 0.0, 0.5]),
        token_ids=np.array([5, 6, 5, 5, 6, 6, 5, 6, 5, 6, 5], np.int32),
        trained=np.array([1, 1, 0, 1, 1, 1], bool),
        sampled=np.array([1, 1, 0, 1, 1, 1], bool),
        engine_logp=-floats,
        old_logp=-floats,
        advantages=floats,
        old_experts=np.zeros((11, 2, 1), np.int8),
    )


def same(a: StepRecord, b: StepRecord) -> bool:
    pairs = [(a, b), *zip(a.updates, b.updates, strict=True)]
    for one, other in pairs:
        for name, value in vars(one).items():
            if isinstance(value, np.ndarray):
                copied = getattr(other, name)
                if copied.dtype != value.dtype or not np.array_equal(copied, value, equal_nan=True):
                    return False
    return a.header == b.header


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = example()
    record.updates[0].logp[0] = np.nan  # of a run that has diverged
    record.rewards[0] = np.inf
    size = write_record(record_file(tmp_path, 7), record)
    path = find_record(tmp_path, -1)
    assert path == find_record(tmp_path, 7) and path.stat().st_size == size
    assert same(read_record(path), record)
    assert recorded_steps(tmp_path) == [7]
    (tmp_path / "steps" / "step_last.safetensors").write_bytes(b"")
    assert recorded_steps(tmp_path) == [7]


def test_rows_and_their_tokens():
    record = example()
    assert len(record) == 3 and record.ends.tolist() == [1, 4, 6]
    assert record.tokens_of(1) == slice(1, 4)
    prompt, response = record.prompt_and_response(1)
    assert prompt.tolist() == [5, 6] and response.tolist() == [6, 5, 6]
    assert smallest_experts(np.array([[127, -1]], np.int16)).dtype == np.int8
    assert smallest_experts(np.array([[128]], np.int16)).dtype == np.int16
    assert smallest_experts(np.zeros((0, 2), np.int16)).dtype == np.int8


def changed_header(path, **values):
    """Write the record at a path with other values in its header. None removes the key."""
    arrays = load_file(path)
    header = json.loads(json.dumps(vars(example().header))) | values
    header = {key: value for key, value in header.items() if value is not None}
    save_file(arrays, path, {METADATA_KEY: json.dumps(header)})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 3}, "it has version 3, and versions 1 to 2 are read here"),
        ({"version": "1" * 100}, "it has version 1111"),
        ({"step": None}, "no step"),
        ({"step": -1}, "its step is -1"),
        ({"step": 10**30}, "an integer of 31 digits"),
        ({"tasks": ["math"]}, "3 responses, but 1 tasks"),
        ({"tasks": "mat"}, "tasks in its header"),
        ({"vocabulary": {"5": 3}}, "vocabulary in its header"),
        ({"metrics": {"a": "x"}}, "metrics in its header"),
        ({"turns": {"9": []}}, "turns of a row '9'"),
        ({"turns": {"1": [["policy", 1]]}}, "a turn"),
        ({"turns": {"1": [["policy", 9, 0]]}}, "do not add up"),
        ({"turns": {"1": [["policy", 5, 0], ["policy", -2, 0]]}}, "do not add up"),
        ({"turns": {"1": []}}, "do not add up"),
        ({"limit": True}, "limit in its header"),
        ({"turns": {"\u0661": [["policy", 3, 0]]}}, "turns of a row '\u0661'"),
        ({"turns": {"1": [["policy", 3, float("inf")]]}}, "a turn"),
        ({"state": {"kl_coef": [1]}}, "kl_coef in its state is '[1]'"),
        ({"state": {"entropy_coef": 5}}, "entropy_coef in its state is '5'"),
        ({"state": {"entropy_coef": [1]}}, "entropy_coef in its state has not two numbers"),
        ({"state": {"rewards": {"x": 1}}}, "rewards in its state"),
        ({"state": {"rewards": {"count": -1}}}, "rewards in its state"),
        ({"state": {"rewards": []}}, "rewards in its state is '[]'"),
        ({"state": {"experts": 10**12}}, "experts in its state is 1000000000000"),
        ({"state": {"experts": -1}}, "experts in its state is -1"),
        ({"state": {"skips_old_pass": 1}}, "skips_old_pass in its state is '1'"),
    ],
)
def test_headers_that_contradict_the_layout_are_refused(values, message, tmp_path):
    path = record_file(tmp_path, 7)
    write_record(path, example())
    changed_header(path, **values)
    refused(path, message)


def refused(path, message: str) -> None:
    with pytest.raises(Unreadable) as error:
        read_record(path)
    text = str(error.value)
    assert message in text and str(path) in text and "\n" not in text and len(text) < 500


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", None, "the array token_ids is missing"),
        ("more", np.zeros(1), "an unknown array 'more'"),
        ("update_3.rows", np.zeros(1, np.int32), "an unknown array 'update_3.rows'"),
        ("token_ids", np.zeros(11), "the array token_ids is float64"),
        ("token_ids", np.zeros((11, 1), np.int32), "with shape (11, 1)"),
        ("token_ids", np.full(11, -1, np.int32), "a negative token ID"),
        ("token_ids", np.zeros(12, np.int32), "shape"),
        ("groups", np.array([0, 1, 0], np.int32), "not sorted by group"),
        ("groups", np.array([0, 2, 2], np.int32), "not sorted by group"),
        ("groups", np.array([1, 1, 1], np.int32), "not sorted by group"),
        ("response_lengths", np.array([2, 3, 2], np.int32), "7 tokens, not 6"),
        ("response_lengths", np.array([0, 4, 2], np.int32), "has no token"),
        ("response_lengths", np.array([2**31 - 1] * 3, np.int32), "tokens, not 6"),
        ("prompt_lengths", np.array([2, 2, 2], np.int32), "do not add up"),
        ("prompt_lengths", np.array([-2, 6, 1], np.int32), "has no token"),
        ("sampled", np.zeros(6, bool), "did not write"),
        ("update_1.rows", np.array([2, 3], np.int32), "rows beyond the 3 responses"),
        ("update_1.rows", np.array([-1, 0], np.int32), "rows beyond the 3 responses"),
        ("update_1.rows", np.array([0, 0], np.int32), "has a row twice"),
        ("update_1.rows", np.array([1, 0], np.int32), "3 tokens for its rows"),
        ("update_1.experts", np.zeros((3, 9, 1), np.int8), "shape"),
        ("rewards", np.zeros(4), "shape"),
        ("sampled", np.array([0, 1, 0, 1, 1, 1], bool), "did not write"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(name, value, message, tmp_path):
    path = record_file(tmp_path, 7)
    write_record(path, example())
    arrays = load_file(path)
    header = json.dumps(vars(example().header))
    arrays[name] = value
    arrays = {key: array for key, array in arrays.items() if array is not None}
    save_file(arrays, path, {METADATA_KEY: header})
    refused(path, message)


def test_a_response_without_a_token_of_the_policy_and_an_update_without_rows_are_refused(tmp_path):
    path = record_file(tmp_path, 7)
    record = example()
    record.sampled[0] = record.trained[0] = False
    write_record(path, record)
    refused(path, "a response without a token of the policy")
    record = example()
    empty = np.zeros(0, np.float32)
    record.updates.append(RecordedUpdate(rows=empty.astype(np.int32), logp=empty))
    write_record(path, record)
    refused(path, "update 2 has no rows")


def test_a_record_under_the_name_of_another_step_is_refused(tmp_path):
    write_record(record_file(tmp_path, 7), example())
    assert same(read_step(tmp_path, -1), example())
    record_file(tmp_path, 7).rename(record_file(tmp_path, 9))
    with pytest.raises(Unreadable, match="is the record of step 7"):
        read_step(tmp_path, 9)


def test_infinite_settings_and_coefficients_are_written_by_name(tmp_path):
    """An adaptive KL coefficient is NaN after a KL of NaN: its record must not end the run."""
    record = example()
    record.header.settings = {"objective": {"bound": float("inf"), "list": [float("nan"), 1]}}
    record.header.state = {"kl_coef": float("nan"), "entropy_coef": None}
    write_record(record_file(tmp_path, 7), record)
    header = read_step(tmp_path, 7).header
    assert header.settings == {"objective": {"bound": "inf", "list": ["nan", 1]}}
    assert header.state == {"kl_coef": "nan", "entropy_coef": None}


def test_files_that_are_no_records_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"")
    refused(path, "is no record of a step")
    path.write_bytes(b"\x80\x04\x95" + b"x" * 100)  # a pickle
    refused(path, "is no record of a step")
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    refused(path, "is no record of a step")
    save_file({"a": np.zeros(1)}, path)
    refused(path, "another safetensors file")
    save_file({"a": np.zeros(1)}, path, {METADATA_KEY: "[" * 100_000})
    refused(path, "nested too deeply")
    save_file({"a": np.zeros(1)}, path, {METADATA_KEY: "[]"})
    refused(path, "no mapping")
    write_record(path, example())
    whole = path.read_bytes()
    for size in (4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, "is no record of a step")
    path.write_bytes(whole)
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    with pytest.raises(Unreadable, match="is a link"):
        read_record(link)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unreadable):
        read_record(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path / "none")
    monkeypatch.setattr(step_record_files, "MAX_RECORD_BYTES", 100)
    refused(path, "larger than 100 bytes")
    monkeypatch.undo()
    monkeypatch.setattr(step_record_files, "MAX_HEADER_CHARS", 100)
    refused(path, "more than 100 characters")


def test_numbers_that_json_does_not_know_are_written_as_others(tmp_path):
    record = example()
    record.header = replace(record.header, state={"limit": np.float32(2), "path": tmp_path})
    write_record(record_file(tmp_path, 7), record)
    state = read_record(record_file(tmp_path, 7)).header.state
    assert state == {"limit": 2.0, "path": str(tmp_path)}
    record.header.metrics["optim/loss"] = float("nan")
    with pytest.raises(ValueError):
        write_record(record_file(tmp_path, 7), record)
