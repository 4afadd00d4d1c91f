"""Effective sample sizes, mutual information and the gradient's signal and noise in a trainer."""

import json
import math
import random
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from builders import small_policy
from gspo.algorithm.corrections import TIS, Correction
from gspo.algorithm.masks import M2PO
from gspo.algorithm.mutual_information import prompt_information
from gspo.algorithm.objectives import GRPO, GSPO, P3O
from gspo.data.pack import pack
from gspo.data.samples import Score, ScoredResponse, Turn
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.model.settings import TinyDense
from gspo.rollout.settings import RolloutSettings
from gspo.tasks.testbed.guessing import Guessing
from gspo.train.accumulator import MetricAccumulator
from gspo.train.checkpoint import TrainState
from gspo.train.loss_terms import PolicyTerm
from gspo.train.signal_probe import (
    SignalProbe,
    cross_log_probs,
    measure_snr,
    random_halves,
    signal_and_noise,
)
from trainers import FirstCharacter, gap_trainer, steps, trainer, weights, with_advantages

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
CLOCKS = ("time/", "throughput/", "compute/")


# -- effective sample sizes


def test_the_effective_size_of_groups_by_hand():
    """Groups with the mean weights 2, 1 and 0, of which the first comes in two parts."""
    accumulator = MetricAccumulator()
    accumulator.group_ess("a", torch.tensor([7, 3, 7]), torch.tensor([1.0, 1.0, 3.0]))
    accumulator.group_ess("a", torch.tensor([7, 5]), torch.tensor([2.0, 0.0]))
    accumulator.group_ess("zeros", torch.tensor([1, 2]), torch.zeros(2))
    assert accumulator.result() == {"a": pytest.approx(9 / (3 * 5))}


def test_the_effective_sizes_of_rows_by_hand():
    """Rows with the weights (1, 3), (0) and (2, 2, 2), and a row without tokens."""
    accumulator = MetricAccumulator()
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    weight_BT = torch.tensor([[1.0, 3.0, 9.0], [0.0, 5.0, 5.0], [7.0, 7.0, 7.0]])
    accumulator.row_weights("a", "_used", torch.tensor([4, 4, 5]), weight_BT, mask_BT)
    all_BT = torch.ones(1, 3, dtype=torch.bool)
    accumulator.row_weights("a", "_used", torch.tensor([8]), torch.tensor([[2.0]]), all_BT)
    expected = {
        "a/ess_token_used": 10**2 / (6 * 22),
        "a/ess_sequence_used": 4**2 / (3 * 8),  # means 2, 0 and 2
        "a/ess_group_used": 3**2 / (2 * 5),  # means 1 and 2
    }
    assert accumulator.result() == pytest.approx(expected)


def test_micro_batches_do_not_change_the_effective_sizes():
    names = [
        f"ratio/ess_{unit}{used}"
        for unit in ("token", "sequence", "group")
        for used in ("", "_used")
    ]
    rows = []
    for size in (3, 32):
        t = trainer(GRPO(clip_low=0.01, clip_high=0.01), model=DENSE, micro_batch_size=size)
        rows.append(steps(t, 1)[0])
    for name in names:
        assert 0 < rows[0][name] <= 1 + 1e-9, name
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-4), name
    # a clip makes weights of 0
    assert rows[0]["ratio/ess_token_used"] < rows[0]["ratio/ess_token"]


def test_a_correction_raises_the_effective_size():
    t = gap_trainer(
        GRPO(), model=DENSE, parts={"correction": TIS(high=1.0)}, dtype="bfloat16", lr=1e-2
    )
    row = steps(t, 1)[0]
    assert row["mismatch/ess_token"] < row["mismatch/ess_token_used"] <= 1
    # min(w, 1) brings the weights of tokens together, but not always their means over a response
    for population in ("sequence", "group"):
        assert 0.99 < row[f"mismatch/ess_{population}_used"] <= 1


# -- mutual information


def test_information_by_hand():
    """One response of probability .5 under its own prompt and .1 under the other: log(.5 / .3)."""
    logp = torch.tensor([[0.5, 0.1]], dtype=torch.float64).log()
    found = prompt_information(logp, 3 * logp, torch.tensor([0]), torch.arange(2))
    assert found["mi"] == pytest.approx(math.log(5 / 3))
    assert found["mi_sequence"] == pytest.approx(math.log(0.125 / ((0.125 + 0.001) / 2)))
    assert found["bound"] == pytest.approx(math.log(2))
    assert (found["retrieval@1"], found["chance@1"]) == (1.0, 0.5)
    assert (found["retrieval@8"], found["chance@8"]) == (1.0, 1.0)


