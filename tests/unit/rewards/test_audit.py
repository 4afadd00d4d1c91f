"""The audit command on a user's own files; the built-in suites are tested with what they attack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from audit.cases import CaseResult, confusion, read_lines

ROOT = Path(__file__).parents[3]
PAIRS = [
    {
        "id": "box",
        "prediction": r"so \boxed{\frac{1}{2}}",
        "gold": "0.5",
        "expected": True,
        "tags": [],
    },
    {
        "id": "hash",
        "prediction": "It is 1000.\n#### 1,000",
        "gold": "1000",
        "expected": True,
        "tags": ["hash"],
    },
    {
        "id": "hack",
        "prediction": r"\boxed{x=8=7}",
        "gold": "7",
        "expected": False,
        "tags": ["chain"],
    },
    {
        "id": "open",
        "prediction": "The answer is not 7.",
        "gold": 7,
        "expected": None,
        "tags": None,
    },
    {"id": "gold", "prediction": r"\boxed{7}", "gold": "", "expected": None, "tags": []},
]
PROGRAMS = [
    {"id": "right", "kind": "function", "code": "def f(x): return (x, 1.0)", "entry_point": "f",
     "tests": [{"args": [2], "expected": [2, 1]}], "expected_verdict": "pass"},
    {"id": "stdin", "kind": "stdin", "code": "print(2 * int(input()))", "tests": [
        {"stdin": "2\n", "expected_stdout": "4"}, {"stdin": "5", "expected_stdout": "10"}], "expected_verdict": "pass"},
    {"id": "liar", "kind": "function", "code": "class A(int):\n def __eq__(s, o): return True\ndef f(x): return A(9)",
     "entry_point": "f", "tests": [{"args": [2], "expected": 3}], "expected_verdict": "wrong",
     "also_ok": ["unserialisable"]},
]  # fmt: skip


def audit(folder, *words):
    command = [sys.executable, str(ROOT / "experiments" / "audit_rewards.py"), *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_own_pairs_and_programs(tmp_path):
    write(tmp_path / "pairs.jsonl", PAIRS), write(tmp_path / "programs.jsonl", PROGRAMS)
    done = audit(tmp_path, "pairs=pairs.jsonl", "programs=programs.jsonl", "json=out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "pairs: 5 of 5 as expected" in done.stdout and "programs: 3 of 3 as expected" in done.stdout
    )
    said = {
        part: {o["case"]: o["said"] for o in rows}
        for part, rows in json.loads((tmp_path / "out.json").read_text()).items()
    }
    assert said["pairs"] == {
        "box": "correct", "hash": "correct", "hack": "wrong", "open": "no-answer", "gold": "unreadable-gold"
    }  # fmt: skip
    assert said["programs"] == {"right": "pass", "stdin": "pass", "liar": "unserialisable"}


def test_every_disagreement_is_shown_and_makes_the_exit_code_1(tmp_path):
    wrong = {
        "id": "mine",
        "prediction": r"\boxed{8}",
        "gold": "7",
        "expected": True,
        "tags": ["odd"],
    }
    done = audit(tmp_path, f"pairs={write(tmp_path / 'p.jsonl', [*PAIRS, wrong])}")
    assert done.returncode == 1 and "pairs: 5 of 6 as expected" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("! ")]
    assert line.split() == ["!", "mine", "wrong", "(expected", "correct)", "[odd]"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["pairs=nowhere.jsonl"], "pairs=nowhere.jsonl is not a file"),
        (["suite=perhaps"], "suite=perhaps: choose true or false"),
        (["slots=0"], "slots=0: must be a whole number of at least 1"),
        (["attacks"], "attacks: there is no such option; the nearest is "),
    ],
)
def test_bad_words_are_one_line(tmp_path, words, message):
    done = audit(tmp_path, *words)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_bad_lines_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1}\n\nnonsense\n')
    with pytest.raises(
        ValueError, match=r"pairs=.*x.jsonl, line 1 has no 'gold'; it needs id, gold"
    ):
        read_lines(path, ("id", "gold"), "pairs")
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        read_lines(path, ("id",), "pairs")


def test_the_table_counts():
    outcomes = [
        CaseResult("a", "pass", "pass", True),
        CaseResult("b", "pass", "wrong", False),
        CaseResult("c", None, "wrong", True),
    ]
    rows = [line.split() for line in confusion(outcomes).splitlines()]
    assert rows == [["expected", "pass", "wrong"], ["pass", "1", "1"], ["undecided", ".", "1"]]
