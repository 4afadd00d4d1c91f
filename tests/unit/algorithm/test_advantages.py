"""Advantages: a naive restatement (naive_credit.py), hand-worked numbers, equivalences, edges,
refusals.
"""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import naive_credit as naive
from gspo.algorithm.advantages import (
    GAE,
    Advantage,
    Credit,
    GroupAdvantage,
    GroupMean,
    GroupNormalized,
    Groups,
    LeaveOneOut,
    ReinforcePP,
    Returns,
)
from refusals import refuses

SEEDS = range(4)
# An estimator, and what it gives for (token rewards, mask, groups, values) according to the naive
# restatement.
CASES = [
    (GroupNormalized(), lambda r, m, g, v: naive.group_normalized(r, m, g)),
    (GroupNormalized(eps=0.1), lambda r, m, g, v: naive.group_normalized(r, m, g, eps=0.1)),
    (
        GroupNormalized(std="batch"),
        lambda r, m, g, v: naive.group_normalized(r, m, g, over="batch"),
    ),
    (
        GroupNormalized(group_of_one="reward"),
        lambda r, m, g, v: naive.group_normalized(r, m, g, group_of_one="reward"),
    ),
    (GroupMean(), lambda r, m, g, v: naive.group_mean(r, m, g)),
    (GroupMean(group_of_one="reward"), lambda r, m, g, v: naive.group_mean(r, m, g, "reward")),
    (LeaveOneOut(), lambda r, m, g, v: naive.rloo(r, m, g)),
    (LeaveOneOut(group_of_one="reward"), lambda r, m, g, v: naive.rloo(r, m, g, "reward")),
    (Returns(), lambda r, m, g, v: naive.returns(r, m)),
    (Returns(gamma=0.9), lambda r, m, g, v: naive.returns(r, m, 0.9)),
    (ReinforcePP(), lambda r, m, g, v: naive.reinforce_pp(r, m, g)),
    (ReinforcePP(gamma=0.8), lambda r, m, g, v: naive.reinforce_pp(r, m, g, 0.8)),
    (
        ReinforcePP(baseline="group"),
        lambda r, m, g, v: naive.reinforce_pp(r, m, g, baseline="group"),
    ),
    (GAE(whiten="none"), lambda r, m, g, v: naive.gae(r, m, v)),
    (
        GAE(gamma=0.9, lam=0.7),
        lambda r, m, g, v: naive.whiten_tokens(naive.gae(r, m, v, 0.9, 0.7), m),
    ),
    (GAE(whiten="none", lam=0.0), lambda r, m, g, v: naive.gae(r, m, v, lam=0.0)),
]
PLAIN = [  # every estimator without whitening; ReinforcePP has none
    *(
        kind(group_of_one=alone)
        for kind in (GroupNormalized, GroupMean, LeaveOneOut)
        for alone in ("zero", "reward")
    ),
    GroupNormalized(std="batch"),
    Returns(),
    Returns(gamma=0.9),
    GAE(whiten="none"),
]
ALL = [*PLAIN, ReinforcePP(), ReinforcePP(baseline="group"), GAE()]
GROUPED = [one for one in PLAIN if isinstance(one, GroupAdvantage)]


def name(estimator) -> str:
    return "-".join(str(value) for value in asdict(estimator).values())


cases = pytest.mark.parametrize(
    "estimator, expected", CASES, ids=[name(estimator) for estimator, _ in CASES]
)
every = pytest.mark.parametrize("estimator", ALL, ids=name)
grouped = pytest.mark.parametrize("estimator", GROUPED, ids=name)


def credit(rewards, mask, groups=None, values=None) -> Credit:
    mask_BT = torch.tensor(np.asarray(mask), dtype=torch.bool)
    groups_B = torch.arange(len(mask_BT)) if groups is None else torch.tensor(np.asarray(groups))
    values_BT = None if values is None else torch.tensor(values, dtype=torch.float64)
    return Credit(
        torch.tensor(np.asarray(rewards), dtype=torch.float64), mask_BT, groups_B, values_BT
    )


