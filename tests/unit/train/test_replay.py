"""A replay of a recorded step gives the run's metrics and gradients, and those of other objectives."""

import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from daily import daily_but
from games import Echoes
from gspo.algorithm.advantages import GAE, GroupMean
from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import TIS
from gspo.algorithm.kl import KLInLoss, KLInReward
from gspo.algorithm.masks import M2PO, OPSM
from gspo.algorithm.objectives import (
    CISPO,
    GMPO,
    GRPO,
    GSPO,
    P3O,
    PPO,
    SAPO,
    VESPO,
    GSPOToken,
    GSPOTurn,
    PrimeRL,
    Reinforce,
)
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.algorithm.turn_advantage import TurnNormalized
from gspo.data.pack import pack
from gspo.data.step_record import ACTIVE
from gspo.data.step_record_files import find_record, read_record, record_file
from gspo.io.errors import SettingError
from gspo.model.settings import LoraSettings, TinyDense
from gspo.rollout.settings import RolloutSettings
from gspo.tracking.step_page import step_page
from gspo.tracking.step_tokens import Passes, View, ViewTokens, recorded_view, row_numbers
from gspo.train import replay_checks
from gspo.train.recorder import StepRecorder
from gspo.train.replay import replay
from gspo.train.replay_comparison import (
    agreement,
    cosines,
    effective_responses,
    gradient_norm,
    response_weights,
    without_balance,
)
from gspo.train.settings import Algorithm, PolicySettings
from ranked import ranked
from trainers import gap_trainer, steps, trainer, weights

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
MEAN = Aggregation("seq-mean-token-mean")
NARROW = GSPO(clip_low=1e-3, clip_high=1e-3)
EPISODES = RolloutSettings(
    prompts_per_step=4, group_size=4, max_new_tokens=24, stop=list("aeiouxXG59|")
)
FEW = RolloutSettings(prompts_per_step=4, group_size=4, max_new_tokens=10)

# each records and replays something that the others do not
CASES = {
    "gspo": partial(trainer, NARROW, old_pass="auto"),
    "gspo, dense, engine skipped": partial(trainer, NARROW, model=DENSE, old_pass="auto"),
    "grpo, dual clip, kl in the loss": partial(
        trainer,
        GRPO(clip_low=0.02, clip_high=0.02, dual_clip=1.1),
        parts={"kl": KLInLoss(coef=0.1, aggregation=MEAN)},
    ),
    "grpo, kl in the reward": partial(trainer, GRPO(), parts={"kl": KLInReward(coef=0.05)}),
    "ppo, critic": partial(trainer, PPO(), parts={"advantage": GAE()}, epochs=2),
    "cispo, correction, rounding engine": partial(
        gap_trainer, CISPO(), parts={"correction": TIS()}, dtype="bfloat16"
    ),
    "gspo, r2": partial(trainer, NARROW, replay="r2"),
    "grpo, kept tokens, rounding engine": partial(
        gap_trainer,
        GRPO(clip_low=0.02, clip_high=0.02),
        parts={"correction": TIS()},
        dtype="bfloat16",
        top_p=0.8,
        keep_mask=True,
    ),
    "grpo, r3": partial(gap_trainer, GRPO(), replay="r3", dtype="bfloat16"),
    "gspo_token, episodes": partial(
        trainer,
        GSPOToken(clip_low=1e-3, clip_high=1e-3),
        model=DENSE,
        rollout=EPISODES,
        task=Echoes(),
        parts={"advantage": TurnNormalized(), "reward": RewardShaping(turns="each")},
        minibatches=2,
    ),
    "grpo, lora": partial(
        trainer, GRPO(), model=DENSE, lora=LoraSettings(rank=4, alpha=8), old_pass="auto"
    ),
    "gmpo, truncated masked, running moments": partial(
        trainer,
        GMPO(),
        model=DENSE,
        mask_truncated=True,
        parts={"reward": RewardShaping(shift="running", scale="running", overlong_cache=4)},
    ),
    "sapo, entropy bonus": partial(
        trainer, SAPO(), model=DENSE, entropy_coef=0.01, entropy_target=3.0
    ),
    "grpo, stale, behaviour": partial(
        gap_trainer, GRPO(), model=DENSE, old="behaviour", staleness=1
    ),
    "vespo, token weights": partial(
        gap_trainer, VESPO(), model=DENSE, parts={"correction": TIS()}, dtype="bfloat16"
    ),
    "grpo, opsm": partial(
        gap_trainer, GRPO(), model=DENSE, parts={"correction": OPSM(delta=1e-3)}, dtype="bfloat16"
    ),
    "grpo, m2po": partial(
        gap_trainer,
        GRPO(),
        model=DENSE,
        parts={"correction": M2PO(threshold=1e-7)},
        dtype="bfloat16",
    ),
    "p3o, stale": partial(gap_trainer, P3O(), model=DENSE, staleness=1, old="behaviour"),
    "p3o, old log-probs of the engine": partial(
        gap_trainer, P3O(), model=DENSE, old="engine", dtype="bfloat16"
    ),
    "prime_rl": partial(gap_trainer, PrimeRL(), model=DENSE, dtype="bfloat16"),
    "gspo_turn, episodes": partial(
        trainer,
        GSPOTurn(clip_low=1e-3, clip_high=1e-3),
        model=DENSE,
        rollout=EPISODES,
        task=Echoes(),
        minibatches=2,
    ),
    "gspo, routers balanced": partial(trainer, NARROW, router_aux_loss_coef=0.01),
    "gspo, old log-probs of the engine": partial(
        gap_trainer, NARROW, model=DENSE, old="engine", dtype="bfloat16"
    ),
}
# metrics that a record cannot tell: of responses that are not trained on, of the model, of time
NOT_IN_A_RECORD = (
    "compute/", "filter/", "group/", "length/", "reward/", "staleness/", "throughput/", "time/",
    "sampling/", "verdict/", "optim/", "episode/", "routing/consistency_after_step", "mismatch/after_sync",
    "mismatch/sync_",
)  # fmt: skip


