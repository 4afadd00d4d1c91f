"""KL estimators and coefficient: a naive restatement, numbers by hand, exact expectations by
enumeration, refusals.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch

import naive_credit as naive
from gspo.algorithm.advantages import Credit, Returns
from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.kl import ESTIMATORS, KLCoefficient, KLInLoss, KLInReward, Penalized
from gspo.data.batch import TrainBatch
from gspo.model.policy import PolicyOutput
from gspo.train.accumulator import MetricAccumulator
from gspo.train.loss_terms import KLTerm, TermInputs
from refusals import refuses

SEEDS = range(3)


def tensor(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float64)


def value_and_gradient(settings, logp, ref, mask) -> tuple[np.ndarray, np.ndarray]:
    """The estimate of every token, and its derivative by that token's log-prob."""
    logp_BT = tensor(logp).requires_grad_()
    value_BT = settings.estimate(
        logp_BT, tensor(ref), torch.tensor(np.asarray(mask), dtype=torch.bool)
    )
    (gradient_BT,) = torch.autograd.grad(value_BT.sum(), logp_BT)
    return value_BT.detach().numpy(), gradient_BT.numpy()


def at(settings, d: float) -> tuple[float, float]:
    """The same for one token whose log-ratio is d."""
    value, gradient = value_and_gradient(settings, [[d]], [[0.0]], [[1]])
    return float(value[0, 0]), float(gradient[0, 0])


def of_tokens(batch: naive.Batch, function) -> np.ndarray:
    """function(p, q) of every token that counts."""
    return naive.spread_tokens(
        batch.mask, lambda i, t: function(math.exp(batch.logp[i, t]), math.exp(batch.other[i, t]))
    )


@pytest.mark.parametrize("kind", [Penalized, KLInLoss, KLInReward])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bounds", [(20.0, math.inf), (0.4, math.inf), (20.0, 0.15)])
@pytest.mark.parametrize("seed", SEEDS)
def test_agrees_with_the_naive_restatement(kind, estimator, bounds, seed):
    batch = naive.ragged(seed)
    bound = None if bounds[1] == math.inf else bounds[1]
    settings = kind(estimator=estimator, log_ratio_bound=bounds[0], value_bound=bound)
    value, gradient = value_and_gradient(settings, batch.logp, batch.other, batch.mask)
    expected = of_tokens(batch, lambda p, q: naive.kl_gradient(p, q, estimator, *bounds))
    np.testing.assert_allclose(
        value, of_tokens(batch, lambda p, q: naive.kl(p, q, estimator, *bounds)), atol=1e-12
    )
    np.testing.assert_allclose(gradient, expected, atol=1e-12)
    cut = (expected[batch.mask] == 0).mean()
    assert cut == 0 if bounds == (20.0, math.inf) else 0 < cut < 1


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", SEEDS)
def test_straight_through_has_the_estimators_value_and_the_gradient_of_k2(estimator, seed):
    batch = naive.ragged(seed)
    value, gradient = value_and_gradient(
        KLInLoss(estimator=estimator, gradient="k2"), batch.logp, batch.other, batch.mask
    )
    np.testing.assert_allclose(
        value, of_tokens(batch, lambda p, q: naive.kl(p, q, estimator)), atol=1e-12
    )
    np.testing.assert_allclose(gradient, of_tokens(batch, lambda p, q: math.log(p / q)), atol=1e-12)


@pytest.mark.parametrize("p, q, k1, k2, k3", [
    (0.5, 0.25, 0.693147, 0.240227, 0.193147),  # d = ln 2: d^2/2; 1/2 - 1 + ln 2
    (0.25, 0.5, -0.693147, 0.240227, 0.306853),  # d = -ln 2: d^2/2; 2 - 1 - ln 2
    (0.3, 0.3, 0.0, 0.0, 0.0),
    (1.0, math.exp(-2), 2.0, 2.0, 1.135335),  # d = 2: 4/2; e^-2 - 1 + 2
])  # fmt: skip
def test_by_hand(p, q, k1, k2, k3):
    for estimator, expected in (("k1", k1), ("k2", k2), ("k3", k3), ("abs", abs(k1))):
        assert at(Penalized(estimator=estimator), math.log(p / q))[0] == pytest.approx(
            expected, abs=1e-6
        ), estimator