def test_equal_prompts_count_as_one_of_them():
    """Three of four prompts are equal: chance is the mean over responses, cut off at 1."""
    logp = torch.tensor([[-9.0, -1.0, -9.0, -2.0], [-9.0, -9.0, -1.0, -2.0]], dtype=torch.float64)
    equal = torch.tensor([5, 5, 5, 8])
    found = prompt_information(logp, logp, torch.tensor([0, 3]), equal)
    assert (found["retrieval@1"], found["chance@1"]) == (0.5, 0.5)
    assert (found["retrieval@2"], found["chance@2"]) == (1.0, 1.0)


def test_information_is_0_if_the_prompt_makes_no_difference():
    logp = torch.tensor([[-1.0, -1.0, -1.0], [-4.0, -4.0, -4.0]], dtype=torch.float64)
    found = prompt_information(logp, logp, torch.tensor([0, 2]), torch.arange(3))
    assert found["mi"] == pytest.approx(0, abs=1e-12)
    certain = torch.tensor([[0.0, -99.0], [-99.0, 0.0]], dtype=torch.float64)
    found = prompt_information(certain, certain, torch.tensor([0, 1]), torch.arange(2))
    assert found["mi"] == found["mi_sequence"] == pytest.approx(math.log(2))


def test_information_does_not_know_the_order_of_prompts_and_responses():
    generator = torch.Generator().manual_seed(1)
    logp = -torch.rand(6, 4, generator=generator, dtype=torch.float64)
    own = torch.tensor([0, 0, 1, 2, 3, 3])
    found = prompt_information(logp, 5 * logp, own, torch.arange(4))
    prompts = torch.tensor([2, 0, 3, 1])
    rows = torch.tensor([5, 1, 0, 3, 2, 4])
    moved = logp[rows][:, prompts]
    place = prompts.argsort()
    again = prompt_information(moved, 5 * moved, place[own[rows]], torch.arange(4))
    assert again == pytest.approx(found)


@pytest.mark.parametrize("rules", [{}, {"min_p": 0.4, "keep_mask": True}], ids=["whole", "kept"])
def test_cross_log_probs_are_the_policys(rules):
    """They are of the whole vocabulary. The kept tokens would tell the own prompt to the others."""
    sizes = {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 10}
    t = trainer(GRPO(), model=DENSE, rollout=RolloutSettings(**sizes, **rules))
    rollout = t.source.next(1)
    found = cross_log_probs(
        t.policy, rollout.groups, prompts=3, samples=2, micro_batch_size=5, ranks=Ranks()
    )
    mean_RP, sum_RP, own_R = found
    distinct = list(dict.fromkeys(tuple(group[0].prompt_ids) for group in rollout.groups))[:3]
    chosen = [group for group in rollout.groups if tuple(group[0].prompt_ids) in distinct]
    responses = [r for group in chosen for r in group[:2]]
    assert mean_RP.shape == (len(responses), 3)
    for i in (0, 3):
        r = responses[i]
        assert distinct[own_R[i]] == tuple(r.prompt_ids)
        for j, prompt in enumerate(distinct):
            ids = torch.tensor([[*prompt, *r.token_ids]])
            logp = t.policy.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            total = logp.gather(-1, torch.tensor(r.token_ids).unsqueeze(-1)).sum().item()
            assert sum_RP[i, j].item() == pytest.approx(total, abs=1e-3)
            assert mean_RP[i, j].item() == pytest.approx(total / len(r.token_ids), abs=1e-3)
    alone = cross_log_probs(
        t.policy, rollout.groups[:1], prompts=3, samples=2, micro_batch_size=5, ranks=Ranks()
    )
    assert alone is None


def demonstrated_game(task: Guessing, policy: Policy, index: int, sample: int) -> ScoredResponse:
    """Return an episode with turns of both authors, by random guesses."""
    problem = task.problem(1, "train", index)
    texts = task.demonstrated_turns(problem, 1.0, random.Random(10 * index + sample))
    turns = []
    token_ids: list[int] = []
    for i, text in enumerate(texts):
        ids = policy.tokenizer(text, add_special_tokens=False).input_ids
        author = "environment" if i % 2 else "policy"
        turns.append(Turn(author, len(ids), text))
        token_ids += ids
    prompt_ids = policy.tokenizer(problem.prompt, add_special_tokens=False).input_ids
    return ScoredResponse(
        problem, sample, prompt_ids, token_ids, np.zeros(len(token_ids)), "stop", "", 0,
        turns=turns, score=Score(1.0, "found"),
    )  # fmt: skip