def record(t, run: Path, **options) -> None:
    """Let a trainer record its steps."""
    settings = {
        "objective": asdict(t.algorithm.objective),
        "policy": asdict(t.policy_settings),
    }
    t.recorder = StepRecorder(run, "test", t.policy, settings, t.ranks, **{"every": 1} | options)


def replayed(t, run: Path, step: int):
    """Return a step's record and its replay under the trainer's own settings."""
    recorded = read_record(find_record(run, step))
    return recorded, replay(recorded, t.algorithm, t.settings, t.policy_settings)


EVERY_CHANGE = [
    "gspo",
    "gspo, dense, engine skipped",
    "grpo, dual clip, kl in the loss",
    "ppo, critic",
    "cispo, correction, rounding engine",
    "gspo, r2",
    "gspo_token, episodes",
    "grpo, stale, behaviour",
    "grpo, opsm",
    "grpo, m2po",
    "p3o, stale",
    "p3o, old log-probs of the engine",
    "grpo, kept tokens, rounding engine",
]


@pytest.mark.parametrize("case", daily_but(CASES, *EVERY_CHANGE))
def test_a_replay_gives_the_metrics_of_the_run(case, tmp_path):
    t = CASES[case]()
    record(t, tmp_path)
    rows = steps(t, 3)
    row = rows[2]
    recorded, again = replayed(t, tmp_path, 3)
    agreed = agreement(
        again.metrics, without_balance(row, t.settings.router_aux_loss_coef, recorded)
    )
    assert not agreed.differing
    missing = [
        name for name in row if name not in again.metrics and not name.startswith(NOT_IN_A_RECORD)
    ]
    # with the engine's log-probs as the old policy's, a record has no others to compare them with
    if "old log-probs of the engine" in case:
        missing = [name for name in missing if not name.startswith("mismatch/")]
    assert missing == ["routing/balance"] * ("routing/balance" in row)
    assert agreed.compared > 40
    # token by token: advantages, clips and weights are those of the run
    assert np.allclose(again.advantages, recorded.advantages, atol=1e-6)
    for update, own in zip(again.updates, recorded.updates, strict=True):
        trained = np.concatenate([recorded.trained[recorded.tokens_of(r)] for r in own.rows])
        assert np.array_equal(update.clipped[trained], own.clipped[trained])
        assert np.allclose(update.weight[trained], own.weight[trained], rtol=1e-6, atol=1e-7)
    assert len(recorded.updates) == t.settings.minibatches * t.settings.epochs