def test_bounds_by_hand():
    """d = 3 within +-2: 2, 2, e^-2 + 1, 2; k3 of d = -3, e^3 - 4 = 16.1, within +-10. No gradient
    in any of them.
    """
    for estimator, expected in (("k1", 2), ("k2", 2), ("k3", 1.135335), ("abs", 2)):
        assert at(Penalized(estimator=estimator, log_ratio_bound=2.0), 3.0) == (
            pytest.approx(expected, abs=1e-6),
            0.0,
        )
    assert at(Penalized(estimator="k1", log_ratio_bound=2.0), -3.0) == (-2.0, 0.0)
    assert at(Penalized(), -3.0)[0] == pytest.approx(16.085537, abs=1e-6)
    assert at(Penalized(value_bound=10.0), -3.0) == (10.0, 0.0)
    assert at(Penalized(estimator="k1", value_bound=1.5), -3.0) == (-1.5, 0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gradient", ["own", "k2"])
def test_beyond_the_log_ratio_bound_the_estimate_is_finite_and_has_no_gradient(estimator, gradient):
    settings = KLInLoss(estimator=estimator, gradient=gradient)
    for d in (-800.0, -20.5, 20.5, 800.0):
        value, slope = at(settings, d)
        assert value == pytest.approx(
            at(Penalized(estimator=estimator), math.copysign(20.0, d))[0], rel=1e-9
        )
        assert slope == 0, d
    assert at(settings, 19.5)[1] != 0


@pytest.mark.parametrize("kind", [Penalized, KLInLoss, KLInReward])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_is_masked_does_not_matter_and_gets_exactly_zero(kind, estimator, junk):
    batch = naive.ragged(9)
    for settings in (kind(estimator=estimator), KLInLoss(estimator=estimator, gradient="k2")):
        clean = value_and_gradient(settings, batch.logp, batch.other, batch.mask)
        for logp, ref in ((junk, junk), (junk, -1.0), (-1.0, junk)):
            dirty = value_and_gradient(
                settings,
                np.where(batch.mask, batch.logp, logp),
                np.where(batch.mask, batch.other, ref),
                batch.mask,
            )
            for before, after in zip(clean, dirty, strict=True):
                assert (
                    np.array_equal(before, after)
                    and (after[~batch.mask] == 0).all()
                    and np.isfinite(after).all()
                )


def test_the_reference_gets_no_gradient():
    logp, ref = (tensor([[-1.0, x]]).requires_grad_() for x in (-2.0, -3.0))
    for settings in (KLInLoss(), KLInLoss(gradient="k2"), KLInReward()):
        settings.estimate(logp, ref, torch.ones(1, 2, dtype=torch.bool)).sum().backward()
    assert logp.grad is not None and ref.grad is None


def test_k3_of_close_policies_keeps_its_digits():
    """d = 1e-4 in float32: d^2/2 = 5e-9 up to 2e-13; exp(-d) + d - 1 would give 0 or 6e-8. Never
    negative.
    """
    d = torch.tensor([[1e-4, -1e-4, 3e-6, 1e-8]])
    value = KLInLoss().estimate(d, torch.zeros_like(d), torch.ones(1, 4, dtype=torch.bool))
    assert value[0, :2].tolist() == pytest.approx([5e-9, 5e-9], rel=5e-3)
    assert (value >= 0).all()


# Exact expectations, over all tokens of a small vocabulary


LOGITS, REF, OLD = (
    torch.tensor(x, dtype=torch.float64)
    for x in ([0.3, -0.8, 1.1, 0.0], [-0.4, 0.5, 0.6, -0.2], [0.9, -0.1, 0.2, -0.7])
)
P, Q = (torch.softmax(x, 0) for x in (LOGITS, REF))
D = (P / Q).log()
FORWARD = P * (D - (P * D).sum())  # d/dlogits KL(pi || ref) = pi (d - KL)
BACKWARD = P - Q  # d/dlogits KL(ref || pi)


def expectation(settings, sampler=None) -> tuple[float, torch.Tensor]:
    """sum_y sampler(y) term(y), of responses of one token, and its gradient by the logits. On
    policy by default.
    """
    logits, sampler = LOGITS.clone().requires_grad_(), LOGITS if sampler is None else sampler
    logp, old, ref = (torch.log_softmax(x, 0) for x in (logits, sampler, REF))
    total = sum(old[y].exp() * term(settings, logp[y], old[y], ref[y]) for y in range(4))
    return float(total.detach()), torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "abs"])
def test_a_wide_bound_is_used_where_the_estimator_has_no_exp(estimator):
    settings = in_loss(estimator, log_ratio_bound=100)
    logp, ref = torch.tensor([-1.0]), torch.tensor([-91.0])
    expected = {"k1": 90.0, "k2": 90.0**2 / 2, "abs": 90.0}
    assert float(term(settings, logp, logp, ref)) == pytest.approx(expected[estimator])


