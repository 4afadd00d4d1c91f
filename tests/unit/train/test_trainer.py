"""The step: first mini-batch on policy, lr=0 null control, independence of the cut, learning,
compute accounting.
"""

import math
import time
from dataclasses import replace

import pytest
import torch

from builders import SMOOTH, assert_same_sums, recorded_gradients
from games import Echo, Echoes
from gspo.algorithm.advantages import GroupMean
from gspo.algorithm.objectives import GRPO, GSPO, GSPOToken
from gspo.data.pack import pack
from gspo.data.samples import Score
from gspo.model.settings import TinyDense
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import PendingRollouts
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.pending import load_pending, save_pending
from gspo.rollout.sources.problem_sampler import REFILL, Uniform
from gspo.tracking.metrics import lookup
from gspo.train.accumulator import MetricAccumulator
from gspo.train.settings import OptimSettings
from gspo.train.trainer import Trainer
from refusals import refuses
from trainers import FirstCharacter, steps, trainer, weights, with_advantages


@pytest.mark.parametrize("objective", [GSPO(), GSPOToken(), GRPO()])
@pytest.mark.parametrize("replay", ["none", "r2"])
def test_on_the_first_minibatch_every_ratio_is_one_and_nothing_is_clipped(objective, replay):
    t = trainer(objective, replay=replay, minibatches=1)
    metrics = steps(t, 1)[0]
    for name in ("ratio/token_min", "ratio/token_max", "ratio/sequence_min", "ratio/sequence_max"):
        assert metrics[name] == pytest.approx(1, abs=1e-5)
    assert metrics["clip/token_active"] == metrics["clip/token_outside"] == 0
    later = steps(trainer(objective, replay=replay), 1)[0]
    assert later["clip/token_outside_minibatch_1"] == 0
    assert later["ratio/token_max"] > 1 + 1e-4, "later mini-batches are off policy"


@pytest.mark.parametrize("replay", ["none", "r2"])
def test_with_lr_zero_policy_metrics_and_routing_stay_put(replay):
    t = trainer(GSPO(), lr=0.0, replay=replay)
    before = weights(t)
    for metrics in steps(t, 2):
        assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
        assert metrics["ratio/token_min"] == pytest.approx(1, abs=1e-5)
        assert metrics["ratio/token_max"] == pytest.approx(1, abs=1e-5)
        assert metrics["clip/token_outside"] == 0 and metrics["kl/old_k3"] < 1e-10
        assert metrics["routing/consistency"] == metrics["routing/consistency_after_step"] == 1
        assert metrics["routing/changed_any_layer"] == 0


def test_gradients_weights_and_metrics_do_not_depend_on_the_micro_batch_size():
    results = []
    for size in (1, 3, 32):
        t = trainer(GSPO(clip_low=0.01, clip_high=0.01), micro_batch_size=size, **SMOOTH)
        before = weights(t)
        with recorded_gradients() as gradients:
            metrics = steps(t, 1)[0]
        moved = [a - b for a, b in zip(weights(t), before, strict=True)]
        results.append((metrics, gradients, moved))
    assert results[0][0]["clip/token_active"] > 0, "the updates after the first are off policy"
    for metrics, gradients, moved in results[1:]:
        assert len(gradients) == 4
        for ours, others in zip(gradients, results[0][1], strict=True):
            assert_same_sums(ours, others)
        assert_same_sums(moved, results[0][2])
        for name, value in results[0][0].items():
            if not name.startswith(("time", "throughput", "compute/seconds", "ratio/floor_")):
                assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_rows_without_advantage_change_nothing_in_the_gradient():
    """Updates that leave them out of the backward pass equal updates that do not, whatever stands
    beside them.
    """
    results = []
    for size in (4, 16):  # four: micro-batches of such rows alone; sixteen: mixed with others
        t = trainer(GRPO(), micro_batch_size=size, minibatches=1)
        rollout = t.source.next(1)
        for group in rollout.groups[:5]:
            for response in group:
                response.score = Score(1.0, "correct")
        backwards = []
        t.policy.model.lm_head.register_full_backward_hook(
            lambda *_, seen=backwards: seen.append(1)
        )
        with recorded_gradients() as gradients:
            t.train_step(1, rollout)
        results.append((gradients[0], len(backwards)))
    assert_same_sums(results[0][0], results[1][0])
    assert results[0][1] <= 3 < 8, "five of eight groups should have had no backward pass"


