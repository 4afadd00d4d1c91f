"""The paired difference and its split into format and correctness: numbers worked by hand,
invariances, oracles.
"""

import itertools
import math

import numpy as np
import pytest

from gspo.data.problems import Problem
from gspo.data.samples import NO_ANSWER
from gspo.evaluation.estimates import mean_difference
from gspo.evaluation.paired import MAX_SUM, compare, in_steps, problem_means, split
from gspo.statistics import sign_flip_p, sign_flip_p_of_integers
from gspo.tasks.benchmarks.math_sets import AIME24
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.tasks.testbed.function_writing import FunctionWriting


def group(*responses: str) -> list[dict]:
    """Rows of responses: "correct", or another verdict, which earns nothing; "ungraded" has no
    reward.
    """
    rewards = {"correct": 1.0, "ungraded": None}
    rows = []
    for verdict in responses:
        finish_reason = "length" if verdict == "truncated" else "stop"
        reward = rewards.get(verdict, 0.0)
        rows.append({"reward": reward, "verdict": verdict, "finish_reason": finish_reason})
    return rows


BASE = [group("correct", "no-answer"), group("wrong", "truncated")]
TRAINED = [group("correct", "correct"), group("correct", "wrong")]


def test_numbers_worked_by_hand():
    """Base: accuracy (1/2 + 0)/2 = 1/4, found (1/2 + 1/2)/2 = 1/2, so c = 1/2. Trained: 3/4 = 1 x
    3/4. Format gives (1 - 1/2)(1/2 + 3/4)/2 = 5/16, correctness (3/4 - 1/2)(1/2 + 1)/2 = 3/16,
    together 1/2."""
    result = compare(BASE, TRAINED)
    assert result["problems"] == 2 and result["problems_left_out"] == 0
    assert result["accuracy"] == [0.25, 0.75] and result["found"] == [0.5, 1.0]
    assert result["right_of_found"] == [0.5, 0.75] and result["truncated"] == [0.25, 0.0]
    assert result["gain"] == {"value": 0.5, "interval_95": [0.5, 0.5], "p": 0.5}, (
        "both differences are 1/2"
    )
    assert result["format"]["value"] == 5 / 16 and result["correctness"]["value"] == 3 / 16


def test_a_response_that_was_cut_off_counts_as_cut_off_whatever_its_verdict():
    """With reward.truncated=null it is graded like another."""
    graded = [{"reward": 0.0, "verdict": "wrong", "finish_reason": "length"}]
    result = compare([group("correct")], [graded])
    assert result["truncated"] == [0.0, 1.0] and result["found"] == [1.0, 1.0]


def test_the_p_of_few_problems_is_exact_for_any_rewards():
    rng = np.random.default_rng(3)
    base, trained = ([[row(r)] for r in rng.uniform(size=7)] for _ in range(2))
    differences = [t[0]["reward"] - b[0]["reward"] for b, t in zip(base, trained, strict=True)]
    signs = itertools.product((1, -1), repeat=7)
    extreme = sum(abs(np.dot(s, differences)) >= abs(sum(differences)) - 1e-9 for s in signs)
    assert compare(base, trained)["gain"]["p"] == extreme / 2**7


def row(reward: float) -> dict:
    return {"reward": float(reward), "verdict": "partial", "finish_reason": "stop"}


def random_groups(
    seed: int, problems: int, samples: int, chances: tuple[float, ...]
) -> list[list[dict]]:
    verdicts = ("correct", "wrong", "no-answer", "truncated", "ungraded")
    rng = np.random.default_rng(seed)
    return [group(*rng.choice(verdicts, samples, p=chances)) for _ in range(problems)]


def pair(problems: int = 60) -> tuple[list, list]:
    return (
        random_groups(1, problems, 4, (0.3, 0.3, 0.2, 0.15, 0.05)),
        random_groups(2, problems, 6, (0.5, 0.3, 0.1, 0.05, 0.05)),
    )