def term(settings, logp, old, ref) -> torch.Tensor:
    """What a response of these tokens adds to the loss, with coefficient 1."""
    logp, old, ref = (x.reshape(1, -1) for x in (logp, old, ref))
    mask = torch.ones_like(logp, dtype=torch.bool)
    batch = TrainBatch(
        tokens_BS=mask.long(),
        attention_BS=mask,
        mask_BT=mask,
        sampled_BT=mask,
        prompts_B=torch.zeros(1, dtype=torch.int64),
        engine_logp_BT=old,
        old_logp_BT=old,
        ref_logp_BT=ref,
        adv_BT=torch.zeros_like(logp),
    )
    output = PolicyOutput(logp, entropy_BT=None, experts_BSLK=None)
    inputs = TermInputs(output, batch, Totals.of(mask), 1, MetricAccumulator())
    return KLTerm(settings, KLCoefficient(settings))(inputs)


def in_loss(estimator: str, **settings) -> KLInLoss:
    return KLInLoss(
        estimator=estimator, coef=1.0, aggregation=Aggregation("seq-mean-token-sum"), **settings
    )


def test_expected_values_on_policy():
    divergence = float((P * D).sum())
    values = {estimator: expectation(in_loss(estimator))[0] for estimator in ESTIMATORS}
    assert values["k1"] == pytest.approx(divergence, rel=1e-12)
    assert values["k3"] == pytest.approx(divergence, rel=1e-12)
    assert values["k2"] == pytest.approx(float((P * D**2).sum() / 2), rel=1e-12)
    assert abs(values["k2"] / divergence - 1) > 0.02  # biased
    assert values["abs"] > divergence


def test_expected_gradients_on_policy():
    """Of k1 zero; of k2 that of KL(pi || ref); of k3 that of KL(ref || pi); of abs that of sum |pi
    - ref|.
    """
    gradients = {estimator: expectation(in_loss(estimator))[1] for estimator in ESTIMATORS}
    assert gradients["k1"].abs().max() < 1e-15 < 0.05 < FORWARD.abs().max()
    torch.testing.assert_close(gradients["k2"], FORWARD)
    torch.testing.assert_close(gradients["k3"], BACKWARD)
    # so k3's is not that of the divergence which it estimates
    assert (FORWARD - BACKWARD).abs().max() > 0.02
    sign = (P - Q).sign()
    torch.testing.assert_close(gradients["abs"], P * (sign - (P * sign).sum()))


def test_the_two_directions_are_those_of_autograd():
    """The two closed forms above, from the divergences themselves."""
    logits = LOGITS.clone().requires_grad_()
    logp, logq = torch.log_softmax(logits, 0), torch.log_softmax(REF, 0)
    torch.testing.assert_close(
        torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits)[0], FORWARD
    )
    logp = torch.log_softmax(logits, 0)
    torch.testing.assert_close(torch.autograd.grad((Q * (logq - logp)).sum(), logits)[0], BACKWARD)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_straight_through_gives_every_estimator_the_gradient_of_the_divergence(estimator):
    value, gradient = expectation(in_loss(estimator, gradient="k2"))
    assert value == pytest.approx(expectation(in_loss(estimator))[0], rel=1e-12)
    torch.testing.assert_close(gradient, FORWARD)


@pytest.mark.parametrize("level", ["token", "sequence"])  # the same for a response of one token
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_times_ratio_makes_value_and_gradient_those_of_the_policy_whoever_sampled(estimator, level):
    """E_old[ pi/old k ] = E_pi[ k ], as a function of pi; so k1 and k3 give KL(pi || ref) and its
    gradient.
    """
    for sampler in (OLD, REF, LOGITS):
        value, gradient = expectation(in_loss(estimator, times_ratio=level), sampler)
        assert value == pytest.approx(expectation(in_loss(estimator))[0], rel=1e-12)
        if estimator in ("k1", "k3"):
            torch.testing.assert_close(gradient, FORWARD)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_without_the_ratio_both_are_biased_off_policy(estimator):
    value, gradient = expectation(in_loss(estimator), OLD)
    assert abs(value / float((P * D).sum()) - 1) > 0.05
    assert (gradient - FORWARD).abs().max() > 0.05