@pytest.mark.slow
@pytest.mark.parametrize("objective", [GSPO(clip_low=0.02, clip_high=0.03), GRPO()])
def test_reward_rises_on_a_task_that_can_be_learned(objective):
    rollout = RolloutSettings(prompts_per_step=8, group_size=8, max_new_tokens=8)
    rewards = [m["reward/mean"] for m in steps(trainer(objective, lr=3e-3, rollout=rollout), 25)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards


def test_every_metric_is_registered_and_dense_models_have_no_routing_metrics():
    for metrics in (
        steps(trainer(), 1)[0],
        steps(trainer(model=TinyDense(hidden=32, layers=2, heads=2, width=32)), 1)[0],
    ):
        for name in metrics:
            lookup(name)
    assert not any(name.startswith("routing/") for name in metrics)


def test_a_step_without_a_single_token_to_train_on_changes_nothing_and_goes_on():
    t = trainer(
        GSPO(),
        mask_truncated=True,
        rollout=RolloutSettings(prompts_per_step=2, group_size=2, max_new_tokens=1),
        minibatches=2,
    )
    rollout = t.source.next(1)
    for response in rollout.responses:
        response.finish_reason = "length"
    before = weights(t)
    row = t.train_step(1, rollout)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
    assert row["filter/truncated"] == 1.0 and "clip/token_active" not in row
    assert all(math.isfinite(value) for value in row.values())


def test_groups_may_lose_responses_that_could_not_be_graded():
    t = trainer(
        GSPO(),
        parts={"advantage": GroupMean()},
        rollout=RolloutSettings(prompts_per_step=3, group_size=3, max_new_tokens=10),
    )
    rollout = t.source.next(1)
    for group, rewards in zip(
        rollout.groups, ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]), strict=True
    ):
        for response, reward in zip(group, rewards, strict=True):
            response.score = Score(reward, "")
    rollout.groups[1].pop()
    rollout = replace(rollout, ungraded=[rollout.groups[2].pop(0)])
    batch = pack(rollout.responses, t.policy.tokenizer.pad_token_id)
    rows = torch.arange(len(batch))
    old = t.old_policy.add(batch, rollout.responses, rows, t.ranks, MetricAccumulator())
    batch = with_advantages(t, old, rollout)
    by_hand = [2 / 3, -1 / 3, -1 / 3, 1 / 2, -1 / 2, 1 / 2, -1 / 2]
    assert batch.adv_BT[:, 0].tolist() == pytest.approx(by_hand)
    row = t.train_step(1, rollout)
    assert t.state.updates == 3 and all(lookup(name) for name in row)
    assert row["compute/tokens"] == sum(
        len(r.token_ids) for r in [*rollout.responses, *rollout.ungraded]
    )


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    "groups, updates", [(8, 4), (7, 4), (6, 4), (5, 4), (4, 4), (3, 3), (1, 1)]
)
def test_vanished_groups_cost_no_update_while_there_is_one_for_each(groups, updates, epochs):
    t = trainer(GRPO(), epochs=epochs)
    rollout, seen = t.source.next(1), []
    ungraded = [r for group in rollout.groups[groups:] for r in group]
    rollout = replace(rollout, groups=rollout.groups[:groups], ungraded=ungraded)
    update = t.update
    t.update = lambda batch, *rest: (seen.append(len(batch)), update(batch, *rest))
    row = t.train_step(1, rollout)
    assert t.state.updates == len(seen) == updates * epochs
    assert sum(seen) == 4 * groups * epochs and max(seen) - min(seen) <= 4, (
        "every group once an epoch, evenly"
    )
    assert row["optim/missing_updates"] == (4 - updates) * epochs


class Ungraded(FirstCharacter):
    """The verifier fails on the problems of these indices."""

    def __init__(self, *lost: int):
        super().__init__()
        self.lost = lost

    def score(self, answers) -> list[Score]:
        scores = super().score(answers)
        lost = [not self.lost or problem.index in self.lost for problem, _, _ in answers]
        return [
            Score(None, "sandbox-error") if gone else s
            for s, gone in zip(scores, lost, strict=True)
        ]


@pytest.mark.parametrize("options", [{}, {"refill_rounds": 1}, {"token_budget": 4, "in_flight": 6}])
def test_a_batch_that_nothing_could_grade_ends_the_run_in_words(options):
    t = trainer(
        rollout=RolloutSettings(prompts_per_step=4, group_size=2, max_new_tokens=10, **options),
        task=Ungraded(),
    )
    with pytest.raises(
        RuntimeError, match=r"step 3: none of .* could be graded, .*: sandbox-error \("
    ):
        t.source.next(3)