def of(batch: naive.Batch) -> Credit:
    return credit(batch.token_rewards, batch.mask, batch.groups, batch.values)


def one_token(rewards, groups=None) -> Credit:
    """Responses of one token, with these rewards; one group unless told otherwise. Values are 0."""
    rewards = np.reshape(rewards, (-1, 1))
    return credit(
        rewards,
        np.ones_like(rewards),
        [0] * len(rewards) if groups is None else groups,
        0.0 * rewards,
    )


def close(tensor, expected, tolerance=1e-11) -> None:
    np.testing.assert_allclose(tensor.numpy(), np.asarray(expected), rtol=tolerance, atol=tolerance)


@cases
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_agrees_with_the_naive_restatement(estimator, expected, last_only, seed):
    batch = naive.ragged(seed, last_only=last_only)
    raw = expected(batch.token_rewards, batch.mask, batch.groups, batch.values)
    close(estimator(of(batch)), raw)
    close(replace(estimator, clip=0.3)(of(batch)), naive.clipped(raw, 0.3))
    assert np.abs(raw).max() > 0.3  # or the clip would have had nothing to do
    if estimator.whiten == "none":
        close(replace(estimator, whiten="tokens")(of(batch)), naive.whiten_tokens(raw, batch.mask))
        close(
            replace(estimator, whiten="responses")(of(batch)),
            naive.whiten_responses(raw, batch.mask),
        )


# Rewards 1 0 0 1 and 1 0 0 0 of two problems; mean 1/2 and 1/4, variance (ddof 1) 4 (1/4) / 3 = 1/3
# and (9/16 + 3/16) / 3 = 1/4. Over the eight: mean 3/8, variance (3 (25/64) + 5 (9/64)) / 7 =
# 120/448 = 15/56.
REWARDS, TWO_GROUPS = [1, 0, 0, 1, 1, 0, 0, 0], [5, 5, 5, 5, 2, 2, 2, 2]
A, B = 0.5 / (math.sqrt(1 / 3) + 1e-6), 0.25 / (0.5 + 1e-6)
C = 0.5 / (math.sqrt(15 / 56) + 1e-6)


@pytest.mark.parametrize(
    "estimator, expected",
    [
        (GroupNormalized(), [A, -A, -A, A, 3 * B, -B, -B, -B]),
        (GroupNormalized(std="batch"), [C, -C, -C, C, 1.5 * C, -C / 2, -C / 2, -C / 2]),
        (GroupMean(), [0.5, -0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]),
        # 1 - (0 + 0 + 1) / 3 = 2/3;  0 - (1 + 0 + 1) / 3 = -2/3;  1 - 0 = 1;  0 - (1 + 0 + 0) / 3 =
        #                             -1/3
        (LeaveOneOut(), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1, -1 / 3, -1 / 3, -1 / 3]),
        (Returns(), REWARDS),
        # (r - 3/8) / sqrt(15/56 + 1e-8)
        (ReinforcePP(), [(r - 3 / 8) / math.sqrt(15 / 56 + 1e-8) for r in REWARDS]),
        # r - group mean has mean 0 and variance (4 (1/4) + 9/16 + 3/16) / 7 = 1/4
        (
            ReinforcePP(baseline="group"),
            [
                x / math.sqrt(1 / 4 + 1e-8)
                for x in (0.5, -0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25)
            ],
        ),
    ],
    ids=lambda x: name(x) if isinstance(x, Advantage) else "",
)
def test_by_hand(estimator, expected):
    close(estimator(one_token(REWARDS, TWO_GROUPS)).squeeze(-1), expected)


def test_group_normalized_by_hand_in_digits():
    """Rewards 1 0 0 1: mean 0.5, std 0.577350, so 0.866024; with peers' other epsilons 0.865875 and
    0.866025.
    """
    for eps, expected in ((1e-6, 0.8660239), (1e-4, 0.8658754), (1e-9, 0.8660254)):
        adv = GroupNormalized(eps=eps)(one_token([1, 0, 0, 1])).squeeze(-1)
        close(adv, [expected, -expected, -expected, expected], 1e-7)


