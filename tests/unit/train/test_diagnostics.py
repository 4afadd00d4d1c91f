"""Metrics against hand numbers."""

import math

import pytest
import torch

from gspo.algorithm.corrections import MIS, TIS, IcePop, Rejection
from gspo.algorithm.masks import KPop
from gspo.algorithm.objectives import LossInputs, LossOutputs
from gspo.data.batch import TrainBatch
from gspo.data.problems import Problem
from gspo.data.samples import Score, ScoredResponse, Turn
from gspo.rollout.sources.base import Rollout
from gspo.tracking.metrics import lookup
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator


def batch(adv, mask, old=None) -> TrainBatch:
    mask = torch.tensor(mask, dtype=torch.bool)
    zeros = torch.zeros(mask.shape)
    return TrainBatch(
        tokens_BS=mask.long(),
        attention_BS=mask,
        mask_BT=mask,
        sampled_BT=mask,
        prompts_B=torch.arange(len(mask)),
        engine_logp_BT=zeros,
        old_logp_BT=zeros if old is None else torch.tensor(old),
        adv_BT=torch.tensor(adv)[:, None].expand(mask.shape),
    )


def flags(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_clip_fractions_by_hand():
    # response 1: 4 tokens, A > 0, all clipped; response 2: 2 tokens, A < 0, one clipped; padding
    # says "clipped" too
    active = flags([[1, 1, 1, 1], [1, 0, 1, 1]])
    outside = flags([[1, 1, 1, 1], [1, 1, 1, 1]])
    weight = torch.tensor([[0.0, 0, 0, 0], [0, 1.2, 9, 9]])
    dual = flags([[0, 0, 0, 0], [1, 0, 1, 1]])
    outputs = LossOutputs(
        torch.zeros(2, 4), weight, active, outside, flags([[0, 0, 0, 0], [0, 1, 1, 1]]), dual
    )
    packed = batch([1.0, -1.0], [[1, 1, 1, 1], [1, 1, 0, 0]])
    accumulator = MetricAccumulator()
    diagnostics.measure_clips(
        outputs, LossInputs(weight, weight, packed.adv_BT, packed.mask_BT), 3, accumulator
    )
    result = accumulator.result()
    assert result["clip/token_active"] == pytest.approx(5 / 6)
    assert result["clip/sequence_active"] == pytest.approx((1 + 1 / 2) / 2)
    assert result["clip/token_outside"] == result["clip/sequence_outside"] == 1
    assert result["clip/token_active_positive"] == 1 and result[
        "clip/token_active_negative"
    ] == pytest.approx(1 / 2)
    assert (
        result["clip/sequence_active_positive"] == 1
        and result["clip/sequence_active_negative"] == 1 / 2
    )
    assert result["clip/token_outside_negative"] == result["clip/sequence_outside_negative"] == 1
    assert result["clip/token_active_minibatch_3"] == pytest.approx(5 / 6)
    assert result["clip/weight"] == pytest.approx(1.2 / 6) and result[
        "clip/token_dual"
    ] == pytest.approx(1 / 6)
    assert result["clip/log_ratio_bounded"] == pytest.approx(1 / 6)


def test_weights_by_length_by_hand():
    accumulator = MetricAccumulator()
    lengths = torch.tensor([1, 2, 3, 4, 5])
    mask = torch.arange(5) < lengths[:, None]
    weight = torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0])[:, None].expand(5, 5)
    diagnostics.measure_weights_by_length(torch.where(mask, weight, math.nan), mask, accumulator)
    assert accumulator.result() == {
        "clip/weight_length_1": 1.0,
        "clip/weight_length_2": 2.0,
        "clip/weight_length_4": 4.0,  # 3 and 4 tokens
        "clip/weight_length_8": 7.0,
    }


def test_ratios_and_kl_by_hand():
    a, b, c = math.log(2), math.log(0.5), math.log(1.5)
    logp = torch.tensor([[a, b], [c, math.nan]])
    accumulator = MetricAccumulator()
    diagnostics.measure_ratios(logp, batch([1.0, 1.0], [[1, 1], [1, 0]]), 20.0, accumulator)
    result = accumulator.result()
    assert result["ratio/token_mean"] == pytest.approx((2 + 0.5 + 1.5) / 3)
    assert (result["ratio/token_min"], result["ratio/token_max"]) == pytest.approx((0.5, 2))
    assert result["ratio/sequence_mean"] == pytest.approx((1 + 1.5) / 2)  # sqrt(2 * 0.5) = 1
    assert result["ratio/sequence_log_abs"] == pytest.approx(c / 2, rel=1e-5)
    assert result["ratio/token_log_var"] == pytest.approx(a * a / 2, rel=1e-5)
    assert result["ratio/ess_token"] == pytest.approx(4**2 / (3 * (4 + 0.25 + 2.25)), rel=1e-5)
    assert result["ratio/ess_sequence"] == pytest.approx(2.5**2 / (2 * 3.25), rel=1e-5)
    assert result["kl/old_k1"] == pytest.approx(-c / 3, rel=1e-5)
    k3 = [(2 - 1 - a), (0.5 - 1 - b), (1.5 - 1 - c)]
    assert result["kl/old_k3"] == pytest.approx(sum(k3) / 3, rel=1e-5)


