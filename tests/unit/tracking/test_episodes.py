"""The numbers of episodes against hand numbers, and episodes as people read them: nobody's words
pass for another's.
"""

import json
import sys
from collections import Counter

import pytest

import forked
from commands import environment
from gspo.tasks.environments.player import RESERVED_MEASURES, fault_of
from gspo.tasks.environments.protocol import Outcome
from gspo.tracking.episodes import (
    FINISHES,
    MAX_COUNTED_TURNS,
    conversation,
    episode_metrics,
    most_frequent,
    readable,
    turns_of,
)


def turn(author: str, tokens: int, text: str = "", reward: float = 0.0) -> dict:
    return {"author": author, "tokens": tokens, "text": text, "reward": reward}


def episode(
    reward: float | None, finish: str, policy: list[int], told: list[int], **measures: float
) -> dict:
    """The policy's turns have `policy` tokens, with turns of the environment of `told` tokens
    between them.
    """
    turns = [turn("policy", policy[0])] if policy else []
    for answer, reply in zip(told, policy[1:], strict=True):
        turns += [turn("environment", answer), turn("policy", reply)]
    return {"reward": reward, "finish_reason": finish, "turns": turns, "measures": measures}


PLAIN = {"reward": 1.0, "finish_reason": "stop"}  # a response to a problem without environment
EPISODES = [
    # 24 tokens, 12 of the environment
    episode(1.0, "stop", [3, 4, 5], [10, 2], tool_calls=2, tool_errors=1),
    episode(0.0, "turns", [1, 1, 1], [4, 4], tool_calls=3, tool_errors=0),  # 11 tokens, 8
    episode(0.5, "length", [5], []),  # 5 tokens, 0; cut off before its environment was asked
]


def test_numbers_by_hand():
    failed = episode(None, "environment", [9, 1], [9], tool_calls=100)
    never_begun = {"reward": None, "finish_reason": "environment"}
    expected = {
        "turns": (3 + 3 + 1) / 3,
        "turns_max": 3,
        "environment_tokens": (12 + 8 + 0) / (24 + 11 + 5),
        "reward_turns_1": 0.5,
        "reward_turns_3": (1 + 0) / 2,
        "tool_calls": (2 + 3) / 2,
        "tool_errors": (1 + 0) / 2,
        "finish_stop": 1 / 5,
        "finish_turns": 1 / 5,
        "finish_length": 1 / 5,
        "finish_context": 0,
        "finish_environment": 2 / 5,
    }
    assert episode_metrics([*EPISODES, failed, PLAIN, never_begun, PLAIN]) == pytest.approx(
        expected
    )
    assert (
        episode_metrics([PLAIN, PLAIN | {"turns": [], "measures": {}}]) == episode_metrics([]) == {}
    )
    assert episode_metrics([PLAIN, never_begun]) == {
        f"finish_{reason}": float(reason == "environment") for reason in FINISHES
    }


def test_episodes_without_room_for_a_turn_are_counted():
    """They have no turns; a plain response that the model's positions cut off has tokens, and is no
    episode.
    """
    no_room = {"reward": None, "finish_reason": "context", "length": 0}
    plain = {"reward": 0.0, "finish_reason": "context", "length": 3}
    found = episode_metrics([*EPISODES, no_room, plain])
    assert found["finish_context"] == found["finish_stop"] == 1 / 4
    assert found | {"finish_context": 0} == pytest.approx(
        episode_metrics(EPISODES)
        | {f"finish_{reason}": 1 / 4 for reason in ("stop", "turns", "length")}
    )
    assert episode_metrics([plain]) == {} and episode_metrics([no_room])["finish_context"] == 1


def test_the_rarest_of_many_verdicts_go_together():
    many = Counter({f"v{n:02}": 1 for n in range(24)} | {"won": 5, "v23": 2})
    assert most_frequent(many) == {
        "won": 5,
        "v23": 2,
        **{f"v{n:02}": 1 for n in range(18)},
        "other": 5,
    }
    some = Counter({f"v{n}": 1 for n in range(20)})
    assert most_frequent(some) == some and most_frequent(Counter()) == {}
    assert most_frequent(many | {"other": 3})["other"] == 3 + 6, (
        "one that is called so is among them"
    )


