"""Workers for real: formulas judged, time-outs, killed and stopped workers, threads, forks, copies,
the cache.
"""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gspo.rewards.math.verifier import MathVerdict, MathVerifier
from math_pairs import PAIRS
from processes import alive, gone

ROOT = Path(__file__).parents[3]
# a gold is trusted: it reaches the worker, which computes it without end
ENDLESS = "10^{10^{9^9}}+x"
FORMULA, GOLD = r"\boxed{2\sqrt{2}}", r"\sqrt{8}"


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(workers=2) as verifier:
        yield verifier


def verdicts(verifier: MathVerifier, *items: tuple[str, str]) -> list[str]:
    return [verdict.verdict for verdict in verifier.verify(list(items))]


def test_hand_made_pairs(verifier):
    found = verifier.verify([(response, gold) for _, _, gold, response in PAIRS])
    wrong = [
        (pair, verdict)
        for pair, verdict in zip(PAIRS, found, strict=True)
        if _disagrees(pair, verdict)
    ]
    false_positives = [pair for pair, verdict in wrong if verdict.verdict == "correct"]
    assert false_positives == []
    # no box, no answer: that one is meant
    assert [pair[1:] for pair, _ in wrong] == [("plain", "42", "The answer is 42.")]


def _disagrees(pair: tuple[str, str, str, str], verdict: MathVerdict) -> bool:
    return (verdict.verdict == "correct") != (pair[0] == "T")


def test_answers_come_in_order_and_numbers_need_no_worker():
    with MathVerifier() as verifier:
        items = [(rf"\boxed{{{i}}}", str(i % 7)) for i in range(20)] + [
            ("", "1"),
            (r"\boxed{1", "1"),
        ]
        expected = ["correct" if i == i % 7 else "wrong" for i in range(20)] + [
            "no-answer",
            "malformed",
        ]
        assert verdicts(verifier, *items) == expected
        assert verifier.worker_pids() == []
        assert verdicts(verifier, (FORMULA, GOLD)) == ["correct"]
        assert len(verifier.worker_pids()) == 1
        assert verifier.verify([]) == []


def test_the_answer_is_reported_in_its_normal_form(verifier):
    found = verifier.verify(
        [(r"\boxed{007.50\text{ cm}}", "1"), (r"\boxed{2\sqrt{2}}", GOLD), ("", "1")]
    )
    assert [verdict.answer for verdict in found] == ["15/2", r"2\sqrt{2}", ""]


@pytest.mark.slow
def test_a_long_computation_ends_in_time_and_is_remembered():
    with MathVerifier(seconds=2.0) as verifier:
        assert verdicts(verifier, (FORMULA, GOLD)) == ["correct"]
        (pid,) = verifier.worker_pids()
        start = time.monotonic()
        assert verdicts(verifier, (r"\boxed{x}", ENDLESS), (FORMULA, GOLD)) == [
            "timeout",
            "correct",
        ]
        assert time.monotonic() - start < 10
        assert gone(pid)
        start = time.monotonic()
        assert verdicts(verifier, *[(r"\boxed{x}", ENDLESS)] * 100) == ["timeout"] * 100
        assert time.monotonic() - start < 0.5


@pytest.mark.slow
def test_time_outs_count_cpu_time(verifier):
    """A worker that waits for a second and a half of its 0.8 seconds is not blamed for it."""
    with MathVerifier(seconds=2.0) as verifier:
        verdicts(verifier, (FORMULA, GOLD))
        (pid,) = verifier.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        assert verdicts(verifier, (r"\boxed{3\sqrt{2}}", r"\sqrt{18}")) == ["correct"]
        assert verifier.worker_pids() == [pid]


@pytest.mark.slow
def test_memory_is_bounded():
    with MathVerifier(memory_mb=256, seconds=20.0) as verifier:
        assert verdicts(verifier, (r"\boxed{x}", "x+" + "(9^{99999999})!"), (FORMULA, GOLD)) == [
            "timeout",
            "correct",
        ]


@pytest.mark.slow
def test_a_killed_or_stopped_worker_is_replaced_and_no_answer_is_lost():
    with MathVerifier(seconds=0.5) as verifier:
        for number, how in enumerate((signal.SIGKILL, signal.SIGSTOP), start=2):
            verdicts(verifier, (FORMULA, GOLD))
            (pid,) = verifier.worker_pids() or [0]
            if not pid:
                verdicts(verifier, (r"\boxed{9\sqrt{2}}", r"\sqrt{162}"))
                (pid,) = verifier.worker_pids()
            os.kill(pid, how)
            gold = rf"\sqrt{{{number * number * 5}}}"
            assert verdicts(verifier, (rf"\boxed{{{number}\sqrt{{5}}}}", gold)) == ["correct"]
            assert gone(pid) and verifier.worker_pids() != [pid]


