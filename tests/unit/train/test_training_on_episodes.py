"""Training on episodes: gradients by hand, no influence of the environment's log-probs, one turn,
whole runs.
"""

import copy
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from builders import SMOOTH, assert_same_sums, perturb, recorded_gradients, small_policy
from daily import daily_but
from drawing_engine import Drawn
from games import Echoes
from gspo.algorithm.advantages import (
    GAE,
    GroupMean,
    LeaveOneOut,
    ReinforcePP,
    Returns,
)
from gspo.algorithm.aggregation import MODES, Aggregation
from gspo.algorithm.corrections import MIS, TIS, IcePop, Rejection
from gspo.algorithm.kl import KLInLoss, KLInReward
from gspo.algorithm.objectives import CISPO, GRPO, GSPO, OBJECTIVES, PPO, GSPOToken
from gspo.algorithm.otb import OTB
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.algorithm.turn_advantage import TurnNormalized
from gspo.config.settings import CHOICES
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.model.settings import TinyDense
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import Rollout
from gspo.rollout.sources.pending import load_pending, save_pending
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Outcome
from gspo.train.accumulator import MetricAccumulator
from ranked import ranked
from trainers import FirstCharacter, gap_trainer, steps, trainer, weights, with_advantages
from vllm_engines import played

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
MEAN = Aggregation("seq-mean-token-mean")
STOPS = list("aeiouxXG59|")
SIZES = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 24, "stop": STOPS}
FEW = SIZES | {"prompts_per_step": 2, "group_size": 3}
SAME = (
    "problem",
    "sample",
    "prompt_ids",
    "token_ids",
    "finish_reason",
    "text",
    "score",
    "rendered",
    "length",
)
CLOCKS = ("time/", "throughput/", "compute/seconds")


def echo_trainer(objective=None, model=None, routes=False, **options):
    rollout = RolloutSettings(**SIZES, routes=routes)
    options = {"minibatches": 2, "micro_batch_size": 5} | options
    return trainer(objective, model=model, rollout=rollout, task=Echoes(), **options)


def sampled(model) -> Rollout:
    """Episodes of a fresh policy, which are the same for every trainer of that model; some were cut
    off.
    """
    return copy.deepcopy(sampled_once(model is None))


@cache
def sampled_once(moe: bool) -> Rollout:
    model = None if moe else DENSE
    rollout = echo_trainer(model=model, routes=model is None).source.next(1)
    reasons = [r.finish_reason for r in rollout.responses]
    assert len(rollout.responses) == 16 and {"stop", "length"} <= set(reasons)
    assert max(len(r.turns) for r in rollout.responses) == 5
    assert sum((~r.policy_mask).sum() for r in rollout.responses) > 100
    return rollout


def measured(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}


# --- the gradient by hand ---

HAND = {
    "gspo": GSPO(clip_low=0.03, clip_high=0.04),
    "gspo_token": GSPOToken(clip_low=0.03, clip_high=0.04),
    "grpo": GRPO(clip_low=0.1, clip_high=0.1),
    "cispo": CISPO(clip_low=0.1, clip_high=0.1),
}


