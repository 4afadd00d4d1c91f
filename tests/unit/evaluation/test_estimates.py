"""avg@k, pass@k, maj@k and their errors: hand numbers, all subsets enumerated, coverage in
simulated evaluations.
"""

import itertools
import math

import numpy as np
import pytest

from gspo.evaluation import estimates
from gspo.evaluation.estimates import (
    average,
    error_parts,
    interval,
    majority_at_k,
    pass_at_k,
    powers,
)
from gspo.statistics import t_quantile

NAN = math.nan


def test_average_by_hand():
    rewards = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], dtype=float)
    got = average(rewards)
    assert got.value == pytest.approx(3 / 8) and got.problems == 4
    assert got.stderr == pytest.approx(np.std([1, 0.5, 0, 0], ddof=1) / 2)
    assert got.low < got.value < got.high


def test_the_error_splits_into_sampling_and_problems():
    rewards = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 1]], dtype=float)
    p, k, m = rewards.mean(1), 4, 3
    sampling, between = error_parts(rewards)
    assert sampling == pytest.approx(math.sqrt((p * (1 - p) / (k - 1)).sum()) / m)
    assert math.hypot(sampling, between) == pytest.approx(average(rewards).stderr)
    # alike within, different between: no sampling noise; and the other way round: noise alone
    assert error_parts(np.array([[1.0, 1], [0, 0]])) == pytest.approx((0, 0.5))
    assert error_parts(np.array([[1.0, 0], [0, 1]])) == pytest.approx((math.sqrt(0.5) / 2, 0))
    assert np.isnan(error_parts(np.ones((5, 1)))).all(), (
        "one sample says nothing of the noise of samples"
    )


def test_the_parts_are_unbiased():
    rng, m, k = np.random.default_rng(0), 40, 4
    chances = rng.beta(2, 3, size=(3000, m, 1))
    rewards = (rng.random((3000, m, k)) < chances).astype(float)
    parts = np.array([error_parts(r) for r in rewards]) ** 2
    # E p(1-p) = 1/5 for Beta(2, 3)
    assert parts[:, 0].mean() == pytest.approx(1 / 5 / k / m, rel=0.02)
    assert parts[:, 1].mean() == pytest.approx(1 / 25 / m, rel=0.03)  # var p = 1/25


def test_ungraded_samples_and_problems_are_left_out():
    rewards = np.array([[1, NAN, 0], [NAN, NAN, NAN], [1, 1, 1], [NAN, 0, NAN]])
    got = average(rewards)
    assert got.value == pytest.approx((0.5 + 1 + 0) / 3) and got.problems == 3
    assert got == average(np.array([[1, 0, NAN], [1, 1, 1], [0, NAN, NAN]]))
    assert pass_at_k(rewards, 2).problems == 2 and pass_at_k(rewards, 2).value == 1
    assert pass_at_k(rewards, 3).problems == 1
    answers = np.array([["7", "5", "8"], ["", "", ""], ["1", "1", "1"], ["9", "9", "9"]])
    assert majority_at_k(rewards, answers, 2).problems == 2
    nothing = average(np.full((3, 2), NAN))
    assert math.isnan(nothing.value) and nothing.problems == 0
    assert majority_at_k(rewards, answers, 3).value == 1