def test_returns_by_hand():
    """Rewards 1 2 _ 4, the third token not the policy's. gamma 1/2: 4; 2 + 4/2 = 4; 1 + 4/2 = 3.
    gamma 1: 4, 6, 7.
    """
    seen = credit([[1, 2, 9, 4]], [[1, 1, 0, 1]])
    close(Returns(gamma=0.5)(seen), [[3, 4, 0, 4]])
    close(Returns()(seen), [[7, 6, 0, 4]])


def test_gae_by_hand():
    """Three tokens, the reward 1 on the last, V = 0.2 0.4 0.7, lam = 1/2.

    gamma 1: delta = 0.4 - 0.2, 0.7 - 0.4, 1 - 0.7 = 0.2 0.3 0.3
             A_3 = 0.3;  A_2 = 0.3 + 0.15 = 0.45;  A_1 = 0.2 + 0.225 = 0.425
    gamma .9: delta = 0.36 - 0.2, 0.63 - 0.4, 0.3 = 0.16 0.23 0.3;  gamma lam = 0.45
             A_3 = 0.3;  A_2 = 0.23 + 0.135 = 0.365;  A_1 = 0.16 + 0.16425 = 0.32425
    """
    seen = credit([[0, 0, 1]], [[1, 1, 1]], values=[[0.2, 0.4, 0.7]])
    estimator = GAE(whiten="none", lam=0.5)
    close(estimator(seen), [[0.425, 0.45, 0.3]])
    close(estimator.returns(seen), [[0.625, 0.85, 1.0]])
    close(GAE(whiten="none", gamma=0.9, lam=0.5)(seen), [[0.32425, 0.365, 0.3]])


def test_gae_by_hand_with_a_hole():
    """The second token is not the policy's: the first one's successor is the third, with V = 0.7.

    delta = 0.7 - 0.2, 1 - 0.7 = 0.5 0.3;  A_3 = 0.3;  A_1 = 0.5 + 0.15 = 0.65;  R = 0.85, 1
    """
    seen = credit([[0, 50, 1]], [[1, 0, 1]], values=[[0.2, -90, 0.7]])
    close(GAE(whiten="none", lam=0.5)(seen), [[0.65, 0, 0.3]])
    close(GAE(lam=0.5).returns(seen), [[0.85, 0, 1.0]])  # of the critic's targets no whitening