def test_threads_share_a_verifier(verifier):
    results = {}

    def work(number: int) -> None:
        gold = rf"\sqrt{{{3 * number * number}}}"
        results[number] = verdicts(
            verifier, (rf"\boxed{{{number}\sqrt{{3}}}}", gold), (r"\boxed{\sqrt{3}}", gold)
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: ["correct", "wrong"] for number in range(2, 10)}
    # workers outlive those threads
    assert verdicts(verifier, (r"\boxed{10\sqrt{3}}", r"\sqrt{300}")) == ["correct"]


def _in_a_copy(verifier: MathVerifier, queue) -> None:
    queue.put((verdicts(verifier, (r"\boxed{5\sqrt{2}}", r"\sqrt{50}")), verifier.worker_pids()))
    verifier.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_copies_in_other_processes_have_workers_of_their_own(verifier, method):
    verdicts(verifier, (FORMULA, GOLD))
    mine = verifier.worker_pids()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_in_a_copy, args=(verifier, queue))
    process.start()
    found, theirs = queue.get(timeout=30)
    process.join()
    assert found == ["correct"] and theirs and not set(theirs) & set(mine)
    assert verdicts(verifier, (r"\boxed{6\sqrt{2}}", r"\sqrt{72}")) == ["correct"]


def test_pickling_keeps_the_settings(verifier):
    copy = pickle.loads(
        pickle.dumps(MathVerifier(form="hash", workers=3, seconds=1.5, memory_mb=512, cache=10))
    )
    assert (copy.form, copy.workers, copy.seconds, copy.memory_mb, copy.cache) == (
        "hash",
        3,
        1.5,
        512,
        10,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_killed_parent():
    program = (
        "import time\nfrom gspo.rewards.math.verifier import MathVerifier\nv = MathVerifier()\n"
        "v.verify([(r'\\boxed{2\\sqrt{2}}', r'\\sqrt{8}')])\nprint(*v.worker_pids(), flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


@pytest.mark.slow
def test_the_cache_is_bounded_and_repeats_are_asked_once():
    with MathVerifier(cache=3) as verifier:
        items = [(rf"\boxed{{{n}\sqrt{{7}}}}", rf"\sqrt{{{7 * n * n}}}") for n in range(2, 9)]
        assert verdicts(verifier, *items, *items) == ["correct"] * 14
        verdicts(verifier, (FORMULA, GOLD))
        assert len(verifier._answers) <= 3
        assert verdicts(verifier, *items[:2]) == ["correct"] * 2


@pytest.mark.slow
def test_an_answer_of_many_formulas_needs_no_cache():
    with MathVerifier(cache=1) as verifier:
        gold = r"\begin{pmatrix}\sqrt{8}&\sqrt{12}\\\sqrt{18}&\sqrt{20}\end{pmatrix}"
        answer = r"\begin{bmatrix}2\sqrt{2}&2\sqrt{3}\\3\sqrt{2}&2\sqrt{5}\end{bmatrix}"
        other = answer.replace("5", "7")
        assert verdicts(
            verifier, (rf"\boxed{{{answer}}}", gold), (rf"\boxed{{{other}}}", gold)
        ) == ["correct", "wrong"]
        assert verdicts(verifier, (r"\boxed{3\sqrt{2},2\sqrt{3}}", r"\sqrt{12},\sqrt{18}")) == [
            "correct"
        ]


@pytest.mark.slow
def test_an_interrupted_question_does_not_answer_the_next():
    with MathVerifier(seconds=5.0) as verifier:
        verdicts(verifier, (FORMULA, GOLD))
        # a shell's background jobs ignore the signal
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                verdicts(verifier, (r"\boxed{x}", ENDLESS))
        finally:
            signal.signal(signal.SIGINT, before)
        assert verifier.worker_pids() == []
        assert verdicts(verifier, (r"\boxed{8\sqrt{2}}", r"\sqrt{128}")) == ["correct"]


def test_an_unreadable_gold_is_a_verdict_of_its_own_item(verifier):
    unreadable = ["", " ", "$$", r"\boxed{}", "."]
    items = [
        (r"\boxed{7}", "7"),
        *((r"\boxed{7}", gold) for gold in unreadable),
        ("", ""),
        (FORMULA, GOLD),
    ]
    assert verdicts(verifier, *items) == ["correct", *["unreadable-gold"] * 6, "correct"]


def test_bad_settings_are_refused():
    for settings in (
        {"form": "xml"},
        {"workers": 0},
        {"seconds": 0},
        {"memory_mb": 1},
        {"cache": 0},
    ):
        (key,) = settings
        with pytest.raises(ValueError, match=f"{key}="):
            MathVerifier(**settings)


def test_forms():
    cases = {"boxed": r"so \boxed{7}", "hash": "so\n#### 7", "answer": "so\nAnswer: 7"}
    for form in cases:
        for other, response in cases.items():
            expected = "correct" if other == form else "no-answer"
            assert verdicts(MathVerifier(form=form), (response, "7")) == [expected]