def test_a_further_group_takes_the_place_of_one_that_could_not_be_graded():
    settings = RolloutSettings(prompts_per_step=8, group_size=4, max_new_tokens=10, refill_rounds=3)
    whole = trainer(rollout=settings).source.next(1)
    assert whole.filtered["filled"] == 0, "enough further groups have different rewards"
    lost = {group[0].problem.index for group in whole.groups[:2]}
    rollout = trainer(rollout=settings, task=Ungraded(*lost)).source.next(1)
    indices = [group[0].problem.index for group in rollout.groups]
    assert len(set(indices)) == 8 and not lost & set(indices)
    assert rollout.filtered["ungraded"] == 8 and rollout.filtered["filled"] == 0


def test_a_refill_round_that_nothing_could_grade_fills_no_place():
    settings = RolloutSettings(prompts_per_step=8, group_size=2, max_new_tokens=10, refill_rounds=1)
    t = trainer(rollout=settings, task=Ungraded(*range(REFILL, REFILL + 8)))
    rollout = t.source.next(1)
    assert (
        len(rollout.groups) == 8
        and len(rollout.ungraded) == 16
        and rollout.filtered["ungraded"] == 16
    )
    assert rollout.filtered["filled"] > 0 and rollout.filtered["refill_rounds"] == 1


def test_replay_is_what_makes_the_arms_differ():
    plain, replayed = trainer(lr=1e-2), trainer(lr=1e-2, replay="r2")
    a, b = steps(plain, 1)[0], steps(replayed, 1)[0]
    # the same rollouts
    assert a["reward/mean"] == b["reward/mean"] and a["length/mean"] == b["length/mean"]
    # the routers' own choice moves in both
    assert a["routing/consistency"] < 1 and b["routing/consistency"] < 1
    assert any(
        not torch.equal(x, y) for x, y in zip(weights(plain), weights(replayed), strict=True)
    )


def test_engine_log_probs_as_old_ones():
    t = trainer(GSPO())
    t.policy_settings.old_logprobs = "engine"
    metrics = steps(t, 1)[0]
    assert (
        metrics["mismatch/logp_abs_max"] < 1e-4 and metrics["clip/token_outside_minibatch_1"] == 0
    )


def test_updates_epochs_and_warm_up():
    t = trainer(epochs=2)
    t.optim.warmup_updates = 16
    first, second = steps(t, 2)
    assert first["optim/updates"] == 8 and second["optim/updates"] == 16
    assert first["optim/lr"] == pytest.approx(1e-3 * 8 / 16) and second[
        "optim/lr"
    ] == pytest.approx(1e-3)
    assert "clip/token_active_minibatch_8" in first


def test_the_learning_rate_falls_after_its_warm_up():
    linear = OptimSettings(
        lr=2.0, warmup_updates=4, decay="linear", decay_updates=10, final_lr_factor=0.1
    )
    assert [linear.lr_of(n) for n in (1, 4, 9, 14, 99)] == pytest.approx([0.5, 2.0, 1.1, 0.2, 0.2])
    cosine = OptimSettings(lr=2.0, warmup_updates=0, decay="cosine", decay_updates=8)
    halves = [2.0 * (1 + math.cos(math.pi / 4)) / 2, 1.0, 0.0, 0.0]
    assert [cosine.lr_of(n) for n in (2, 4, 8, 9)] == pytest.approx(halves, abs=1e-12)
    t = trainer()
    t.optim = OptimSettings(lr=1e-3, warmup_updates=1, decay="linear", decay_updates=6)
    used = [row["optim/lr"] for row in steps(t, 2)]  # four updates a step
    assert used == pytest.approx([1e-3 * (1 - 3 / 6), 0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"decay": "step"}, ("optim.decay", "step")),
        ({"decay": "cosine"}, ("optim.decay", "cosine", "with optim.decay_updates=0")),
        ({"decay_updates": 5}, ("optim.decay", "none", "with optim.decay_updates=5")),
        (
            {"final_lr_factor": 0.1},
            ("optim.final_lr_factor", 0.1, "does nothing with optim.decay=none"),
        ),
    ],
)
def test_a_decay_that_is_half_said_is_refused(settings, refusal):
    with refuses(*refusal):
        OptimSettings(**settings)


