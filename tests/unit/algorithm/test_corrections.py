"""Corrections for the engine's mismatch: a naive restatement (naive_credit.py), numbers by hand,
refusals.
"""

import math
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch

import naive_credit as naive
from gspo.algorithm.corrections import (
    LEVELS,
    MIS,
    TIS,
    Correction,
    IcePop,
    Rejection,
    importance_weight,
)
from refusals import refuses

SEEDS = range(4)
RS_LEVELS = (*LEVELS, "largest")
reject = partial(Rejection, "rejection")
# A correction, and its weights for (old, mu, mask) according to the naive restatement. Bands that
# cut on both sides.
CASES = [
    (Correction(), lambda o, b, m: np.asarray(m, float)),
    *((TIS(level=x), lambda o, b, m, x=x: naive.tis(o, b, m, x)) for x in LEVELS),
    *(
        (TIS(level=x, low=0.8, high=1.2), lambda o, b, m, x=x: naive.tis(o, b, m, x, 0.8, 1.2))
        for x in LEVELS
    ),
    *(
        (MIS(level=x, low=0.7, high=1.5), lambda o, b, m, x=x: naive.mis(o, b, m, x, "", 0.7, 1.5))
        for x in LEVELS
    ),
    *(
        (
            MIS(level=x, judged_by=y, low=0.7, high=1.5),
            lambda o, b, m, x=x, y=y: naive.mis(o, b, m, x, y, 0.7, 1.5),
        )
        for x in LEVELS
        for y in LEVELS
    ),
    (IcePop(), lambda o, b, m: naive.mis(o, b, m, "token", "", 0.5, 5.0)),
    *(
        (reject(x, y, low, high), lambda o, b, m, a=(x, y, low, high): naive.rejection(o, b, m, *a))
        for x, low, high in (("ratio", 0.7, 1.5), ("k2", 0.01, 0.2), ("k3", 0.01, 0.2))
        for y in RS_LEVELS
    ),
]
BOTH = [correction for correction, _ in CASES if isinstance(correction, TIS | MIS)]


def name(correction) -> str:
    return "-".join(str(value) for value in asdict(correction).values())


cases = pytest.mark.parametrize(
    "correction, expected", CASES, ids=[name(correction) for correction, _ in CASES]
)
every = pytest.mark.parametrize("correction", [correction for correction, _ in CASES], ids=name)
normalizing = pytest.mark.parametrize(
    "correction", [replace(one, normalize=True) for one in BOTH], ids=name
)


def tensor(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float64)


def weights(correction, old, mu, mask) -> torch.Tensor:
    return correction(tensor(old), tensor(mu), torch.tensor(np.asarray(mask), dtype=torch.bool))


def of_ratios(correction, ratios, mask=None) -> torch.Tensor:
    """Weights where pi_old / mu has these values."""
    old = np.log(np.asarray(ratios, float))
    return weights(correction, old, np.zeros_like(old), np.ones_like(old) if mask is None else mask)


def close(tensor, expected, tolerance=1e-11) -> None:
    np.testing.assert_allclose(tensor.numpy(), np.asarray(expected), rtol=tolerance, atol=tolerance)


@cases
@pytest.mark.parametrize("seed", SEEDS)
def test_agrees_with_the_naive_restatement(correction, expected, seed):
    batch = naive.ragged(seed)
    sides = batch.logp, batch.other, batch.mask
    close(weights(correction, *sides), expected(*sides))
    if isinstance(correction, TIS | MIS):
        close(
            weights(replace(correction, normalize=True), *sides),
            naive.normalized(expected(*sides), batch.mask, correction.level),
        )


@cases
def test_the_random_batches_have_tokens_on_both_sides_of_every_band(correction, expected):
    """Or the agreement above would say little."""
    batches = [naive.ragged(seed) for seed in SEEDS]
    seen = {float(w) for b in batches for w in expected(b.logp, b.other, b.mask)[b.mask]}
    if isinstance(correction, TIS):
        assert {correction.high, *([correction.low] if correction.low else [])} < seen
    elif isinstance(correction, MIS | Rejection):
        assert 0.0 in seen and len(seen) > 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weight_before_any_truncation(level, seed):
    """What the metrics of the mismatch are made from."""
    batch = naive.ragged(seed, spread=2.0)
    weight = importance_weight(
        tensor(batch.logp), tensor(batch.other), torch.tensor(batch.mask), level
    )
    expected = naive.weights(batch.logp, batch.other, batch.mask, level)
    close(weight[torch.tensor(batch.mask)], expected[batch.mask], 1e-9)
    assert expected.max() > 2.0  # more than TIS would leave