def test_the_information_of_episodes_is_of_the_policys_tokens_behind_all_others():
    """Games of guessing are scored under three intervals by the model's own forward.

    The environment's answers are read and not scored: scoring them too gives other numbers."""
    policy = small_policy(DENSE)
    games = [[demonstrated_game(Guessing(), policy, i, j) for j in range(3)] for i in range(3)]
    probe = SignalProbe(information_every=1, information_prompts=3, information_samples=2)
    accumulator = MetricAccumulator()
    probe.information(policy, games, 5, Ranks(), accumulator)
    prompts = [group[0].prompt_ids for group in games]
    episodes = [game for group in games for game in group[:2]]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert max(len(game.turns) for game in episodes) >= 5
    found = accumulator.result()
    for scores_all, is_same in ((False, True), (True, False)):
        rows = []
        for game in episodes:
            is_scored = torch.from_numpy(game.policy_mask) | scores_all
            row = []
            for prompt in prompts:
                ids = torch.tensor([prompt + game.token_ids])
                logits = policy.model(ids).logits[0, len(prompt) - 1 : -1].double()
                chosen = torch.tensor(game.token_ids).unsqueeze(-1)
                logp = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
                row.append(logp[is_scored].mean())
            rows.append(torch.stack(row))
        logp_RP = torch.stack(rows).detach()
        own_R = torch.tensor([0, 0, 1, 1, 2, 2])
        matched_R = logp_RP[torch.arange(6), own_R]
        marginal_R = logp_RP.exp().mean(1).log()
        mi = float((matched_R - marginal_R).mean())
        retrieved = float((logp_RP.argmax(1) == own_R).double().mean())
        assert (found["information/mi"] == pytest.approx(mi, abs=1e-5)) is is_same
        if is_same:
            assert found["information/retrieval@1"] == pytest.approx(retrieved)
            assert found["information/matched"] == pytest.approx(float(matched_R.mean()), abs=1e-5)


# -- signal and noise


def test_signal_and_noise_by_hand():
    """Gradients (3, 1) and (1, -1): g_1 . g_2 = 2, |g_1 - g_2|^2 / 4 = 2."""
    first = [torch.tensor([3.0]), torch.tensor([[1.0]])]
    second = [torch.tensor([1.0]), torch.tensor([[-1.0]])]
    expected = {
        "gradient_signal": 2.0, "gradient_noise": 2.0, "snr": 1.0, "snr_cosine": 2 / 20**0.5,
    }  # fmt: skip
    assert signal_and_noise(first, second) == pytest.approx(expected)
    assert signal_and_noise(first, first) == pytest.approx(
        {"gradient_signal": 10.0, "gradient_noise": 0.0, "snr_cosine": 1.0}
    )
    zeros = [torch.zeros(1), torch.zeros(1, 1)]
    assert signal_and_noise(zeros, zeros) == {"gradient_signal": 0.0, "gradient_noise": 0.0}


def test_signal_and_noise_have_no_bias():
    """Over all pairs of halves of +-1 noise around G = 0.5 in 2 dimensions: .5 and tr(S) / 2 = 1."""
    draws = [torch.tensor([0.5 + a, 0.5 + b]) for a in (-1, 1) for b in (-1, 1)]
    found = [signal_and_noise([g], [h]) for g in draws for h in draws]
    mean = {k: sum(f[k] for f in found) / len(found) for k in ("gradient_signal", "gradient_noise")}
    assert mean == pytest.approx({"gradient_signal": 0.5, "gradient_noise": 1.0})


def test_halves_have_whole_groups():
    prompts_B = torch.tensor([4, 4, 0, 0, 2, 2, 9, 9, 9])
    seen = set()
    for step in range(8):
        first, second = random_halves(prompts_B, 1, step)
        assert (first ^ second).all() and first.any() and second.any()
        groups = set(prompts_B[first].tolist())
        assert len(groups) == 2 and not groups & set(prompts_B[second].tolist())
        seen.add(frozenset(groups))
    assert len(seen) > 1
    assert random_halves(torch.tensor([3, 3]), 1, 1) is None


@pytest.mark.parametrize("model", [None, DENSE], ids=["moe", "dense"])
def test_a_run_with_the_probe_trains_to_the_same_bits(model):
    rows = []
    trained = []
    for probe in (SignalProbe(), SignalProbe(information_every=2, snr_every=1)):
        t = trainer(GSPO(clip_low=1e-3, clip_high=1e-3), model=model, old_pass="auto")
        t.probe = probe
        rows.append(steps(t, 2))
        trained.append((weights(t), torch.get_rng_state()))
    for a, b in zip(*rows, strict=True):
        kept = {k: v for k, v in a.items() if not k.startswith(CLOCKS)}
        assert kept == {k: b[k] for k in kept}
    assert all(torch.equal(a, b) for a, b in zip(trained[0][0], trained[1][0], strict=True))
    first, second = rows[1]
    assert "information/mi" not in first and second["information/mi"] > -1
    assert 0 <= second["information/retrieval@1"] <= second["information/retrieval@8"] <= 1
    assert "optim/snr" not in rows[0][0] and math.isfinite(first["optim/snr"])


