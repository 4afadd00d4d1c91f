"""What an evaluation from the command line leaves behind, so that it can be stopped and gone on with at any time.

settings.json            what the numbers depend on
responses/<set>.jsonl    every response with its verdict, problem by problem, appended chunk by chunk
result.json              settings, versions, and the numbers of every set

Every response is a function of (seed, set, problem, sample), so whole chunks are kept, the rest is sampled again, and
an evaluation that was killed ends with the numbers of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from gspo.core.files import LOCK, replace_text
from gspo.core.types import Problem
from gspo.core.untrusted import parse_json, plain_file, read_json
from gspo.evaluation.estimates import powers
from gspo.evaluation.evaluate import HeldOut, rows, summarise
from gspo.rollout.engine import Engine
from gspo.rollout.requests import Sampling
from gspo.rollout.scoring import at_once, scored_chunks

FINGERPRINTED = 64  # weights of every parameter
WRITTEN = ("settings.json", "responses", "result.json", LOCK)
FREE = ("slots", "workers", "cache")  # settings of a task that change how fast it scores, not how


class Folder:
    """The folder of one evaluation. Raises ValueError if it holds one with other settings."""

    def __init__(self, path: Path, settings: dict):
        self.path, self.settings = path, settings
        file = path / "settings.json"
        if file.exists():
            difference = first_difference(read_json(file), json.loads(json.dumps(settings)))
            if difference:
                raise ValueError(f"{path} holds an evaluation with other settings: {difference}; choose another out=")
        elif (path / "responses").exists():
            raise ValueError(f"{path} holds responses without settings.json; choose another out=")
        path.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(settings, indent=1))  # before the first response: a kill leaves no doubt
        (path / "responses").mkdir(exist_ok=True)

    def responses(self, name: str) -> Path:
        return self.path / "responses" / f"{name}.jsonl"

    def kept(self, name: str, samples: int, chunk: int, problems: list[Problem]) -> list[list[dict]]:
        """The rows of the problems that are done, in whole chunks of `chunk` problems; anything after them is removed.

        Raises ValueError for a file that is not a beginning of what would be written here.
        """
        path = self.responses(name)
        found, ends = [], [0]
        with open(path, "a+b", opener=plain_file) as file:
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a kill cut it short
                number, sample = divmod(len(found), samples)
                index = problems[number].index if number < len(problems) else -1
                found.append(self._row(path, line, (index, sample)))
                ends.append(ends[-1] + len(line))
            whole = len(found) // samples
            whole = whole if whole >= len(problems) else whole - whole % chunk
            file.truncate(ends[whole * samples])
        return [found[i : i + samples] for i in range(0, whole * samples, samples)]

    def _row(self, path: Path, line: bytes, place: tuple[int, int]) -> dict:
        try:
            row = parse_json(line)
            if (row["problem"], row["sample"]) != place:
                raise ValueError("another problem or sample was expected")
            return slim(row)
        except (ValueError, KeyError, TypeError) as error:
            where = f"problem {place[0]}, sample {place[1]}"
            raise ValueError(f"{path} is damaged at {where} ({error}): remove it and start again") from None

    def append(self, name: str, groups: list[list[dict]]) -> None:
        """Add the rows of a chunk; they are on the disk afterwards."""
        with open(self.responses(name), "ab", opener=plain_file) as file:
            file.write("".join(json.dumps(row) + "\n" for group in groups for row in group).encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self, results: dict[str, dict], code: dict) -> Path:
        """Write the result; where."""
        path = self.path / "result.json"
        replace_text(path, json.dumps({"settings": self.settings, "code": code, "sets": results}, indent=1))
        return path


def evaluate_into(
    folder: Folder,
    engine: Engine,
    sets: list[HeldOut],
    samples: int,
    sampling: Sampling,
    seed: int,
    step: int,
    report: Callable[[str, int, bool], None],
) -> dict[str, dict]:
    """The numbers of every set by name, from what the folder holds and what is still to be sampled.

    `report(set, problems, sampled)` is told of the problems that were there, then of every chunk.
    """
    results, chunk = {}, at_once(engine, samples)
    for held_out in sets:
        groups = folder.kept(held_out.name, samples, chunk, held_out.problems)
        report(held_out.name, len(groups), False)
        for new in new_chunks(engine, held_out, len(groups), samples, sampling, seed, step):
            folder.append(held_out.name, new)
            report(held_out.name, len(new), True)
            groups += [[slim(row) for row in group] for group in new]
        results[held_out.name] = summarise(groups, powers(samples)) | {"prompt_too_long": held_out.left_out}
    return results


def new_chunks(
    engine: Engine, held_out: HeldOut, first: int, samples: int, sampling: Sampling, seed: int, step: int
) -> Iterator[list[list[dict]]]:
    """Rows of the set's problems from `first` on, chunk by chunk."""
    position = (seed, "evaluation", held_out.name)
    problems = held_out.problems[first:]
    sampling = replace(sampling, max_new_tokens=held_out.limit or sampling.max_new_tokens)
    for groups in scored_chunks(engine, held_out.task, problems, samples, sampling, position, step):
        yield [rows(group) for group in groups]