# Ratios 2 and 1/8 (and a third token that is not the policy's): product 1/4, geometric mean 1/2.
# Ratios 4 and 4: product 16, geometric mean 4.
RATIOS, MASK = [[2, 0.125, 77], [4, 4, 77]], [[1, 1, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    "correction, first, second",
    [
        (Correction(), [1, 1], [1, 1]),
        (TIS(high=100.0), [2, 0.125], [4, 4]),
        (TIS(level="sequence", high=100.0), [0.25, 0.25], [16, 16]),
        (TIS(level="geometric", high=100.0), [0.5, 0.5], [4, 4]),
        (TIS(), [2, 0.125], [2, 2]),
        (TIS(low=0.5, high=3.0), [2, 0.5], [3, 3]),
        (TIS(level="sequence", low=0.3), [0.3, 0.3], [2, 2]),
        (MIS(high=3.0), [2, 0.125], [0, 0]),
        (MIS(low=0.2, high=3.0), [2, 0], [0, 0]),
        (MIS(low=0.2, high=4.5, level="sequence"), [0.25, 0.25], [0, 0]),
        (MIS(low=0.2, high=4.5, level="geometric"), [0.5, 0.5], [4, 4]),
        # token weights, as ms-swift
        (MIS(low=0.4, high=3.0, judged_by="geometric"), [2, 0.125], [0, 0]),
        (MIS(low=0.4, high=5.0, judged_by="sequence"), [0, 0], [0, 0]),
        (IcePop(), [2, 0], [4, 4]),
        (Rejection(high=3.0), [1, 1], [0, 0]),
        (Rejection(low=0.2, high=3.0), [1, 0], [0, 0]),
        (Rejection(level="sequence", low=0.2, high=3.0), [1, 1], [0, 0]),
        (Rejection(level="geometric", low=0.6, high=4.5), [0, 0], [1, 1]),
        (Rejection(level="largest", high=3.0), [1, 1], [0, 0]),
        # k2 = ln^2 / 2: 0.240227 and 2.161999 (sum 2.402, mean 1.201); of 4: 0.960906 twice (sum
        # 1.922)
        (reject("k2", high=1.0), [1, 0], [1, 1]),
        (reject("k2", "sequence", high=2.0), [0, 0], [1, 1]),
        (reject("k2", "geometric", high=1.0), [0, 0], [1, 1]),
        (reject("k2", "geometric", low=1.0, high=1.21), [1, 1], [0, 0]),
        (reject("k2", "largest", high=2.2), [1, 1], [1, 1]),
        (reject("k2", "largest", high=2.1), [0, 0], [1, 1]),
        # k3 = r - 1 - ln r: 0.306853 and 1.204442 (sum 1.511, mean 0.756); of 4: 1.613706 twice
        # (sum 3.227)
        (reject("k3", high=1.3), [1, 1], [0, 0]),
        (reject("k3", high=1.0), [1, 0], [0, 0]),
        (reject("k3", "sequence", high=1.52), [1, 1], [0, 0]),
        (reject("k3", "sequence", high=1.50), [0, 0], [0, 0]),
        (reject("k3", "geometric", high=0.76), [1, 1], [0, 0]),
        (reject("k3", "geometric", high=0.75), [0, 0], [0, 0]),
        (reject("k3", "largest", high=1.21), [1, 1], [0, 0]),
    ],
    ids=lambda x: name(x) if isinstance(x, Correction) else "",
)
def test_by_hand(correction, first, second):
    close(of_ratios(correction, RATIOS, MASK), [[*first, 0], [*second, 0]])


def test_normalize_by_hand():
    """TIS: 2 1/8 2 2, mean 49/32. MIS up to 3: 2 1/8 0 0, over all four tokens 17/32. The mean is
    then 1.
    """
    close(
        of_ratios(TIS(normalize=True), RATIOS, MASK), np.array([[2, 1 / 8, 0], [2, 2, 0]]) * 32 / 49
    )
    close(
        of_ratios(MIS(high=3.0, normalize=True), RATIOS, MASK),
        np.array([[2, 1 / 8, 0], [0, 0, 0]]) * 32 / 17,
    )


@normalizing
@pytest.mark.parametrize("seed", SEEDS)
def test_normalized_weights_have_mean_one(correction, seed):
    batch = naive.ragged(seed)
    weight, mask = (
        weights(correction, batch.logp, batch.other, batch.mask),
        torch.tensor(batch.mask),
    )
    rows = [w[m].mean() for w, m in zip(weight, mask, strict=True) if m.any()]
    mean = weight[mask].mean() if correction.level == "token" else torch.stack(rows).mean()
    assert float(mean) == pytest.approx(1, rel=1e-12)


@normalizing
def test_normalizing_nothing_gives_zeros(correction):
    """No token in the mask; and, where weights can be masked, no token in the band."""
    assert (of_ratios(correction, RATIOS, np.zeros((2, 3))) == 0).all()
    if isinstance(correction, MIS):
        assert (of_ratios(correction, [[9.0, 9.0]]) == 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_the_band_includes_its_ends(level):
    for ratio, kept in ((1.0, 1), (0.999, 0), (2.0, 1), (2.001, 0)):
        old, mu = [[math.log(ratio)]], [[0.0]]  # log 2 and its exp are exact enough for these ends
        assert (
            float(weights(MIS(level=level, low=1.0, high=2.0), old, mu, [[1]]).ceil().clamp(max=1))
            == kept
        )
        assert float(weights(Rejection(level=level, low=1.0, high=2.0), old, mu, [[1]])) == kept


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", LEVELS)
def test_equivalences(level, seed):
    batch = naive.ragged(seed)
    sides = batch.logp, batch.other, batch.mask
    band = {"level": level, "low": 0.7, "high": 1.5}
    mis, rejected = weights(MIS(**band), *sides), weights(Rejection(**band), *sides)
    assert torch.equal((mis > 0).double(), rejected)  # the same tokens, with weight and without
    # inside, nothing is cut
    assert torch.equal(mis, torch.where(rejected > 0, weights(TIS(**band), *sides), 0.0))
    assert torch.equal(mis, weights(MIS(**band, judged_by=level), *sides))
    assert torch.equal(
        weights(IcePop(level=level), *sides), weights(MIS(level=level, low=0.5, high=5.0), *sides)
    )
    same = (batch.other, *sides[1:])  # engine and trainer agree: every ratio is 1
    for correction in (
        TIS(level=level),
        MIS(level=level),
        IcePop(level=level),
        Rejection(level=level),
    ):
        assert torch.equal(weights(correction, *same), weights(Correction(), *same))


def test_levels_are_one_for_responses_of_one_token():
    ratios = [[0.3], [1.0], [1.7], [9.0]]
    for kind in (TIS, MIS, Rejection):
        results = [of_ratios(kind(level=level), ratios) for level in LEVELS]
        for result in results:
            close(result, results[0])


@every
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_is_masked_does_not_matter_and_gets_exactly_zero(correction, junk):
    batch = naive.ragged(3)
    for one in (
        (correction, replace(correction, normalize=True))
        if isinstance(correction, TIS | MIS)
        else (correction,)
    ):
        clean = weights(one, batch.logp, batch.other, batch.mask)
        for old, mu in ((junk, junk), (junk, -1.0), (-1.0, junk)):
            old, mu = np.where(batch.mask, batch.logp, old), np.where(batch.mask, batch.other, mu)
            dirty = weights(one, old, mu, batch.mask)
            assert torch.equal(dirty, clean) and (dirty[torch.tensor(~batch.mask)] == 0).all()
            assert dirty.isfinite().all() and dirty.any()


@every
def test_weights_have_no_gradient_and_keep_dtype_and_shape(correction):
    batch = naive.ragged(1)
    for dtype in (torch.float32, torch.float64):
        old, mu = (tensor(x).to(dtype).requires_grad_() for x in (batch.logp, batch.other))
        weight = correction(old, mu, torch.tensor(batch.mask))
        assert not weight.requires_grad and weight.dtype == dtype and weight.shape == old.shape


@pytest.mark.parametrize("level", LEVELS)
def test_importance_weights_have_no_gradient(level):
    old, mu = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    assert not importance_weight(old, mu, torch.ones(2, 3, dtype=torch.bool), level).requires_grad


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [800.0, -800.0, math.inf, -math.inf])
def test_a_huge_mismatch_stays_finite(correction, dtype, m):
    """Also where the engine reports a probability of 0 (m infinite), and beside a token without
    mismatch.
    """
    old, mu = torch.tensor([[m, -1.0]], dtype=dtype), torch.tensor([[0.0, -1.0]], dtype=dtype)
    for one in (
        (correction, replace(correction, normalize=True))
        if isinstance(correction, TIS | MIS)
        else (correction,)
    ):
        assert one(old, mu, torch.ones(1, 2, dtype=torch.bool)).isfinite().all()
    for level in LEVELS:
        weight = importance_weight(old, mu, torch.ones(1, 2, dtype=torch.bool), level)[0, 0]
        assert float(weight) == pytest.approx(math.exp(math.copysign(20, m)), rel=1e-5)


@pytest.mark.parametrize("level, ratio", [("sequence", math.exp(-10)), ("geometric", math.exp(-5))])
def test_the_bound_acts_on_the_ratio_of_the_response_not_on_its_tokens(level, ratio):
    """m = -30 and 20: the product is e^-10, also where a single token lies beyond the bound of 20."""
    old, mu, mask = [[-30.0, -1.0]], [[0.0, -21.0]], [[1, 1]]
    close(weights(MIS(level=level), old, mu, mask), [[ratio, ratio]])
    for low, kept in ((ratio * 0.9, 1.0), (ratio * 1.1, 0.0)):
        assert (weights(MIS(level=level, low=low), old, mu, mask) > 0).double().tolist() == [
            [kept, kept]
        ]
        assert weights(Rejection(level=level, low=low), old, mu, mask).tolist() == [[kept, kept]]


@every
def test_order_of_rows_does_not_matter(correction):
    batch = naive.ragged(2)
    order = np.random.default_rng(0).permutation(len(batch.mask))
    sides = batch.logp, batch.other, batch.mask
    close(
        weights(correction, *(x[order] for x in sides)),
        weights(correction, *sides)[torch.tensor(order)].numpy(),
    )


def test_defaults():
    assert (TIS().level, TIS().low, TIS().high, TIS().normalize) == ("token", 0.0, 2.0, False)
    assert (MIS().level, MIS().judged_by, MIS().low, MIS().high, MIS().normalize) == (
        "token",
        "",
        0.0,
        2.0,
        False,
    )
    assert (IcePop().level, IcePop().judged_by, IcePop().low, IcePop().high) == (
        "token",
        "",
        0.5,
        5.0,
    )
    assert (Rejection().measure, Rejection().level) == ("ratio", "token")


KINDS = (TIS, MIS, IcePop, Rejection)


@pytest.mark.parametrize(
    "kind, settings, key",
    [
        *((kind, {"level": value}, "level") for kind in KINDS for value in ("response", "")),
        *((kind, {"level": "largest"}, "level") for kind in (TIS, MIS, IcePop)),
        *((kind, {"low": value}, "low") for kind in KINDS for value in (-0.1, 7.0, math.nan)),
        *(
            (kind, {"low": 1.0, "high": value}, key)
            for kind in KINDS
            for value, key in ((1.0, "low"), (0.5, "low"), (-2.0, "high"), (math.nan, "high"))
        ),
        *(
            (kind, {"judged_by": value}, "judged_by")
            for kind in (MIS, IcePop)
            for value in ("largest", "k2")
        ),
        *((Rejection, {"measure": value}, "measure") for value in ("k1", "")),
    ],
)
def test_refusals_name_the_key_and_the_value(kind, settings, key):
    with refuses(f"correction.{key}", settings[key]):
        kind(**settings)
