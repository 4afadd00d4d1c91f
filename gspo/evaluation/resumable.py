"""The folder of a command-line evaluation, which can be stopped and continued at any time.

settings.json            the settings that the numbers depend on
responses/<set>.jsonl    every response with its verdict, problem by problem, appended once scored
result.json              settings, versions, the numbers of every set, and a comparison if requested

Every response is a function of (seed, set, problem, sample). An evaluation that continues keeps the
complete problems and samples the rest again. With the in-process engine it keeps complete chunks:
the problems that are sampled at once, in their order. Its numbers then equal the numbers of an
uninterrupted evaluation to the last bit. With vLLM it keeps single problems, in the order in which
they ended. The sums of vLLM depend on the rest of its batch anyway.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gspo.data.problems import Problem
from gspo.evaluation.estimates import powers
from gspo.evaluation.evaluate import EvaluationSet, rows, summarise
from gspo.io.escaping import escape_line
from gspo.io.files import LOCK_FILE, replace_text
from gspo.io.ranges import fields_with
from gspo.io.tables import text_table
from gspo.io.untrusted import parse_json, plain_file_opener, read_json
from gspo.io.user_code import sources
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.requests import SamplingRequest
from gspo.rollout.scoring import scored_stream

DIGEST_WEIGHTS = 64  # how many weights of every parameter a weights_digest hashes
WRITTEN = ("settings.json", "responses", "result.json", LOCK_FILE)


class Folder:
    """Reads and writes the folder of one evaluation.

    Raises ValueError if the folder holds an evaluation with other settings."""

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.settings = settings
        file = path / "settings.json"
        if file.exists():
            as_json = json.loads(json.dumps(settings))
            difference = first_difference(read_json(file), as_json)
            if difference:
                raise ValueError(
                    f"{path} holds an evaluation with other settings: {difference}; choose another "
                    "out="
                )
        elif (path / "responses").exists():
            raise ValueError(f"{path} holds responses without settings.json; choose another out=")
        path.mkdir(parents=True, exist_ok=True)
        # written before the first response: responses always have their settings beside them
        replace_text(file, json.dumps(settings, indent=1))
        (path / "responses").mkdir(exist_ok=True)

    def responses(self, name: str) -> Path:
        """Return the file with the responses to a set."""
        return self.path / "responses" / f"{name}.jsonl"

    def complete_groups(
        self, name: str, group_size: int, chunk_size: int, problems: list[Problem]
    ) -> list[list[dict]]:
        """Return the groups of rows that are complete, and delete the rest of the file.

        With a chunk size, problems must be in their own order, and complete chunks are kept. With
        chunk size 0, problems may be in any order, and each complete problem is kept.

        Raises ValueError if this evaluation would not have written the file's content.
        """
        path = self.responses(name)
        groups: list[list[dict]] = []
        ends = [0]  # the file's size after each complete group
        size = 0
        indices = [problem.index for problem in problems]
        unread = set(indices)
        group: list[dict] = []
        with open(path, "a+b", opener=plain_file_opener) as file:
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the process was killed while it wrote this line
                number = len(groups)
                sample = len(group)
                if group:
                    expected = {group[0]["problem"]}
                elif chunk_size:
                    expected = set(indices[number : number + 1])
                else:
                    expected = unread
                row = self._row(path, line, expected, sample)
                group.append(row)
                unread.discard(row["problem"])
                size += len(line)
                if len(group) == group_size:
                    groups.append(group)
                    ends.append(size)
                    group = []
            complete = len(groups)
            if chunk_size and complete < len(problems):
                complete -= complete % chunk_size
            file.truncate(ends[complete])
        return groups[:complete]

    def _row(self, path: Path, line: bytes, expected: set[int], sample: int) -> dict:
        """Parse a row, which must be this sample of an expected problem.

        Raises ValueError if it is not."""
        try:
            row = parse_json(line)
            if row["problem"] not in expected or row["sample"] != sample:
                raise ValueError("another problem or sample was expected")
            return slim(row)
        except (ValueError, KeyError, TypeError) as error:
            problem = min(expected, default="none")
            raise ValueError(
                f"{path} is damaged at problem {problem}, sample {sample} ({error}): remove it and "
                "start again"
            ) from None

    def append(self, name: str, groups: list[list[dict]]) -> None:
        """Append the rows of a chunk and wait until they are on the disk."""
        path = self.responses(name)
        with open(path, "ab", opener=plain_file_opener) as file:
            for row in chain.from_iterable(groups):
                line = json.dumps(row) + "\n"
                file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self, results: dict[str, dict], code: dict, against: dict | None = None) -> Path:
        """Write result.json, with a comparison if there is one, and return its path."""
        path = self.path / "result.json"
        content = {"settings": self.settings, "code": code, "sets": results}
        if against:
            content["against"] = against
        replace_text(path, json.dumps(content, indent=1))
        return path


def evaluate_into(
    folder: Folder,
    engine: Engine,
    sets: list[EvaluationSet],
    requests: list[SamplingRequest],
    on_progress: Callable[[str, list[list[dict]], bool], None],
) -> dict[str, dict]:
    """Evaluate every set by its request, and return the numbers of each set by name.

    Only problems that the folder does not hold yet are sampled. `on_progress(set, groups, sampled)`
    is called once with the rows that the folder holds, and then with new rows whenever they have
    been written.
    """
    results = {}
    for evaluation_set, request in zip(sets, requests, strict=True):
        name = evaluation_set.name
        group_size = request.group_size
        chunk_size = engine.problems_at_once(group_size) if engine.in_chunks else 0
        groups = folder.complete_groups(name, group_size, chunk_size, evaluation_set.problems)
        on_progress(name, groups, False)
        done = {group[0]["problem"] for group in groups}
        missing = [p for p in evaluation_set.problems if p.index not in done]
        missing_request = request.with_problems(missing)
        for responses in scored_stream(engine, evaluation_set.task, missing_request):
            new_groups = [rows(group) for group in responses]
            folder.append(name, new_groups)
            slim_groups = [[slim(row) for row in group] for group in new_groups]
            groups += slim_groups
            on_progress(name, slim_groups, True)
        by_problem = {group[0]["problem"]: group for group in groups}
        groups = [by_problem[problem.index] for problem in evaluation_set.problems]
        results[name] = summarise(groups, powers(group_size))
        results[name]["prompt_too_long"] = evaluation_set.left_out
    return results


def slim(row: dict) -> dict:
    """Return a row without its texts, which no later step reads."""
    slim_row = dict(row)
    for key in ("prompt", "rendered", "response"):
        slim_row.pop(key, None)
    if "turns" in row:
        slim_row["turns"] = [{"author": t["author"], "tokens": t["tokens"]} for t in row["turns"]]
    return slim_row


def weights_digest(model: torch.nn.Module) -> str:
    """Hash a model's weights to twelve hexadecimal digits.

    It hashes evenly spaced weights of every parameter. An optimizer step changes nearly all
    weights, so these are enough. Buffers that are saved with the model, such as the bias with which
    a router selects experts, are hashed too.
    """
    hashed = hashlib.blake2b(digest_size=6)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    tensors |= {name: buffers[name] for name in model.state_dict() if name in buffers}
    for name, parameter in tensors.items():
        flat = parameter.detach().flatten()
        stride = max(1, len(flat) // DIGEST_WEIGHTS)
        weights = flat[::stride][:DIGEST_WEIGHTS]
        values = weights.float().cpu().numpy()
        description = f"{name} {tuple(parameter.shape)}"
        hashed.update(description.encode())
        hashed.update(values.tobytes())
    return hashed.hexdigest()


def digest(content: object) -> str:
    """Hash settings or other content to ten hexadecimal digits.

    What JSON cannot hold is hashed by its repr."""
    text = json.dumps(content, sort_keys=True, default=repr)
    hashed = hashlib.sha256(text.encode())
    return hashed.hexdigest()[:10]


def describe(evaluation_set: EvaluationSet) -> dict:
    """Describe a set by its problems and its task. The numbers of a set depend on these alone.

    The task's settings of speed are left out."""
    task = evaluation_set.task
    problems = evaluation_set.problems
    described = {
        "problems": len(problems),
        "prompts": digest([problem.prompt for problem in problems]),
        "answers": digest([[problem.answer, problem.rating] for problem in problems]),
        "task": without_speed_settings(task),
        "reward.truncated": task.truncated_reward,
    }
    # names of user code, such as my_package.rewards:score
    kind = type(task)
    code_names = [getattr(task, name) for name in fields_with(kind, "outside_code")]
    if not kind.__module__.startswith("gspo."):
        code_names.append(f"{kind.__module__}:{kind.__qualname__}")
    code = {name: sources(name, "task") for name in code_names if name}
    if code:
        described["outside"] = code
    return described