def own_log_probs(model, response) -> torch.Tensor:
    """The log-probs of the policy's tokens, by the model's own forward over the whole sequence."""
    ids = torch.tensor([response.prompt_ids + response.token_ids])
    logits = model(ids).logits[0, len(response.prompt_ids) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
    return (chosen - logits.exp().sum(-1).log())[torch.from_numpy(response.policy_mask)]


def loss_by_hand(name: str, o, logps, olds, heldouts, groups) -> torch.Tensor:
    """The mean over the responses of their losses; `heldouts` are the log-probs that stand still
    inside sg[...].
    """
    total, i = 0.0, 0
    for group in groups:
        rewards = [r.score.reward for r in group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        for reward in rewards:
            advantage = 0.0 if min(rewards) == max(rewards) else (reward - mean) / (std + 1e-6)
            logp, old, held = logps[i], olds[i], heldouts[i]
            if name == "gspo":
                ratio = ((logp - old).sum() / len(logp)).exp()
            elif name == "gspo_token":
                ratio = ((held - old).sum() / len(logp)).exp() * (logp - held).exp()
            else:
                ratio = (logp - old).exp()
            if name == "cispo":
                gain = (held - old).exp().clamp(1 - o.clip_low, 1 + o.clip_high) * advantage * logp
            else:
                gain = torch.minimum(
                    ratio * advantage, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * advantage
                )
            total, i = total - gain.sum() / gain.numel(), i + 1
    return total / i


def updated(name: str, model):
    """A trainer whose policy has moved from the old one, the batch, and the gradient of an update
    before its norm is clipped."""
    t = echo_trainer(HAND[name], model=model, minibatches=1)
    rollout = sampled(model)
    batch, everything = pack(rollout.responses, t.policy.tokenizer.pad_token_id), torch.arange(16)
    old = t.old_policy.add(batch, rollout.responses, everything, t.ranks, MetricAccumulator())
    batch = with_advantages(t, old, rollout)
    with torch.no_grad():
        olds = [own_log_probs(t.policy.model, r) for r in rollout.responses]
    perturb(t.policy, 0.005)
    moved = copy.deepcopy(t.policy.model)
    accumulator = MetricAccumulator()
    with recorded_gradients() as gradients:
        t.update(batch, torch.ones(16, dtype=torch.bool), 2, accumulator)
    metrics = accumulator.result()
    scale = max(1.0, metrics["optim/grad_norm"])
    return moved, rollout.groups, olds, [g * scale for g in gradients[0]], metrics


@pytest.mark.parametrize("name", HAND)
@pytest.mark.parametrize(
    "model", [pytest.param(DENSE, marks=pytest.mark.daily), None], ids=["dense", "moe"]
)
def test_the_gradient_is_that_of_the_loss_written_out_by_hand(name, model):
    moved, groups, olds, gradient, metrics = updated(name, model)
    logps = [own_log_probs(moved, r) for group in groups for r in group]
    loss = loss_by_hand(name, HAND[name], logps, olds, [logp.detach() for logp in logps], groups)
    moved.zero_grad()
    loss.backward()
    expected = [p.grad for p in moved.parameters() if p.grad is not None]
    for ours, theirs in zip(gradient, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, atol=2e-4 * float(theirs.abs().max()) + 1e-8, rtol=2e-3
        )
    # its loss has the log-prob itself, of which the value here is another by a constant
    if name != "cispo":
        assert metrics["optim/loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert 0 < metrics["clip/token_outside"] < 1, "some tokens are clipped, others are not"


@pytest.mark.parametrize("name", daily_but(HAND, "gspo", "cispo"))
def test_the_gradient_is_the_difference_quotient_of_that_loss(name):
    """In float64, along the gradient itself and along two random directions."""
    moved, groups, olds, gradient, _ = updated(name, DENSE)
    moved = moved.double()
    olds = [old.double() for old in olds]
    responses = [r for group in groups for r in group]
    with torch.no_grad():
        held = [own_log_probs(moved, r) for r in responses]
        parameters = list(moved.parameters())

        def loss_at(distance, direction):
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=distance)
            found = loss_by_hand(
                name, HAND[name], [own_log_probs(moved, r) for r in responses], olds, held, groups
            )
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=-distance)
            return float(found)

        own = [g.double() for g in gradient]
        length = math.sqrt(sum(float(g.square().sum()) for g in own))
        for seed in (0, 1, 2):
            random = torch.Generator().manual_seed(seed)
            direction = [torch.randn(g.shape, generator=random, dtype=torch.float64) for g in own]
            direction = direction if seed else own
            size = math.sqrt(sum(float(d.square().sum()) for d in direction))
            along = sum(float((g * d).sum()) for g, d in zip(own, direction, strict=True)) / size
            # smaller ones drown in the rounding of transformers' norms, which are float32 at all
            # times
            step = 3e-4
            quotient = (loss_at(step / size, direction) - loss_at(-step / size, direction)) / (
                2 * step
            )
            assert quotient == pytest.approx(along, abs=1e-3 * length)


# --- the environment's log-probs have no influence ---


def spoiled(policy, junk: float, experts: bool) -> None:
    """Let every pass of this policy say `junk` of the environment's tokens."""
    if policy is None:
        return
    forward = policy.forward

    def changed(batch, entropy=True, sum_pi_squared=False):
        output = forward(batch, entropy, sum_pi_squared)
        theirs = batch.attention_BS[:, batch.prompt_width :] & ~batch.sampled_BT
        assert theirs.any() or len(batch) < 4
        new = {
            name: torch.where(theirs, junk, getattr(output, name))
            for name in ("logp_BT", "entropy_BT", "values_BT", "balance_BT", "sum_pi_squared_BT")
            if getattr(output, name) is not None
        }
        if experts and output.experts_BSLK is not None:
            new["experts_BSLK"] = output.experts_BSLK.clone()
            new["experts_BSLK"][:, batch.prompt_width - 1 : -1][theirs] = 0
        return replace(output, **new)

    policy.forward = changed


def trained(make, model, junk: float, experts: bool = False, own: bool = False) -> tuple:
    """The gradients, metrics and weights of a step in which everybody says `junk` of the
    environment's tokens; with `own` it is said of a token of the policy too."""
    t, rollout = make(), sampled(model)
    for r in rollout.responses:
        r.logprobs[~r.policy_mask] = junk
        if experts and r.experts is not None:
            r.experts[len(r.prompt_ids) - 1 :][~r.policy_mask] = 0
    if own:
        rollout.responses[3].logprobs[0] = junk
    for policy in (t.policy, t.reference):
        spoiled(policy, junk, experts)
    with recorded_gradients() as gradients:
        metrics = t.train_step(1, rollout)
    return [g for update in gradients for g in update], measured(metrics), weights(t)


def assert_no_influence(make, model=DENSE, experts=False) -> dict:
    calm = trained(make, model, 7.25)
    gradients, metrics, after = trained(make, model, float("nan"), experts)
    assert metrics == calm[1]
    for ours, theirs in ((gradients, calm[0]), (after, calm[2])):
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(math.isfinite(value) for value in calm[1].values())
    assert any(g.abs().max() > 0 for g in calm[0])
    return calm[1]


@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_no_objective_sees_the_environments_log_probs(kind):
    parts = {"advantage": GroupMean()} if kind.name == "dr_grpo" else {}
    metrics = assert_no_influence(lambda: echo_trainer(kind(), DENSE, parts=parts))
    assert metrics["mismatch/k3"] < 1e-6


ADVANTAGES = {
    **{
        kind.name: kind()
        for kind in (GroupMean, LeaveOneOut, TurnNormalized, Returns, ReinforcePP, GAE, OTB)
    },
    "returns, discounted": Returns(gamma=0.9, whiten="responses"),
    "reinforce_pp, group": ReinforcePP(baseline="group"),
    "whitened over tokens": GroupMean(whiten="tokens", clip=1.0),
    "otb by column": OTB(align="column", zero_tail=False),
}


def test_every_estimator_is_among_the_cases():
    cases = {advantage.name for advantage in ADVANTAGES.values()} | {"group_normalized"}
    # these read the verifier's rewards alone
    raw = {name for name, kind in CHOICES["advantage"].items() if kind.needs_raw_rewards}
    assert raw == {"maxrl", "gdpo", "nsr"}
    assert set(CHOICES["advantage"]) <= cases | raw


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_estimator_sees_the_environments_values_and_log_probs(name):
    advantage = ADVANTAGES[name]
    # those that compare whole responses read the sum alone
    turns = "outcome" if "group" in name or name in ("rloo", "whitened over tokens") else "each"
    objective = GSPOToken() if advantage.per_token else PPO() if advantage.needs_values else GRPO()
    parts = {
        "advantage": advantage,
        "reward": RewardShaping(turns=turns),
        "kl": KLInReward(coef=0.2),
    }
    assert_no_influence(lambda: echo_trainer(objective, DENSE, parts=parts))


def with_drift(make):
    """An engine whose log-probs differ from the trainer's, so that corrections have something to
    act on.
    """
    t = make()
    perturb(t.policy, 0.02)
    return t


OTHERS = {
    "kl in the loss": {
        "parts": {
            "kl": KLInLoss(coef=0.2, target=1e-6, horizon=64, times_ratio="token", aggregation=MEAN)
        }
    },
    "kl in the loss, of sequences": {
        "parts": {"kl": KLInLoss(coef=0.2, times_ratio="sequence", aggregation=MEAN)}
    },
    "kl in the reward": {"parts": {"kl": KLInReward(coef=0.2)}},
    "tis": {"parts": {"correction": TIS(normalize=True, high=1.05)}},
    "tis, sequences": {"parts": {"correction": TIS(level="sequence", high=1.05)}},
    "mis": {"parts": {"correction": MIS(judged_by="geometric", low=0.97, high=1.03)}},
    "icepop": {"parts": {"correction": IcePop(low=0.9, high=1.1)}},
    "rejection": {"parts": {"correction": Rejection(measure="k3", level="largest", high=0.3)}},
    "rejection of sequences": {
        "parts": {"correction": Rejection(level="sequence", low=0.5, high=1.5)}
    },
    "entropy bonus": {"entropy_coef": 0.3, "entropy_target": 2.0, "entropy_coef_delta": 0.1},
    "truncated left out": {"mask_truncated": True},
    "overlong": {
        "parts": {"reward": RewardShaping(shift="batch", scale="running", overlong_cache=10)}
    },
    "two epochs": {"epochs": 2},
    "old pass skipped": {"old_pass": "auto"},
    **{
        mode: {"aggregation": Aggregation(mode, length=10 if "norm" in mode else None)}
        for mode in MODES
    },
}


@pytest.mark.parametrize(
    "case",
    daily_but(
        OTHERS,
        "kl in the loss, of sequences",
        "kl in the reward",
        "tis, sequences",
        "entropy bonus",
        "old pass skipped",
        "seq-mean-token-sum-norm",
    ),
)
def test_nothing_else_sees_them(case):
    options = copy.deepcopy(OTHERS[case])
    metrics = assert_no_influence(
        lambda: with_drift(lambda: echo_trainer(GRPO(), DENSE, **options))
    )
    if correction := OTHERS[case].get("parts", {}).get("correction"):
        mean, largest = metrics["mismatch/corrected_mean"], metrics["mismatch/weight_token_max"]
        # their mean is 1
        truncated = getattr(correction, "normalize", False) and largest > correction.high
        assert 0 < metrics["mismatch/masked"] < 1 or abs(mean - 1) > 1e-4 or truncated, (
            "the correction acts"
        )


ROUTED = {
    "plain": {"replay": "none"},
    "r2": {"replay": "r2"},
    "r3": {"replay": "r3"},
    "balanced": {"replay": "none", "router_aux_loss_coef": 0.1},
}


@pytest.mark.parametrize("case", ROUTED)
def test_no_statistic_of_the_routers_sees_them(case):
    """Without replay the experts at the places that predict the environment's tokens are spoiled
    too; in a replay they are those that the tokens go through."""
    metrics = assert_no_influence(
        lambda: echo_trainer(GSPO(), None, routes=True, **ROUTED[case]),
        None,
        experts=ROUTED[case]["replay"] == "none",
    )
    assert metrics["routing/engine_agreement"] == 1


def test_the_same_number_at_a_token_of_the_policy_would_be_seen():
    make = lambda: echo_trainer(GRPO(), DENSE, parts={"correction": TIS(high=1.05)})  # noqa: E731
    assert trained(make, DENSE, 7.25)[1] != trained(make, DENSE, 7.25, own=True)[1]


def test_counts_and_ages_are_of_the_policys_tokens():
    rollout = sampled(DENSE)
    own = [int(r.policy_mask.sum()) for r in rollout.responses]
    metrics = echo_trainer(GSPO(), DENSE).train_step(3, rollout)
    assert metrics["length/mean"] == sum(own) / 16 and metrics["compute/tokens"] == sum(own)
    assert metrics["staleness/mean"] == 2
    rollout.responses[0].policy_step = 2
    aged = echo_trainer(GSPO(), DENSE).train_step(3, rollout)["staleness/mean"]
    assert aged == pytest.approx(2 * (1 - own[0] / sum(own)))


def test_episodes_that_a_limit_has_cut_off_can_be_left_out_of_the_loss():
    """Whichever limit of ours it is: tokens, positions or turns. One that its environment has ended
    is trained on.
    """
    for mask_truncated in (True, False):
        rollout = sampled(DENSE)
        ended = [r for r in rollout.responses if r.finish_reason == "stop"]
        ended[0].finish_reason, ended[1].finish_reason = "turns", "context"
        reasons = [r.finish_reason for r in rollout.responses]
        t = echo_trainer(GSPO(), DENSE, minibatches=1, mask_truncated=mask_truncated)
        seen, update = [], t.update
        t.update = lambda batch, *rest, seen=seen, update=update: (
            seen.append(batch),
            update(batch, *rest),
        )[1]
        metrics = t.train_step(1, rollout)
        whole = reasons.count("stop")
        assert 0 < whole < 16 and set(reasons) == {"stop", "length", "turns", "context"}
        assert seen[0].mask_BT.any(-1).sum() == (whole if mask_truncated else 16)
        assert metrics.get("filter/truncated") == (1 - whole / 16 if mask_truncated else None)


# --- one turn ---


class First(FirstCharacter):
    """As FirstCharacter, but a response that was cut off scores 0, as in every task."""

    def score(self, answers):
        found = zip(super().score(answers), answers, strict=True)
        return [score if ended else Score(0.0, "truncated") for score, (_, _, ended) in found]


class OneTurn(Environment):
    def step(self, text):
        score = FirstCharacter().score([(None, text, True)])[0]
        return Outcome("nobody reads this", score.reward, True, score.verdict)


@dataclass
class FirstTurn(EnvironmentTask):
    name: str = "first"
    replays: int = 0
    size, problem = FirstCharacter.size, FirstCharacter.problem

    def evaluation_sets(self):
        return []

    def environment(self, problem, position):
        return OneTurn()


ONE_TURN = {
    "gspo": {"objective": GSPO()},
    "dense, stop strings": {
        "objective": GRPO(),
        "model": DENSE,
        "rollout": {"stop": ["a", "5", "x"]},
    },
    "r3": {"objective": GSPO(), "replay": "r3", "rollout": {"routes": True}},
    "critic": {"objective": PPO(), "parts": {"advantage": GAE(), "kl": KLInReward(coef=0.1)}},
    "dynamic, chunks": {"objective": GSPO(), "rollout": {"refill_rounds": 2, "batch_rows": 8}},
    "greedy, truncated left out": {"objective": GSPO(), "mask_truncated": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", daily_but(ONE_TURN, "r3", "critic", "dynamic, chunks"))
def test_an_episode_of_one_turn_is_the_ordinary_response_to_the_bit(case):
    found = []
    for task in (First(), FirstTurn()):
        options = copy.deepcopy(ONE_TURN[case])
        rollout = RolloutSettings(
            **{"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 10}
            | options.pop("rollout", {})
        )
        t = trainer(rollout=rollout, task=task, minibatches=2, **options)
        rows, responses = [], []
        with recorded_gradients() as gradients:
            for step in (1, 2):
                rollout = t.source.next(step)
                responses += rollout.responses
                rows.append(measured(t.train_step(step, rollout)))
        found.append((responses, [g for update in gradients for g in update], rows, weights(t)))
    (ordinary, gradients, rows, after), (turns, gradients2, rows2, after2) = found
    for a, b in zip(ordinary, turns, strict=True):
        for name in [
            "problem",
            "sample",
            "prompt_ids",
            "token_ids",
            "finish_reason",
            "text",
            "score",
            "rendered",
            "length",
        ]:
            assert getattr(a, name) == getattr(b, name), name
        assert np.array_equal(a.logprobs, b.logprobs)
        assert (a.experts is None and b.experts is None) or np.array_equal(a.experts, b.experts)
        assert not a.turns and [turn.author for turn in b.turns] == ["policy"]
    assert len({r.finish_reason for r in ordinary}) == 2
    assert all(
        torch.equal(a, b) for a, b in zip(gradients + after, gradients2 + after2, strict=True)
    )
    for a, b in zip(rows, rows2, strict=True):
        assert a == {name: value for name, value in b.items() if not name.startswith("episode/")}


# --- whole runs ---


def stale(**options):
    return gap_trainer(
        GSPO(),
        model=DENSE,
        task=Echoes(),
        minibatches=2,
        **{"staleness": 2, "old": "behaviour"} | FEW | options,
    )


def rows_of(t, count: int) -> list[dict]:
    keys = (*CLOCKS, "staleness/in_flight")
    return [{k: v for k, v in row.items() if not k.startswith(keys)} for row in steps(t, count)]


@pytest.mark.slow
@pytest.mark.parametrize("old", ["step_start", "behaviour", "engine"])
def test_sampling_beside_the_training_changes_no_number(old):
    results = []
    for overlap in (False, True):
        t = stale(old=old, overlap=overlap, staleness=1)
        results.append((rows_of(t, 3), weights(t)))
        t.source.close()
    assert results[0][0] == results[1][0] and results[0][0][2]["staleness/mean"] == 1
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert all(math.isfinite(value) for row in results[0][0] for value in row.values())


@pytest.mark.slow
@pytest.mark.parametrize("routes", [False, True])
def test_episodes_that_wait_in_a_checkpoint_come_back_to_the_bit(tmp_path, routes):
    def make():
        if not routes:
            return stale()
        return gap_trainer(
            GSPO(), task=Echoes(), minibatches=2, staleness=2, old="behaviour", replay="r3", **FEW
        )

    t = make()
    rows_of(t, 1)
    waiting = t.source.pending()
    save_pending(waiting, tmp_path)
    problems = Echoes()
    again = make()
    back = load_pending(tmp_path, lambda index: problems.problem(1, "train", index))
    assert list(back.rollouts) == list(waiting.rollouts) == [2, 3]
    for step, rollout in waiting.rollouts.items():
        for a, b in zip(rollout.responses, back.rollouts[step].responses, strict=True):
            for name in vars(a):
                one, other = getattr(a, name), getattr(b, name)
                assert (
                    np.array_equal(one, other, equal_nan=True)
                    if isinstance(one, np.ndarray)
                    else one == other
                ), name
            assert np.isnan(b.logprobs).any() or len(b.turns) == 1
            assert not np.isnan(b.old_logprobs).any() and len(b.old_logprobs) == len(b.token_ids)
    again.policy.load_tensors(t.policy.named_tensors())
    again.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))
    state = copy.deepcopy(t.state)
    state.source = t.source.state()
    again.restore(state)
    again.source.restore_pending(back)
    assert rows_of(again, 2) == rows_of(t, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(t), weights(again), strict=True))


def test_dynamic_sampling_replaces_groups_of_episodes_with_equal_rewards():
    rollout = RolloutSettings(**SIZES | {"max_new_tokens": 6}, refill_rounds=3)
    t = trainer(GSPO(), model=DENSE, rollout=rollout, task=Echoes(length=2), minibatches=2)
    metrics = [t.train_step(step, t.source.next(step)) for step in (1, 2, 3)]
    assert sum(row["filter/zero_variance"] for row in metrics) > 0
    assert all(math.isfinite(value) for row in metrics for value in row.values())


@dataclass
class Fragile(Echoes):
    """Every third environment fails, some of them at once."""

    def environment(self, problem, position):
        if (problem.index + position[-1]) % 3 == 0:
            if position[-1] % 2:
                raise OSError("no board")
            return Breaks()
        return super().environment(problem, position)


class Breaks(Environment):
    told = 0

    def step(self, text):
        self.told += 1
        if self.told == 2:
            raise OSError("lost")
        return Outcome("ab")


@pytest.mark.parametrize("model", [DENSE, None], ids=["dense", "moe"])
def test_episodes_whose_environment_failed_are_counted_and_left_out(model):
    rollout = RolloutSettings(**SIZES, routes=model is None)
    t = trainer(
        GSPO(),
        model=model,
        rollout=rollout,
        task=Fragile(),
        minibatches=2,
        replay="none" if model else "r3",
    )
    for step in (1, 2):
        found = t.source.next(step)
        metrics = t.train_step(step, found)
        assert metrics["filter/ungraded"] == len(found.ungraded) > 3
        assert {r.score.verdict for r in found.ungraded} == {"environment-error"}
        assert any(not r.token_ids for r in found.ungraded) and any(
            len(r.turns) == 3 for r in found.ungraded
        )
        assert len(found.responses) + len(found.ungraded) == 16
        assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_in_which_every_environment_fails_says_so():
    @dataclass
    class Gone(Echoes):
        def environment(self, problem, position):
            raise OSError("no board")

    t = trainer(GSPO(), model=DENSE, rollout=RolloutSettings(**SIZES), task=Gone())
    with pytest.raises(
        RuntimeError,
        match=r"none of 16 responses could be graded, .*: OSError: no board \(16 times\)",
    ):
        t.source.next(1)


def two_steps(ranks=None):
    policy_rows = RolloutSettings(**SIZES)
    t = trainer(
        GSPO(),
        model=DENSE,
        rollout=policy_rows,
        task=Echoes(),
        minibatches=2,
        ranks=ranks,
        **SMOOTH,
    )
    rollout = t.source.next(1)
    with recorded_gradients() as gradients:
        metrics = t.train_step(1, rollout)
    return (
        [r.token_ids for r in rollout.responses],
        [g for update in gradients for g in update],
        measured(metrics),
    )


@pytest.mark.slow
def test_two_ranks_share_the_episodes_out():
    alone = two_steps()
    for tokens, gradients, metrics in ranked(2, two_steps):
        assert tokens == alone[0]
        assert_same_sums(gradients, alone[1])
        for name, value in alone[2].items():
            if not name.startswith("ratio/floor_"):  # rounding, which is each process's own
                assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert small_policy(DENSE).network, "the engines go on with their caches"


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2])
def test_ranks_with_an_engine_outside_go_on_until_the_episodes_of_all_have_ended(together):
    """Rank 0 has more chunks, rank 1 longer episodes; in the last round of all, one of them has no
    row.
    """

    def rounds(ranks=None) -> tuple:
        engine = Drawn(small_policy(DENSE), 8, ranks, together)
        return [r.token_ids for r in played(engine, experts=False)], engine.rounds

    expected, alone = rounds()
    (first, asked), (second, others) = ranked(2, rounds)
    assert first == second == expected
    # rounds of the ranks' chunks: one of one turn beside one of three, then one of one turn beside
    # an empty one
    assert (alone, asked, others) == (7, *((2, 3) if together == 1 else (4, 0)))


