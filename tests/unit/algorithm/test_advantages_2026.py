"""MaxRL, GDPO, NSR and the optimal token baseline: by hand, against loops, invariances, refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gspo.algorithm.advantages import Credit, GroupNormalized, Groups
from gspo.algorithm.gdpo import GDPO, statistics_of_others
from gspo.algorithm.maxrl import MaxRL
from gspo.algorithm.nsr import NSR
from gspo.algorithm.otb import OTB, variance_proxies
from refusals import refuses

SEEDS = range(6)


def credit(rewards, groups=None, named=None, weights=None) -> Credit:
    """Responses of one token."""
    rewards_BT = torch.tensor(rewards, dtype=torch.float64).unsqueeze(-1)
    groups_B = torch.zeros(len(rewards), dtype=torch.int64)
    if groups is not None:
        groups_B = torch.tensor(groups)
    made = Credit(rewards_BT, torch.ones_like(rewards_BT, dtype=torch.bool), groups_B)
    if named is not None:
        made.named_rewards_BK = torch.tensor(named, dtype=torch.float64)
        made.weights_K = torch.tensor(weights or [1.0] * len(named[0]), dtype=torch.float64)
    return made


def close(tensor, expected, tolerance=1e-12):
    torch.testing.assert_close(
        tensor.squeeze(-1), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance
    )


def uneven(seed: int) -> Credit:
    """Episodes of uneven groups: holes, a row without tokens, a group of one, a lone long row."""
    rng = np.random.default_rng(seed)
    rows, width = 12, 9
    mask = np.arange(width) < rng.integers(1, width + 1, rows)[:, None]
    mask &= rng.random((rows, width)) < 0.8
    mask[0] = False
    mask[1, 0] = True
    logp = -rng.exponential(1.0, (rows, width))
    pi = np.exp(logp)
    squares = pi**2 + (1 - pi) ** 2 * rng.random((rows, width))
    rewards = np.where(mask, rng.normal(size=(rows, width)), 7.0)
    groups = np.array([3, 3, 3, 3, 8, 8, 8, 5, 8, 9, 9, 9])
    return Credit(
        torch.tensor(rewards),
        torch.tensor(mask),
        torch.tensor(groups),
        old_logp_BT=torch.tensor(logp),
        sum_pi_squared_BT=torch.tensor(squares),
        correction_BT=torch.tensor(rng.uniform(0.5, 1.5, (rows, width))),
    )


# -- MaxRL


def test_maxrl_by_hand():
    # a quarter is correct: (1 - 1/4) / (1/4) = 3, and -1 for the wrong ones
    close(MaxRL()(credit([0, 0, 0, 1])), [-1, -1, -1, 3])
    close(MaxRL()(credit([0.5, 1.5])), [-0.5, 0.5])
    one_in_16 = MaxRL()(credit([0] * 15 + [1]))
    assert one_in_16[-1].item() == pytest.approx(15, abs=1e-12)
    close(MaxRL(clip=2.0)(credit([0, 0, 0, 1])), [-1, -1, -1, 2])


def test_maxrl_of_equal_rewards_and_of_a_group_of_one_is_0():
    adv = MaxRL()(credit([0, 0, 1, 1, 0.3, 0.3, 1], groups=[0, 0, 1, 1, 2, 2, 3]))
    assert not adv.any()
    close(MaxRL(group_of_one="reward")(credit([0.5, 0], groups=[0, 1])), [0.5, 0])


@pytest.mark.parametrize("seed", SEEDS)
def test_maxrl_does_not_know_the_scale_of_the_rewards(seed):
    rewards = np.random.default_rng(seed).random(8)
    groups = [0, 0, 0, 1, 1, 1, 1, 1]
    adv = MaxRL()(credit(rewards, groups))
    torch.testing.assert_close(MaxRL()(credit(17.0 * rewards, groups)), adv, rtol=1e-12, atol=1e-12)
    assert adv[:3].sum().abs() < 1e-12


def test_maxrl_is_the_gradient_of_the_truncated_log_likelihood():
    """Over all outcomes of G Bernoulli responses, E[mean A grad log pi] is the gradient of
    sum_k -(1 - p)^k / k up to k = G - 1: the last term of G is lost with the groups that are 0.
    """
    size, p = 4, 0.3
    expected = 0.0
    for outcome in range(2**size):
        rewards = [float(outcome >> i & 1) for i in range(size)]
        adv = MaxRL()(credit(rewards)).squeeze(-1)
        scores = [1 / p if r else -1 / (1 - p) for r in rewards]
        score = torch.tensor(scores, dtype=torch.float64)
        chance = math.prod(p if r else 1 - p for r in rewards)
        expected += chance * float((adv * score).mean())
    # d/dp sum_k -(1 - p)^k / k = sum_k (1 - p)^(k - 1)
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)), rel=1e-12)


def test_maxrl_refuses_negative_rewards_and_whitening():
    with refuses("advantage", "maxrl", "the reward -1"):
        MaxRL()(credit([-1, 1]))
    with refuses("advantage.whiten", "tokens"):
        MaxRL(whiten="tokens")


# -- NSR


def test_nsr_psr_and_w_reinforce_by_hand():
    rewards = [0, 1, 1, 0]
    close(NSR()(credit(rewards)), [-1, 0, 0, -1])
    close(NSR(positive_weight=1.0, negative_weight=0.0)(credit(rewards)), [0, 1, 1, 0])
    close(NSR(positive_weight=0.1)(credit(rewards)), [-1, 0.1, 0.1, -1])
    # PSR + NSR is the reward between -1 and 1
    both = NSR(positive_weight=1.0)(credit(rewards))
    close(both, [2 * r - 1 for r in rewards])


def test_nsr_does_not_know_groups():
    rewards = [0, 0, 1, 0]
    alone = NSR()(credit(rewards, groups=[0, 1, 2, 3]))
    torch.testing.assert_close(alone, NSR()(credit(rewards)), rtol=0, atol=0)


def test_nsr_refuses_what_it_cannot_mean():
    for rewards in ([0.5, 1], [-1, 1], [0, 2], [0, math.nan]):
        with refuses("advantage", "nsr", "must be 0 or 1"):
            NSR()(credit(rewards))
    with refuses("advantage.negative_weight", 0.0):
        NSR(positive_weight=0.0, negative_weight=0.0)
    with refuses("advantage.whiten", "responses"):
        NSR(whiten="responses")
    with refuses("advantage.positive_weight", -1.0):
        NSR(positive_weight=-1.0)


# -- GDPO


def test_gdpo_by_hand():
    named = [[0.0, 5.0], [2.0, 5.0], [1.0, 0.0], [1.0, 4.0]]
    made = credit([0] * 4, groups=[0, 0, 1, 1], named=named, weights=[1.0, 0.5])
    half = 1 / math.sqrt(2)  # (2 - 1) / std of 0, 2
    adv = GDPO(whiten="none", eps=0.0)(made)
    # the second reward is equal in the first group, the first in the second
    close(adv, [-half, half, -half / 2, half / 2])
    values = np.array([-half, half, -half / 2, half / 2])
    whitened = GDPO(eps=0.0, whiten_eps=0.25)(made)
    close(whitened, list((values - values.mean()) / (values.std(ddof=1) + 0.25)))


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_of_equal_rewards_is_the_group_normalized_advantage(seed):
    rewards = np.random.default_rng(seed).random(7)
    groups = [0, 0, 0, 1, 1, 1, 1]
    made = credit(rewards, groups, named=np.stack([rewards, 3 * rewards], 1), weights=[0.75, 0.25])
    torch.testing.assert_close(
        GDPO(whiten="none", eps=0.0)(made),
        GroupNormalized(eps=0.0)(credit(rewards, groups)),
        rtol=1e-11,
        atol=1e-11,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("baseline", ["all", "others"])
def test_gdpo_does_not_know_shift_and_scale_of_a_reward(seed, baseline):
    rng = np.random.default_rng(seed)
    named = rng.normal(size=(9, 3))
    groups = [0, 1, 1, 2, 2, 2, 2, 2, 4]
    estimator = GDPO(eps=0.0, whiten_eps=0.0, baseline=baseline)
    adv = estimator(credit([0] * 9, groups, named))
    moved = named * [10.0, 0.1, 3.0] + [5.0, -2.0, 100.0]
    # others: a group of two has no std, so there the scale stays
    if baseline == "others":
        moved = named + np.array([5.0, -2.0, 100.0])
    torch.testing.assert_close(estimator(credit([0] * 9, groups, moved)), adv, rtol=1e-9, atol=1e-9)
    assert adv.mean().abs() < 1e-12
    assert adv.std().item() == pytest.approx(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_statistics_of_others_against_loops(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 3, 10) * 0.1
    groups = rng.integers(0, 4, 10)
    mean_B, std_B = statistics_of_others(torch.tensor(x), Groups(torch.tensor(groups)))
    for i in range(10):
        others = [x[j] for j in range(10) if j != i and groups[j] == groups[i]]
        assert mean_B[i].item() == pytest.approx(np.mean(others) if others else 0.0)
        if len(set(others)) < 2:
            assert std_B[i] == 0
        else:
            assert std_B[i].item() == pytest.approx(np.std(others, ddof=1))


def test_gdpo_of_others_that_are_equal_is_not_divided():
    named = [[0.1, 0.0], [0.1, 0.0], [0.1, 0.0], [0.7, 0.0]]
    adv = GDPO(whiten="none", baseline="others")(credit([0] * 4, named=named))
    assert adv[3].item() == pytest.approx(0.6, abs=1e-12)


def test_gdpo_edges():
    one = credit([0], named=[[1.0, 2.0]])
    assert not GDPO()(one).any()
    close(GDPO(eps=0.0, group_of_one="reward")(one), [3.0])  # a single one is not whitened
    equal = credit([0] * 3, named=[[0.3, 0.1]] * 3)
    for estimator in (
        GDPO(eps=0.0, whiten_eps=0.0),
        GDPO(baseline="others"),
        GDPO(whiten="tokens"),
    ):
        assert not estimator(equal).any()


def test_gdpo_refuses_a_single_reward():
    for made in (credit([0, 1]), credit([0, 1], named=[[0.0], [1.0]])):
        with refuses("advantage", "gdpo", "at least two named rewards"):
            GDPO()(made)


# -- OTB


def test_otb_by_hand():
    # one token each, pi = 1/2 of two tokens (w = 1/2) and pi = 1 (w = 0): the first decides
    made = credit([1, 0])
    made.old_logp_BT = torch.tensor([[0.5], [1.0]], dtype=torch.float64).log()
    made.sum_pi_squared_BT = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    close(OTB(eps=0.0)(made), [0, -1])
    # all weights 0: there is no baseline
    made.old_logp_BT = torch.zeros(2, 1, dtype=torch.float64)
    made.sum_pi_squared_BT = torch.ones(2, 1, dtype=torch.float64)
    close(OTB(eps=0.0)(made), [1, 0])


def naive_otb(made: Credit, estimator: OTB) -> np.ndarray:
    """Token by token, in loops. With align=token a token's time is its number in the response."""
    mask, rewards = made.mask_BT.numpy(), made.token_rewards_BT.numpy()
    rho = made.correction_BT.numpy()
    w = (1 - 2 * np.exp(made.old_logp_BT.numpy()) + made.sum_pi_squared_BT.numpy()) * rho**2
    rows, width = mask.shape
    groups = made.groups_B.tolist()

    def times(i):
        tokens = [t for t in range(width) if mask[i, t]]
        return {(n if estimator.align == "token" else t): t for n, t in enumerate(tokens)}

    adv = np.zeros_like(rewards)
    for i in range(rows):
        members = [j for j in range(rows) if groups[j] == groups[i]]
        others = [mask[j].sum() for j in members if j != i]
        for time, t in times(i).items():
            baseline = 0.0
            if len(members) > 1:
                top = bottom = 0.0
                for j in members:
                    if time in times(j):
                        u = times(j)[time]
                        weight = sum(w[j, v] for v in range(u + 1) if mask[j, v])
                        top += weight * sum(rewards[j, v] for v in range(u, width) if mask[j, v])
                        bottom += weight
                baseline = top / (bottom + estimator.eps)
                if estimator.zero_tail and mask[i].sum() > max(others) and time >= max(others):
                    baseline = 0.0
            elif estimator.group_of_one == "zero":
                continue
            adv[i, t] = sum(rewards[i, v] for v in range(t, width) if mask[i, v]) - baseline
    return adv


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("align", ["token", "column"])
@pytest.mark.parametrize("zero_tail", [True, False])
def test_otb_against_loops(seed, align, zero_tail):
    made = uneven(seed)
    for group_of_one in ("zero", "reward"):
        estimator = OTB(align=align, zero_tail=zero_tail, group_of_one=group_of_one)
        np.testing.assert_allclose(
            estimator(made).numpy(), naive_otb(made, estimator), rtol=1e-11, atol=1e-12
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_otb_minimises_the_weighted_squares_of_every_token(seed):
    """sum_i W (G - b)^2 is smallest at the baseline: moving it either way costs."""
    made = uneven(seed)
    estimator = OTB(zero_tail=False, align="column", eps=0.0, group_of_one="reward")
    adv = estimator(made)
    rho_w = (1 - 2 * made.old_logp_BT.exp() + made.sum_pi_squared_BT) * made.correction_BT.square()
    weight = torch.where(made.mask_BT, rho_w, 0.0).cumsum(1) * made.mask_BT
    several = made.groups_B != 5

    def cost(moved):
        return (weight * moved.square())[several].sum()

    for step in (-1e-3, 1e-3):
        assert cost(adv + step * made.mask_BT) > cost(adv)


@pytest.mark.parametrize("seed", SEEDS)
def test_otb_does_not_read_padding_or_the_order_of_rows(seed):
    made = uneven(seed)
    adv = OTB()(made)
    noise = torch.full_like(made.token_rewards_BT, math.nan)
    tensors = ("token_rewards_BT", "old_logp_BT", "sum_pi_squared_BT", "correction_BT")
    filled = {name: torch.where(made.mask_BT, getattr(made, name), noise) for name in tensors}
    torch.testing.assert_close(OTB()(replace(made, **filled)), adv, rtol=0, atol=0)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(adv)))
    permuted = {name: getattr(made, name)[order] for name in (*tensors, "mask_BT", "groups_B")}
    torch.testing.assert_close(OTB()(Credit(**permuted)), adv[order], rtol=1e-12, atol=1e-12)