@pytest.mark.slow
def test_recording_changes_nothing(tmp_path):
    plain = trainer(NARROW)
    recording = trainer(NARROW)
    record(recording, tmp_path)
    rows = [steps(t, 2) for t in (plain, recording)]
    for a, b in zip(*rows, strict=True):
        assert {n: v for n, v in a.items() if not n.startswith(("time/", "thr", "compute/s"))} == {
            n: v for n, v in b.items() if not n.startswith(("time/", "thr", "compute/s"))
        }
    assert all(map(torch.equal, weights(plain), weights(recording)))
    assert "time/record_s" not in rows[0][0] and rows[1][0]["time/record_s"] > 0


def test_the_gradient_by_the_log_probs_is_the_one_that_reaches_the_model(tmp_path):
    """The chain rule: parameter gradients are the Jacobian of the log-probs times this gradient."""
    t = trainer(GRPO(clip_low=0.02, clip_high=0.02), model=DENSE, minibatches=1, max_grad_norm=1e9)
    record(t, tmp_path)
    policy = copy.deepcopy(t.policy.model)
    (row,) = steps(t, 1)
    recorded, again = replayed(t, tmp_path, 1)
    t.policy.model.load_state_dict(policy.state_dict())
    rollout = trainer(GRPO(), model=DENSE).source.next(1)
    batch = pack(rollout.responses, t.policy.pad_id)
    rows_N = torch.from_numpy(again.updates[0].rows).long()
    batch = batch.rows(rows_N)
    logp_BT = t.policy.forward(batch).logp_BT
    gradient_BT = torch.zeros_like(logp_BT)
    gradient_BT[batch.mask_BT] = torch.from_numpy(again.updates[0].gradient)
    (logp_BT * gradient_BT).sum().backward()
    squares = [p.grad.double().square().sum() for p in t.policy.parameters() if p.grad is not None]
    assert float(sum(squares).sqrt()) == pytest.approx(row["optim/grad_norm"], rel=1e-4)
    assert Totals.of(batch.mask_BT).sequences == len(recorded)


def test_another_objective_is_computed_from_the_same_responses(tmp_path):
    """GSPO's record under GRPO: the numbers of hand-written formulas on the recorded log-probs."""
    t = trainer(NARROW, model=DENSE)
    record(t, tmp_path)
    steps(t, 2)
    recorded = read_record(find_record(tmp_path, 2))
    grpo = Algorithm(GRPO(clip_low=0.01, clip_high=0.01), GroupMean())
    other = replay(recorded, grpo, t.settings, t.policy_settings)
    own = replay(recorded, t.algorithm, t.settings, t.policy_settings)

    rewards = recorded.rewards
    means = np.array([rewards[recorded.groups == g].mean() for g in recorded.groups])
    advantages = np.repeat(rewards - means, recorded.response_lengths)
    assert np.allclose(other.advantages, advantages, atol=1e-6)
    clipped = 0
    tokens = 0
    loss_sum = 0.0
    for number, update in enumerate(recorded.updates, start=1):
        positions = np.concatenate(
            [np.arange(*recorded.tokens_of(r).indices(10**9)) for r in update.rows]
        )
        old = update.logp if number == 1 else recorded.old_logp[positions]
        ratio = np.exp(update.logp.astype(float) - old)
        a = advantages[positions]
        surrogate = np.minimum(ratio * a, ratio.clip(0.99, 1.01) * a)
        lengths = recorded.response_lengths[update.rows]
        response_means = np.add.reduceat(surrogate, np.cumsum(lengths) - lengths) / lengths
        loss_sum -= response_means.mean()
        clipped += (ratio.clip(0.99, 1.01) * a < ratio * a).sum()
        tokens += len(a)
    assert clipped > 0
    assert other.metrics["clip/token_active"] == pytest.approx(clipped / tokens)
    assert other.metrics["optim/loss"] == pytest.approx(loss_sum / 4, abs=1e-6)
    whole, *by_update = cosines(own, other)
    assert len(by_update) == 4 and -1 <= whole < 0.999
    # the first update's ratios are 1 under either objective; advantages differ by group factors
    assert by_update[0] > 0.9


def test_equal_gradients_have_the_cosine_one_and_shares_add_up(tmp_path):
    t = trainer(NARROW, model=DENSE)
    record(t, tmp_path)
    steps(t, 2)
    recorded, own = replayed(t, tmp_path, 2)
    assert cosines(own, own) == pytest.approx([1.0] * 5)
    weights_of_rows = response_weights(recorded, own)
    assert weights_of_rows.share.sum() == pytest.approx(1)
    assert 1 <= effective_responses(weights_of_rows.share) <= len(recorded)
    assert effective_responses(np.zeros(3)) == 0
    active = own.metrics["clip/token_active"]
    lengths = recorded.response_lengths
    assert (weights_of_rows.clipped * lengths).sum() / lengths.sum() == pytest.approx(active)
    assert gradient_norm(own) > 0