@pytest.mark.parametrize(
    ("n", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 4, 2), (4, 0, 2), (5, 3, 5)]
)
def test_pass_at_k_is_the_mean_over_all_subsets(n, right, k):
    solved = [1.0] * right + [0.0] * (n - right)
    subsets = list(itertools.combinations(solved, k))
    expected = sum(max(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(np.array([solved, solved]), k).value == pytest.approx(expected)


def test_pass_at_k_counts_full_rewards_only():
    assert pass_at_k(np.array([[0.99, 0.5], [1.0, 0.0]]), 2).value == 0.5


def vote(answers, rights):
    """The rule in words: most votes, ties to the first occurrence, the empty answer has no vote."""
    voters = [a for a in answers if a]
    if not voters:
        return 0.0
    winner = max(dict.fromkeys(voters), key=voters.count)  # max takes the first of equals
    return rights[answers.index(winner)]


@pytest.mark.parametrize(
    "answers",
    [
        ["7", "7", "5", "5", "5"],
        ["5", "7", "7", "5", "9"],
        ["", "", "", "7", "5"],
        ["", "", "", "", ""],
        ["7", "", "5", "5", "7"],
    ],
)
def test_the_majority_by_hand_and_over_all_subsets(answers):
    rights = [float(a == "7") for a in answers]
    rewards, table = np.array([rights, rights]), np.array([answers, answers])
    assert majority_at_k(rewards, table, 5).value == vote(answers, rights)
    for k in (1, 2, 3, 4):
        orders = list(itertools.permutations(range(5), k))
        exact = sum(vote([answers[i] for i in o], [rights[i] for i in o]) for o in orders) / len(
            orders
        )
        got = majority_at_k(rewards, table, k).value
        assert got == pytest.approx(exact, abs=4 * 0.5 / math.sqrt(estimates.DRAWS))
        assert got == majority_at_k(rewards, table, k).value


def test_a_problem_votes_with_its_own_answers_alone():
    rewards, answers = (
        np.array([[1.0, 0, 0], [0, 1, 1]]),
        np.array([["7", "5", "5"], ["7", "5", "5"]]),
    )
    assert majority_at_k(rewards, answers, 3).value == 0.5


def test_pass_and_majority_at_k_are_unbiased():
    """Many evaluations with n = 8 samples estimate what k = 3 fresh samples would have given."""
    rng, m, n, k = np.random.default_rng(1), 4000, 8, 3
    chances = np.array([0.5, 0.3, 0.2])  # answers a (right), b, c
    answers = rng.choice(["a", "b", "c"], p=chances, size=(m, n))
    rewards = (answers == "a").astype(float)
    fresh = [c for c in itertools.product(range(3), repeat=k)]
    weights = [math.prod(chances[i] for i in c) for c in fresh]
    majority = sum(
        w * vote(["abc"[i] for i in c], [float(i == 0) for i in c])
        for c, w in zip(fresh, weights, strict=True)
    )
    for got, truth in (
        (pass_at_k(rewards, k), 1 - 0.5**k),
        (majority_at_k(rewards, answers, k), majority),
    ):
        assert abs(got.value - truth) < 3.5 * got.stderr < 0.02


# shapes of the chances over problems (Beta): spread, hard, easy with few problems, and all nearly
# alike
@pytest.mark.parametrize(
    ("a", "b", "m", "k"), [(0.5, 0.5, 30, 8), (0.2, 3.8, 50, 4), (5, 2, 100, 4), (40, 60, 30, 16)]
)
def test_intervals_cover_in_92_to_98_of_100_evaluations(a, b, m, k):
    rng, times = np.random.default_rng(2), 1000
    chances = rng.beta(a, b, size=(times, m, 1))
    rewards = (rng.random((times, m, k)) < chances).astype(float)
    truth = a / (a + b)
    covered = sum(e.low <= truth <= e.high for e in map(average, rewards))
    assert 0.92 <= covered / times <= 0.98
    large = rng.beta(a, b, 400_000)
    truth = float((1 - (1 - large) ** 2).mean())
    covered = sum(e.low <= truth <= e.high for e in (pass_at_k(r, 2) for r in rewards))
    assert 0.92 <= covered / times <= 0.98


def test_intervals_stay_within_0_and_1():
    for value, m in ((0.0, 30), (1.0, 30), (0.0, 2)):
        low, high = interval(value, 0.0, m, 8 * m)
        assert 0 <= low <= value <= high <= 1 and high - low > 0.05
    # Wilson for 0 of 30, t with 29 degrees
    assert interval(0.0, 0.0, 30, 240)[1] == pytest.approx(0.122, abs=0.001)
    # all problems alike: no better than 80 independent samples
    low, high = interval(0.5, 0.0, 10, 80)
    assert high - low == pytest.approx(2 * 2.262 * math.sqrt(0.25 / 80), rel=0.05)
    # far from the ends and with many problems: value -+ 1.96 stderr
    assert interval(0.4, 0.01, 2000, 16000) == pytest.approx((0.3804, 0.4196), abs=2e-4)


@pytest.mark.parametrize(
    "rewards", [[[5, 3], [4, -2], [1, 1]], [[-1, -1], [-1, 0], [0, -1]], [[2, 2], [2, 2]]]
)
def test_rewards_beyond_0_and_1_have_students_interval_around_their_mean(rewards):
    got, values = average(np.array(rewards, dtype=float)), np.mean(rewards, axis=1)
    half = t_quantile(len(rewards) - 1) * values.std(ddof=1) / math.sqrt(len(rewards))
    assert (got.low, got.high) == pytest.approx((values.mean() - half, values.mean() + half))


def test_the_error_is_that_of_the_bootstrap_over_problems():
    rng = np.random.default_rng(3)
    rewards = (rng.random((60, 8)) < rng.beta(1, 2, size=(60, 1))).astype(float)
    got = pass_at_k(rewards, 4)
    means = [pass_at_k(rewards[rng.integers(0, 60, 60)], 4).value for _ in range(2000)]
    assert got.stderr * math.sqrt(59 / 60) == pytest.approx(np.std(means), rel=0.05)


def test_student_quantiles_are_those_of_tables():
    for freedom, t in (
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (9, 2.262),
        (29, 2.045),
        (10**6, 1.960),
    ):
        assert t_quantile(freedom) == pytest.approx(t, abs=5e-4)


def test_powers():
    assert [powers(n) for n in (1, 2, 5, 32)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8, 16, 32]]


def test_rewards_outside_0_to_1_have_students_interval_whatever_their_means_are():
    """The means of these problems lie in [0, 1], where Wilson's interval would end at 0."""
    rewards_PK = np.array([[1.0, -1.0]] * 8 + [[1.0, 1.0]] * 2)
    got = estimates.average(rewards_PK)
    means = rewards_PK.mean(1)
    half = 2.262157 * means.std(ddof=1) / math.sqrt(10)  # t of 9 degrees of freedom
    assert (got.low, got.high) == pytest.approx((means.mean() - half, means.mean() + half))
    assert got.low < 0
    shares = estimates.average((rewards_PK + 1) / 2)  # within [0, 1]: Wilson's
    assert shares.high < 1 and shares.high - shares.value != pytest.approx(
        shares.value - shares.low
    )
