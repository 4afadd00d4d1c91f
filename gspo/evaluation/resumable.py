"""The folder of an evaluation from the command line, which can be stopped and continued at any
time.

settings.json            the settings that the numbers depend on
responses/<set>.jsonl    every response with its verdict, problem by problem, appended as soon as
                         they are scored
result.json              settings, versions, the numbers of every set, and the comparison if one was
                         asked for

Every response is a function of (seed, set, problem, sample). When an evaluation continues, what is
whole is kept and the rest is sampled again. With the in-process engine that is done by chunks, of
as many problems as are sampled at once and in their order, so that the numbers are those of an
evaluation that was never stopped, to the last bit. vLLM's sums depend on what else is in its batch
anyway, so there problems are kept one by one, in the order in which they ended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gspo.data.samples import Problem
from gspo.evaluation.estimates import powers
from gspo.evaluation.evaluate import EvaluationSet, rows, summarise
from gspo.io.files import LOCK, replace_text
from gspo.io.ranges import fields_with
from gspo.io.tables import text_table
from gspo.io.untrusted import parse_json, plain_file, read_json
from gspo.io.user_code import sources
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.requests import Sampling
from gspo.rollout.scoring import at_once, scored_stream

FINGERPRINTED = 64  # how many weights of every parameter a fingerprint is made from
WRITTEN = ("settings.json", "responses", "result.json", LOCK)


class Folder:
    """Reads and writes the folder of one evaluation. Raises ValueError if the folder holds one with
    other settings.
    """

    def __init__(self, path: Path, settings: dict):
        self.path, self.settings = path, settings
        file = path / "settings.json"
        if file.exists():
            difference = first_difference(read_json(file), json.loads(json.dumps(settings)))
            if difference:
                raise ValueError(
                    f"{path} holds an evaluation with other settings: {difference}; choose another out="
                )
        elif (path / "responses").exists():
            raise ValueError(f"{path} holds responses without settings.json; choose another out=")
        path.mkdir(parents=True, exist_ok=True)
        # written before the first response, so that responses always have settings beside them
        replace_text(file, json.dumps(settings, indent=1))
        (path / "responses").mkdir(exist_ok=True)

    def responses(self, name: str) -> Path:
        """Return the file with the responses to a set."""
        return self.path / "responses" / f"{name}.jsonl"

    def kept(
        self, name: str, samples: int, chunk: int, problems: list[Problem]
    ) -> list[list[dict]]:
        """Read the rows of the problems that are done, and delete the rest of the file. With
        `chunk` 0 problems may stand in any order, and each that is whole is kept; else in their own
        order, and whole chunks are kept.

        Raises ValueError if the file's content is not what this evaluation would have written so
        far.
        """
        path = self.responses(name)
        found, ends, left = [], [0], {problem.index for problem in problems}
        with open(path, "a+b", opener=plain_file) as file:
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the process was killed while it wrote this line
                number, sample = divmod(len(found), samples)
                if sample:
                    expected = {found[-1]["problem"]}
                else:
                    expected = (
                        left if not chunk else {p.index for p in problems[number : number + 1]}
                    )
                found.append(self._row(path, line, expected, sample))
                left.discard(found[-1]["problem"])
                ends.append(ends[-1] + len(line))
            whole = len(found) // samples
            whole = whole if whole >= len(problems) else whole - whole % (chunk or 1)
            file.truncate(ends[whole * samples])
        return [found[i : i + samples] for i in range(0, whole * samples, samples)]

    def _row(self, path: Path, line: bytes, expected: set[int], sample: int) -> dict:
        """Parse a row, which must be that of this sample of one of the problems that are expected
        next.
        """
        try:
            row = parse_json(line)
            if row["problem"] not in expected or row["sample"] != sample:
                raise ValueError("another problem or sample was expected")
            return slim(row)
        except (ValueError, KeyError, TypeError) as error:
            where = f"problem {min(expected, default='none')}, sample {sample}"
            raise ValueError(
                f"{path} is damaged at {where} ({error}): remove it and start again"
            ) from None

    def append(self, name: str, groups: list[list[dict]]) -> None:
        """Append the rows of a chunk and wait until they are on the disk."""
        with open(self.responses(name), "ab", opener=plain_file) as file:
            file.write(
                "".join(json.dumps(row) + "\n" for group in groups for row in group).encode()
            )
            file.flush()
            os.fsync(file.fileno())

    def finish(self, results: dict[str, dict], code: dict, against: dict | None = None) -> Path:
        """Write result.json, with a comparison if there is one, and return its path."""
        path = self.path / "result.json"
        content = {"settings": self.settings, "code": code, "sets": results}
        replace_text(
            path, json.dumps(content | ({"against": against} if against else {}), indent=1)
        )
        return path


def evaluate_into(
    folder: Folder,
    engine: Engine,
    sets: list[EvaluationSet],
    samples: int,
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    on_progress: Callable[[str, list[list[dict]], bool], None],
) -> dict[str, dict]:
    """Evaluate every set, sampling only what the folder does not hold yet. Returns the numbers of
    each set by name.

    `on_progress(set, groups, sampled)` is called once with the rows of the problems that the folder
    holds, and then with those of the problems that were sampled, as often as some are written.
    """
    results, chunk = {}, at_once(engine, samples) if engine.in_chunks else 0
    for evaluation_set in sets:
        groups = folder.kept(evaluation_set.name, samples, chunk, evaluation_set.problems)
        on_progress(evaluation_set.name, groups, False)
        done = {group[0]["problem"] for group in groups}
        left = [problem for problem in evaluation_set.problems if problem.index not in done]
        for new in new_groups(engine, evaluation_set, left, samples, sampling, seed, step):
            folder.append(evaluation_set.name, new)
            groups += (kept := [[slim(row) for row in group] for group in new])
            on_progress(evaluation_set.name, kept, True)
        by_problem = {group[0]["problem"]: group for group in groups}
        groups = [by_problem[problem.index] for problem in evaluation_set.problems]
        results[evaluation_set.name] = summarise(groups, powers(samples)) | {
            "prompt_too_long": evaluation_set.left_out
        }
    return results


def new_groups(
    engine: Engine,
    evaluation_set: EvaluationSet,
    problems: list[Problem],
    samples: int,
    sampling: Sampling,
    seed: int,
    step: int,
) -> Iterator[list[list[dict]]]:
    """Sample and score these problems of a set, and yield their rows as soon as they are there."""
    position = (seed, "evaluation", evaluation_set.name)
    sampling = replace(sampling, max_new_tokens=evaluation_set.limit or sampling.max_new_tokens)
    for groups in scored_stream(
        engine, evaluation_set.task, problems, samples, sampling, position, policy_step=step
    ):
        yield [rows(group) for group in groups]


def slim(row: dict) -> dict:
    """Drop the texts of a row, which are not needed any more."""
    kept = {
        key: value for key, value in row.items() if key not in ("prompt", "rendered", "response")
    }
    if "turns" in row:
        kept["turns"] = [
            {"author": turn["author"], "tokens": turn["tokens"]} for turn in row["turns"]
        ]
    return kept


def fingerprint(model: torch.nn.Module) -> str:
    """Hash a model's weights to twelve hexadecimal digits.

    Evenly spaced weights of every parameter are enough, because an optimizer step changes nearly
    all weights.
    """
    hashed = hashlib.blake2b(digest_size=6)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sampled = flat[:: max(1, len(flat) // FINGERPRINTED)][:FINGERPRINTED]
        hashed.update(
            f"{name} {tuple(parameter.shape)}".encode() + sampled.float().cpu().numpy().tobytes()
        )
    return hashed.hexdigest()


def digest(content: object) -> str:
    """Hash settings, or anything else that JSON can hold, to ten hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def describe(evaluation_set: EvaluationSet) -> dict:
    """Describe what the numbers of a set depend on: its problems, and its task without the settings
    of speed.
    """
    task = evaluation_set.task
    described = {
        "problems": len(evaluation_set.problems),
        "prompts": digest([p.prompt for p in evaluation_set.problems]),
        "task": without_speed_settings(task),
    }
    places = [getattr(task, name) for name in fields_with(type(task), "outside_code")]
    if not type(task).__module__.startswith("gspo."):
        places.append(f"{type(task).__module__}:{type(task).__qualname__}")
    code = {place: sources(place, "task") for place in places if place}
    return described | ({"outside": code} if code else {})


