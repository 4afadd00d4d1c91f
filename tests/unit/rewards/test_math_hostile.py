"""Answers that try to fool or stall the verifier, rewritings of right answers, and the benchmarks'
own answers.
"""

import json
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from audit.hostile import HOSTILE_RESPONSES, hacks, poisons
from gspo.rewards.math.verifier import MathVerifier
from math_pairs import PAIRS
from math_rewrites import changes, rewrites

DATA = Path(os.environ.get("GSPO_DATA", Path(__file__).parents[4] / "shared" / "data"))
OWN_GSM8K = [  # records in the manner of GSM8K, for where it is absent
    ("A pen costs 2 and a pad 3. Together 2+3=<<2+3=5>>5.\n#### 5", "5"),
    ("He sells 10,000*2=<<10000*2=20000>>20,000.\n#### 20,000", "20,000"),
    ("She owes 3-10=<<3-10=-7>>-7.\n#### -7", "-7"),
]


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(workers=2) as verifier:
        yield verifier


def boxed(items: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(response, gold) of (gold, answer)."""
    return [(rf"\boxed{{{answer}}}", gold) for gold, answer in items]


def lines(*path: str) -> list[dict]:
    file = DATA.joinpath(*path)
    if not file.exists():
        pytest.skip(f"needs {'/'.join(path)} below GSPO_DATA")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def gold_rewrites() -> list[tuple[str, str]]:
    golds = {
        gold for truth, kind, gold, _ in PAIRS if truth == "T" and kind not in ("text", "choice")
    }
    return [(gold, answer) for gold in sorted(golds) for answer in rewrites(gold)]


@pytest.mark.slow
def test_no_hack_is_accepted(verifier):
    tried = list(hacks())
    found = verifier.verify(boxed(tried))
    accepted = [
        pair for pair, verdict in zip(tried, found, strict=True) if verdict.verdict == "correct"
    ]
    assert len(tried) > 250 and accepted == []
    assert Counter(v.verdict for v in found)["timeout"] == 0


def test_hacks_in_the_other_forms():
    for form, lead in (("hash", "#### "), ("answer", "Answer: ")):
        with MathVerifier(form=form) as verifier:
            tried = [
                (gold, answer) for gold, answer in hacks() if gold == "7" and "\n" not in answer
            ]
            found = verifier.verify([(lead + answer, gold) for gold, answer in tried])
            assert [
                pair
                for pair, verdict in zip(tried, found, strict=True)
                if verdict.verdict == "correct"
            ] == []


@pytest.mark.parametrize("form", ["boxed", "hash", "answer"])
def test_hostile_responses_cost_milliseconds(form):
    verifier = MathVerifier(form=form)
    for response in HOSTILE_RESPONSES:
        times = []
        for _ in range(3):  # the fastest: the garbage collector's pauses are not meant
            start = time.process_time()
            (found,) = verifier.verify([(response, "7")])
            times.append(time.process_time() - start)
        assert min(times) < 0.05, (form, response[:40])
        assert found.verdict != "correct" or response.startswith(r"\boxed{7}"), (
            form,
            response[:40],
        )
    assert verifier.worker_pids() == []


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_poisons_in_a_row_leave_a_working_verifier(verifier, count):
    poison = list(poisons(count))
    assert len(set(poison)) == count
    start = time.monotonic()
    slowest = 0.0
    verdicts = Counter()
    for item in boxed(poison):
        begun = time.monotonic()
        (found,) = verifier.verify([item])
        slowest = max(slowest, time.monotonic() - begun)
        verdicts[found.verdict] += 1
    print(
        f"{count} poisons: {time.monotonic() - start:.1f} s, slowest {slowest:.2f} s, {dict(verdicts)}"
    )
    assert verdicts["correct"] == 0 and slowest < 5
    assert verifier.verify([(r"\boxed{7\sqrt{2}}", r"\sqrt{98}")])[0].verdict == "correct"


@pytest.mark.slow
def test_rewritten_golds_are_accepted(verifier):
    pairs = gold_rewrites()
    found = verifier.verify(boxed(pairs))
    missed = [
        pair for pair, verdict in zip(pairs, found, strict=True) if verdict.verdict != "correct"
    ]
    print(f"{len(pairs)} rewritten golds, {len(missed)} missed: {missed}")
    assert len(missed) <= 0.03 * len(pairs)


@pytest.mark.slow
def test_changed_and_swapped_golds_are_not_accepted(verifier):
    golds = sorted({gold for truth, _, gold, _ in PAIRS if truth == "T"})
    changed = [(gold, answer) for gold in golds for answer in changes(gold)]
    found = verifier.verify(boxed(changed))
    accepted = [
        pair for pair, verdict in zip(changed, found, strict=True) if verdict.verdict == "correct"
    ]
    assert len(changed) > 300 and accepted == [(r"\binom{5}{2}", r"\binom{5}{3}")]  # both are 10


def test_own_records_in_the_manner_of_gsm8k():
    check_gsm8k(OWN_GSM8K)


def test_gsm8k_solutions():
    rows = lines("gsm8k", "train.jsonl") + lines("gsm8k", "test.jsonl")
    assert len(rows) == 8792
    start = time.monotonic()
    check_gsm8k([(row["answer"], row["answer"].rpartition("#### ")[2]) for row in rows])
    assert time.monotonic() - start < 40


def check_gsm8k(records: list[tuple[str, str]]) -> None:
    """Right by the own gold, wrong by the neighbour's (unless equal) and by one more."""
    verifier = MathVerifier(form="hash")
    numbers = [int(gold.replace(",", "")) for _, gold in records]
    assert {v.verdict for v in verifier.verify(records)} == {"correct"}
    assert {
        v.verdict
        for v in verifier.verify(
            [(s, str(n + 1)) for (s, _), n in zip(records, numbers, strict=True)]
        )
    } == {"wrong"}
    neighbours = numbers[1:] + numbers[:1]
    found = verifier.verify(
        [(solution, str(n)) for (solution, _), n in zip(records, neighbours, strict=True)]
    )
    equal = [
        "correct" if one == other else "wrong"
        for one, other in zip(numbers, neighbours, strict=True)
    ]
    assert [verdict.verdict for verdict in found] == equal
    assert verifier.worker_pids() == []


def math500() -> tuple[list[str], list[str]]:
    parts = [
        row["reference_solution"].rpartition("#### ") for row in lines("math500", "math500.jsonl")
    ]
    return [part[0] for part in parts], [part[2] for part in parts]


@pytest.mark.slow
def test_math500_reference_solutions(verifier):
    solutions, golds = math500()
    found = verifier.verify(list(zip(solutions, golds, strict=True)))
    assert sum(verdict.verdict == "correct" for verdict in found) >= 0.97 * len(golds)
    neighbours = golds[1:] + golds[:1]
    found = verifier.verify(list(zip(solutions, neighbours, strict=True)))
    accepted = {
        pair
        for pair, v in zip(zip(golds, neighbours, strict=True), found, strict=True)
        if v.verdict == "correct"
    }
    assert accepted == {("5", "x=5"), ("7", "7"), ("3", "3")}  # neighbours with equal golds


@pytest.mark.daily
def test_math500_golds_agree_only_with_themselves(verifier):
    _, golds = math500()
    golds = sorted({gold for gold in golds if not re.fullmatch(r"-?\d+", gold)})
    pairs = [(gold, answer) for gold in golds for answer in golds if gold != answer]
    found = verifier.verify(boxed(pairs))
    accepted = {
        pair for pair, verdict in zip(pairs, found, strict=True) if verdict.verdict == "correct"
    }
    same = {(r"\frac{1}{4}", r"\frac14"), ("1,-2", "-2,1"), (r"2\sqrt{5}", r"2 \sqrt{5}")}
    assert accepted == same | {(one, other) for other, one in same}
    assert "timeout" not in {verdict.verdict for verdict in found}


@pytest.mark.slow
def test_math500_rewritten(verifier):
    _, golds = math500()
    pairs = [(gold, answer) for gold in golds for answer in rewrites(gold)]
    found = verifier.verify(boxed(pairs))
    missed = [
        pair for pair, verdict in zip(pairs, found, strict=True) if verdict.verdict != "correct"
    ]
    print(f"{len(pairs)} rewritten golds, {len(missed)} missed: {missed}")
    assert len(missed) <= 0.03 * len(pairs)
    changed = [(gold, answer) for gold in golds for answer in changes(gold)]
    found = verifier.verify(boxed(changed))
    assert [pair for pair, v in zip(changed, found, strict=True) if v.verdict == "correct"] == []


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23"])
def test_competition_golds(name):
    verifier = MathVerifier()
    golds = [str(row["answer"]) for row in lines(name, "test.jsonl")]
    numbers = [int(float(gold)) for gold in golds]
    for answers, expected in (
        (golds, "correct"),
        (numbers, "correct"),
        ([f"{n:03d}" for n in numbers], "correct"),
        ([n + 1 for n in numbers], "wrong"),
        ([-n for n in numbers], "wrong"),
    ):
        found = verifier.verify(
            [(rf"so \boxed{{{a}}}.", g) for a, g in zip(answers, golds, strict=True)]
        )
        assert {verdict.verdict for verdict in found} == {expected}