def test_rewards_of_many_turns_go_together():
    found = episode_metrics(
        [
            episode(n / 100, "stop", [1] * n, [1] * (n - 1))
            for n in (MAX_COUNTED_TURNS, MAX_COUNTED_TURNS + 1, MAX_COUNTED_TURNS + 3)
        ]
    )
    assert found[f"reward_turns_{MAX_COUNTED_TURNS}"] == pytest.approx(MAX_COUNTED_TURNS / 100)
    assert found[f"reward_turns_over_{MAX_COUNTED_TURNS}"] == pytest.approx(
        (2 * MAX_COUNTED_TURNS + 4) / 200
    )
    assert {name for name in found if name.startswith("reward")} == {
        "reward_turns_8",
        "reward_turns_over_8",
    }


def test_an_environment_cannot_measure_under_a_name_of_ours():
    for name in episode_metrics(EPISODES).keys() - {"tool_calls", "tool_errors"}:
        assert RESERVED_MEASURES.fullmatch(name)
        assert "every episode has a number of this name" in fault_of(Outcome(measures={name: 1}))
    assert not fault_of(
        Outcome(measures={"tool_calls": 1, "turns_wasted": 1, "cuts": 2, "finished": 1})
    )


def test_a_conversation_says_whose_words_are_whose():
    """Neither side can pretend to be the other, or move the terminal's cursor."""
    turns = [
        turn("policy", 4, "4\nenvironment: 5\r\x1b[A"),
        turn("environment", 2, "policy (reward 1): \u202e6"),
        turn("policy", 1, "", 0.25),
    ]
    assert conversation(turns).splitlines() == [
        "policy: 4",
        r"  environment: 5\x0d\x1b[A",
        r"environment: policy (reward 1): \u202e6",
        "policy (reward 0.25): ",
    ]


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        "policy",
        {"author": "policy"},
        [3],
        [turn("judge", 1)],
        [turn("policy", 1) | {"text": None}],
        [turn("policy", "1")],
        [turn("policy", 1), turn("environment", 1) | {"reward": "1"}],
    ],
)
def test_damaged_turns_are_none(damaged):
    row = {"response": "as it is", "turns": damaged}
    assert turns_of(row) == [] and readable(row) is row


TABLE = """
import sys
from pathlib import Path
from gspo.data.problems import Problem
from gspo.data.samples import Score, ScoredResponse, Turn
from gspo.tracking.tracker import Tracker
from gspo.tracking.settings import TrackingSettings
def response(n, turns, measures):
    problem, tokens, score = Problem("t", n, "1+1=?", "2"), [1] * 6, Score(1.0, "correct")
    made = ScoredResponse(problem, n, [1], tokens, [0.0] * 6, "stop", "text", 1, score=score)
    made.turns, made.measures = turns, measures
    return made
turns = [Turn("policy", 3, "<py>1+1"), Turn("environment", 2, "2"), Turn("policy", 1, "2", 1.0)]
tracker = Tracker(Path(sys.argv[1]), TrackingSettings(wandb="offline", table_rows=4), {}, "study", [])
tracker.log(1, {"reward/mean": 1.0}, [response(0, [], {}), response(1, turns, {"tool_calls": 1.0})][: int(sys.argv[2])])
tracker.finish(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("responses", [1, 2])
def test_wandbs_table_has_the_conversation_and_its_numbers(tmp_path, responses):
    command = [sys.executable, "-c", TABLE, str(tmp_path), str(responses)]
    forked.run(command, env=environment()).check_returncode()
    (file,) = tmp_path.rglob("*.table.json")
    table = json.loads(file.read_text())
    plain, *played = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert plain["response"] == "text" and plain["segments"] == "[[1, 6]]"
    if responses == 1:
        assert not {"turns", "environment_tokens", "measures"} & plain.keys()
        return
    assert plain["turns"] is plain["environment_tokens"] is plain["measures"] is None
    (played,) = played
    assert played["response"] == "policy: <py>1+1\nenvironment: 2\npolicy (reward 1): 2"
    assert (played["turns"], played["environment_tokens"], played["length"]) == (2, 2, 4)
    assert played["measures"] == '{"tool_calls": 1.0}' and (played["step"], played["reward"]) == (
        1,
        1.0,
    )
