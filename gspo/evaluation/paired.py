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

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from gspo.data.samples import NO_ANSWER
from gspo.data.seeding import numpy_generator
from gspo.evaluation.estimates import mean_difference, ratio
from gspo.statistics import (
    percentile_interval,
    resample_counts,
    sign_flip_p,
    sign_flip_p_of_integers,
)

DRAWS = 1000  # the number of resampled sets of problems in the bootstrap
MAX_LISTED = 24  # problems whose sign patterns are all counted, so that nothing is rounded
MAX_SUM = 2 * 10**6  # of the differences' sizes in the exact test: a few seconds
STEPS_PER_UNIT = 1000  # of differences without a common unit, unless all are small
MIN_STEPS = 100  # the largest difference has so many steps at least
# the rows of one problem's responses, made by gspo.evaluation.evaluate.rows
Group = list[dict]


@dataclass(frozen=True)
class ProblemMeans:
    """One policy's results, as means over each problem's graded samples."""

    right_P: ndarray  # the mean reward
    found_P: ndarray  # the share of responses with an answer to judge
    truncated_P: ndarray  # the share of responses that were cut off


def graded_rows(group: Group) -> Group:
    """Return the rows of responses that the verifier could grade."""
    return [row for row in group if row["reward"] is not None]


def problem_means(groups: list[Group]) -> ProblemMeans:
    """Take the means over the samples of every problem, which must all be graded."""
    means = []
    for group in groups:
        values = []
        for row in group:
            reward = row["reward"]
            verdict = row["verdict"]
            # a response with a reward had an answer
            has_answer = reward > 0 or verdict not in NO_ANSWER
            values.append((reward, has_answer, row["finish_reason"] == "length"))
        means.append(np.mean(values, axis=0))
    right_P, found_P, truncated_P = np.transpose(means)
    return ProblemMeans(right_P, found_P, truncated_P)


def split(
    right0: ndarray, found0: ndarray, right1: ndarray, found1: ndarray
) -> tuple[ndarray, ndarray]:
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
    base_groups = []
    trained_groups = []
    for base_group, trained_group in zip(base, trained, strict=True):
        base_rows = graded_rows(base_group)
        trained_rows = graded_rows(trained_group)
        if base_rows and trained_rows:
            base_groups.append(base_rows)
            trained_groups.append(trained_rows)
    problems = len(base_groups)
    result = {"problems": problems, "problems_left_out": len(base) - problems}
    if not problems:
        return result
    base_results = problem_means(base_groups)
    trained_results = problem_means(trained_groups)
    right_P2 = np.stack([base_results.right_P, trained_results.right_P], axis=1)
    found_P2 = np.stack([base_results.found_P, trained_results.found_P], axis=1)
    truncated_P2 = np.stack([base_results.truncated_P, trained_results.truncated_P], axis=1)
    right_2 = right_P2.mean(0)
    found_2 = found_P2.mean(0)
    differences_P = trained_results.right_P - base_results.right_P
    gain = mean_difference(differences_P)
    counts = {len(rows) for rows in base_groups + trained_groups}
    if problems <= MAX_LISTED:
        p = sign_flip_p(differences_P)
    else:
        p = sign_flip_p_of_integers(in_steps(differences_P, counts))
    base_right, trained_right = right_2
    base_found, trained_found = found_2
    format_gain, correctness_gain = split(base_right, base_found, trained_right, trained_found)
    format_interval, correctness_interval = resampled(right_P2, found_P2)
    return result | {
        "accuracy": right_2.tolist(),
        "found": found_2.tolist(),
        "right_of_found": ratio(right_2, found_2).tolist(),
        "truncated": truncated_P2.mean(0).tolist(),
        "gain": {
            "value": gain.value,
            "interval_95": [gain.low, gain.high],
            "p": p,
        },
        "format": {"value": format_gain.item(), "interval_95": format_interval},
        "correctness": {"value": correctness_gain.item(), "interval_95": correctness_interval},
    }


def resampled(right_P2: ndarray, found_P2: ndarray) -> list[list[float]]:
    """Compute the 95 % intervals of format and correctness by a bootstrap over problems.

    They are percentiles over `DRAWS` sets of as many problems, drawn with replacement."""
    problems = len(right_P2)
    if problems < 2:
        return [[math.nan, math.nan], [math.nan, math.nan]]
    rng = numpy_generator("paired", problems, DRAWS)
    weights_DP = resample_counts(problems, DRAWS, rng) / problems
    right_D2 = weights_DP @ right_P2
    found_D2 = weights_DP @ found_P2
    base_right_D, trained_right_D = right_D2.T
    base_found_D, trained_found_D = found_D2.T
    parts = split(base_right_D, base_found_D, trained_right_D, trained_found_D)
    return [list(percentile_interval(part_D)) for part_D in parts]


def in_steps(differences_P: ndarray, counts: Iterable[int]) -> ndarray:
    """Return differences of means over `counts` samples as whole multiples of a common unit.

    With rewards 0 and 1, all differences are multiples of 1 / lcm(counts). Rewards between 0 and 1
    have no common unit, and a very small unit would make the exact test too slow. In both cases the
    differences are rounded to multiples of 1 / 1000, or of a smaller power of ten if all are small.
    A decimal unit keeps the ties of rewards in tenths, which the exact test counts. The unit is
    coarser for many large differences.
    """
    max_steps = MAX_SUM // len(differences_P)
    common_steps = math.lcm(*counts)
    if common_steps <= max_steps:
        steps_P = differences_P * common_steps
        rounded_P = np.rint(steps_P)
        if np.allclose(steps_P, rounded_P, rtol=0, atol=1e-6):
            return rounded_P.astype(np.int64)
    sizes_P = np.abs(differences_P)
    largest = float(sizes_P.max(initial=0))
    if not largest:
        return np.zeros(len(differences_P), np.int64)
    steps_per_unit = STEPS_PER_UNIT
    while largest * steps_per_unit < MIN_STEPS:
        steps_per_unit *= 10
    most = MAX_SUM / float(sizes_P.sum())
    if steps_per_unit > most:
        steps_per_unit = max(1, int(most))
    rounded_P = np.rint(differences_P * steps_per_unit)
    return rounded_P.astype(np.int64)