def without_speed_settings(task: Any) -> Any:
    """Return a task's settings without those that only change how fast it scores, however deep they
    stand.
    """
    if not is_dataclass(task):
        return task
    left_out = fields_with(type(task), "speed_only")
    return {
        f.name: without_speed_settings(getattr(task, f.name))
        for f in fields(task)
        if f.name not in left_out
    }


def first_difference(a: object, b: object, key: str = "") -> str | None:
    """Return the first difference of two settings as "key: a against b"; None if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(name for name in b if name not in a)]:
            inner = first_difference(a.get(name), b.get(name), f"{key}.{name}".strip("."))
            if inner:
                return inner
        return None
    return None if a == b else f"{key}: {a} against {b}"


def table(results: dict[str, dict], samples: int) -> str:
    """Lay out the results for the terminal: a line per set, and below them remarks on samples and
    ratings.
    """
    k = str(samples)
    heads = (
        "set",
        "problems",
        f"avg@{k}",
        "95 % interval",
        f"pass@{k}",
        f"maj@{k}",
        "truncated",
        "tokens",
    )
    lines = [heads]
    for name, r in results.items():
        majority = r["maj"][k]["value"] if r["maj"] else None
        low, high = r["avg"]["interval_95"]
        between = f"{_figure(low)} .. {_figure(high)}"
        figures = [_figure(x) for x in (r["pass"][k]["value"], majority, r["truncated"])]
        average = _figure(r["avg"]["value"])
        lines.append(
            (name, str(r["problems"]), average, between, *figures, _figure(r["tokens"], 1))
        )
    return "\n".join([*text_table(lines, right_aligned=True), *_remarks(results)])


def _remarks(results: dict[str, dict]) -> list[str]:
    """Write a line for each set about problems left out, responses without grade, episodes,
    ratings.
    """
    lines = []
    for name, r in results.items():
        if r.get("prompt_too_long"):
            left_out = f"{r['prompt_too_long']} problems left out"
            lines.append(
                f"{name}: {left_out}, whose prompt and response exceed the model's positions"
            )
        if r["ungraded"]:
            left_out = r["problems_left_out"]
            lines.append(
                f"{name}: {r['ungraded']} responses could not be graded; {left_out} problems left out"
            )
        if e := r.get("episodes"):
            lines.append(
                f"{name}: episodes: "
                + ", ".join(f"{key} {value:.3g}" for key, value in sorted(e.items()))
            )
        if r["elo"]:
            e = r["elo"]
            low, high = e["bootstrap_interval_95"]
            likely = e["ml"] if isinstance(e["ml"], str) else f"{e['ml']:.0f}"
            lines.append(
                f"{name}: Elo {e['map']:.0f}, 95 % interval {low:.0f} .. {high:.0f} (bootstrap over problems), maximum "
                f"likelihood {likely}; {e['problems']} problems rated {e['window'][0]:.0f} to {e['window'][1]:.0f}, "
                f"{e['attempts']} attempts"
            )
    return lines


def _figure(value: float | None, digits: int = 3) -> str:
    """Format a number; "-" if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