def test_problems_without_environment_are_answered_beside_episodes_as_ever():
    @dataclass
    class Mixed(Echoes):
        """Every other problem is an ordinary one, of the task "first"."""

        def problem(self, seed, split, index):
            found = super().problem(seed, split, index)
            return Problem("first", index, found.prompt, None) if index % 2 else found

        def score(self, answers):
            assert all(problem.task == "first" for problem, _, _ in answers)
            return First().score(answers)

    @dataclass
    class Ordinary(First):
        def problem(self, seed, split, index):
            return Mixed().problem(seed, split, index)

    mixed = (
        trainer(GSPO(), model=DENSE, rollout=RolloutSettings(**SIZES), task=Mixed())
        .source.next(1)
        .responses
    )
    plain = (
        trainer(GSPO(), model=DENSE, rollout=RolloutSettings(**SIZES), task=Ordinary())
        .source.next(1)
        .responses
    )
    for a, b in zip(mixed, plain, strict=True):
        if a.problem.index % 2:
            assert (a.token_ids, a.score, a.finish_reason, a.turns) == (
                b.token_ids,
                b.score,
                b.finish_reason,
                [],
            )
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        else:
            assert a.turns and a.prompt_ids == b.prompt_ids


class SameReward(Environment):
    """A single turn with the reward 1.1, which is no float32."""

    async def step(self, text: str) -> Outcome:
        return Outcome("", 1.1, True, "over")


@dataclass
class SameRewards(Echoes):
    length: int = 1

    def environment(self, problem: Problem, position: tuple) -> Environment:
        return SameReward()


def test_equal_rewards_of_turns_leave_no_rounding_to_learn_from():
    """AdamW would turn advantages of 1e-12 into steps of the size of the learning rate."""
    rollout = RolloutSettings(
        prompts_per_step=8, group_size=4, max_new_tokens=150, stop=list("aeiouxXG59|")
    )
    parts = {"advantage": ReinforcePP(), "reward": RewardShaping(turns="each")}
    t = trainer(PPO(), model=DENSE, task=SameRewards(), rollout=rollout, parts=parts, lr=1e-3)
    before = weights(t)
    rows = steps(t, 2)
    assert rows[0]["episode/turns"] == 1 and rows[0]["advantage/abs_max"] == 0
    assert rows[1]["group/steps_without_signal"] == 2
    assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
