r"""A user's own cases for the verifiers: pairs of answer and gold, and programs, each with the
verdict it should get.

pairs     one JSON object per line: {"id", "prediction", "gold", "expected": true | false | null,
          "tags": [...]} tag "hash": the answer stands after GSM8K's ####, else in the last
          \boxed{}; null: no decided truth
programs  {"id", "kind": "function" | "stdin", "code", "entry_point", "tests": [{"args", "expected"}
          or {"stdin", "expected_stdout"}], "expected_verdict", "also_ok": [...]}
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.io.tables import text_table
from gspo.rewards.code.grader import CodeGrader, FunctionCase, StdinCase, Submission
from gspo.rewards.math.verifier import MathVerifier


@dataclass(frozen=True)
class CaseResult:
    """One case: the verdict that was expected (None: undecided), the verdict that was given, and
    whether they agree.
    """

    case: str
    expected: str | None
    said: str
    agrees: bool
    tags: tuple[str, ...] = ()


def read_lines(path: Path, needed: tuple[str, ...], key: str) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file. Raises ValueError naming the file, the line and what is
    wrong with it.
    """
    if not path.is_file():
        raise ValueError(f"{key}={path} is not a file")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{key}={path}, line {number} is not JSON: {error}") from None
        missing = [name for name in needed if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(
                f"{key}={path}, line {number} has no {missing[0]!r}; it needs {', '.join(needed)}"
            )
        rows.append(row)
    return rows


EXPECTED = {True: "correct", False: "not correct", None: None}


def audit_pairs(path: Path, verifiers: dict[str, MathVerifier]) -> list[CaseResult]:
    """Judge every pair. `verifiers` has one verifier for "hash" and one for "boxed"."""
    rows = read_lines(path, ("id", "prediction", "gold", "expected"), "pairs")
    for row in rows:
        if row["expected"] not in (True, False, None):
            raise ValueError(
                f"pairs={path}, id {row['id']!r}: expected={row['expected']!r} must be true, false "
                "or null"
            )
    verdicts = [""] * len(rows)
    for form, verifier in verifiers.items():
        chosen = [number for number, row in enumerate(rows) if form_of(row) == form]
        pairs = [(str(rows[n]["prediction"]), str(rows[n]["gold"])) for n in chosen]
        for number, judgement in zip(chosen, verifier.verify(pairs), strict=True):
            verdicts[number] = judgement.verdict
    results = []
    for row, verdict in zip(rows, verdicts, strict=True):
        expected = EXPECTED[row["expected"]]
        agrees = expected is None or (verdict == "correct") == (expected == "correct")
        results.append(CaseResult(str(row["id"]), expected, verdict, agrees, tags_of(row)))
    return results


def tags_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row.get("tags") or ())


def form_of(row: dict[str, Any]) -> str:
    return "hash" if "hash" in tags_of(row) else "boxed"


def audit_programs(path: Path, grader: CodeGrader) -> list[CaseResult]:
    """Run every program on its tests."""
    rows = read_lines(path, ("id", "kind", "code", "tests", "expected_verdict"), "programs")
    grades = grader.grade([_submission(row, path) for row in rows])
    outcomes = []
    for row, grade in zip(rows, grades, strict=True):
        expected = row["expected_verdict"]
        agrees = expected is None or grade.verdict in (expected, *row.get("also_ok", ()))
        outcomes.append(CaseResult(str(row["id"]), expected, grade.verdict, agrees, tags_of(row)))
    return outcomes


def _submission(row: dict[str, Any], path: Path) -> Submission:
    where = f"programs={path}, id {row['id']!r}"
    if row["kind"] not in ("function", "stdin"):
        raise ValueError(f"{where}: kind={row['kind']!r} must be function or stdin")
    if row["kind"] == "function" and not row.get("entry_point"):
        raise ValueError(f"{where}: a function needs its entry_point")
    try:
        if row["kind"] == "stdin":
            return Submission(
                row["code"],
                "",
                tuple(StdinCase(t["stdin"], t["expected_stdout"]) for t in row["tests"]),
            )
        cases = tuple(FunctionCase(tuple(t["args"]), t["expected"]) for t in row["tests"])
    except KeyError as error:
        raise ValueError(f"{where}: a test of kind {row['kind']} has no {error}") from None
    return Submission(row["code"], row["entry_point"], cases)


def confusion(outcomes: list[CaseResult]) -> str:
    """Return a table of counts, with the expected verdicts as rows and the given ones as columns."""
    counts = Counter((outcome.expected or "undecided", outcome.said) for outcome in outcomes)
    columns = sorted({column for _, column in counts})
    rows = [["expected", *columns]]
    for row in sorted({row for row, _ in counts}):
        rows.append([row, *(str(counts[row, column] or ".") for column in columns)])
    return "\n".join(text_table(rows, right_aligned=True))


def disagreements(outcomes: list[CaseResult]) -> list[CaseResult]:
    return [outcome for outcome in outcomes if not outcome.agrees]