def test_the_parts_are_the_gain_and_the_factors_are_the_accuracy():
    result = compare(*pair())
    assert result["format"]["value"] + result["correctness"]["value"] == pytest.approx(
        result["gain"]["value"]
    )
    for accuracy, found, right in zip(
        result["accuracy"], result["found"], result["right_of_found"], strict=True
    ):
        assert accuracy == pytest.approx(found * right)
    assert result["gain"]["value"] == pytest.approx(result["accuracy"][1] - result["accuracy"][0])
    for part in ("gain", "format", "correctness"):
        low, high = result[part]["interval_95"]
        assert low < result[part]["value"] < high


def test_a_policy_against_itself_gains_nothing():
    base, _ = pair()
    result = compare(base, base)
    assert result["gain"] == {"value": 0.0, "interval_95": [0.0, 0.0], "p": 1.0}
    for part in ("format", "correctness"):
        assert result[part] == {"value": 0.0, "interval_95": [0.0, 0.0]}


def test_the_other_way_round_signs_flip():
    there, back = compare(*pair()), compare(*pair()[::-1])
    assert there["gain"]["p"] == back["gain"]["p"]
    for part in ("gain", "format", "correctness"):
        assert back[part]["value"] == -there[part]["value"] != 0
        assert back[part]["interval_95"] == pytest.approx(
            [-end for end in reversed(there[part]["interval_95"])]
        )


def test_what_changes_one_factor_alone_is_that_part():
    answers = [group("correct", "wrong"), group("wrong", "wrong"), group("correct", "correct")]
    fewer = [group("correct", "wrong", "no-answer", "no-answer") for _ in answers]
    more = [group("correct", "wrong", "correct", "wrong") for _ in answers]
    result = compare(fewer, more)
    assert (
        result["format"]["value"] == pytest.approx(result["gain"]["value"])
        and result["gain"]["value"] == 0.25
    )
    better = [group("correct", "correct") for _ in answers]
    result = compare(answers, better)
    assert result["format"] == {"value": 0.0, "interval_95": [0.0, 0.0]}
    assert result["correctness"]["value"] == pytest.approx(0.5)


def test_a_policy_without_any_answer_gains_by_format_alone():
    silent, speaking = [group("no-answer"), group("truncated")], [group("correct"), group("wrong")]
    result = compare(silent, speaking)
    assert result["right_of_found"][1] == 0.5 and math.isnan(result["right_of_found"][0])
    assert (
        result["format"]["value"] == 0.5 == result["gain"]["value"]
        and result["correctness"]["value"] == 0
    )
    assert compare(silent, silent)["format"]["value"] == 0
    parts = split(
        np.array([0.0, 0.2]), np.array([0.0, 0.4]), np.array([0.0, 0.3]), np.array([0.0, 0.6])
    )
    assert np.allclose(parts, [[0, 0.1], [0, 0.0]])


def test_problems_without_a_grade_are_left_out_on_both_sides():
    base, trained = [*BASE, group("ungraded", "ungraded")], [*TRAINED, group("correct", "correct")]
    expected = compare(BASE, TRAINED) | {"problems_left_out": 1}
    assert compare(base, trained) == expected
    assert compare([group("ungraded")], [group("correct")]) == {
        "problems": 0,
        "problems_left_out": 1,
    }
    partly = [group("correct", "no-answer", "ungraded"), BASE[1]]
    assert compare(partly, TRAINED) == compare(BASE, TRAINED), (
        "an ungraded response is in no denominator"
    )


def test_one_problem_has_no_interval():
    result = compare(BASE[:1], TRAINED[:1])
    assert result["gain"]["value"] == 0.5 and result["gain"]["p"] == 1.0
    assert all(
        math.isnan(end) for part in ("gain", "format") for end in result[part]["interval_95"]
    )


def test_with_all_answers_found_the_bootstrap_agrees_with_students_t():
    base = random_groups(3, 300, 4, (0.4, 0.6, 0, 0, 0))
    trained = random_groups(4, 300, 4, (0.5, 0.5, 0, 0, 0))
    result = compare(base, trained)
    assert result["correctness"]["interval_95"] == pytest.approx(
        result["gain"]["interval_95"], abs=0.006
    )
    assert result["format"]["interval_95"] == [0.0, 0.0]