def test_otb_of_tokens_does_not_know_where_the_environment_wrote():
    """With align=token, holes in the mask change nothing; with columns they do."""
    made = uneven(0)
    tight = replace(made, mask_BT=made.mask_BT.clone())
    columns = (~made.mask_BT).long().argsort(dim=1, stable=True)
    for name in (
        "token_rewards_BT",
        "old_logp_BT",
        "sum_pi_squared_BT",
        "correction_BT",
        "mask_BT",
    ):
        setattr(tight, name, getattr(made, name).gather(1, columns))
    torch.testing.assert_close(OTB()(tight), OTB()(made).gather(1, columns), rtol=1e-12, atol=1e-12)
    by_column = OTB(align="column")
    assert not torch.allclose(by_column(tight), by_column(made).gather(1, columns))


def test_otb_of_equal_weights_is_the_mean_over_the_group():
    made = credit([0, 1, 2, 5])
    made.old_logp_BT = torch.full((4, 1), 0.5, dtype=torch.float64).log()
    made.sum_pi_squared_BT = torch.full((4, 1), 0.5, dtype=torch.float64)
    close(OTB(eps=0.0)(made), [-2, -1, 0, 3])


def test_otb_needs_the_sums_of_squares():
    with refuses("advantage", "otb", "sum_v pi_v^2"):
        OTB()(credit([0, 1]))
    with refuses("advantage.whiten", "tokens"):
        OTB(whiten="tokens")


