"""Compares two policies on the same problems: their paired difference, and its share of format.

A response is right only if an answer was found in it, so the accuracy a of a policy is a product:

    a = f c      f  the share of responses in which the verifier found an answer to judge (format)
                 c  the share of right responses among these (correctness)

The gain from policy 0 to policy 1 is a sum of two parts, without a remainder and the same in both
directions:

    a1 - a0 = (f1 - f0) (c0 + c1)/2  +  (c1 - c0) (f0 + f1)/2
              format                    correctness

Format is the gain if only f had changed, correctness the gain if only c had changed, each at the
mean of the other factor (the Shapley value of the two factors). If a policy gives no answer at all
it has no c. Then the c of the other policy replaces it, and the whole gain is format.

Shape suffixes: P problems, D draws of the bootstrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gspo.data.samples import NO_ANSWER
from gspo.data.seeding import seed_for
from gspo.evaluation.estimates import mean_difference, ratio
from gspo.statistics import percentile_interval, resample_counts, sign_flip_p_of_integers

DRAWS = 1000  # the number of resampled sets of problems in the bootstrap
MAX_ADDITIONS = 10**9  # of the exact test: a second or two
# differences without a common unit are rounded to multiples of 1 / 1000, or coarser
MAX_STEPS_PER_UNIT = 1000
# the rows of one problem's responses, made by gspo.evaluation.evaluate.rows
Group = list[dict]


@dataclass(frozen=True)
class Answered:
    """One policy's results, as means over each problem's graded samples, NaN without any."""

    right_P: np.ndarray  # the mean reward
    found_P: np.ndarray  # the share of responses with an answer to judge
    truncated_P: np.ndarray  # the share of responses that were cut off; none of these has an answer
    graded_P: np.ndarray  # the number of graded samples


def answered(groups: list[Group]) -> Answered:
    """Take the means over the graded samples of every problem."""
    means = []
    counts = []
    for group in groups:
        graded = [row for row in group if row["reward"] is not None]
        values = [(row["reward"], has_answer(row), row["verdict"] == "truncated") for row in graded]
        group_means = np.full(3, math.nan)
        if values:
            group_means = np.mean(values, axis=0)
        means.append(group_means)
        counts.append(len(graded))
    means_P3 = np.array(means, dtype=float).reshape(-1, 3)
    right_P, found_P, truncated_P = means_P3.T
    return Answered(right_P, found_P, truncated_P, np.array(counts))


def has_answer(row: dict) -> bool:
    """Return whether the verifier found an answer to judge. A response with a reward had one."""
    return row["reward"] > 0 or row["verdict"] not in NO_ANSWER


def split(
    right0: np.ndarray, found0: np.ndarray, right1: np.ndarray, found1: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Split the gain right1 - right0 into (format, correctness), by the formula at the top.

    All arguments are means over problems. Arrays are split element by element."""
    share0 = ratio(right0, found0)
    share1 = ratio(right1, found1)
    # with no answer of one policy the other's share replaces it; with no answer at all it is 0
    c0 = np.nan_to_num(np.where(np.isnan(share0), share1, share0))
    c1 = np.nan_to_num(np.where(np.isnan(share1), share0, share1))
    format_gain = (found1 - found0) * (c0 + c1) / 2
    correctness_gain = (c1 - c0) * (found0 + found1) / 2
    return format_gain, correctness_gain


def compare(base: list[Group], trained: list[Group]) -> dict:
    """Compare two policies on the same problems, in the same order.

    The result is ready for JSON, except that numbers may be NaN. The gain has the 95 % interval of
    Student's t over the problems' differences, and the p of the exact sign-flip test over problems.
    Its parts have the 2.5 % and 97.5 % percentiles of a bootstrap over problems, whose draws are
    the same each time. All of these describe the spread over other problems of the same kind and
    other samples. Problems without a graded response of both policies are left out, and counted.
    """
    base_results = answered(base)
    trained_results = answered(trained)
    both = (base_results, trained_results)
    used_P = (base_results.graded_P > 0) & (trained_results.graded_P > 0)
    right_P2 = np.stack([results.right_P for results in both], axis=1)[used_P]
    found_P2 = np.stack([results.found_P for results in both], axis=1)[used_P]
    truncated_P2 = np.stack([results.truncated_P for results in both], axis=1)[used_P]
    problems = len(right_P2)
    result = {"problems": problems, "problems_left_out": len(base) - problems}
    if not problems:
        return result
    right = right_P2.mean(0)
    shares = found_P2.mean(0)
    differences_P = right_P2[:, 1] - right_P2[:, 0]
    gain = mean_difference(differences_P)
    counts = np.concatenate([results.graded_P[used_P] for results in both])
    steps_P = in_steps(differences_P, counts)
    format_gain, correctness_gain = split(right[0], shares[0], right[1], shares[1])
    format_interval, correctness_interval = resampled(right_P2, found_P2)
    return result | {
        "accuracy": right.tolist(),
        "found": shares.tolist(),
        "right_of_found": ratio(right, shares).tolist(),
        "truncated": truncated_P2.mean(0).tolist(),
        "gain": {
            "value": gain.value,
            "interval_95": [gain.low, gain.high],
            "p": sign_flip_p_of_integers(steps_P),
        },
        "format": {"value": float(format_gain), "interval_95": format_interval},
        "correctness": {"value": float(correctness_gain), "interval_95": correctness_interval},
    }


def resampled(right_P2: np.ndarray, found_P2: np.ndarray) -> list[list[float]]:
    """Compute the 95 % intervals of format and correctness by a bootstrap over problems.

    They are percentiles over `DRAWS` sets of as many problems, drawn with replacement."""
    problems = len(right_P2)
    if problems < 2:
        return [[math.nan, math.nan], [math.nan, math.nan]]
    rng = np.random.Generator(np.random.Philox(key=seed_for("paired", problems, DRAWS)))
    weights_DP = resample_counts(problems, DRAWS, rng) / problems
    right_D, trained_right_D = (weights_DP @ right_P2).T
    found_D, trained_found_D = (weights_DP @ found_P2).T
    parts = split(right_D, found_D, trained_right_D, trained_found_D)
    return [list(percentile_interval(part_D)) for part_D in parts]


def in_steps(differences_P: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return differences of means over `counts` samples as whole multiples of a common unit.

    With rewards 0 and 1, all differences are multiples of 1 / lcm(counts). If rewards lie between 0
    and 1, or if that unit is so small that the exact test would take too long, differences are
    rounded to multiples of 1 / MAX_STEPS_PER_UNIT, or of a coarser unit for many problems.
    """
    max_steps = MAX_ADDITIONS // len(differences_P) ** 2
    common_steps = math.lcm(*(int(count) for count in np.unique(counts)))
    if common_steps <= max_steps:
        steps_P = differences_P * common_steps
        if np.allclose(steps_P, np.rint(steps_P), rtol=0, atol=1e-6):
            return np.rint(steps_P).astype(np.int64)
    steps_P = differences_P * max(1, min(MAX_STEPS_PER_UNIT, max_steps))
    return np.rint(steps_P).astype(np.int64)