def test_what_earned_something_had_an_answer():
    """A reward function of one's own may give part of the reward to a response that it calls
    malformed.
    """
    rows = [row(reward) | {"verdict": "malformed"} for reward in (0.5, 0.0)]
    assert problem_means([rows]).found_P.tolist() == [0.5]


# -------------------------------------------------------------------------------------------------------------
# p


def test_the_exact_p_is_the_share_of_all_patterns():
    rng = np.random.default_rng(0)
    for problems in range(1, 11):
        d = rng.integers(-4, 6, problems)
        sums = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=problems)]
        expected = np.mean([total >= abs(d.sum()) for total in sums])
        assert sign_flip_p_of_integers(d) == pytest.approx(expected), d
        assert sign_flip_p(d) == pytest.approx(expected), "by halves, as the figures compute it"
    assert (
        sign_flip_p_of_integers(np.array([3] * 6)) == 2 / 64
        and sign_flip_p_of_integers(np.zeros(5, int)) == 1.0
    )


def test_differences_need_not_be_whole_numbers():
    assert sign_flip_p(np.array([0.154, 0.154, 0.154])) == 0.25
    assert sign_flip_p(np.array([0.154, -0.2, 0.0, 0.3])) == 0.75, "0 changes nothing"
    assert sign_flip_p(np.array([0.1, 0.2, -0.3])) == 1.0, "the sum is 0, but for rounding"
    assert sign_flip_p(np.array([2.0, -1.0])) == sign_flip_p(np.array([2, -1]))
    assert math.isnan(sign_flip_p(np.array([0.5, math.nan])))
    rng = np.random.default_rng(2)
    for problems in range(1, 11):
        d = rng.choice([rng.normal(0.3, 1, problems), rng.integers(-9, 9, problems) / 10])
        sums = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=problems)]
        expected = np.mean([total >= abs(d.sum()) - 1e-9 for total in sums])
        assert sign_flip_p(d) == pytest.approx(expected), d


def test_of_many_differences_the_p_comes_from_random_patterns():
    d = np.random.default_rng(4).integers(-20, 30, 100)
    assert sign_flip_p(d / 7) == pytest.approx(sign_flip_p_of_integers(d), abs=0.01)


def test_fractional_differences_equal_whole_ones_in_another_unit():
    d = np.random.default_rng(3).integers(-20, 30, 30)
    assert sign_flip_p(d / 7) == pytest.approx(sign_flip_p_of_integers(d), abs=1e-12)


def test_many_problems_take_no_patterns():
    rng = np.random.default_rng(1)
    d = rng.integers(-8, 9, 2000)
    normal = math.erfc(abs(d.sum()) / math.sqrt(2 * (d**2).sum()))
    assert sign_flip_p_of_integers(d) == pytest.approx(normal, abs=0.005)
    assert sign_flip_p_of_integers(np.abs(d) + 1) == 1e-15, "the smallest p that is given"


def test_as_many_problems_as_a_benchmark_has_keep_their_unit():
    """20,000 problems with 16 samples each: the differences are sixteenths, and stay so."""
    rng = np.random.default_rng(4)
    d = rng.integers(-16, 17, 20_000)
    assert in_steps(d / 16, np.array([16])).tolist() == d.tolist()
    normal = math.erfc(abs(d.sum()) / math.sqrt(2.0 * (d**2).sum()))
    assert sign_flip_p_of_integers(d) == pytest.approx(normal, abs=0.001)


def test_the_convolutions_give_the_binomial_tail_by_hand():
    """Of 8 differences of 1 and one of 3, seven of 8 ones and the 3 are positive: the sum is 9.

    Sums of 9 or more: the 3 is positive, and at least 7 of the ones. So p = 2 x (8 + 1) / 512.
    """
    d = np.array([1] * 7 + [-1, 3])
    assert sign_flip_p_of_integers(d) == pytest.approx(18 / 512, rel=1e-12)