def test_times_ratio_over_two_tokens():
    """All nine responses of two tokens out of three, sampled by old.

    The token's ratio gives the divergence of every token exactly, after the prefixes that old
    wrote. The sequence's (a geometric mean, as in GSPO) gives neither this nor the divergence of
    responses: it is unbiased for one token.
    """
    rng = np.random.default_rng(0)
    pi, old, ref = (torch.log_softmax(tensor(rng.standard_normal((4, 3))), -1) for _ in range(3))
    # KL(pi || ref) of the first token; of the second, by what the first was
    local = (pi.exp() * (pi - ref)).sum(-1)
    by_prefix = {
        who: float(local[0] + (p[0].exp() * local[1:]).sum())
        for who, p in (("old", old), ("pi", pi))
    }
    values = {}
    for level in ("token", "sequence"):
        values[level] = 0.0
        for a, b in product(range(3), repeat=2):
            x, y, z = (torch.stack([p[0, a], p[1 + a, b]]) for p in (pi, old, ref))
            share = float(term(in_loss("k3", times_ratio=level), x, y, z))
            values[level] += float(y.sum().exp()) * share
            assert share == pytest.approx(
                sum(naive.kl_times_ratio(*(v.exp().tolist() for v in (x, z, y)), "k3", level))
            )
    assert values["token"] == pytest.approx(by_prefix["old"], rel=1e-12)
    assert min(abs(values["sequence"] - divergence) for divergence in by_prefix.values()) > 0.01


# KL in the reward, the coefficient, refusals


def test_kl_in_the_reward_by_hand():
    """beta 0.1, d = 0.2 -0.1, verifier's reward 1: token rewards -0.02 and 1 + 0.01; returns 0.99
    and 1.01.
    """
    mask = torch.ones(1, 2, dtype=torch.bool)
    kl = KLInReward().estimate(tensor([[-1.0, -2.0]]), tensor([[-1.2, -1.9]]), mask)
    adv = Returns()(
        Credit(tensor([[0.0, 1.0]]) - 0.1 * kl, mask, torch.zeros(1, dtype=torch.int64))
    )
    torch.testing.assert_close(adv, tensor([[0.99, 1.01]]))


def updated(kl: float, responses: int, coef=0.2, **settings) -> float:
    coefficient = KLCoefficient(
        KLInReward(coef=coef, **{"target": 0.1, "horizon": 10000, **settings})
    )
    coefficient.update(kl, responses)
    return coefficient.value


def test_adaptive_coefficient_by_hand():
    """KL / target - 1 = 0.1, -0.1, 0; 4 (cut to 0.2), -0.8 (to -0.2); times 1000 / 10000."""
    for kl, expected in (
        (0.11, 0.202),
        (0.09, 0.198),
        (0.1, 0.2),
        (0.5, 0.204),
        (0.02, 0.196),
        (-3.0, 0.196),
    ):
        assert updated(kl, 1000) == pytest.approx(expected, rel=1e-12)
        assert updated(kl, 1000, target=None) == 0.2  # fixed
    assert updated(math.nan, 1000) == updated(math.inf, 1000) == 0.2, "a step without a number"


@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_coefficient_is_the_peers_up_to_the_horizon(seed):
    rng, peers = np.random.default_rng(seed), 0.01
    coefficient = KLCoefficient(KLInLoss(coef=peers, target=0.05, horizon=512))
    for _ in range(50):
        kl, responses = float(rng.normal(0.05, 0.02)), int(rng.integers(1, 513))
        peers = naive.peers_coefficient(peers, kl, 0.05, responses, 512)
        coefficient.update(kl, responses)
        assert coefficient.value == pytest.approx(peers, rel=1e-12)


def test_adaptive_coefficient_stays_positive_far_beyond_the_horizon():
    """n = 6 horizons and KL = 0: the peers' multiplier is 1 - 0.2 * 6 = -0.2, here it is 1 - 0.2."""
    assert naive.peers_coefficient(0.2, 0.0, 0.1, 60000, 10000) == pytest.approx(-0.04)
    assert updated(0.0, 60000) == pytest.approx(0.16)
    assert naive.peers_coefficient(0.2, 1.0, 0.1, 60000, 10000) == pytest.approx(0.44)
    assert updated(1.0, 60000) == pytest.approx(0.24)
    coefficient = KLCoefficient(KLInReward(coef=0.2, target=0.1))
    for _ in range(300):
        coefficient.update(0.0, 10**9)
    assert 0 < coefficient.value < 1e-29


@pytest.mark.parametrize(
    "kind, key, value",
    [
        *(
            (kind, "estimator", value)
            for kind in (KLInLoss, KLInReward)
            for value in ("k4", "", "mse")
        ),
        *(
            (kind, "coef", value)
            for kind in (KLInLoss, KLInReward)
            for value in (0.0, -1e-3, math.nan)
        ),
        *(
            (KLInLoss, key, value)
            for key in ("horizon", "log_ratio_bound", "value_bound")
            for value in (0.0, -1.0)
        ),
        *((KLInReward, "target", value) for value in (0.0, -0.1, math.nan)),
        (KLInLoss, "refresh_every", -1),
        (KLInLoss, "gradient", "k3"),
        (KLInLoss, "times_ratio", "geometric"),
    ],
)
def test_refusals_name_the_key_and_the_value(kind, key, value):
    with refuses(f"kl.{key}", value):
        kind(**{key: value})
