"""Reads saved episodes: computes their metrics, and formats their turns for people.

A saved episode is the row of a response (gspo.tracking.tracker.rollout_row) that has `turns`: the
turns of the policy, and the environment's turns between them.
"""

import json
from collections import Counter, defaultdict
from typing import Any

from gspo.io.escaping import escape

# the authors of turns
POLICY = "policy"
ENVIRONMENT = "environment"
# why an episode can end: Response.finish_reason
FINISHES = ("stop", "length", "turns", "context", ENVIRONMENT)
MAX_COUNTED_TURNS = 8  # episodes with more turns share one reward metric
MAX_VERDICTS = (
    20  # verdicts of a task with a metric of their own: an environment's may be any words
)


def episode_metrics(rows: list[dict]) -> dict[str, float]:
    """Compute the metrics of the episodes among the rows of a batch, by name.

    turns, turns_max     number of the policy's turns: mean and largest
    environment_tokens   the environments' tokens / all tokens after the prompts
    reward_turns_<n>     mean reward of the episodes in which the policy had n turns (over_8: with
                         more than 8 turns)
    finish_<reason>      share of the episodes that ended for this reason
    <name>               mean of the environment's measure of this name over the episodes that have
                         it

    The result is empty without episodes. finish_<reason> counts all episodes. Everything else
    leaves out episodes without reward: their environment failed, or their first messages left no
    room for a turn.
    """
    episodes = [
        row
        for row in rows
        if row.get("turns") or row["finish_reason"] == ENVIRONMENT or never_begun(row)
    ]
    if not episodes:
        return {}
    values: dict[str, list[float]] = defaultdict(list)
    for row in episodes:
        for reason in FINISHES:
            values[f"finish_{reason}"].append(row["finish_reason"] == reason)
    graded = [row for row in episodes if row["reward"] is not None]
    for row in graded:
        turns = count(row)
        values["turns"].append(turns)
        suffix = str(turns) if turns <= MAX_COUNTED_TURNS else f"over_{MAX_COUNTED_TURNS}"
        values[f"reward_turns_{suffix}"].append(row["reward"])
        for name, value in row["measures"].items():
            values[name].append(value)
    means = {name: sum(each) / len(each) for name, each in values.items()}
    if graded:
        means["turns_max"] = float(max(values["turns"]))
        tokens = sum(turn["tokens"] for row in graded for turn in row["turns"])
        means["environment_tokens"] = sum(map(environment_tokens, graded)) / tokens
    return means


def never_begun(row: dict) -> bool:
    """Return whether a row belongs to an episode without room for a turn.

    Any other response has a token."""
    return row["finish_reason"] == "context" and row.get("length") == 0


def count(row: dict) -> int:
    """Count the policy's turns."""
    return sum(turn["author"] == POLICY for turn in row["turns"])


def most_frequent(verdicts: Counter[str]) -> Counter[str]:
    """Return the counts of a task's 20 most frequent verdicts, and of all others as "other".

    Each verdict makes a metric of its own, so their number is limited. Equally frequent verdicts
    are ordered by name."""
    ordered = sorted(verdicts, key=lambda verdict: (-verdicts[verdict], verdict))
    counts = Counter({verdict: verdicts[verdict] for verdict in ordered[:MAX_VERDICTS]})
    for verdict in ordered[MAX_VERDICTS:]:
        counts["other"] += verdicts[verdict]
    return counts


def environment_tokens(row: dict) -> int:
    """Count the environment's tokens."""
    return sum(turn["tokens"] for turn in row["turns"] if turn["author"] == ENVIRONMENT)


# ---------------------------------------------------------------------------------------------
# for people to read
def turns_of(row: dict) -> list[dict]:
    """Return an episode's turns, none for another row or if a turn is damaged.

    The row may come from anyone's file. Without turns, its response can still be shown as a text.
    """
    turns = row.get("turns")
    return turns if isinstance(turns, list) and all(map(_is_turn, turns)) else []


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and turn.get("author") in (POLICY, ENVIRONMENT)
        and isinstance(turn.get("text"), str)
        and type(turn.get("tokens")) is int
        and type(turn.get("reward")) in (int, float)
    )


def conversation(turns: list[dict]) -> str:
    """Return turns as a text.

    Every turn begins a line with its author, and with its reward if it is not 0:

    policy: <py>4837*2911</py>
    environment: 14080507
    policy (reward 1): The answer is
      14080507.

    Further lines of a turn are indented, so no turn can pretend to be the other side's.
    """
    texts = [f"{turn['author']}{reward(turn)}: {escape(turn['text'])}" for turn in turns]
    return "\n".join(text.replace("\n", "\n  ") for text in texts)


def reward(turn: dict) -> str:
    """Return a turn's reward as a remark for the text behind its author, "" if it is 0."""
    return f" (reward {turn['reward']:g})" if turn["reward"] else ""


def readable(row: dict) -> dict:
    """Return a saved row for a table that people read.

    An episode's response becomes a conversation. The row also gets the number of turns and of the
    environment's tokens, and its measures. Other rows do not change."""
    turns = turns_of(row)
    if not turns:
        return row
    return row | {
        "response": conversation(turns),
        "turns": count(row),
        "environment_tokens": environment_tokens(row),
        "measures": json.dumps(row.get("measures")),
    }