def without_speed_settings(task: Any) -> Any:
    """Return a task's settings, also nested ones, without those that only change its speed."""
    if not is_dataclass(task):
        return task
    left_out = fields_with(type(task), "speed_only")
    settings = {}
    for f in fields(task):
        if f.name not in left_out:
            value = getattr(task, f.name)
            settings[f.name] = without_speed_settings(value)
    return settings


def first_difference(a: object, b: object, key: str = "") -> str | None:
    """Return the first difference of two settings as "key: a against b"; None if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in a | b:
            path = f"{key}.{name}".strip(".")
            difference = first_difference(a.get(name), b.get(name), path)
            if difference:
                return difference
        return None
    return None if a == b else f"{key}: {a} against {b}"


def table(results: dict[str, dict], group_size: int) -> str:
    """Format the results for the terminal: a line per set, and remarks on samples and ratings."""
    k = str(group_size)
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
        average = r["avg"]
        solved = r["pass"][k]
        majority = r["maj"][k] if r["maj"] else {"value": None}
        low, high = average["interval_95"]
        lines.append(
            (
                name,
                str(r["problems"]),
                _decimal(average["value"]),
                f"{_decimal(low)} .. {_decimal(high)}",
                _decimal(solved["value"]),
                _decimal(majority["value"]),
                _decimal(r["truncated"]),
                _decimal(r["tokens"], 1),
            )
        )
    return "\n".join([*text_table(lines, right_aligned=True), *_remarks(results)])


def _remarks(results: dict[str, dict]) -> list[str]:
    """Return lines on problems left out, responses without grade, episodes and ratings."""
    lines = []
    for name, r in results.items():
        if r.get("prompt_too_long"):
            lines.append(
                f"{name}: {r['prompt_too_long']} problems left out, whose prompt and response "
                "exceed the model's positions"
            )
        if r["ungraded"]:
            why = ""
            if r["ungraded_because"]:
                why = f" (most often: {escape_line(r['ungraded_because'])})"
            lines.append(
                f"{name}: {r['ungraded']} responses could not be graded{why}; "
                f"{r['problems_left_out']} problems left out"
            )
        if r.get("episodes"):
            numbers = [f"{key} {value:.3g}" for key, value in sorted(r["episodes"].items())]
            lines.append(f"{name}: episodes: {', '.join(numbers)}")
        if r["elo"]:
            elo = r["elo"]
            easiest, hardest = elo["window"]
            likely = elo["ml"] if isinstance(elo["ml"], str) else f"{elo['ml']:.0f}"
            error = f"standard error {elo['map_stderr']:.0f} (of the posterior)"
            if elo["bootstrap_interval_95"]:
                low, high = elo["bootstrap_interval_95"]
                error = f"95 % interval {low:.0f} .. {high:.0f} (bootstrap over problems)"
            lines.append(
                f"{name}: Elo {elo['map']:.0f}, {error}, maximum likelihood {likely}; "
                f"{elo['problems']} problems rated {easiest:.0f} to {hardest:.0f}, "
                f"{elo['attempts']} attempts"
            )
    return lines


def _decimal(value: float | None, digits: int = 3) -> str:
    """Format a number; "-" if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
