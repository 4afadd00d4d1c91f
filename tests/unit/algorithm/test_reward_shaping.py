"""Reward shaping: a naive restatement (naive_credit.py), hand-worked numbers, running moments,
refusals.
"""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

import naive_credit as naive
from gspo.algorithm.reward_shaping import OVER, RewardShaping, RunningMoments
from refusals import refuses


def rewards_and_groups(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of 1 to 4 in random order; the rewards of the group of three are equal."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([9, -4, 30, 2], [1, 2, 3, 4]))
    return np.where(groups == 30, 0.25, rng.standard_normal(10) + 0.4), groups


def shaped(shaping, rewards, groups=None, running=None) -> torch.Tensor:
    groups = [0] * len(rewards) if groups is None else groups
    rewards_B = torch.tensor(np.asarray(rewards), dtype=torch.float64)
    return shaping(rewards_B, torch.tensor(np.asarray(groups)), running or RunningMoments())


def close(tensor, expected, tolerance=1e-11) -> None:
    np.testing.assert_allclose(tensor.numpy(), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shift", OVER)
@pytest.mark.parametrize("scale", OVER)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_agrees_with_the_naive_restatement(shift, scale, clip):
    """Over three batches of a run, so that `running` has a past."""
    shaping, running, seen, cut = (
        RewardShaping(shift, scale, clip, eps=0.01),
        RunningMoments(),
        [],
        False,
    )
    for seed in range(3):
        rewards, groups = rewards_and_groups(seed)
        seen += list(rewards)
        expected = naive.shape(
            rewards, groups, seen, shift, scale, math.inf if clip is None else clip, eps=0.01
        )
        close(shaped(shaping, rewards, groups, running), expected)
        cut |= clip is not None and max(map(abs, expected)) == clip
    assert cut == (clip is not None)
    # it counts only where something reads it
    assert running.count == (30 if "running" in (shift, scale) else 0)


D, E = math.sqrt(5 / 3) + 1e-6, math.sqrt(1 / 2) + 1e-6


@pytest.mark.parametrize(
    "settings, expected",
    [
        # Rewards 0 1 of one problem and 2 3 of another: means 0.5 and 2.5, of all 1.5; variances
        # (ddof 1) 1/2 and 1/2, of all (2.25 + 0.25 + 0.25 + 2.25) / 3 = 5/3
        ({}, [0, 1, 2, 3]),
        ({"shift": "batch"}, [-1.5, -0.5, 0.5, 1.5]),
        ({"shift": "group"}, [-0.5, 0.5, -0.5, 0.5]),
        ({"scale": "batch"}, [0, 1 / D, 2 / D, 3 / D]),
        ({"scale": "group"}, [0, 1 / E, 2 / E, 3 / E]),
        ({"shift": "group", "scale": "batch"}, [-0.5 / D, 0.5 / D, -0.5 / D, 0.5 / D]),
        ({"shift": "batch", "scale": "group"}, [-1.5 / E, -0.5 / E, 0.5 / E, 1.5 / E]),
        ({"shift": "batch", "clip": 1.0}, [-1, -0.5, 0.5, 1]),
        ({"clip": 1.0}, [0, 1, 1, 1]),
        # The run has seen -3 and 3 before: mean (0 + 6) / 6 = 1, variance (16 + 4 + 1 + 0 + 1 + 4)
        # / 5 = 5.2
        ({"shift": "running"}, [-1, 0, 1, 2]),
        ({"scale": "running"}, [r / (math.sqrt(5.2) + 1e-6) for r in (0, 1, 2, 3)]),
        (
            {"shift": "running", "scale": "running"},
            [r / (math.sqrt(5.2) + 1e-6) for r in (-1, 0, 1, 2)],
        ),
    ],
)
def test_by_hand(settings, expected):
    before = RunningMoments()
    before.update(torch.tensor([-3.0, 3.0]))
    close(shaped(RewardShaping(**settings), [0, 1, 2, 3], [8, 8, 1, 1], before), expected, 1e-6)


def test_float64_rewards_are_scaled_in_float64():
    """Every scale to the last digits, also the running one: 1 / (std + eps) with std^2 = 1/3 of 1 0
    0.
    """
    for scale in ("batch", "group", "running"):
        first = float(shaped(RewardShaping(scale=scale), [1.0, 0.0, 0.0])[0])
        assert first == pytest.approx(1 / (math.sqrt(1 / 3) + 1e-6), rel=1e-13), scale


@pytest.mark.parametrize("scale", ["batch", "group", "running"])
@pytest.mark.parametrize("reward", [0.0, 1.0, -0.25])
def test_equal_rewards_are_not_scaled(scale, reward):
    close(shaped(RewardShaping(scale=scale), [reward] * 3), [reward] * 3, 0.0)
    close(shaped(RewardShaping(shift=scale, scale=scale), [reward] * 3), [0.0] * 3, 0.0)


@pytest.mark.parametrize("scale", ["batch", "group", "running"])
@pytest.mark.parametrize("reward", [0.1, -0.7, 1 / 3])
def test_equal_rewards_are_not_scaled_by_a_rounded_deviation(scale, reward):
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1 in binary: the deviation is then 1e-17, not 0."""
    running = RunningMoments()
    for _ in range(3):
        close(shaped(RewardShaping(scale=scale), [reward] * 3, running=running), [reward] * 3)


@pytest.mark.parametrize("shift", OVER)
@pytest.mark.parametrize("scale", OVER)
def test_a_single_reward_is_not_scaled(shift, scale):
    """One response in the batch, its group and the run: no deviation exists; its mean is itself."""
    close(shaped(RewardShaping(shift, scale), [0.7]), [0.7 if shift == "none" else 0.0], 0.0)


def test_groups_of_one_and_groups_of_equal_rewards_among_others():
    """Of rewards 5 | 2 2 | 0 1 by group only the last has a deviation, sqrt(1/2)."""
    rewards, groups = [5, 2, 0, 2, 1], [7, 0, 3, 0, 3]
    close(shaped(RewardShaping(scale="group"), rewards, groups), [5, 2, 0, 2, 1 / E])
    close(shaped(RewardShaping("group", "group"), rewards, groups), [0, 0, -0.5 / E, 0, 0.5 / E])


@pytest.mark.parametrize("shift", OVER)
@pytest.mark.parametrize("scale", OVER)
def test_order_and_labels_of_groups_do_not_matter(shift, scale):
    rewards, groups = rewards_and_groups(4)
    order, labels = np.random.default_rng(0).permutation(10), {9: -1, -4: 2**40, 30: 0, 2: 5}
    result = shaped(RewardShaping(shift, scale), rewards, groups)
    close(shaped(RewardShaping(shift, scale), rewards[order], groups[order]), result.numpy()[order])
    close(shaped(RewardShaping(shift, scale), rewards, [labels[g] for g in groups]), result)


def test_shaping_leaves_its_input_alone():
    rewards_B = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    RewardShaping("batch", "batch", clip=0.1)(
        rewards_B, torch.zeros(3, dtype=torch.int64), RunningMoments()
    )
    assert rewards_B.tolist() == [0.0, 1.0, 5.0]


# Soft overlong penalty


def test_overlong_by_hand():
    """L = 100, C = 20: 0 up to 80 tokens; (80 - 90) / 20 = -1/2 at 90; -1 at 100 and beyond."""
    lengths = torch.tensor([0, 1, 79, 80, 81, 85, 90, 99, 100, 120])
    expected = [0, 0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1, -1]
    close(RewardShaping(overlong_cache=20).overlong(lengths, 100), expected, 1e-6)
    close(
        RewardShaping(overlong_cache=20, overlong_penalty=3.0).overlong(lengths, 100),
        3 * np.array(expected),
        1e-6,
    )
    assert not RewardShaping().overlong(lengths, 100).any()


@pytest.mark.parametrize("cache, limit", [(1, 6), (4, 12), (12, 12), (7, 4096)])
def test_overlong_agrees_with_the_naive_restatement(cache, limit):
    lengths = list(range(limit + 5))
    penalty = RewardShaping(overlong_cache=cache, overlong_penalty=0.4).overlong(
        torch.tensor(lengths), limit
    )
    close(penalty, [naive.overlong(length, limit, cache, 0.4) for length in lengths], 1e-6)
    assert (penalty.diff() <= 0).all() and penalty.max() <= 0


# Running moments


# far from 0, sums of squares would have lost the deviation
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_moments_are_those_of_everything_seen(offset):
    rng, running, seen = np.random.default_rng(3), RunningMoments(), []
    for size in (1, 5, 1, 64, 2, 300):
        batch = offset + rng.standard_normal(size)
        seen += list(batch)
        running.update(torch.tensor(batch))
        assert running.count == len(seen)
        assert running.mean == pytest.approx(naive.mean(seen), rel=1e-12, abs=1e-12)
        assert running.std == pytest.approx(naive.std(seen), rel=1e-9)


def test_running_moments_by_hand():
    """2 and 4, then 9: mean 3, squares 2; mean 5, squares 9 + 1 + 16 = 26, std sqrt(26 / 2)."""
    running = RunningMoments()
    assert (running.count, running.mean, running.std) == (0, 0.0, 0.0)
    running.update(torch.tensor([2.0, 4.0]))
    assert (running.count, running.mean, running.squares) == (2, 3.0, 2.0)
    running.update(torch.tensor([9.0]))
    assert running == RunningMoments(3, 5.0, 26.0)
    assert running.std == pytest.approx(math.sqrt(13))


def test_running_moments_do_not_depend_on_how_the_stream_is_cut():
    stream = torch.tensor(np.random.default_rng(8).standard_normal(60))
    whole, cut = RunningMoments(), RunningMoments()
    whole.update(stream)
    for part in stream.split([1, 10, 4, 45]):
        cut.update(part)
    assert cut.mean == pytest.approx(whole.mean, rel=1e-12)
    assert cut.std == pytest.approx(whole.std, rel=1e-12)


def test_running_moments_keep_float64_from_float32_rewards():
    """In float32 the sum of 0.1 over many batches drifts by 1e-6; here 0.1 of float32 stays exactly
    that.
    """
    running = RunningMoments()
    for _ in range(2000):
        running.update(torch.full((64,), 0.1))
    assert running.mean == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    assert running.std < 1e-12


def test_running_moments_survive_json_exactly():
    """A resumed run shapes to the last bit as one that was never interrupted."""
    rng, straight = np.random.default_rng(11), RunningMoments()
    for _ in range(5):
        straight.update(torch.tensor(rng.standard_normal(7) / 3))
    resumed = RunningMoments(**json.loads(json.dumps(asdict(straight))))
    assert resumed == straight
    rewards, groups = rewards_and_groups(6)
    both = [
        shaped(RewardShaping("running", "running"), rewards, groups, running)
        for running in (straight, resumed)
    ]
    assert torch.equal(*both)
    assert resumed == straight and straight.count == 45


@pytest.mark.parametrize(
    "key, value",
    [
        *((key, value) for key in ("shift", "scale") for value in ("std", "", "tokens")),
        *(("clip", value) for value in (0.0, -1.0, math.nan)),
        ("overlong_cache", -1),
        *(("overlong_penalty", value) for value in (0.0, -0.5, math.nan)),
    ],
)
def test_refusals_name_the_key_and_the_value(key, value):
    with refuses(f"reward.{key}", value):
        RewardShaping(**{key: value})