@pytest.mark.slow
def test_ranks_write_the_record_of_all_rows(tmp_path):
    one = trainer(NARROW)
    record(one, tmp_path / "one")
    steps(one, 1)

    def work(ranks):
        t = trainer(NARROW, ranks=ranks, engine_ranks=ranks.new_group())
        record(t, tmp_path / "two")
        steps(t, 1)

    ranked(2, work)
    a, b = (read_record(find_record(tmp_path / name, 1)) for name in ("one", "two"))
    assert np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.groups, b.groups)
    assert np.array_equal(a.old_experts, b.old_experts)
    for mine, other in zip(a.updates, b.updates, strict=True):
        assert np.array_equal(mine.rows, other.rows)
        assert mine.logp.shape == other.logp.shape and mine.experts.shape == other.experts.shape
    assert np.allclose(a.updates[0].logp, b.updates[0].logp, atol=1e-5)
    again = replay(b, one.algorithm, one.settings, one.policy_settings)
    assert not agreement(again.metrics, b.header.metrics).differing


def test_which_steps_are_recorded(tmp_path):
    t = trainer(NARROW, model=DENSE, rollout=FEW)
    record(t, tmp_path, every=2)
    steps(t, 4)
    assert [record_file(tmp_path, step).exists() for step in range(1, 5)] == [False, True] * 2
    with pytest.raises(
        ValueError, match="no record of step 3; the nearest recorded steps are 2, 4"
    ):
        find_record(tmp_path, 3)
    with pytest.raises(ValueError, match=r"tracking\.record_every"):
        find_record(tmp_path / "none", 3)


def test_a_step_that_fails_leaves_what_it_had(tmp_path):
    t = trainer(NARROW, model=DENSE, rollout=FEW)
    record(t, tmp_path)
    t.optim = replace(t.optim, max_skipped=0)
    t.train_step(1, t.source.next(1))
    rollout = t.source.next(2)
    for parameter in t.policy.parameters():
        parameter.data.mul_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite") as failed:
        t.train_step(2, rollout)
    t.recorder.finish({}, str(failed.value))
    recorded = read_record(find_record(tmp_path, 2))
    assert not recorded.header.complete and "not finite" in recorded.header.error
    assert len(recorded.updates) == 1 and np.isnan(recorded.updates[0].logp).any()


def test_log_probs_after_the_last_update_can_be_recorded(tmp_path):
    t = trainer(NARROW, replay="r2")
    record(t, tmp_path / "after", after=True)
    plain = trainer(NARROW, replay="r2")
    rows = [steps(which, 1)[0] for which in (t, plain)]
    assert rows[0]["optim/grad_norm"] == rows[1]["optim/grad_norm"]
    assert all(map(torch.equal, weights(t), weights(plain)))
    recorded = read_record(find_record(tmp_path / "after", 1))
    (groups,) = [trainer(NARROW, replay="r2").source.next(1).groups]
    batch = pack([r for group in groups for r in group], t.policy.pad_id)
    replayed_BSLK = t.policy.score(batch, 8).experts_BSLK
    assert replayed_BSLK is not None and recorded.after_logp is not None
    # with r2 the pass goes through the old policy's experts, as the updates did
    experts = torch.full_like(replayed_BSLK, -1)
    experts[batch.attention_BS] = torch.from_numpy(recorded.old_experts).short()
    logp_BT = t.policy.score(replace(batch, replay_BSLK=experts), 8).logp_BT
    assert np.allclose(recorded.after_logp, logp_BT[batch.mask_BT].numpy(), atol=1e-5)
    assert np.abs(recorded.after_logp - recorded.old_logp).max() > 1e-4


def test_experts_can_be_left_out(tmp_path):
    t = trainer(NARROW)
    record(t, tmp_path, experts=False)
    rows = steps(t, 1)
    recorded, again = replayed(t, tmp_path, 1)
    assert recorded.old_experts is None and recorded.updates[0].experts is None
    assert not agreement(again.metrics, rows[0]).differing
    assert "routing/consistency" not in again.metrics