def test_compute_by_hand():
    t = trainer()
    rollout = t.source.next(1)
    metrics = t.train_step(1, rollout)
    policy = t.policy
    # 32 hidden, 3 layers, 8 experts of 3 * 32 * 16, 2 active; 4 attention matrices of 32 * 32, q
    # and k norms of 16; two norms of 32 a layer and one at the end; router 8 * 32; tied embedding
    # counted once, as the output head
    per_layer = 2 * 3 * 32 * 16 + 4 * 32 * 32 + 2 * 16 + 2 * 32 + 8 * 32
    active = 3 * per_layer + 32 + len(policy.tokenizer) * 32
    assert policy.active_parameters == active
    flops = 0.0
    for group in rollout.groups:
        for i, r in enumerate(group):
            prompt, length = len(r.prompt_ids), len(r.prompt_ids) + len(r.token_ids)
            forward = lambda n: 2 * active * n + 2 * 3 * 32 * n * n  # noqa: E731
            flops += (
                forward(length) * 4
                + forward(length)
                - forward(prompt)
                + (forward(prompt) if i == 0 else 0)
            )
    assert metrics["compute/flops"] == pytest.approx(flops, rel=1e-9)
    assert metrics["compute/tokens"] == sum(len(r.token_ids) for r in rollout.responses)


class Poison:
    """Makes the gradient of some backward passes not finite, as an overflow would."""

    def __init__(self, t: Trainer, *passes: int):
        self.passes, self.seen = passes, 0
        t.policy.model.lm_head.weight.register_hook(self)

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return grad * float("inf") if not self.passes or self.seen in self.passes else grad


def test_an_update_whose_gradient_is_not_finite_is_left_out_and_counted():
    t, untouched = trainer(micro_batch_size=8), trainer(micro_batch_size=8)
    Poison(t, 4)
    metrics, healthy = (steps(one, 1)[0] for one in (t, untouched))
    assert (metrics["optim/skipped"], metrics["optim/updates"]) == (1, 3)
    assert (healthy["optim/skipped"], healthy["optim/updates"]) == (0, 4)
    assert math.isfinite(metrics["optim/grad_norm_max"]) and t.state.skipped == 1
    assert all(w.isfinite().all() for w in weights(t))
    third = "clip/token_outside_minibatch_3"
    assert metrics[third] == healthy[third], "the others went on"
    metrics = steps(t, 1)[0]
    assert metrics["optim/skipped"] == 0 and t.state.skipped == 0


def test_gradients_that_are_never_finite_end_the_run_before_the_weights():
    t = trainer()
    t.optim.max_skipped = 5
    Poison(t)
    before = weights(t)
    with pytest.raises(RuntimeError, match=r"6 updates in a row .*optim.max_skipped=5"):
        steps(t, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))


class Slow(Echo):
    def reset(self, problem):
        time.sleep(0.2)
        return super().reset(problem)


class SlowEchoes(Echoes):
    def environment(self, problem, position):
        return Slow(self.length, position)


@pytest.mark.slow
def test_seconds_of_environments_are_a_part_of_sampling_in_every_round_and_after_a_pause(tmp_path):
    settings = RolloutSettings(prompts_per_step=2, group_size=2, max_new_tokens=4, refill_rounds=1)
    t = trainer(rollout=settings, minibatches=1)
    (without,) = steps(t, 1)
    assert not any("environment" in name or "episode" in name for name in without)
    task = SlowEchoes()
    t.source = make_source(t.source.engine, task, settings, Uniform(), 1)
    rollout = t.source.next(2)
    assert (
        rollout.filtered["refill_rounds"] == 1 and 0.3 < rollout.environment_s < rollout.rollout_s
    )
    save_pending(PendingRollouts({2: rollout}), tmp_path)
    read = load_pending(tmp_path, lambda index: task.problem(1, "train", index)).rollouts[2]
    metrics = t.train_step(2, read)
    assert metrics["time/environment_s"] == rollout.environment_s and metrics["episode/turns"] >= 1
    assert all(lookup(name) for name in metrics)


def test_a_prompt_of_an_ungraded_response_is_prefilled_once_with_its_group():
    t = trainer()
    rollout = t.source.next(1)
    whole = t.train_step(1, rollout)["compute/flops"]
    t = trainer()
    rollout = t.source.next(1)
    # as the source leaves out a response that could not be graded
    ungraded = rollout.groups[0].pop()
    rollout.ungraded.append(ungraded)
    fewer = t.train_step(1, rollout)["compute/flops"]
    length = torch.tensor([ungraded.length + len(ungraded.prompt_ids)])
    # it is generated as before, and not trained on: a forward and a backward pass less
    assert whole - fewer == pytest.approx(float(t.policy.forward_flops(length)) * 4, rel=1e-9)
