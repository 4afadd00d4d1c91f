"""Compares two finished evaluations on the same problems: reads, checks and tabulates them.

gspo.evaluation.paired computes the numbers. Both evaluations must have the same sets, and in each
set the same problems with the same prompts. The number of samples, the temperature and the engine
may differ. The table lists these differences.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.evaluation.evaluate import EvaluationSet
from gspo.evaluation.paired import Group, compare
from gspo.evaluation.resumable import WRITTEN, first_difference, slim
from gspo.io.files import refuse_links
from gspo.io.nested import finite_or_none, mapped
from gspo.io.tables import text_table
from gspo.io.untrusted import open_plain_file, parse_json, path_inside, read_json

# the settings of sampling and scoring, which may differ; `max_new_tokens` is by set
MAY_DIFFER = (
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
# what a set's rewards depend on beside its problems. Of `outside`, user code, there are only hashes
GRADING = ("task", "outside", "reward.truncated")
MAX_NAMED = 3  # an error message names at most so many problems


Prompts = Mapping[str, Mapping[int, str]]  # by set and problem


@dataclass(frozen=True)
class Finished:
    """A finished evaluation: by set and problem, the rows of the responses and the prompt."""

    path: Path
    settings: dict
    groups: dict[str, dict[int, Group]]
    prompts: dict[str, dict[int, str]]


def read_finished(path: str | Path) -> Finished:
    """Read the folder of a finished evaluation.

    Raises ValueError if it is another folder, is not finished or is damaged."""
    path = Path(path)
    has_settings = (path / "settings.json").exists()
    if not has_settings or not (path / "responses").exists():
        raise ValueError(
            f"{path} holds no evaluation: give the folder that `gspo evaluate` names in its last "
            "line"
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
        groups[name] = {}
        prompts[name] = {}
        for row in read_responses(path_inside(path / "responses", f"{name}.jsonl")):
            problem = row["problem"]
            prompts[name].setdefault(problem, row["prompt"])
            groups[name].setdefault(problem, []).append(slim(row))
    return Finished(path, settings, groups, prompts)


def read_responses(path: Path) -> Iterator[dict]:
    """Yield the rows of a file of responses. Raises ValueError for a line that is no row."""
    with open_plain_file(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = parse_json(line)
                if not (isinstance(row["problem"], int) and isinstance(row["prompt"], str)):
                    raise ValueError("its problem is no number, or its prompt no text")
                reward = row["reward"]
                is_number = isinstance(reward, int | float) and math.isfinite(reward)
                if not (is_number or reward is None) or not isinstance(row["verdict"], str):
                    raise ValueError("its reward is no number, or its verdict no text")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is damaged in line {number} ({error})") from None
            # rewards of an environment or of the user's function have no bounds
            if reward is not None and not 0 <= reward <= 1:
                kind = "an episode" if "turns" in row else "a response"
                raise ValueError(
                    f"{path}: {kind} has the reward {reward:g}; only rewards from 0 to 1 can "
                    "be compared as accuracies, so give the command without a comparison"
                )
            yield row


def prompts_of(sets: list[EvaluationSet]) -> dict[str, dict[int, str]]:
    """Return the prompts of sets, by set and problem, before they are evaluated."""
    prompts = {}
    for s in sets:
        prompts[s.name] = {problem.index: problem.prompt for problem in s.problems}
    return prompts


def check_same_problems(
    base: Finished, theirs: Prompts, described: Mapping[str, dict], name: str
) -> None:
    """Raise ValueError if the evaluation `name` differs from `base` in sets, problems, prompts or
    answers.

    `theirs` are its prompts by set and problem, and `described` its sets as in settings.json."""
    ours = base.prompts
    _check_contained(ours, theirs, str(base.path), name)
    _check_contained(theirs, ours, name, str(base.path))
    for s, prompts in ours.items():
        changed = sorted(i for i in prompts if prompts[i] != theirs[s][i])
        if changed:
            raise ValueError(
                f"{s}: other prompts in {name} than in {base.path}: {numbered(changed)}"
            )
        base_answers = base.settings["sets"][s].get("answers")
        if described[s].get("answers", base_answers) != base_answers:
            raise ValueError(
                f"{s}: other answers to the same problems in {name} than in {base.path}: evaluate "
                "both with the same data"
            )


def _check_contained(a: Prompts, b: Prompts, a_name: str, b_name: str) -> None:
    """Raise ValueError for a set or a problem of evaluation `a` that `b` does not have."""
    for s in a:
        if s not in b:
            raise ValueError(
                f"the set {s} is in {a_name} and not in {b_name}: evaluate both on the same "
                "sets=[...]"
            )
    for s in a:
        missing = sorted(set(a[s]) - set(b[s]))
        if missing:
            raise ValueError(
                f"{s}: {numbered(missing)} in {a_name} and not in {b_name}: evaluate both on the "
                "same ones"
            )


def numbered(problems: list[int]) -> str:
    """Name a few problems: "problem 3", "problems 1, 2, 5 and 7 more"."""
    names = ", ".join(map(str, problems[:MAX_NAMED]))
    if len(problems) > MAX_NAMED:
        names += f" and {len(problems) - MAX_NAMED} more"
    return f"problem {names}" if len(problems) == 1 else f"problems {names}"


def compared(base: Finished, trained: Finished) -> dict[str, Any]:
    """Return the comparison of two evaluations, ready for JSON.

    It has both paths, the differences of their settings and of how responses were graded, and the
    numbers of every set. Raises ValueError if they do not have the same problems.
    """
    check_same_problems(base, trained.prompts, trained.settings["sets"], str(trained.path))
    differences = [
        first_difference(base.settings.get(key), trained.settings.get(key), key)
        for key in MAY_DIFFER
    ]
    sets = {}
    for name, base_groups in base.groups.items():
        base_set = base.settings["sets"][name]
        trained_set = trained.settings["sets"][name]
        differences += [
            first_difference(base_set.get(key), trained_set.get(key), f"{name}.{key}")
            for key in GRADING
        ]
        problems = sorted(base_groups)
        trained_groups = trained.groups[name]
        sets[name] = compare(
            [base_groups[i] for i in problems], [trained_groups[i] for i in problems]
        )
    return {
        "base": str(base.path),
        "trained": str(trained.path),
        "differences": [difference for difference in differences if difference],
        "sets": mapped(sets, finite_or_none),
    }


def comparison_table(comparison: dict[str, Any]) -> str:
    """Format a comparison for the terminal: a line per set, then remarks on the two factors."""
    heads = ("set", "problems", "base", "trained", "gain", "p", "gain: format", "gain: correctness")
    lines = [heads]
    remarks = []
    for name, r in comparison["sets"].items():
        if not r["problems"]:
            remarks.append(f"{name}: no problem has graded responses on both sides")
            continue
        lines.append(
            (
                name,
                str(r["problems"]),
                *(f"{value:.3f}" for value in r["accuracy"]),
                with_interval(r["gain"]),
                p_text(r["gain"]["p"]),
                with_interval(r["format"]),
                with_interval(r["correctness"]),
            )
        )
        remarks.append(
            f"{name}: an answer was found in {arrow(r['found'])} of the responses, and was right in "
            f"{arrow(r['right_of_found'])} of these (cut off: {arrow(r['truncated'])})"
        )
        if r["problems_left_out"]:
            remarks.append(
                f"{name}: {r['problems_left_out']} problems left out, which one side has no grade "
                "for"
            )
    paths = [f"base:    {comparison['base']}", f"trained: {comparison['trained']}"]
    notes = [f"note: they differ in {difference}" for difference in comparison["differences"]]
    return "\n".join([*paths, *notes, *text_table(lines, right_aligned=True), *remarks])


def with_interval(part: dict) -> str:
    """Format a difference with its 95 % interval: "+0.213 [+0.151, +0.274]"."""
    low, high = part["interval_95"]
    if low is None:
        return f"{part['value']:+.3f}"
    return f"{part['value']:+.3f} [{low:+.3f}, {high:+.3f}]"


def p_text(p: float) -> str:
    """Format a p: "0.021", "<0.001"."""
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def arrow(shares: list[float | None]) -> str:
    """Format a share of base and trained: "0.250 -> 0.500"; "-" for None."""
    return " -> ".join("-" if share is None else f"{share:.3f}" for share in shares)
