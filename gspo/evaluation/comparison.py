"""Compares two finished evaluations on the same problems: reads them, checks that they fit, lays
out a table.

gspo.evaluation.paired computes the numbers. Evaluations fit if they have the same sets, and in each
the same problems with the same prompts. The number of samples, the temperature and the engine may
differ; what differs is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.evaluation.evaluate import EvaluationSet, without_nan
from gspo.evaluation.paired import Group, compare
from gspo.evaluation.resumable import WRITTEN, first_difference, slim
from gspo.io.files import refuse_links
from gspo.io.tables import text_table
from gspo.io.untrusted import inside, opened, parse_json, read_json

# the settings of an evaluation that describe how it sampled and scored, rather than what;
# `max_new_tokens` is by set
HOW = (
    "samples",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "max_new_tokens",
    "prompt",
    "dtype",
    "engine",
)
SHOWN = 3  # at most so many problems are named in a refusal


@dataclass(frozen=True)
class Finished:
    """Holds a finished evaluation: for every set the rows of its problems, and their prompts, by
    problem.
    """

    path: Path
    settings: dict
    groups: dict[str, dict[int, Group]]
    prompts: dict[str, dict[int, str]]


def read_finished(path: str | Path) -> Finished:
    """Read the folder of a finished evaluation. Raises ValueError if it is none, is not finished or
    is damaged.
    """
    path = Path(path)
    if not ((path / "settings.json").exists() and (path / "responses").exists()):
        raise ValueError(
            f"{path} holds no evaluation: give the folder that `gspo evaluate` names in its last line"
        )
    refuse_links(path, WRITTEN)
    if not (path / "result.json").exists():
        raise ValueError(
            f"{path} holds an evaluation that has not finished: give its command again, it goes on"
        )
    settings = read_json(path / "settings.json")
    if not isinstance(settings.get("sets"), dict):
        raise ValueError(f"{path}/settings.json is damaged: it names no sets")
    groups: dict[str, dict[int, Group]] = {}
    prompts: dict[str, dict[int, str]] = {}
    for name in settings["sets"]:
        groups[name], prompts[name] = {}, {}
        for row in read_rows(inside(path / "responses", f"{name}.jsonl")):
            prompts[name].setdefault(row["problem"], row["prompt"])
            groups[name].setdefault(row["problem"], []).append(slim(row))
    return Finished(path, settings, groups, prompts)


def read_rows(path: Path):
    """Yield the rows of a file of responses. Raises ValueError for a line that is no row."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = parse_json(line)
                if not (isinstance(row["problem"], int) and isinstance(row["prompt"], str)):
                    raise ValueError("its problem is no number, or its prompt no text")
                beyond = row["reward"] is not None and not 0 <= row["reward"] <= 1
                if (beyond and "turns" not in row) or not isinstance(row["verdict"], str):
                    raise ValueError("its reward is not in [0, 1], or its verdict no text")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is damaged in line {number} ({error})") from None
            if beyond:  # an environment gives what rewards it likes
                raise ValueError(
                    f"{path}: an episode has the reward {row['reward']:g}; only rewards from 0 to 1 can be compared as "
                    "accuracies, so give the command without a comparison"
                )
            yield row


def prompts_of(sets: list[EvaluationSet]) -> dict[str, dict[int, str]]:
    """Return the prompts of sets that are about to be evaluated, by set and problem."""
    return {s.name: {problem.index: problem.prompt for problem in s.problems} for s in sets}


def check_same_problems(base: Finished, theirs: Mapping[str, Mapping[int, str]], name: str) -> None:
    """Raise ValueError if the evaluation `name` has other sets, other problems or other prompts
    than `base`.
    """
    ours = base.prompts
    for key, other, here, there in (
        (ours, theirs, base.path, name),
        (theirs, ours, name, base.path),
    ):
        if alone := [s for s in key if s not in other]:
            raise ValueError(
                f"the set {alone[0]} is in {here} and not in {there}: evaluate both on the same sets=[...]"
            )
        for s in key:
            if alone := sorted(set(key[s]) - set(other[s])):
                raise ValueError(
                    f"{s}: {numbered(alone)} in {here} and not in {there}: evaluate both on the same ones"
                )
    for s, prompts in ours.items():
        if changed := sorted(i for i in prompts if prompts[i] != theirs[s][i]):
            raise ValueError(
                f"{s}: other prompts in {name} than in {base.path}: {numbered(changed)}"
            )


def numbered(problems: list[int]) -> str:
    """Name a few problems: "problem 3", "problems 1, 2, 5 and 7 more"."""
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return f"problem{'s' * (len(problems) > 1)} {', '.join(map(str, problems[:SHOWN]))}{more}"


def compared(base: Finished, trained: Finished) -> dict[str, Any]:
    """Return the comparison of two evaluations, ready for JSON: the sides, what differs in how they
    sampled, and the numbers of every set. Raises ValueError if they do not have the same problems.
    """
    check_same_problems(base, trained.prompts, str(trained.path))
    one, other = (side.settings for side in (base, trained))
    differences = [first_difference(one.get(key), other.get(key), key) for key in HOW]
    differences += [
        first_difference(one["sets"][s].get("task"), other["sets"][s].get("task"), s)
        for s in base.groups
    ]
    sets = {}
    for name, groups in base.groups.items():
        order = sorted(groups)
        sets[name] = compare([groups[i] for i in order], [trained.groups[name][i] for i in order])
    return {
        "base": str(base.path),
        "trained": str(trained.path),
        "differences": [difference for difference in differences if difference],
        "sets": without_nan(sets),
    }


def comparison_table(comparison: dict[str, Any]) -> str:
    """Lay out a comparison for the terminal: a line per set, below it where the two factors went."""
    heads = ("set", "problems", "base", "trained", "gain", "p", "of it format", "correctness")
    lines, remarks = [heads], []
    for name, r in comparison["sets"].items():
        if not r["problems"]:
            remarks.append(f"{name}: no problem has graded responses on both sides")
            continue
        gains = [with_interval(r[part]) for part in ("gain", "format", "correctness")]
        levels = [f"{value:.3f}" for value in r["accuracy"]]
        lines.append(
            (name, str(r["problems"]), *levels, gains[0], p_text(r["gain"]["p"]), *gains[1:])
        )
        right = ["-" if value is None else f"{value:.3f}" for value in r["right_of_found"]]
        remarks.append(
            f"{name}: an answer found in {arrow(r['found'])} of the responses (cut off: {arrow(r['truncated'])}), "
            f"right of those {right[0]} -> {right[1]}"
        )
        if r["problems_left_out"]:
            remarks.append(
                f"{name}: {r['problems_left_out']} problems left out, which one side has no grade for"
            )
    sides = [f"base:    {comparison['base']}", f"trained: {comparison['trained']}"]
    notes = [f"note: they differ in {difference}" for difference in comparison["differences"]]
    return "\n".join([*sides, *notes, *text_table(lines, right_aligned=True), *remarks])


def with_interval(part: dict) -> str:
    """Write a difference with its 95 % interval: "+0.213 [+0.151, +0.274]"."""
    low, high = (math.nan if end is None else end for end in part["interval_95"])
    return f"{part['value']:+.3f}" + ("" if math.isnan(low) else f" [{low:+.3f}, {high:+.3f}]")


def p_text(p: float) -> str:
    """Write a p: "0.021", "<0.001"."""
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def arrow(pair: list[float]) -> str:
    """Write what a share was and what it became."""
    return f"{pair[0]:.3f} -> {pair[1]:.3f}"