def test_whitening_by_hand():
    """Responses of 3 and 1 tokens with returns 1 and 0.

    tokens: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4, so 1/2 and -3/2 (the long response weighs
    more) responses: mean 1/2, std sqrt(1/2), so +-0.707 (up to the 1e-4)
    """
    seen = credit([[0, 0, 1], [0, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    high, low = (x / math.sqrt(1 / 4 + 1e-8) for x in (1 / 4, -3 / 4))
    close(Returns(whiten="tokens")(seen), [[high] * 3, [low, 0, 0]])
    each = 0.5 / (math.sqrt(1 / 2) + 1e-4)
    close(Returns(whiten="responses")(seen), [[each] * 3, [-each, 0, 0]])
    # after whitening: 1 would not be cut
    close(Returns(whiten="tokens", clip=0.4)(seen), [[0.4] * 3, [-0.4, 0, 0]])


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_is_group_mean_times_g_over_g_minus_1(seed):
    seen = of(naive.ragged(seed))
    size = Groups(seen.groups_B).size_B.unsqueeze(-1)
    close(LeaveOneOut()(seen), GroupMean()(seen) * size / (size - 1).clamp(min=1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_equivalences_over_tokens(seed, gamma):
    seen = of(naive.ragged(seed))
    blind = replace(seen, values_BT=torch.zeros_like(seen.values_BT))
    close(GAE(whiten="none", lam=1.0, gamma=gamma)(blind), Returns(gamma=gamma)(seen))
    # lam = 1: the values cancel but for the token's own, A_t = R_t - V_t, so the critic's target is
    # the return
    close(GAE(lam=1.0, gamma=gamma).returns(seen), Returns(gamma=gamma)(seen))
    close(ReinforcePP(gamma=gamma)(seen), Returns(gamma=gamma, whiten="tokens")(seen))
    close(
        ReinforcePP(baseline="group", whiten="responses")(seen), GroupMean(whiten="responses")(seen)
    )


@every
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_masked_does_not_matter_and_gets_exactly_zero(estimator, junk):
    batch = naive.ragged(7)
    clean, hole = estimator(of(batch)), ~batch.mask
    batch.token_rewards[hole], batch.values[hole] = junk, junk
    dirty = estimator(of(batch))
    assert torch.equal(dirty, clean)
    assert (dirty[torch.tensor(hole)] == 0).all() and dirty.isfinite().all() and dirty.any()
    if isinstance(estimator, GAE):
        targets = estimator.returns(of(batch))
        assert targets.isfinite().all() and (targets[torch.tensor(hole)] == 0).all()


@every
@pytest.mark.parametrize("whiten", ["tokens", "responses"])
def test_order_and_labels_of_groups_do_not_matter(estimator, whiten):
    batch, rng = naive.ragged(5), np.random.default_rng(1)
    estimator = replace(estimator, whiten=whiten)
    order = rng.permutation(len(batch.groups))
    shuffled = naive.Batch(*(getattr(batch, field)[order] for field in asdict(batch)))
    close(estimator(of(shuffled)), estimator(of(batch))[torch.tensor(order)].numpy())
    labels = {
        old: new for old, new in zip(np.unique(batch.groups), (2**40, -3, 0, 17), strict=True)
    }
    renamed = replace(batch, groups=np.array([labels[g] for g in batch.groups]))
    close(estimator(of(renamed)), estimator(of(batch)))


@grouped
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -1e9])
def test_a_group_of_equal_rewards_gets_exactly_zero(estimator, reward):
    """Also where the mean of equal numbers is rounded: (0.1 + 0.1 + 0.1) / 3 is not 0.1."""
    adv = estimator(one_token([reward] * 3 + [1, 0, 0.5], [0, 0, 0, 1, 1, 1])).squeeze(-1)
    assert (adv[:3] == 0).all() and (adv[3:5] != 0).all()
    assert (estimator(one_token([reward] * 7)) == 0).all()


@grouped
def test_a_group_of_one(estimator):
    adv = estimator(one_token([0.7, 1, 0], [3, 1, 1])).squeeze(-1)
    divisor = 1 + getattr(estimator, "eps", 0.0)  # of a normalised reward whose std counts as 1
    assert adv[0] == (0.7 / divisor if estimator.group_of_one == "reward" else 0.0)
    assert adv[1] > 0 > adv[2]
    for rewards in ([0.7], [0.7, 0.2]):  # a batch of nothing else: no deviation exists
        adv = estimator(one_token(rewards, range(len(rewards)))).squeeze(-1)
        kept = [
            reward / divisor if estimator.group_of_one == "reward" else 0.0 for reward in rewards
        ]
        close(adv, kept, 0.0)


@pytest.mark.parametrize(
    "estimator, expected",
    [
        (Returns(), [0.7]),
        (GAE(whiten="none"), [0.7]),  # its value is 0
        (GAE(), [0.7]),  # a single token has no deviation: left as it is
        (ReinforcePP(), [0.7]),
        (ReinforcePP(whiten="responses"), [0.7]),
        (ReinforcePP(baseline="group"), [0.0]),
    ],
    ids=lambda x: name(x) if isinstance(x, Advantage) else "",
)
def test_a_batch_of_one_response_of_one_token(estimator, expected):
    close(estimator(one_token([0.7])).squeeze(-1), expected, 0.0)


@every
@pytest.mark.parametrize("whiten", ["tokens", "responses"])
def test_whitening_of_constant_advantages_gives_zero(estimator, whiten):
    adv = replace(estimator, whiten=whiten)(one_token([0.1] * 6, [0, 0, 0, 1, 1, 1]))
    close(adv, np.zeros((6, 1)), 1e-11)


@every
@pytest.mark.parametrize("whiten", ["tokens", "responses"])
def test_whitened_advantages_have_mean_zero_and_deviation_one(estimator, whiten):
    seen = of(naive.ragged(2))
    adv, mask = replace(estimator, whiten=whiten)(seen), seen.mask_BT
    sample = adv[mask] if whiten == "tokens" else (adv.sum(-1) / mask.sum(-1))[mask.any(-1)]
    assert abs(float(sample.mean())) < 1e-12 and abs(float(sample.std()) - 1) < 1e-3


@pytest.mark.parametrize("whiten", ["none", "tokens", "responses"])
@pytest.mark.parametrize("rows", [1, 3])
def test_responses_without_tokens_take_no_part_in_whitening(whiten, rows):
    """`rows` responses with tokens beside two without: as if the two were not there."""
    rewards, mask = np.arange(2.0 * (rows + 2)).reshape(-1, 2), np.ones((rows + 2, 2), bool)
    mask[rows:] = False
    seen, alone = credit(rewards, mask), credit(rewards[:rows], mask[:rows])
    estimator = Returns(whiten=whiten)
    close(estimator(seen)[:rows], estimator(alone))
    assert (estimator(credit(rewards, np.zeros_like(mask))) == 0).all()


REFUSED = [
    *(
        (kind, "whiten", "token")
        for kind in (GroupNormalized, GroupMean, LeaveOneOut, Returns, ReinforcePP, GAE)
    ),
    *(
        (kind, "clip", value)
        for kind in (GroupNormalized, Returns, GAE)
        for value in (0.0, -1.0, math.nan)
    ),
    *((kind, "group_of_one", "one") for kind in (GroupNormalized, GroupMean, LeaveOneOut)),
    (GroupNormalized, "std", "none"),
    *((kind, "gamma", value) for kind in (Returns, ReinforcePP) for value in (0.0, 1.1, math.nan)),
    (ReinforcePP, "baseline", "rloo"),
    (ReinforcePP, "whiten", "none"),
    *((GAE, key, value) for key in ("gamma", "lam") for value in (-0.1, 1.1, math.nan)),
    *((GAE, key, value) for key in ("value_coef", "value_clip") for value in (0.0, -1.0, math.nan)),
]


@pytest.mark.parametrize("kind, key, value", REFUSED)
def test_refusals_name_the_key_and_the_value(kind, key, value):
    with refuses(f"advantage.{key}", value):
        kind(**{key: value})


def test_gae_without_values_and_bases_without_formula_are_refused():
    with refuses("advantage", "gae", "critic"):
        GAE()(credit([[1.0]], [[1]]))
    for base in (Advantage("base"), GroupAdvantage("base")):
        with pytest.raises(TypeError, match="base"):
            base(credit([[1.0]], [[1]]))


@pytest.mark.parametrize(
    ("estimate", "returned"),
    [
        (lambda credit: credit.token_rewards_BT.sum(-1).mean(0, keepdim=True), r"[1]"),
        (lambda credit: credit.token_rewards_BT.T, r"[2, 3]"),
        (lambda credit: credit.token_rewards_BT.sum(), "[]"),
        (lambda credit: [1.0, 2.0, 3.0], "list"),
    ],
)
def test_an_estimator_of_ones_own_with_a_wrong_shape_is_refused_by_name(estimate, returned):
    """A single number for all responses would otherwise be broadcast without a word."""

    mine = Advantage(name="mine")
    mine.estimate = estimate
    with refuses("advantage", "mine", f"of shape [3] or [3, 2], and returned {returned}"):
        mine(credit([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], [[1, 1], [1, 1], [1, 0]]))
    for right in (lambda c: c.token_rewards_BT.sum(-1), lambda c: c.token_rewards_BT):
        mine.estimate = right
        assert mine(credit([[1.0, 0.0]], [[1, 1]])).shape == (1, 2)
