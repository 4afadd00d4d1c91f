"""Run directories of a stranger: one tiny real run, and copies of it with one file spoiled each."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from commands import SMALL, only_run, train

ROOT = Path(__file__).parents[2]
TINY = [
    "objective=gspo_tiny",
    "steps=4",
    "cold_start.steps=2",
    "tracking.wandb=disabled",
    "evaluation.every=4",
]
# sets the window's title, clears the screen, turns the writing round
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
MARKUP = "<script>alert(1)</script>![x](https://evil.example/p.png)[l](https://evil.example) | # h"
NUMBER_400 = "1" * 400
BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


def tiny_run(folder: Path) -> Path:
    """Train it."""
    done = train(folder, *SMALL, *TINY)
    assert done.returncode == 0, done.stderr
    return only_run(folder)


def setting(line: str, value: str) -> Callable[[Path], None]:
    """Put another value in place of a top-level setting."""

    def spoil(run: Path) -> None:
        file = run / "settings.yaml"
        lines = file.read_text().splitlines()
        file.write_text(
            "".join(
                f"{line}: {value}\n" if text.startswith(f"{line}:") else f"{text}\n"
                for text in lines
            )
        )

    return spoil


def option(objective: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        settings = yaml.safe_load((run / "settings.yaml").read_text())
        settings["options"]["objective"] = objective
        (run / "settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))

    return spoil


def text(name: str, content: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        for file in sorted(run.glob(name)) or [run / name]:
            file.unlink(missing_ok=True)
            file.write_text(content)

    return spoil


def appended(name: str, content: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        for file in run.glob(name):
            file.write_text(file.read_text() + content)

    return spoil


def pipe(name: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        for file in sorted(run.glob(name)) or [run / name]:
            file.unlink(missing_ok=True)
            os.mkfifo(file)

    return spoil


def endless(name: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        for file in sorted(run.glob(name)) or [run / name]:
            file.unlink(missing_ok=True)
            file.symlink_to("/dev/zero")

    return spoil


def huge(name: str) -> Callable[[Path], None]:
    """A terabyte of zeros that takes no room on the disk."""

    def spoil(run: Path) -> None:
        with open(run / name, "r+b") as file:
            file.truncate(1 << 40)

    return spoil


def row(**values: object) -> str:
    return json.dumps(values) + "\n"


DEEP = "[" * 100_000
# 400 kB that make a table of .6 GB
SPARSE = "".join(row(step=i, **{f"m{i % 4_000}": 1}) for i in range(20_000))
MANY = "".join(row(step=i, **{f"m{i}/{j}": 1 for j in range(60)}) for i in range(99))
UNREADABLE = {  # the run cannot be shown: it is named, and the others are
    "alias bomb": appended("settings.yaml", BOMB.replace("&a1 [*a0", "&a0 x\na1: &a1 [*a0", 1)),
    "deep settings": appended("settings.yaml", f"deep: {DEEP}"),
    "seed in words": setting("seed", "one"),
    "seed of 400 digits": setting("seed", NUMBER_400),
    "seed is true": setting("seed", "true"),
    "steps are a list": setting("steps", "[3]"),
    "study is a path": setting("study", "../../../tmp/x"),
    "settings are a list": text("settings.yaml", "- 1"),
    "settings are bytes": text("settings.yaml", "\x00\x01"),
    "settings are a pipe": pipe("settings.yaml"),
    "settings never end": endless("settings.yaml"),
    "settings are huge": huge("settings.yaml"),
    "rows are a pipe": pipe("metrics.jsonl"),
    "rows never end": endless("metrics.jsonl"),
    "rows are huge": huge("metrics.jsonl"),
    "too many metrics": text("metrics.jsonl", MANY),
    "rows of a metric each": text("metrics.jsonl", SPARSE),
    "rows are none": text("metrics.jsonl", row(step=1e30) + row(step=True) + row(step=10**15) + "[" * 99_999),
}  # fmt: skip
READABLE = {  # what is spoiled is left out, the run is shown
    "half a character in a metric's name": appended("metrics.jsonl", row(step=5, **{"\ud800": 1})),
    "step 1e30": appended("metrics.jsonl", row(step=1e30, **{"reward/mean": 1})),
    "a value of 400 digits": appended("metrics.jsonl", f'{{"step": 5, "reward/mean": {NUMBER_400}}}\n'),
    "an infinite value": appended("metrics.jsonl", '{"step": 5, "reward/mean": 1e999, "clip/token_active": 1e300}\n'),
    "words for numbers": appended("metrics.jsonl", row(step=5, **{"reward/mean": "high", "eval/avg@2": 1, "x": [1]})),
    "deep rows": appended("metrics.jsonl", f'{{"step": 5, "a": {DEEP}\n{{"step": 6, "a": {"[" * 900}{"]" * 900}}}\n'),
    "status is a list": text("status.json", "[1]"),
    "status is deep": text("status.json", DEEP),
    "status says a list": text("status.json", '{"how": ["finished"], "reason": 3}'),
    "status is a pipe": pipe("status.json"),
    "lock is a pipe": pipe(".lock"),
    "warnings without words": text("monitor.jsonl", row(step=1) + "[1]\n" + row(step="x", kind=1, text=[])),
    "warnings are a pipe": pipe("monitor.jsonl"),
    "code is a list": text("code.json", "[1]"),
    "code has odd parts": text("code.json", '{"commit": 5, "versions": [1], "changed_files": 7}'),
    "code is deep": text("code.json", DEEP),
    "rollouts are odd": text("rollouts/step_*.jsonl", '[1]\n{"reward": "x"}\n{"reward": true}\n{"reward": 1}\n' + DEEP),
    "rollouts are a pipe": pipe("rollouts/step_*.jsonl"),
    "rollouts never end": endless("rollouts/step_*.jsonl"),
    "rollbacks are odd": text("rollbacks.json", '[1, {"from": []}]'),
    "rollbacks are a mapping": text("rollbacks.json", '{"from": 1}'),
    "continuations are odd": text("continued.jsonl", DEEP + "\n[]\n" + row(step=1e30)),
    "a name of markup": lambda run: (run / "rollouts" / "step_9<img src=x onerror=alert(1)>.jsonl").write_text(""),
    "escapes in the status": text("status.json", json.dumps({"how": "failed", "step": 4, "reason": ESCAPE + MARKUP})),
    "escapes in a setting": option(ESCAPE + MARKUP),
    "markup in a setting": appended("settings.yaml", f"\nextra: {json.dumps(MARKUP)}\n"),
    "escapes in a setting's name": appended("settings.yaml", f"\n{json.dumps(ESCAPE + MARKUP)}: 1\n"),
    "a formula in a setting": appended("settings.yaml", "\nextra: '$\\frac{'\n"),
    "escapes in a metric's name": appended("metrics.jsonl", row(step=5, **{"reward/" + ESCAPE + MARKUP: 1})),
}  # fmt: skip


def study(run: Path, folder: Path) -> dict[str, Path]:
    """Copies of the run, a seed each, by what is wrong with them; one is whole."""
    made = {}
    for number, (name, spoil) in enumerate(
        ({"whole": lambda _: None} | UNREADABLE | READABLE).items(), start=1
    ):
        made[name] = (
            folder / f"gspo_tiny-seed{number}-{name.replace(' ', '_').replace(chr(39), '')}"
        )
        shutil.copytree(
            run, made[name], ignore=shutil.ignore_patterns("checkpoints", "report.html")
        )
        setting("seed", str(number))(made[name])
        spoil(made[name])
    (folder / "manifest.jsonl").write_text(
        '[1]\n{"jobs": 3}\n{"jobs": [1]}\n{"jobs": [{"run": "../../etc", "steps": 1, "overrides": []}]}\n'
        '{"run": ["x"], "reason": "y"}\n' + DEEP + "\n"
    )
    return made
