"""Two policies on the same problems: the paired difference of their accuracies, and how much of it
is format.

A response is right only if an answer was found in it, so the accuracy a of a policy is a product:

    a = f c      f  the share of responses in which the verifier found an answer to judge (format)
                 c  the share of right ones among those (correctness)

The gain from policy 0 to policy 1 is a sum of two parts, without a remainder and the same in both
directions:

    a1 - a0 = (f1 - f0) (c0 + c1)/2  +  (c1 - c0) (f0 + f1)/2
              format                    correctness

Format is what the gain would be had only f changed, correctness what it would be had only c
changed, each at the mean of the other factor (the Shapley value of the two factors). If a policy
gives no answer at all it has no c; the other policy's stands for it, so that the whole gain is
format.

Shape suffixes: P problems, D draws of the bootstrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gspo.data.samples import NO_ANSWER
from gspo.data.seeding import seed_for
from gspo.evaluation.estimates import mean_difference
from gspo.statistics import percentile_interval, resample_counts, sign_flip_p_of_integers

DRAWS = 1000  # the number of resampled sets of problems in the bootstrap
WORK = 10**9  # the exact test may take so many additions: a second or two
# differences that are no multiples of a common unit are rounded to 1 / FINEST at best
FINEST = 1000
# the rows of one problem's responses, as gspo.evaluation.evaluate.rows makes them
Group = list[dict]


@dataclass(frozen=True)
class Answered:
    """Holds what became of one policy's responses, as means over each problem's graded samples. NaN
    stands for a problem without any."""

    right_P: np.ndarray  # the mean reward
    found_P: np.ndarray  # the share of responses with an answer to judge
    truncated_P: np.ndarray  # the share of responses that were cut off; none of these has an answer
    graded_P: np.ndarray  # the number of graded samples


def answered(groups: list[Group]) -> Answered:
    """Take the means over the graded samples of every problem."""
    means, counts = [], []
    for group in groups:
        graded = [row for row in group if row["reward"] is not None]
        each = [(row["reward"], found(row), row["verdict"] == "truncated") for row in graded]
        means.append(np.mean(each, axis=0) if each else np.full(3, math.nan))
        counts.append(len(graded))
    right_P, found_P, truncated_P = np.array(means, dtype=float).reshape(-1, 3).T
    return Answered(right_P, found_P, truncated_P, np.array(counts))


def found(row: dict) -> bool:
    """Return whether the verifier found an answer to judge in a response, by its verdict. What
    earned something had one."""
    return row["reward"] > 0 or row["verdict"] not in NO_ANSWER


def split(
    right0: np.ndarray, found0: np.ndarray, right1: np.ndarray, found1: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Split the gain right1 - right0 into (format, correctness), by the formula at the top. All are
    means over problems; arrays are split element by element."""
    c0, c1 = share(right0, found0), share(right1, found1)
    c0, c1 = np.where(np.isnan(c0), c1, c0), np.where(np.isnan(c1), c0, c1)
    # neither policy gives an answer: nothing is gained
    c0, c1 = np.nan_to_num(c0), np.nan_to_num(c1)
    return (found1 - found0) * (c0 + c1) / 2, (c1 - c0) * (found0 + found1) / 2


def share(right: np.ndarray, found_share: np.ndarray) -> np.ndarray:
    """Compute c = a / f, the share of right responses among those with an answer; NaN without any."""
    right, found_share = np.asarray(right, float), np.asarray(found_share, float)
    return np.divide(right, found_share, out=np.full(right.shape, math.nan), where=found_share > 0)


def compare(base: list[Group], trained: list[Group]) -> dict:
    """Compare two policies on the same problems, in the same order. Returns numbers ready for JSON,
    but for NaN.

    The gain has the 95 % interval of Student's t over the problems' differences, and the p of the
    exact sign-flip test over problems. Its parts have the 2.5 % and 97.5 % percentiles of a
    bootstrap over problems, whose draws are the same each time. All of these say how the numbers
    would vary over other problems of the same kind and other samples. Problems for which one of the
    policies has no graded response are left out, and counted.
    """
    one, other = answered(base), answered(trained)
    used_P = (one.graded_P > 0) & (other.graded_P > 0)
    right_P2 = np.stack([one.right_P, other.right_P], axis=1)[used_P]
    found_P2 = np.stack([one.found_P, other.found_P], axis=1)[used_P]
    truncated_P2 = np.stack([one.truncated_P, other.truncated_P], axis=1)[used_P]
    problems = len(right_P2)
    result = {"problems": problems, "problems_left_out": len(base) - problems}
    if not problems:
        return result
    right, shares = right_P2.mean(0), found_P2.mean(0)
    differences_P = right_P2[:, 1] - right_P2[:, 0]
    gain = mean_difference(differences_P)
    steps_P = in_steps(
        differences_P, np.concatenate([one.graded_P[used_P], other.graded_P[used_P]])
    )
    parts = split(right[0], shares[0], right[1], shares[1])
    intervals = resampled(right_P2, found_P2)
    return result | {
        "accuracy": right.tolist(),
        "found": shares.tolist(),
        "right_of_found": share(right, shares).tolist(),
        "truncated": truncated_P2.mean(0).tolist(),
        "gain": {
            "value": gain.value,
            "interval_95": [gain.low, gain.high],
            "p": sign_flip_p_of_integers(steps_P),
        },
        "format": {"value": float(parts[0]), "interval_95": intervals[0]},
        "correctness": {"value": float(parts[1]), "interval_95": intervals[1]},
    }


def resampled(right_P2: np.ndarray, found_P2: np.ndarray) -> list[list[float]]:
    """Compute the 95 % intervals of format and correctness: percentiles over `DRAWS` sets of as
    many problems, drawn with replacement."""
    problems = len(right_P2)
    if problems < 2:
        return [[math.nan, math.nan]] * 2
    rng = np.random.Generator(np.random.Philox(key=seed_for("paired", problems, DRAWS)))
    weights_DP = resample_counts(problems, DRAWS, rng) / problems
    right_D2, found_D2 = weights_DP @ right_P2, weights_DP @ found_P2
    parts = split(right_D2[:, 0], found_D2[:, 0], right_D2[:, 1], found_D2[:, 1])
    return [list(percentile_interval(part_D)) for part_D in parts]


def in_steps(differences_P: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return differences of means over `counts` samples as whole numbers of the largest unit that
    all are multiples of.

    Rewards of 0 and 1 have such a unit, 1 / lcm(counts). Where it is so small that the exact test
    would take too long, or where rewards lie between 0 and 1, differences are rounded to the next
    multiple of 1 / FINEST, or of a coarser unit if there are many problems.
    """
    unit, most = (
        math.lcm(*(int(count) for count in np.unique(counts))),
        WORK // len(differences_P) ** 2,
    )
    steps_P = differences_P * unit if unit <= most else np.full(len(differences_P), math.nan)
    if not np.allclose(steps_P, np.rint(steps_P), rtol=0, atol=1e-6):  # NaN is not close to itself
        steps_P = differences_P * max(1, min(FINEST, most))
    return np.rint(steps_P).astype(np.int64)