def test_the_halves_gradients_add_up_to_the_batchs():
    """|g_1 + g_2|^2 / 4 = signal + noise is the squared norm of the batch's own gradient.

    The halves have as many groups, and so as many responses, so their mean is the batch's gradient.
    """
    t = trainer(GRPO(), model=DENSE, minibatches=1, max_grad_norm=1e9)
    t.probe = SignalProbe(snr_every=1)
    row = steps(t, 1)[0]
    total = row["optim/gradient_signal"] + row["optim/gradient_noise"]
    assert total == pytest.approx(row["optim/grad_norm"] ** 2, rel=1e-3)


def test_the_halves_have_the_statistic_of_a_mini_batch():
    """With P3O the effective sample size of the ratios, whatever the size of micro-batches is."""
    rows = []
    for size in (3, 32):
        t = gap_trainer(P3O(), model=DENSE, old="engine", dtype="bfloat16")
        t.settings.micro_batch_size = size
        t.probe = SignalProbe(snr_every=1)
        rows.append(steps(t, 1)[0])
    for name in ("optim/gradient_signal", "optim/gradient_noise", "ratio/floor_outside"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-4), name


def test_m2po_leaves_tokens_out_of_each_half():
    """The gradients are those of halves from which it has removed the tokens before."""
    t = gap_trainer(GRPO(), model=DENSE, dtype="bfloat16")
    m2po = M2PO(threshold=1e-6)
    rollout = t.source.next(1)
    rollout_batch = pack(rollout.responses, t.policy.pad_id)
    rows_N = torch.arange(len(rollout_batch))
    accumulator = MetricAccumulator()
    old = t.old_policy.add(rollout_batch, rollout.responses, rows_N, t.ranks, accumulator)
    batch = with_advantages(t, old, rollout)
    reduced_BT = batch.mask_BT.clone()
    for half_B in random_halves(batch.prompts_B, 1, 1):
        half = batch.rows(half_B.nonzero().squeeze(-1))
        mask_BT = m2po.reduced_mask(half.old_logp_BT, half.engine_logp_BT, half.mask_BT)
        width = mask_BT.shape[1]
        reduced_BT[half_B, :width] = mask_BT
    assert 0 < reduced_BT.sum() < 0.8 * batch.mask_BT.sum()
    numbers = []
    for correction, mask_BT in ((m2po, batch.mask_BT), (Correction(), reduced_BT)):
        accumulator = MetricAccumulator()
        measure_snr(
            t.old_policy,
            PolicyTerm(GRPO(), t.settings.aggregation, correction),
            replace(batch, mask_BT=mask_BT),
            starts_at_old=True,
            micro_batch_size=8,
            local_rows_N=rows_N,
            position=(1, 1),
            ranks=t.ranks,
            accumulator=accumulator,
        )
        numbers.append(accumulator.result())
    assert numbers[0] == numbers[1] and numbers[0]["optim/gradient_noise"] > 0


def test_batches_without_signal_are_counted_and_the_count_survives_a_checkpoint():
    class Constant(FirstCharacter):
        def score(self, answers):
            return [Score(self.always, "wrong") for _ in answers]

    task = Constant()
    task.always = 0.5
    t = trainer(GRPO(), model=DENSE, task=task)
    assert [row["group/steps_without_signal"] for row in steps(t, 2)] == [1, 2]
    state = TrainState.from_json(json.loads(json.dumps(asdict(t.state))))
    assert state.without_signal == 2
    t.source.task = FirstCharacter()
    assert steps(t, 1)[0]["group/steps_without_signal"] == 0


def test_the_pass_for_the_statistic_is_counted_where_it_is_taken():
    """Of four mini-batches the first needs none, if its ratios are 1 by definition."""
    flops = {}
    for old in ("step_start", "engine"):
        for objective in (GRPO(), P3O()):
            t = gap_trainer(objective, model=DENSE, old=old, old_pass="always")
            flops[old, objective.name] = steps(t, 1)[0]["compute/flops"]
    whole = flops["engine", "p3o"] - flops["engine", "grpo"]
    assert 0.6 * whole < flops["step_start", "p3o"] - flops["step_start", "grpo"] < 0.9 * whole