def test_differences_become_whole_numbers_of_one_unit():
    assert in_steps(np.array([0.25, -0.125, 0.5]), np.array([8, 4])).tolist() == [2, -1, 4]
    assert in_steps(np.array([1 / 3, -1 / 7]), np.array([3, 7])).tolist() == [7, -3]
    # rewards between 0 and 1
    assert in_steps(np.array([0.1234, -0.5]), np.array([2])).tolist() == [123, -500]
    assert in_steps(np.array([0.0001234, -0.0005]), np.array([2])).tolist() == [123, -500]
    many_steps = in_steps(np.full(5000, 0.823456), np.array([1]))
    assert many_steps[0] == round(0.823456 * int(MAX_SUM / (5000 * 0.823456))), "to end in time"
    assert in_steps(np.zeros(3), np.array([10**9])).tolist() == [0, 0, 0]


def test_ties_of_rewards_in_tenths_stay_ties():
    """Means over four samples of rewards in tenths are multiples of 1/40: counted by hand in 512 flips."""
    differences = np.array([0.05, 0.1, 0.125, -0.025, 0.075, 0.05, 0.1, -0.05, 0.025])
    fortieths = np.rint(differences * 40).astype(int)
    signs = np.array(list(itertools.product((-1, 1), repeat=9)))
    p = np.mean(np.abs(signs @ fortieths) >= abs(fortieths.sum()))
    assert sign_flip_p_of_integers(in_steps(differences, np.array([10**9]))) == pytest.approx(p)


def test_small_gains_of_graded_rewards_have_the_p_of_their_signs():
    rng = np.random.default_rng(1)
    gains = rng.uniform(1e-4, 3e-4, 12)
    steps = in_steps(gains, np.array([7, 11, 13, 10**6]))
    assert sign_flip_p_of_integers(steps) == pytest.approx(2 / 2**12)


def test_the_mean_difference_worked_by_hand():
    """Differences 0, 1/2, 1: mean 1/2, sd 1/2; t with 2 degrees of freedom is 4.303."""
    found = mean_difference(np.array([0.0, 0.5, 1.0, math.nan]))
    assert (found.value, found.problems) == (0.5, 3)
    half = 4.3027 * 0.5 / math.sqrt(3)
    assert [found.low, found.high] == pytest.approx([0.5 - half, 0.5 + half], rel=1e-4)


# ------------------------------------------------------------------------------------ what
# verifiers say of an answer


def verdicts(task, problem: Problem, *responses: str) -> list[tuple[str, bool]]:
    scores = task.score([(problem, text, True) for text in responses])
    rows = [row(s.reward) | {"verdict": s.verdict} for s in scores]
    return [(row["verdict"], problem_means([[row]]).found_P[0] == 1) for row in rows]


def test_math_verifiers_say_whether_there_was_an_answer():
    chain = ChainArithmetic()
    problem = Problem("math", 0, "7+5=?", 12)
    assert verdicts(chain, problem, "7+5=12;#12", "#13", "7+5=12", "#12 or 13") == [
        ("correct", True), ("wrong", True), ("no-answer", False), ("malformed", False)
    ]  # fmt: skip
    assert chain.score([(problem, "#12", False)])[0].verdict in NO_ANSWER, (
        "a response that was cut off"
    )
    aime = AIME24()
    try:
        found = verdicts(
            aime, Problem("aime24", 0, "?", "12"), r"\boxed{12}", r"so \boxed{13}", "12"
        )
    finally:
        aime.close()
    assert found == [("correct", True), ("wrong", True), ("no-answer", False)]


@pytest.mark.slow
def test_the_code_grader_says_whether_there_was_a_program():
    task = FunctionWriting(variables="x")
    problem = Problem("code", 0, "#times 3\ndef f(x):\n", [((2,), 6), ((3,), 9)])
    try:
        found = verdicts(
            task, problem, " return x*3", " return x*2", " return 1/0", " return x*", " "
        )
    finally:
        task.close()
    assert found == [
        ("pass", True), ("wrong", True), ("runtime-error", True), ("compile-error", False), ("no-answer", False)
    ]  # fmt: skip
