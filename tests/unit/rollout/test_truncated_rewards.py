"""What a response earns that was cut off, and rewards that a mistake made."""

import numpy as np
import pytest

from builders import sample, small_policy
from composing import settings
from gspo.config.remarks import cut_off_pays
from gspo.data.samples import Score, all_same, rewards_of
from gspo.rewards.reward_worker import NotAScore, as_score
from gspo.rollout.scoring import score
from gspo.rollout.sources.on_policy import has_signal
from gspo.tasks.base import Task
from refusals import refuses


class Penalty(Task):
    """A reward of one's own with negative values: -1 for every answer but a short one."""

    name = "penalty"

    def __init__(self, truncated_reward: float | None):
        self.truncated_reward = truncated_reward

    def score(self, answers):
        return [
            Score(-1.0 if ended else 0.0, "wrong" if ended else "truncated")
            for _, _, ended in answers
        ]


@pytest.mark.parametrize(
    ("setting", "earned"), [(0.0, 0.0), (-1.0, -1.0), (-2.5, -2.5), (None, -1.0)]
)
def test_the_setting_says_what_a_response_earns_that_was_cut_off(setting, earned):
    responses = sample(small_policy(), group_size=2, tokens=12)
    responses[0].finish_reason, responses[1].finish_reason = "length", "stop"
    cut, ended = score(Penalty(setting), responses[:2])
    assert (cut.score.reward, ended.score.reward) == (earned, -1.0)
    assert cut.score.verdict == ("wrong" if setting is None else "truncated")
    composed = settings("task=math", f"reward.truncated={'null' if setting is None else setting}")
    assert composed.task.truncated_reward == setting
    lines = cut_off_pays(composed, [cut, ended])
    assert bool(lines) == (setting == 0.0)
    if lines:
        assert lines[0].startswith(
            "a response that is cut off earns reward.truncated=0, which is more than the -1 of one"
        )


def test_rewards_that_would_overflow_are_refused_with_the_number():
    for reward in (1e39, -1e30, 2e9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"the reward is .*, not a number within \+-1e\+09"):
            as_score(reward)
    assert as_score(-1e9).reward == -1e9


def test_the_fields_of_a_score_are_checked_and_made_plain():
    score = as_score(Score(np.float32(0.5), "partial", rewards={"a": np.int64(1)}))
    assert type(score.reward) is float and type(score.rewards["a"]) is float
    for bad in (Score("1", "correct"), Score(1.0, None), Score(1.0, "correct", answer=["a"])):
        with pytest.raises(NotAScore, match="it returned a Score with"):
            as_score(bad)


def test_reward_truncated_is_refused_for_episodes():
    with refuses("reward.truncated", problem="keeps the rewards of its turns"):
        settings("experiment=guessing_moe", "reward.truncated=-1")


def test_sums_of_the_same_rewards_in_another_order_are_no_signal():
    responses = sample(small_policy(), group_size=2, tokens=4)[:2]
    rewards = (0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1)
    group = [
        r.scored(Score(reward, "partial")) for r, reward in zip(responses, rewards, strict=True)
    ]
    assert group[0].score.reward != group[1].score.reward
    assert not has_signal(group) and len(set(rewards_of(group))) == 1
    group[1].score = Score(0.601, "partial")
    assert has_signal(group) and rewards_of(group) == [group[0].score.reward, 0.601]
    assert all_same([0.0, 0.0]) and not all_same([0.0, 1e-6]) and all_same([1e9, 1e9 + 1])
