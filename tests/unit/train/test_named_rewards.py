"""Several named rewards of a response, and the advantages of 2026, in a trainer: they are weighed,
logged, recorded and replayed; runs resume, and what means nothing is refused.
"""

import copy
import math
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch

from games import NamedEchoes
from gspo.algorithm.advantages import GroupMean, GroupNormalized
from gspo.algorithm.gdpo import GDPO
from gspo.algorithm.maxrl import MaxRL
from gspo.algorithm.nsr import NSR
from gspo.algorithm.objectives import GRPO, GSPO, GSPOToken
from gspo.algorithm.otb import OTB
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.data.samples import Score
from gspo.data.step_record_files import find_record, read_record, record_file
from gspo.io.errors import SettingError
from gspo.model.settings import TinyDense
from gspo.rewards.reward_worker import NotAScore, as_score
from gspo.rollout.settings import RolloutSettings
from gspo.tracking.tracker import rollout_row
from gspo.train.recorder import StepRecorder
from gspo.train.replay import replay
from refusals import refuses
from trainers import FirstCharacter, steps, trainer, weights

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
FEW = RolloutSettings(prompts_per_step=4, group_size=4, max_new_tokens=10)
# turns end soon, and some episodes are cut off
TURNS = RolloutSettings(
    prompts_per_step=4, group_size=4, max_new_tokens=24, stop=list("aeiouxXG59|")
)
WEIGHTS = {"digit": 1.0, "short": 0.25}


@dataclass
class TwoRewards(FirstCharacter):
    """The reward `digit` of a first digit, and `short` of a short text."""

    def score(self, answers) -> list[Score]:
        scores = []
        for _, text, _ in answers:
            rewards = {"digit": float(text[:1].isdigit()), "short": 1 - len(text) / 20}
            scores.append(as_score(rewards))
        return scores


def make(advantage, objective=None, reward=None, task=None, rollout=FEW, **options):
    reward = reward or RewardShaping()
    task = task or FirstCharacter()
    task.reward_weights = reward.weights
    return trainer(
        objective or GRPO(),
        model=DENSE,
        rollout=rollout,
        task=task,
        parts={"advantage": advantage, "reward": reward},
        **options,
    )


def gdpo(advantage=None, **options):
    reward = RewardShaping(weights=WEIGHTS)
    return make(advantage or GDPO(), reward=reward, task=TwoRewards(), **options)


def gdpo_of_episodes(advantage=None, **options):
    reward = RewardShaping(weights=WEIGHTS)
    task = NamedEchoes()
    return make(advantage or GDPO(), reward=reward, task=task, rollout=TURNS, **options)


CASES = {
    "maxrl": lambda: make(MaxRL(), GSPO()),
    "nsr": lambda: make(NSR()),
    "w_reinforce": lambda: make(NSR(positive_weight=0.1), GSPO()),
    "gdpo": gdpo,
    "gdpo, episodes": gdpo_of_episodes,
    "gdpo, tokens": lambda: gdpo(GDPO(whiten="tokens", baseline="others"), objective=GSPO()),
    "otb": lambda: make(OTB(), GSPOToken(clip_low=0.1, clip_high=0.1)),
    "otb, engine could stand for the old policy": lambda: make(OTB(), old_pass="auto"),
}


def record(t, run, **options):
    settings = {"objective": asdict(t.algorithm.objective), "policy": asdict(t.policy_settings)}
    t.recorder = StepRecorder(run, "test", t.policy, settings, t.ranks, **{"every": 1} | options)


def replayed(t, run, step):
    found = read_record(find_record(run, step))
    return found, replay(found, t.algorithm, t.settings, t.policy_settings)


# -- training


