"""Dumps of other frameworks from a stranger: one line that names the file, no code is run, no wait
without end.
"""

import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gspo.data import foreign_dumps, foreign_records
from gspo.data.foreign_records import read_dump
from gspo.io.untrusted import Unreadable

NAME = "train_data_step1.jsonl"
NEMO = {
    "rewards": [1.0],
    "input_lengths": [3],
    "token_ids": [[5, 6, 7]],
    "token_loss_mask": [[0, 1, 1]],
    "sample_loss_mask": [1.0],
    "advantages": [[1.0, 1.0, 1.0]],
    "generation_logprobs": [[0.0, -1.0, -1.0]],
    "prev_logprobs": [[0.0, -1.0, -1.5]],
}
PRIME = {
    "export_step": 1,
    "env_name": "e",
    "token_ids": [5, 6, 7],
    "loss_mask": [False, True, True],
    "advantages": [1.0, 1.0, 1.0],
    "rewards": [1.0, 1.0, 1.0],
    "inference_logprobs": [0.0, -1.0, -1.0],
    "trainer_logprobs": [0.0, -1.0, -1.5],
    "entropy": [0.0, 0.5, 0.5],
}
DEEP = "[" * 100_000 + "]" * 100_000


class Touches:
    """A value that creates a file if it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def refused(path: Path, step: int | None = None) -> str:
    """Return the message of a refusal, which is a single line that names the file."""
    with pytest.raises(Unreadable) as error:
        read_dump(path, step)
    message = str(error.value)
    assert "\n" not in message
    assert path.name in message
    assert len(message) < 700 + len(str(path))
    return message


def written(tmp_path: Path, *lines: object, name: str = NAME) -> Path:
    path = tmp_path / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", ["12.pt", "global_step_3_training_input.pkl", "x.jsonl", "x.npy"])
def test_a_pickle_is_never_run(tmp_path, protocol, name):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Touches(tmp_path / "ran"), protocol))
    message = refused(path)
    assert not (tmp_path / "ran").exists()
    if name == "12.pt":
        assert "slime" in message
    if name.endswith(".pkl"):
        assert "SkyRL" in message
    if protocol or name != "x.jsonl":
        assert "unpickling runs the code that the file holds" in message


def test_archives_of_pickles_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.jsonl", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Touches(tmp_path / "ran")))
    np.save(tmp_path / "a.npy", np.array([Touches(tmp_path / "ran")]), allow_pickle=True)
    (tmp_path / "a.npy").rename(tmp_path / "array.jsonl")
    for name in ("data.jsonl", "array.jsonl"):
        assert "pickle" in refused(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_slime_s_pickles_is_refused(tmp_path):
    (tmp_path / "3.pt").write_bytes(pickle.dumps(Touches(tmp_path / "ran")))
    with pytest.raises(Unreadable, match="slime"):
        read_dump(tmp_path, 3)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("token_ids", [[5, -6, 7]], "no integer from 0"),
        ("token_ids", [[5, 2**31, 7]], "no integer from 0"),
        ("token_ids", [[5, 10**30, 7]], "no integer from 0"),
        ("token_ids", [[5, True, 7]], "no integer from 0"),
        ("token_ids", [[5, 6.0, 7]], "no integer from 0"),
        ("token_ids", "567", "not a list"),
        ("token_ids", None, "not a list"),
        ("token_loss_mask", [[0, 1]], "2 entries for 3 tokens"),
        ("token_loss_mask", [[0, 1, 2]], "neither 0 nor 1"),
        ("token_loss_mask", [[0, [1], 1]], "neither 0 nor 1"),
        ("token_loss_mask", [[0, float("nan"), 1]], "neither 0 nor 1"),
        ("advantages", [[1.0, 1.0]], "2 entries for 3 tokens"),
        ("advantages", {"a": 1}, "not a list"),
        ("prev_logprobs", [[0.0, "-1", -1.0]], "no number"),
        ("prev_logprobs", [[0.0, 10**400, -1.0]], "too large"),
        ("generation_logprobs", [[0.0, [], -1.0]], "no number"),
        ("generation_logprobs", [[0.0, False, -1.0]], "no number"),
        ("input_lengths", [4], "input_lengths is '4'"),
        ("input_lengths", [-1], "input_lengths is '-1'"),
        ("input_lengths", ["3\n"], "input_lengths is"),
        ("sample_loss_mask", ["1"], "not a number"),
        ("rewards", [[1.0, 2.0]], "not a number"),
        ("rewards", {}, "not a number"),
    ],
)
def test_rows_of_nemo_with_wrong_values(tmp_path, key, value, message):
    assert message in refused(written(tmp_path, NEMO, NEMO | {key: value}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("token_ids", [5, -6, 7], "no integer from 0"),
        ("loss_mask", [0, 1], "2 entries for 3 tokens"),
        ("inference_logprobs", [0.0, "x", 1.0], "no number"),
        ("rewards", 1.0, "not a list"),
        ("losses", [{}, {}], "2 entries for 3 tokens"),
        ("losses", "rl!", "not a list"),
        ("rl_weights", [1, 1], "2 entries"),
        ("env_name", ["e"], "env_name is"),
        ("env_name", {"a\nb": 1}, "env_name is"),
    ],
)
def test_rows_of_prime_rl_with_wrong_values(tmp_path, key, value, message):
    assert message in refused(written(tmp_path, PRIME, PRIME | {key: value}))


def test_missing_keys_are_named(tmp_path):
    for key in ("token_ids", "token_loss_mask", "advantages"):
        row = {name: value for name, value in NEMO.items() if name != key}
        assert f"no {key}" in refused(written(tmp_path, NEMO, row))
    for key in ("token_ids", "loss_mask", "advantages", "trainer_logprobs"):
        row = {name: value for name, value in PRIME.items() if name != key}
        assert key in refused(written(tmp_path, PRIME, row))


@pytest.mark.parametrize(
    "line", ["", "{", DEEP, '{"token_ids": ' + DEEP + "}", "[1]", "\x00\ud7ff"]
)
def test_lines_that_are_no_rows_are_counted(tmp_path, line):
    record = read_dump(written(tmp_path, NEMO, line), None)
    assert len(record) == 1
    assert any("1 of the dump's lines have no JSON object" in x for x in record.header.notes)
    refused(written(tmp_path, line, name="train_data_step2.jsonl"))


def test_rows_without_a_trained_token_are_counted(tmp_path):
    untrained = NEMO | {"token_loss_mask": [[1, 0, 0]]}  # the first token has no log-prob
    record = read_dump(written(tmp_path, NEMO, untrained, untrained), None)
    assert len(record) == 1
    assert any("2 of the dump's lines have no trained token" in x for x in record.header.notes)
    assert "no row with a token in the loss" in refused(written(tmp_path, untrained))
    outside = NEMO | {"sample_loss_mask": [0.0]}
    assert "no row with a token in the loss" in refused(written(tmp_path, outside))


def test_a_dump_without_the_trainer_s_log_probs_is_refused(tmp_path):
    row = NEMO | {"prev_logprobs": [[0.0, 0.0, 0.0]]}
    assert "force_on_policy_ratio" in refused(written(tmp_path, row))


def test_numbers_beyond_float32_become_infinite_without_a_warning(tmp_path):
    row = NEMO | {"prev_logprobs": [[0.0, -1e300, -1.0]], "advantages": [[0, 10**100, 1]]}
    record = read_dump(written(tmp_path, row), None)
    assert np.isneginf(record.updates[0].logp[0])
    assert np.isposinf(record.advantages[0])


def test_names_of_environments_are_text_for_files(tmp_path):
    row = PRIME | {"env_name": "\ud800" + "x" * 1000}
    record = read_dump(written(tmp_path, row), None)
    assert record.header.tasks == ["?" + "x" * 99]


def test_sizes_are_bounded(tmp_path, monkeypatch):
    path = written(tmp_path, NEMO, NEMO, NEMO)
    monkeypatch.setattr(foreign_records, "MAX_ROWS", 2)
    assert "more than 2 rows" in refused(path)
    monkeypatch.setattr(foreign_dumps, "MAX_LINE_BYTES", 50)
    assert "a line of more than 50 bytes" in refused(path)
    monkeypatch.setattr(foreign_dumps, "MAX_FOLDER_ENTRIES", 0)
    with pytest.raises(Unreadable, match="more than 0 files"):
        read_dump(tmp_path, 1)


def test_links_pipes_and_huge_steps_are_refused(tmp_path):
    target = written(tmp_path, NEMO, name="rows.jsonl")
    (tmp_path / NAME).symlink_to(target)
    assert "is a link" in refused(tmp_path / NAME)
    os.mkfifo(tmp_path / "train_data_step2.jsonl")
    assert "no plain file" in refused(tmp_path / "train_data_step2.jsonl")
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "elsewhere", PRIME, name="rank_0.jsonl")
    (tmp_path / "dump").mkdir()
    for name in ("step_1", "token_exports"):
        (tmp_path / "dump" / name).symlink_to(tmp_path / "elsewhere")
    assert "has no dump" in refused(tmp_path / "dump")
    huge = written(tmp_path, NEMO, name="train_data_step99999999.jsonl")
    assert "too large" in refused(huge)


@pytest.mark.parametrize("row", [{}, {"a": 1}, {"token_ids": [1]}, {"x" * 10_000: 1}, {"a\nb": 1}])
def test_unknown_rows_are_refused(tmp_path, row):
    assert "no dump that is known" in refused(written(tmp_path, row))
