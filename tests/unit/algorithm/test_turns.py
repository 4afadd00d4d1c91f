"""Credit for the turns of episodes, and the ratio's length, by hand."""

import math

import pytest
import torch

from gspo.algorithm.advantages import GAE, Credit, ReinforcePP, Returns
from gspo.algorithm.objectives import GSPO, GSPOAllTokens, LossInputs
from gspo.algorithm.turn_advantage import TurnNormalized

# Two episodes of one group: turns of 2 and 1 tokens with an observation of 2 between them; one turn
# of 3 tokens.
MASK = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
TURNS = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
REWARDS = torch.tensor(
    [[0.0, 0.5, math.nan, math.nan, 1.0], [0.0, 0.0, 1.0, math.nan, math.nan]], dtype=torch.float64
)


def credit(**options) -> Credit:
    return Credit(REWARDS, MASK, torch.tensor([7, 7]), turns_BT=TURNS, **options)


def test_a_turn_is_compared_with_the_same_turn_of_its_group():
    # returns of turn 0: .5 + .8 * 1 = 1.3 and 1; mean 1.15, std (ddof 1) .3 / sqrt 2; turn 1 is
    # alone
    adv = TurnNormalized(gamma=0.8, eps=0.0)(credit())
    expected = 0.15 / (0.3 / math.sqrt(2))
    assert adv[0].tolist() == pytest.approx([expected, expected, 0, 0, 0])
    assert adv[1].tolist() == pytest.approx([-expected] * 3 + [0, 0])


def test_equal_returns_have_no_advantage_whatever_the_turns():
    rewards = torch.where(
        MASK, torch.tensor([[0, 0, 0, 0, 1.0], [0, 0, 1.0, 0, 0]], dtype=torch.float64), math.nan
    )
    adv = TurnNormalized()(Credit(rewards, MASK, torch.tensor([7, 7]), turns_BT=TURNS))
    assert not adv.any()


def test_without_turns_it_is_the_group_normalized_advantage():
    from gspo.algorithm.advantages import GroupNormalized

    g = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.randint(1, 7, (12, 1), generator=g)
    rewards = torch.where(mask, torch.randn(12, 6, generator=g, dtype=torch.float64), 0.0)
    given = Credit(rewards, mask, torch.arange(12) // 4)
    torch.testing.assert_close(TurnNormalized()(given), GroupNormalized()(given))


def test_discounts_go_over_the_policys_tokens_alone():
    assert Returns(gamma=0.5)(credit())[0].tolist() == pytest.approx(
        [0.5 * 0.5 + 0.25, 0.5 + 0.5, 0, 0, 1.0]
    )
    one = torch.tensor([0, 1])
    plain = ReinforcePP(gamma=0.5)(Credit(REWARDS, MASK, one))
    squeezed = Credit(REWARDS[:1, [0, 1, 4]], MASK[:1, [0, 1, 4]], one[:1])
    assert (
        Returns(gamma=0.5)(squeezed)[0].tolist()
        == Returns(gamma=0.5)(credit())[0, [0, 1, 4]].tolist()
    )
    assert torch.isfinite(plain).all()


def test_gae_reads_no_value_at_a_token_of_the_environment():
    values = torch.tensor(
        [[0.1, 0.2, math.nan, math.inf, 0.4], [0.1, 0.2, 0.3, math.nan, math.nan]]
    ).double()
    adv = GAE(gamma=1.0, lam=0.5, whiten="none")(credit(values_BT=values))
    last = 1.0 - 0.4
    middle = 0.5 + 0.4 - 0.2 + 0.5 * last
    assert adv[0].tolist() == pytest.approx([0.2 - 0.1 + 0.5 * middle, middle, 0, 0, last])


def test_the_length_of_the_mistaken_ratio_counts_the_environments_tokens():
    old = torch.zeros(2, 5, dtype=torch.float64)
    logp = torch.where(
        MASK, torch.tensor([[0.1, 0.2, 0, 0, 0.3], [0.2, 0.2, 0.2, 0, 0]]).double(), math.nan
    )
    given = [LossInputs(logp, old, torch.ones(2, 5).double(), MASK, lengths_B=torch.tensor([5, 3]))]
    given.append(LossInputs(logp, old, torch.ones(2, 5).double(), MASK))
    right, wrong = GSPO(clip_low=0.9, clip_high=9.0), GSPOAllTokens(clip_low=0.9, clip_high=9.0)
    assert right(given[0]).loss_BT[:, 0].tolist() == pytest.approx([-math.exp(0.2), -math.exp(0.2)])
    assert wrong(given[0]).loss_BT[:, 0].tolist() == pytest.approx(
        [-math.exp(0.6 / 5), -math.exp(0.2)]
    )
    assert torch.equal(wrong(given[1]).loss_BT, right(given[1]).loss_BT)
