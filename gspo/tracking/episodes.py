"""Reads saved episodes: their numbers, which are metrics, and their turns as people read them.

A saved episode is the row of a response (gspo.tracking.tracker.rollout_row) that has `turns`: those
of the policy, and those of the environment between them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from gspo.io.escaping import escape

POLICY, ENVIRONMENT = "policy", "environment"
# why an episode can end: Response.finish_reason
FINISHES = ("stop", "length", "turns", "context", ENVIRONMENT)
MOST = 8  # rewards are told apart by the number of turns up to so many
VERDICTS = 20  # so many verdicts of a task are told apart: an environment's may be any words


def numbers(rows: list[dict]) -> dict[str, float]:
    """Compute the numbers of the episodes among the rows of a batch, by name; nothing if there are
    none.

    turns, turns_max     how many turns the policy had: mean and largest
    environment_tokens   the environments' tokens / all tokens after the prompts
    reward_turns_<n>     mean reward of the episodes in which the policy had n turns; those with
                         more than 8 go together
    finish_<reason>      share of the episodes that ended for this reason
    <name>               mean of the environment's measure of this name over the episodes that have
                         it

    The shares of the reasons are over all episodes. Those without reward, because their environment
    failed or their first messages left no room for a turn, are left out of everything else.
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
        values[f"reward_turns_{turns}" if turns <= MOST else f"reward_turns_over_{MOST}"].append(
            row["reward"]
        )
        for name, value in row["measures"].items():
            values[name].append(value)
    means = {name: sum(each) / len(each) for name, each in values.items()}
    if graded:
        means["turns_max"] = float(max(values["turns"]))
        tokens = sum(turn["tokens"] for row in graded for turn in row["turns"])
        means["environment_tokens"] = sum(map(environment_tokens, graded)) / tokens
    return means


def never_begun(row: dict) -> bool:
    """Return whether a row is that of an episode without room for a turn: any other response has a
    token.
    """
    return row["finish_reason"] == "context" and row.get("length") == 0


def count(row: dict) -> int:
    """Count the policy's turns."""
    return sum(turn["author"] == POLICY for turn in row["turns"])


def few(verdicts: Counter[str]) -> Counter[str]:
    """Return how often each verdict of a task came. Those beyond the 20 most frequent go together
    as "other": each makes a metric of its own. Of equally frequent ones the first by name are kept.
    """
    ordered = sorted(verdicts, key=lambda verdict: (-verdicts[verdict], verdict))
    kept = Counter({verdict: verdicts[verdict] for verdict in ordered[:VERDICTS]})
    for verdict in ordered[VERDICTS:]:
        kept["other"] += verdicts[verdict]
    return kept


def environment_tokens(row: dict) -> int:
    """Count the environment's tokens."""
    return sum(turn["tokens"] for turn in row["turns"] if turn["author"] == ENVIRONMENT)


# ------------------------------------------------------------------------------------------------------
# to be read
def turns_of(row: dict) -> list[dict]:
    """Return an episode's turns. There are none if the row is no episode's, or if any turn is
    damaged, as the row may come from a file of anyone's: then its response can still be shown as
    one text."""
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
    """Return turns as a text. Every turn begins a line with its author and its reward, where that
    is not 0:

    policy: <py>4837*2911</py>
    environment: 14080507
    policy (reward 1): The answer is
      14080507.

    Further lines of a turn are indented, so that no turn can pretend to be the other side's.
    """
    said = [f"{turn['author']}{reward(turn)}: {escape(turn['text'])}" for turn in turns]
    return "\n".join(text.replace("\n", "\n  ") for text in said)


def reward(turn: dict) -> str:
    """Return a turn's reward as a remark behind its author; "" if it is 0."""
    return f" (reward {turn['reward']:g})" if turn["reward"] else ""


def readable(row: dict) -> dict:
    """Return a saved row for a table that people read: an episode's response as a conversation, its
    turns and its environment's tokens as numbers, and its measures. Other rows stay as they are."""
    turns = turns_of(row)
    if not turns:
        return row
    return row | {
        "response": conversation(turns),
        "turns": count(row),
        "environment_tokens": environment_tokens(row),
        "measures": json.dumps(row.get("measures")),
    }