def test_mismatch_by_hand():
    b = batch([0.0], [[1, 1, 0]], old=[[-1.0, -2.0, -9.0]])
    b.engine_logp_BT = torch.tensor([[-1.0, -2.1, 0.0]])
    accumulator = MetricAccumulator()
    diagnostics.measure_mismatch(b, accumulator)
    assert accumulator.result()["mismatch/logp_abs_max"] == pytest.approx(0.1, rel=1e-4)
    assert accumulator.result()["mismatch/k3"] == pytest.approx((math.exp(0.1) - 1.1) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("correction", "tokens", "responses"),
    [
        (Rejection(level="sequence", low=0.5, high=1.5), 4 / 7, 2 / 3),
        (MIS(level="sequence", low=0.5, high=1.5), 4 / 7, 2 / 3),
        (IcePop(low=0.3), 3 / 7, 1 / 3),
        (KPop(), 1 / 7, 0),
        (KPop(high=0.002), 3 / 7, 1 / 3),
        (TIS(), 0, 0),
    ],
)
def test_drop_rates_of_corrections_before_the_updates_by_hand(correction, tokens, responses):
    """Token weights (1, 1, 1), (.4, 18) and (9, 9), and a response without tokens.

    The weight 18 is of the probabilities .9 and .05, whose binary KL is 2.4. All others are of the
    engine's probability q = e^-8, and their binary KLs are 11.8 q = .004 for 9 and .3 q for .4."""
    engine_BT = torch.full((4, 3), -8.0)
    engine_BT[1, 1] = math.log(0.05)
    weight_BT = torch.tensor([[1.0, 1, 1], [0.4, 18, 7], [9, 9, 7], [7, 7, 7]])
    old_BT = engine_BT + weight_BT.log()
    b = batch([0.0] * 4, [[1, 1, 1], [1, 1, 0], [1, 1, 0], [0, 0, 0]])
    b.engine_logp_BT = engine_BT
    accumulator = MetricAccumulator()
    correction_BT = correction(old_BT, engine_BT, b.mask_BT)
    diagnostics.measure_correction(correction_BT, old_BT, b, accumulator)
    found = accumulator.result()
    assert found["mismatch/masked"] == pytest.approx(tokens)
    assert found["mismatch/sequence_masked"] == pytest.approx(responses)


def test_extremes_are_reported_as_they_are():
    """A broken engine's difference of 60 nats is reported as 60; a ratio is bounded as the
    objectives bound it.
    """
    b = batch([1.0], [[1, 1]], old=[[-60.1, -1.0]])
    b.engine_logp_BT = torch.tensor([[-0.1, -1.0]])
    accumulator = MetricAccumulator()
    diagnostics.measure_mismatch(b, accumulator)
    diagnostics.measure_ratios(torch.tensor([[-90.1, -1.0]]), b, 10.0, accumulator)
    assert accumulator.result()["mismatch/logp_abs_max"] == pytest.approx(60.0)
    assert accumulator.result()["mismatch/k3"] == pytest.approx((math.exp(-20) + 19) / 2)
    assert accumulator.result()["ratio/sequence_min"] == pytest.approx(
        math.exp(-15), rel=1e-5
    )  # mean log-ratio -30 / 2
    assert accumulator.result()["ratio/token_min"] == pytest.approx(math.exp(-20), rel=1e-5)


def test_metrics_do_not_depend_on_how_the_batch_is_cut():
    whole, cut = MetricAccumulator(), MetricAccumulator()
    x = torch.tensor([1.0, 5.0, 2.0, 8.0])
    for accumulator, parts in ((whole, [x]), (cut, [x[:1], x[1:]])):
        for part in parts:
            accumulator.mean("a", part.sum(), len(part))
            accumulator.ess("e", part)
            accumulator.largest("max", part.max())
            accumulator.smallest("min", part.min())
        accumulator.mean("nothing", 0.0, 0)
    assert whole.result() == pytest.approx({"a": 4.0, "e": 256 / (4 * 94), "max": 8, "min": 1})
    assert cut.result() == pytest.approx(whole.result())