@dataclass
class Counting(GRPO):
    """A loss of the user's own that depends on its number of calls and on random numbers."""

    name: str = "counting"

    def __post_init__(self):
        super().__post_init__()
        self.calls = 0

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        self.calls += 1
        noise = torch.rand(outputs.loss_BT.shape)
        return replace(outputs, loss_BT=outputs.loss_BT * (1 + self.calls + noise))


def test_recording_changes_nothing_of_an_objective_with_a_state(tmp_path):
    plain = trainer(Counting(), model=DENSE, rollout=FEW)
    recording = trainer(Counting(), model=DENSE, rollout=FEW)
    record(recording, tmp_path)
    for t in (plain, recording):
        torch.manual_seed(0)
        steps(t, 2)
    assert plain.algorithm.objective.calls == recording.algorithm.objective.calls
    assert all(map(torch.equal, weights(plain), weights(recording)))


def test_a_changed_entropy_bonus_acts_and_a_changed_kl_keeps_it(tmp_path):
    kl = KLInLoss(coef=0.1, aggregation=MEAN)
    t = trainer(GRPO(), model=DENSE, rollout=FEW, entropy_coef=0.01, parts={"kl": kl})
    record(t, tmp_path)
    (row,) = steps(t, 1)
    recorded = read_record(find_record(tmp_path, 1))
    recorded.header.state |= {"kl_coef": 0.3, "entropy_coef": [0.05, None]}

    def coefficients(**options):
        again = replay(recorded, t.algorithm, t.settings, t.policy_settings, **options)
        return again.metrics["kl/coef"], again.metrics["policy/entropy_coef"]

    assert (row["kl/coef"], row["policy/entropy_coef"]) == pytest.approx((0.1, 0.01))
    assert coefficients() == pytest.approx((0.3, 0.05))
    assert coefficients(recorded_kl=False) == pytest.approx((0.1, 0.05))
    assert coefficients(recorded_entropy=False) == pytest.approx((0.3, 0.01))


def test_records_that_would_take_all_memory_are_refused(tmp_path, monkeypatch):
    t = trainer(NARROW, rollout=FEW)
    record(t, tmp_path)
    steps(t, 1)
    recorded = read_record(find_record(tmp_path, 1))
    experts = recorded.header.state["experts"]
    recorded.header.state["experts"] = 1
    with pytest.raises(ValueError, match=r"experts -?\d+ to \d+ of 1 experts"):
        replay(recorded, t.algorithm, t.settings, t.policy_settings)
    recorded.header.state["experts"] = experts
    monkeypatch.setattr(replay_checks, "MAX_CELLS", 1)
    replay(recorded, t.algorithm, t.settings, t.policy_settings)
    monkeypatch.setattr(replay_checks, "MAX_PADDING_FACTOR", 0.5)
    with pytest.raises(ValueError, match="such a batch is too large to replay"):
        replay(recorded, t.algorithm, t.settings, t.policy_settings)


@pytest.mark.parametrize(
    ("algorithm", "settings", "key"),
    [
        (Algorithm(GRPO(), kl=KLInLoss(coef=0.1, aggregation=MEAN)), {}, "kl"),
        (Algorithm(PPO(), GAE()), {}, "advantage"),
    ],
)
def test_tensors_that_a_record_lacks_are_named(algorithm, settings, key, tmp_path):
    t = trainer(NARROW, model=DENSE, rollout=FEW)
    record(t, tmp_path)
    steps(t, 1)
    recorded = read_record(find_record(tmp_path, 1))
    with pytest.raises(SettingError) as refused:
        replay(recorded, algorithm, replace(t.settings, **settings), t.policy_settings)
    assert refused.value.key == key


def test_a_record_without_old_log_probs_cannot_be_replayed_with_them(tmp_path):
    t = gap_trainer(NARROW, model=DENSE, old="engine", dtype="bfloat16")
    record(t, tmp_path)
    steps(t, 1)
    recorded = read_record(find_record(tmp_path, 1))
    with pytest.raises(SettingError) as refused:
        replay(recorded, t.algorithm, t.settings, PolicySettings())
    assert refused.value.key == "policy.old_logprobs"


def test_old_log_probs_that_the_record_does_not_hold_are_refused(tmp_path):
    t = gap_trainer(GRPO(), model=DENSE, old="behaviour", staleness=1)
    record(t, tmp_path)
    steps(t, 1)
    recorded = read_record(find_record(tmp_path, 1))
    with pytest.raises(SettingError, match="old_logprobs=behaviour"):
        replay(recorded, t.algorithm, t.settings, PolicySettings())
    replay(recorded, t.algorithm, t.settings, PolicySettings(old_logprobs="engine"))


