"""The last rows of a metrics file without those before them; and files of one's own of any size."""

import json
import os

import pytest

from gspo.io import ownership, rows, untrusted
from gspo.io.rows import rows_and_damage
from gspo.io.untrusted import Unreadable, last_rows, read_bounded_rows


def row(step: int, **values) -> str:
    return json.dumps({"step": step, "reward/mean": step / 7, **values}) + "\n"


ROWS = "".join(row(step) for step in range(1000))
CASES = {
    "empty": "",
    "one": row(1),
    "many": ROWS,
    "cut off": ROWS + '{"step": 1000, "rew',
    "damaged at the end": ROWS + "x\n" * 15 + row(1000) + "[1]\n",
    "no end of line": ROWS[:-1],
    "blank lines": ROWS.replace("\n", "\n\n"),
    "long lines": "".join(row(step, **{f"m/{i}": 0.5 for i in range(900)}) for step in range(30)),
    "not finite": row(1)
    + '{"step": 2, "a": NaN, "b": Infinity, "c": 1e300, "d": true, "e": "x", "f": null}\n',
    "trees": row(1)
    + '{"step": 2, "a": {"b": 1}, "c": [1]}\n'
    + '{"step": 3, "a": '
    + "[" * 99
    + "]" * 99
    + "}\n",
    "no steps": row(1)
    + '{"a": 1}\n{"step": -1}\n{"step": 1.5}\n{"step": true}\n{"step": 123456789012345678901234}\n',
    "half characters": row(1) + '{"step": 2, "\\ud800": 1}\n',
}


@pytest.mark.parametrize("block", [64, 1000, 64 << 10])
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_whole_file(tmp_path, monkeypatch, name, block):
    monkeypatch.setattr(untrusted, "FIRST_TAIL_BYTES", block)
    path = tmp_path / "metrics.jsonl"
    path.write_text(CASES[name])
    whole = read_bounded_rows(path)[0]
    for count in (1, 3, 10):
        assert last_rows(path, count) == whole[-count:]


def test_little_of_a_large_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text(ROWS * 100)
    monkeypatch.setattr(untrusted, "MAX_ROWS_FILE_BYTES", 1000)
    assert [r["step"] for r in last_rows(path, 3)] == [997, 998, 999]
    with pytest.raises(Unreadable, match="is larger than 1,000 bytes"):
        read_bounded_rows(path)


def test_a_link_is_not_read(tmp_path):
    (tmp_path / "there").write_text(ROWS)
    os.symlink(tmp_path / "there", tmp_path / "metrics.jsonl")
    with pytest.raises(Unreadable, match="is a link to"):
        last_rows(tmp_path / "metrics.jsonl", 3)


def test_neither_many_lines_nor_a_long_one_fill_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1) + "{}\n" * 100_000 + row(2))
    assert [r["step"] for r in last_rows(path, 1)] == [2]
    monkeypatch.setattr(untrusted, "MAX_TAIL_BYTES", 1000)
    monkeypatch.setattr(untrusted, "FIRST_TAIL_BYTES", 500)
    assert [r["step"] for r in last_rows(path, 3)] == [2], "the rest is not looked for"
    monkeypatch.setattr(untrusted, "MAX_LINE_BYTES", 50)
    path.write_text(row(1) + json.dumps({"step": 2, "a": "x" * 60}) + "\n")
    assert [r["step"] for r in last_rows(path, 3)] == [1]


def test_rows_of_ones_own_run_have_wider_bounds(tmp_path, monkeypatch):
    """A run of 60,000 steps has more bytes than are read of a stranger's."""
    (tmp_path / "metrics.jsonl").write_text(ROWS)
    ownership.write_signed(tmp_path / "settings.yaml", "seed: 1\n")
    for bound in ("MAX_ROWS_FILE_BYTES", "MAX_NUMBERS", "MAX_CELLS"):
        monkeypatch.setattr(untrusted, bound, 2000)
    assert len(rows_and_damage(tmp_path / "metrics.jsonl")[0]) == 1000
    (tmp_path / "signed.json").unlink()
    with pytest.raises(Unreadable, match="is larger than 2,000 bytes"):
        rows.read_rows(tmp_path / "metrics.jsonl")