def test_variance_proxies_by_hand():
    made = credit([1, 0])
    made.old_logp_BT = torch.tensor([[0.5], [0.25]], dtype=torch.float64).log()
    made.sum_pi_squared_BT = torch.tensor([[0.5], [0.375]], dtype=torch.float64)
    adv = torch.tensor([[2.0], [-1.0]], dtype=torch.float64)
    # w = 1/2 and 7/8, A^2 = 4 and 1
    found = variance_proxies(adv, made, gradient_norm=1.0)
    power = (4 * 0.5 + 0.875) / 2
    expected = {
        "power": power, "square": 2.5, "score_norm": 0.6875, "signal": 1.0, "noise": power - 1.0,
    }  # fmt: skip
    assert found == pytest.approx(expected)
    assert "noise" not in variance_proxies(adv, made)
    assert variance_proxies(adv, made, 100.0)["noise"] == 0
    weighted = replace(made, correction_BT=torch.full((2, 1), 2.0, dtype=torch.float64))
    assert variance_proxies(adv, weighted)["power"] == pytest.approx(4 * power)
    assert variance_proxies(adv, weighted)["score_norm"] == pytest.approx(4 * 0.6875)


def test_tokens_of_weight_0_have_no_power():
    made = credit([1, 0])
    made.old_logp_BT = torch.tensor([[0.5], [0.25]], dtype=torch.float64).log()
    made.sum_pi_squared_BT = torch.tensor([[0.5], [0.375]], dtype=torch.float64)
    made.correction_BT = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    adv = torch.tensor([[2.0], [-1.0]], dtype=torch.float64)
    found = variance_proxies(adv, made)
    assert (found["power"], found["score_norm"]) == (pytest.approx(1.0), pytest.approx(0.25))