@pytest.mark.parametrize("masks", [True, False])
def test_a_changed_mask_of_truncated_responses_counts_in_every_number(masks, tmp_path):
    """The clipped share and the log-ratio of a response are over the tokens that the replay trains."""
    rollout = RolloutSettings(
        prompts_per_step=8, group_size=2, max_new_tokens=6, stop=list("0123456789")
    )
    t = trainer(NARROW, model=DENSE, rollout=rollout, mask_truncated=masks)
    record(t, tmp_path)
    steps(t, 2)
    recorded = read_record(find_record(tmp_path, 2))
    settings = replace(t.settings, mask_truncated=not masks)
    other = replay(recorded, t.algorithm, settings, t.policy_settings)
    is_cut = np.array([reason == "length" for reason in recorded.header.finish_reasons])
    assert 0 < is_cut.sum() < len(recorded)
    cut_tokens = np.repeat(is_cut, recorded.response_lengths)
    assert recorded.trained[cut_tokens].any() == (not masks)
    assert other.trained[cut_tokens].any() == masks
    weights_of_rows = response_weights(recorded, other)
    clipped = 0
    trained = 0
    for update in other.updates:
        in_loss = np.concatenate([other.trained[recorded.tokens_of(row)] for row in update.rows])
        clipped += ((update.clipped & ACTIVE) > 0)[in_loss].sum()
        trained += in_loss.sum()
    counts = np.array([other.trained[recorded.tokens_of(r)].sum() for r in range(len(recorded))])
    assert (weights_of_rows.clipped * counts).sum() == pytest.approx(clipped)
    assert other.metrics["clip/token_active"] == pytest.approx(clipped / trained)
    assert weights_of_rows.log_ratio[is_cut].any() == masks
    # the page has the same numbers
    view = View(
        "other",
        other.advantages,
        [update.weight for update in other.updates],
        [update.clipped for update in other.updates],
        trained=other.trained,
    )
    passes = Passes(recorded)
    numbers = row_numbers(recorded, passes, ViewTokens(recorded, passes, view))
    assert numbers.clipped == pytest.approx(weights_of_rows.clipped)
    assert "other" in step_page(recorded, [recorded_view(recorded), view], "a step")


def test_the_balance_of_updates_without_tokens_is_none_of_the_loss(tmp_path):
    """Truncated responses are masked, so some of the updates have no token in the loss."""
    rollout = RolloutSettings(
        prompts_per_step=8, group_size=2, max_new_tokens=6, stop=list("0123456789")
    )
    t = trainer(
        GRPO(), rollout=rollout, minibatches=8, mask_truncated=True, router_aux_loss_coef=0.5
    )
    record(t, tmp_path)
    (row,) = steps(t, 1)
    recorded, again = replayed(t, tmp_path, 1)
    trained = [
        any(recorded.trained[recorded.tokens_of(row)].any() for row in update.rows)
        for update in recorded.updates
    ]
    assert 0 < sum(trained) < len(trained) == 8
    assert not agreement(again.metrics, without_balance(row, 0.5, recorded)).differing
    assert agreement(again.metrics, row).differing, "the balancing loss is a part of the loss"


@pytest.mark.parametrize("objective", [Reinforce(), PrimeRL(), GRPO()])
def test_the_first_ratios_are_1_also_if_the_run_did_not_use_them(objective, tmp_path):
    """In bfloat16 the old pass and the update's differ by more than GSPO's clip range."""
    t = trainer(objective, model=DENSE, rollout=FEW)
    t.policy.precision = torch.bfloat16
    record(t, tmp_path)
    steps(t, 1)
    recorded = read_record(find_record(tmp_path, 1))
    metrics = replay(recorded, Algorithm(GSPO()), t.settings, t.policy_settings).metrics
    assert metrics["clip/token_outside_minibatch_1"] == 0


def test_reinforce_has_no_ratio_to_replay(tmp_path):
    t = trainer(Reinforce(), model=DENSE, rollout=FEW, minibatches=1)
    record(t, tmp_path)
    (row,) = steps(t, 1)
    _, again = replayed(t, tmp_path, 1)
    assert not agreement(again.metrics, row).differing