def respond(
    reward: float, tokens: int, finish: str = "stop", task: str = "math", verdict: str = "correct"
) -> ScoredResponse:
    problem = Problem(task, 0, "", "")
    return ScoredResponse(
        problem,
        0,
        [1],
        list(range(tokens)),
        torch.zeros(tokens).numpy(),
        finish,
        "",
        0,
        score=Score(reward, verdict),
    )


def test_rewards_and_lengths_by_hand():
    groups = [
        [respond(1, 2), respond(0, 4, verdict="wrong")],
        [respond(1, 6, task="code"), respond(1, 8, task="code")],
        [respond(0, 10, "length", verdict="truncated"), respond(0, 10, verdict="wrong")],
    ]
    accumulator = MetricAccumulator()
    diagnostics.measure_rewards(groups, accumulator)
    diagnostics.measure_lengths([r for g in groups for r in g], accumulator)
    result = accumulator.result()
    assert result["reward/mean"] == pytest.approx(3 / 6)
    assert result["reward/math"] == pytest.approx(1 / 4) and result["reward/code"] == 1
    assert result["group/zero_variance"] == pytest.approx(2 / 3) and result[
        "group/all_correct"
    ] == pytest.approx(1 / 3)
    assert result["verdict/math_wrong"] == pytest.approx(2 / 6) and result[
        "verdict/math_truncated"
    ] == pytest.approx(1 / 6)
    assert result["length/mean"] == pytest.approx(40 / 6) and result[
        "length/truncated"
    ] == pytest.approx(1 / 6)
    assert result["length/repetition"] == 0


def test_an_environment_cannot_make_a_metric_with_every_response():
    groups = [[respond(0, 2, task="game", verdict=f"v{i}-{j}") for j in range(8)] for i in range(8)]
    accumulator = MetricAccumulator()
    diagnostics.measure_rewards([*groups, [respond(1, 2)] * 4], accumulator)
    shares = {
        name: value for name, value in accumulator.result().items() if name.startswith("verdict/")
    }
    assert len(shares) == 22 and shares["verdict/math_correct"] == 4 / 68
    assert shares["verdict/game_other"] == 44 / 68 and shares["verdict/game_v0-0"] == 1 / 68


def test_episodes_without_room_are_measured():
    full, played = respond(0, 0, "context", "tool"), respond(1, 1, task="tool")
    full.score, played.turns = Score(None, "no-room"), [Turn("policy", 1, "")]
    accumulator = MetricAccumulator()
    sampled = Rollout([[played]], 0, 0, 10, ungraded=[full, respond(0, 5, "context")])
    diagnostics.measure_rollout(sampled, accumulator)
    found = accumulator.result()
    assert found["episode/finish_context"] == found["episode/finish_stop"] == 1 / 2


def test_episodes_are_measured_where_there_are_some():
    """Those whose environment failed are counted beside the groups; a step without episodes has no
    metric of theirs.
    """
    played, failed = respond(1, 6, task="tool"), respond(0, 2, "environment", "tool")
    played.turns = [Turn("policy", 2, ""), Turn("environment", 3, ""), Turn("policy", 1, "")]
    played.measures, failed.score = {"tool_calls": 1.0}, Score(None, "environment-error")
    for groups, ungraded, expected in (
        ([[respond(1, 2)]], [], {}),
        (
            [[respond(0, 2), played]],
            [failed],
            {
                "episode/turns": 2,
                "episode/turns_max": 2,
                "episode/environment_tokens": 1 / 2,
                "episode/reward_turns_2": 1,
                "episode/tool_calls": 1,
                "episode/finish_stop": 1 / 2,
                "episode/finish_length": 0,
                "episode/finish_turns": 0,
                "episode/finish_context": 0,
                "episode/finish_environment": 1 / 2,
            },
        ),
    ):
        accumulator = MetricAccumulator()
        diagnostics.measure_rollout(Rollout(groups, 0, 0, 10, ungraded=ungraded), accumulator)
        found = {
            name: value
            for name, value in accumulator.result().items()
            if name.startswith("episode/")
        }
        assert found == expected and all(lookup(name) for name in found)


def test_entropy_weighs_tokens():
    accumulator = MetricAccumulator()
    diagnostics.measure_entropy(
        torch.tensor([[1.0, 2.0], [6.0, math.nan]]),
        batch([0.0, 0.0], [[1, 1], [1, 0]]),
        accumulator,
    )
    assert accumulator.result()["policy/entropy"] == pytest.approx(3)