@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_and_its_steps_replay(case, tmp_path):
    t = CASES[case]()
    record(t, tmp_path)
    before = weights(t)
    metrics = steps(t, 2)
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
    for step, row in enumerate(metrics, start=1):
        found, again = replayed(t, tmp_path, step)
        np.testing.assert_array_equal(again.advantages, found.advantages)
        for name in ("advantage/abs_max", "advantage/mean", "optim/loss", "clip/weight"):
            assert again.metrics[name] == pytest.approx(row[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("case", ["gdpo", "gdpo, episodes", "otb"])
def test_a_resumed_run_equals_an_uninterrupted_one(case):
    whole = CASES[case]()
    steps(whole, 1)
    saved = copy.deepcopy(
        (whole.policy.model.state_dict(), whole.optimizer.state_dict(), whole.state)
    )
    expected = steps(whole, 1)
    resumed = CASES[case]()
    resumed.policy.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.restore(saved[2])
    clocks = ("time/", "throughput/", "compute/")
    for a, b in zip(expected, steps(resumed, 1), strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(clocks)} == {
            k: v for k, v in b.items() if not k.startswith(clocks)
        }
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


# -- named rewards


def test_the_reward_is_the_weighted_sum_and_each_is_logged(tmp_path):
    t = gdpo()
    record(t, tmp_path)
    rollout = t.source.next(1)
    for r in rollout.responses:
        named = r.score.rewards
        assert r.reward == named["digit"] + 0.25 * named["short"]
        assert rollout_row(r)["rewards"] == named
    row = t.train_step(1, rollout)
    digits = [r.score.rewards["digit"] for r in rollout.responses]
    shorts = [r.score.rewards["short"] for r in rollout.responses]
    assert row["reward/digit/mean"] == pytest.approx(np.mean(digits))
    assert row["reward/short/mean"] == pytest.approx(np.mean(shorts))
    assert row["reward/mean"] == pytest.approx(np.mean(digits) + 0.25 * np.mean(shorts))
    header = read_record(find_record(tmp_path, 1)).header
    assert header.named_rewards == {"digit": digits, "short": shorts}


def test_a_group_is_all_correct_if_every_named_reward_is_1():
    """The weighted sum of a right response is 1.25, and 1 is that of a long one."""
    shares = []
    for short in (1.0, 0.0):
        t = gdpo()
        rollout = t.source.next(1)
        for r in rollout.responses:
            r.score = Score(1.0 + 0.25 * short, "any", rewards={"digit": 1.0, "short": short})
        shares.append(t.train_step(1, rollout)["group/all_correct"])
    assert shares == [1.0, 0.0]


def test_other_advantages_read_the_weighted_sum(tmp_path):
    t = gdpo(GroupMean())
    record(t, tmp_path)
    steps(t, 1)
    found, again = replayed(t, tmp_path, 1)
    sums = np.array(found.header.named_rewards["digit"])
    sums = sums + 0.25 * np.array(found.header.named_rewards["short"])
    np.testing.assert_allclose(found.rewards, sums)
    expected = sums.reshape(4, 4) - sums.reshape(4, 4).mean(1, keepdims=True)
    per_token = np.repeat(expected.reshape(-1), found.response_lengths)
    np.testing.assert_allclose(found.advantages, per_token, atol=1e-6)
    np.testing.assert_array_equal(again.advantages, found.advantages)
    # a replay with other weights has other sums
    t.algorithm.reward = RewardShaping(weights={"digit": 0.0, "short": 1.0})
    shorts = np.array(found.header.named_rewards["short"]).reshape(4, 4)
    expected = (shorts - shorts.mean(1, keepdims=True)).reshape(-1)
    again = replayed(t, tmp_path, 1)[1]
    np.testing.assert_allclose(
        again.advantages, np.repeat(expected, found.response_lengths), atol=1e-6
    )


def gdpo_by_hand(named: np.ndarray, weights: list[float]) -> np.ndarray:
    """GDPO's advantages of named rewards [groups, samples, names], by its definition: [groups, samples]."""
    distances = named - named.mean(1, keepdims=True)
    normalised = distances / (named.std(1, ddof=1, keepdims=True) + 1e-4)
    sums = normalised @ np.array(weights)
    return (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)


def test_gdpo_of_episodes_compares_the_named_rewards_of_the_environment(tmp_path):
    t = gdpo_of_episodes()
    record(t, tmp_path)
    rollout = t.source.next(1)
    assert {r.finish_reason for r in rollout.responses} == {"stop", "length"}
    for r in rollout.responses:
        last = r.turns[-1].text
        expected = {"digit": float(last[:1].isdigit()), "short": 1 - len(last) / 64}
        if r.finish_reason == "length":
            expected = {"digit": 0.0, "short": 0.5}
        assert r.score.rewards == rollout_row(r)["rewards"] == expected
        assert r.reward == expected["digit"] + 0.25 * expected["short"]
    t.train_step(1, rollout)
    found, again = replayed(t, tmp_path, 1)
    named = np.array([[r.score.rewards[name] for name in WEIGHTS] for r in rollout.responses])
    expected = gdpo_by_hand(named.reshape(4, 4, 2), [1.0, 0.25]).reshape(-1)
    for row, r in enumerate(rollout.responses):
        advantages = found.advantages[found.tokens_of(row)]
        np.testing.assert_allclose(advantages[r.policy_mask], expected[row], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(again.advantages, found.advantages)


def test_a_replay_weighs_the_rewards_of_an_episode_that_was_cut_off_anew(tmp_path):
    t = gdpo_of_episodes(GroupMean())
    record(t, tmp_path)
    steps(t, 1)
    found = replayed(t, tmp_path, 1)[0]
    assert "truncated" in found.header.verdicts
    t.algorithm.reward = RewardShaping(weights={"digit": 0.0, "short": 1.0})
    shorts = np.array(found.header.named_rewards["short"]).reshape(4, 4)
    expected = (shorts - shorts.mean(1, keepdims=True)).reshape(-1)
    again = replayed(t, tmp_path, 1)[1]
    by_row = [again.advantages[found.tokens_of(row)] for row in range(16)]
    np.testing.assert_allclose([values[0] for values in by_row], expected, atol=1e-6)


def test_a_record_of_a_single_reward_is_as_it_was(tmp_path):
    t = make(GroupNormalized())
    record(t, tmp_path)
    steps(t, 1)
    content = record_file(tmp_path, 1).read_bytes()
    assert b"named_rewards" not in content and b"sum_pi_squared" not in content
    assert b"sum_pi_squared" not in b"".join(
        bytes(str(rollout_row(r)), "utf-8") for r in t.source.next(2).responses
    )
    for advantage, problem in ((GDPO(), "several named rewards"), (OTB(), "sum_v pi_v^2")):
        t.algorithm.advantage = advantage
        with refuses("advantage", advantage.name, problem):
            replayed(t, tmp_path, 1)
    t.algorithm.advantage = GroupMean()
    t.algorithm.reward = RewardShaping(weights={"a": 1.0})
    with refuses("reward.weights", {"a": 1.0}, "a single reward"):
        replayed(t, tmp_path, 1)


def test_a_damaged_record_is_refused(tmp_path):
    from gspo.data.step_record_files import write_record

    t = gdpo()
    record(t, tmp_path)
    steps(t, 1)
    path = record_file(tmp_path, 1)
    found = read_record(path)
    for values in ([1.0], [math.inf] * 16):
        found.header.named_rewards["digit"] = values
        if math.isfinite(values[0]):
            write_record(path, found)
            with pytest.raises(ValueError, match="the reward 'digit' is not a number of each"):
                read_record(path)
        else:
            with pytest.raises(ValueError):
                write_record(path, found)


def test_a_truncated_response_has_its_reward_under_every_name():
    score = Score(0.0, "truncated").truncated(-0.5, WEIGHTS)
    assert score.reward == -0.5 and score.rewards == {"digit": -0.5, "short": -0.5}
    assert Score(0.0, "truncated").truncated(-0.5, None).rewards == {}


def test_names_must_be_the_same_in_every_response():
    score = as_score({"a": 1, "b": 0.5})
    assert score.weighted({"b": 2.0, "a": 1.0}).reward == 2.0
    assert score.weighted(None).reward == 1.5
    for other in ({}, {"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}):
        with refuses("reward.weights", other, "the rewards a, b"):
            score.weighted(other)
    with refuses("reward.weights", problem="a single reward"):
        as_score(1.0).weighted({"a": 1.0})
    # a response without grade stays one, and a single reward without weights stays as it is
    assert as_score(None).weighted({"a": 1.0}).reward is None
    assert as_score(0.5).weighted({}) == as_score(0.5).weighted(None) == as_score(0.5)
    with pytest.raises(SettingError, match=r"reward\.weights"):
        make(GroupMean(), task=TwoRewards()).source.next(1)


def test_what_a_reward_function_may_return():
    score = as_score({"right": True, "format": np.float32(0.5)})
    assert score.rewards == {"right": 1.0, "format": 0.5}
    assert (score.reward, score.verdict) == (1.5, "partial")
    assert as_score({"a": 1, "b": 1}).verdict == "correct"
    assert as_score({"a": 0, "b": 0}).verdict == "wrong"
    for wrong in ({}, {"a": "1"}, {1: 1.0}, {"a": None}, {"a": [1]}):
        with pytest.raises(NotAScore):
            as_score(wrong)
    for wrong in (math.nan, math.inf, 1e10):
        with pytest.raises(ValueError):
            as_score({"a": 1.0, "b": wrong})


def test_weights_are_checked():
    with refuses("reward.weights.a/b"):
        RewardShaping(weights={"a/b": 1.0})
    with refuses("reward.weights", {"a": 0.0, "b": 0.0}):
        RewardShaping(weights={"a": 0.0, "b": 0.0})
    with refuses("reward.weights.a"):
        RewardShaping(weights={"a": math.inf})


# -- sum_v pi_v^2


def test_sums_of_squares_are_those_of_the_policys_distribution():
    t = make(OTB())
    t.policy.temperature = 0.7
    batch = t.source.next(1)
    from gspo.data.pack import pack

    packed = pack(batch.responses, t.policy.pad_id)
    ours = t.policy.score(packed, 5, sum_pi_squared=True).sum_pi_squared_BT
    assert t.policy.score(packed, 5).sum_pi_squared_BT is None
    for row in range(3):
        r = batch.responses[row]
        ids = torch.tensor([r.prompt_ids + r.token_ids])
        logits = t.policy.model(ids).logits[0, len(r.prompt_ids) - 1 : -1].double() / 0.7
        expected = logits.softmax(-1).square().sum(-1).float()
        torch.testing.assert_close(ours[row, : len(expected)], expected, rtol=1e-4, atol=1e-6)
    network = t.policy.network
    t.policy.network = None
    plain = t.policy.score(packed, 5, sum_pi_squared=True).sum_pi_squared_BT
    t.policy.network = network
    mask = packed.mask_BT
    torch.testing.assert_close(plain[mask], ours[mask], rtol=1e-4, atol=1e-6)