def slim(row: dict) -> dict:
    """A row without its texts, which nothing more is done with."""
    return {key: value for key, value in row.items() if key not in ("prompt", "rendered", "response")}


def fingerprint(model: torch.nn.Module) -> str:
    """Twelve hexadecimal digits of a model's weights, from evenly spaced ones of every parameter: an optimizer step
    changes nearly all of them."""
    hashed = hashlib.blake2b(digest_size=6)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        few = flat[:: max(1, len(flat) // FINGERPRINTED)][:FINGERPRINTED]
        hashed.update(f"{name} {tuple(parameter.shape)}".encode() + few.float().cpu().numpy().tobytes())
    return hashed.hexdigest()


def digest(content: object) -> str:
    """Ten hexadecimal digits of settings, or of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def describe(held_out: HeldOut) -> dict:
    """What a set's part of the numbers depends on: its problems and its task, but for settings that only change how
    fast that scores."""
    task = without_free(asdict(held_out.task))
    return {"problems": len(held_out.problems), "prompts": digest([p.prompt for p in held_out.problems]), "task": task}


def without_free(settings: dict) -> dict:
    return {k: without_free(v) if isinstance(v, dict) else v for k, v in settings.items() if k not in FREE}


def first_difference(a: object, b: object, key: str = "") -> str | None:
    """Where two settings differ first, as "key: a against b"; None if they are alike."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(name for name in b if name not in a)]:
            inner = first_difference(a.get(name), b.get(name), f"{key}.{name}".strip("."))
            if inner:
                return inner
        return None
    return None if a == b else f"{key}: {a} against {b}"


def table(results: dict[str, dict], samples: int) -> str:
    """The results for the terminal: a line per set; avg@k with its 95 % interval over problems, then the ratings."""
    k = str(samples)
    heads = ("set", "problems", f"avg@{k}", "95 % interval", f"pass@{k}", f"maj@{k}", "truncated", "tokens")
    lines = [heads]
    for name, r in results.items():
        majority = r["maj"][k]["value"] if r["maj"] else None
        low, high = r["avg"]["interval_95"]
        between = f"{_figure(low)} .. {_figure(high)}"
        figures = [_figure(x) for x in (r["pass"][k]["value"], majority, r["truncated"])]
        average = _figure(r["avg"]["value"])
        lines.append((name, str(r["problems"]), average, between, *figures, _figure(r["tokens"], 1)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    text = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([*text, *_remarks(results)])


def _remarks(results: dict[str, dict]) -> list[str]:
    lines = []
    for name, r in results.items():
        if r.get("prompt_too_long"):
            left_out = f"{r['prompt_too_long']} problems left out"
            lines.append(f"{name}: {left_out}, whose prompt and response exceed the model's positions")
        if r["ungraded"]:
            left_out = r["problems_left_out"]
            lines.append(f"{name}: {r['ungraded']} responses could not be graded; {left_out} problems left out")
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
    return "-" if value is None else f"{value:.{digits}f}"
