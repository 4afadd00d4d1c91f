"""Makes the page of a run: report.html, one HTML file that opens from disk without a network.

It says in words what happened, answers the three questions of stability, and shows curves,
warnings, the best and worst responses of the batch that was saved last, time and cost, and the
settings. Everything comes from the run directory's files, so the page can be made of a run under
way, of one that was killed, and again at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from gspo.io import untrusted
from gspo.io.files import CONTINUATIONS_FILE, read_events, read_status, replace_text
from gspo.io.rows import read_rows
from gspo.tracking.collapse import best, collapse, is_finite, levels
from gspo.tracking.episodes import reward, turns_of
from gspo.tracking.metrics import Metric, custom_metrics, lookup
from gspo.tracking.monitor import stability_report
from gspo.tracking.pages import TEMPLATES, fill
from gspo.tracking.rounding import floor_of_run, mismatch_of_run

PAGE = "report.html"
# each metric, and whether its axis is logarithmic; metrics that a run does not have are left out
CURVES = (
    ("reward/mean", False), ("policy/entropy", False), ("optim/grad_norm", True), ("clip/token_active", True),
    ("routing/consistency", False), ("length/mean", False), ("length/truncated", False), ("mismatch/k3", True),
    ("ratio/ess_token", False), ("group/zero_variance", False), ("episode/turns", False),
    ("episode/environment_tokens", False),
)  # fmt: skip
RESPONSES = 3  # how many of the best responses are shown, and of the worst
SECONDS = {
    "time/rollout_s": "sampling",
    "time/environment_s": "environments, a part of sampling",
    "time/score_s": "grading",
    "time/train_s": "training",
    "time/eval_s": "evaluation",
    "time/checkpoint_s": "checkpoints",
    "time/monitor_s": "monitor",
}


def write_page(folder: Path) -> Path:
    """Write the page of a run directory, and return its path. Raises ValueError if `folder` is no
    run directory.
    """
    if not (folder / "settings.yaml").exists():
        raise ValueError(
            f"{folder} has no settings.yaml: name a run directory, such as runs/STUDY/RUN"
        )
    replace_text(folder / PAGE, page(folder))
    return folder / PAGE


def page(folder: Path) -> str:
    """Return the page's HTML. Raises ValueError if the settings cannot be read; other files that
    cannot be read are named on the page."""
    settings, amiss = untrusted.read_yaml(folder / "settings.yaml"), []
    rows = _read(read_rows, folder / "metrics.jsonl", amiss) or []
    events = _read(read_events, folder / "monitor.jsonl", amiss) or []
    custom = _read(custom_metrics, folder, amiss) or {}
    status, batch = (
        read_status(folder),
        max((folder / "rollouts").glob("step_*.jsonl"), default=None),
    )
    values = {
        "name": folder.name,
        "subtitle": _subtitle(folder, settings, amiss),
        "stability": stability_report(rows, status.get("how", "")).splitlines(),
        "curves": curves(rows, custom) if len(rows) > 2 else [],
        "events": [(event["step"], event["kind"], event["text"]) for event in events],
        "batch": batch and batch.name,
        "episodes": _episodes(rows),
        "responses": _best_and_worst(_read(_graded, batch, amiss) or []) if batch else [],
        "turns_of": turns_of,
        "reward": reward,
        "cost": _cost(rows),
        "profiles": _profiles(folder / "profile", amiss),
        "settings": yaml.safe_dump(settings, sort_keys=False),
    }
    story = _story(settings, rows, status) + _went_on(folder, amiss)
    values["story"] = [*story, *(f"A file is left out: {what}" for what in amiss)]
    return fill(
        TEMPLATES / "run_report.html.j2", f"{_value(settings, 'study')}: {folder.name}", values
    )


def _read(how: Callable[[Path], Any], path: Path, amiss: list[str]) -> Any:
    """Read a file of the run with `how`; None if it is not there or cannot be read. The latter is
    noted in `amiss`.
    """
    try:
        return how(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        amiss.append(str(error))
        return None


def _value(tree: object, key: str, unknown: object = "unknown") -> object:
    """Return a nested mapping's value by its dotted key, `unknown` if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return unknown if tree is None else tree


def _subtitle(folder: Path, settings: dict, amiss: list[str]) -> str:
    """Return study, objective, model, seed, commit and versions in one line."""
    code = _read(untrusted.read_json, folder / "code.json", amiss) or {}
    changed = ", with changed files" if code.get("changed_files") else ""
    objective = _value(settings, "options.objective", _value(settings, "objective.name"))
    words = [
        f"study {_value(settings, 'study')}",
        f"objective {objective}",
        f"model {_value(settings, 'model.name')}",
    ]
    varied = code.get("varied")
    words += [f"varied in its sweep: {varied}"] if isinstance(varied, str) and varied else []
    words += [
        f"seed {_value(settings, 'seed')}",
        f"commit {str(code.get('commit') or 'unknown')[:10]}{changed}",
    ]
    versions = {name: _value(code, f"versions.{name}", "") for name in ("torch", "transformers")}
    return ", ".join(
        [*words, *(f"{name} {version}" for name, version in versions.items() if version)]
    )


# ------------------------------------------------------------------------------------------------------------
# words
def _story(settings: dict, rows: list[dict], status: dict) -> list[str]:
    """Return what happened, in sentences."""
    batches = [row for row in rows if row["step"] > 0]
    step = rows[-1]["step"] if rows else 0
    reason = f": {status['reason']}" if status.get("reason") else ""
    lines = [
        f"The run {_ended(status.get('how', ''))} at step {step} of {_value(settings, 'steps')}{reason}."
    ]
    rewards = [row["reward/mean"] for row in batches if is_finite(row.get("reward/mean"))]
    if rewards:
        first, last = rewards[:5], rewards[-10:]
        before, after, top = sum(first) / len(first), sum(last) / len(last), best(rewards)[0]
        lines.append(
            f"The reward went from {before:.3f} (first {len(first)} batches) to {after:.3f} (last {len(last)}); "
            f"the highest smoothed value was {top:.3f}."
        )
        at = collapse(rewards)
        if at is not None:
            lines.append(
                f"It collapsed at step {batches[at]['step']} by the registered rule (gspo/tracking/collapse.py)."
            )
    if floor := floor_of_run(batches):
        lines.append(floor)
    if mismatch := mismatch_of_run(batches):
        lines.append(mismatch)
    return lines + [
        _held_out(rows, name) for name in sorted({n for row in rows for n in row if "/avg@" in n})
    ]


def _went_on(folder: Path, amiss: list[str]) -> list[str]:
    """Return sentences about continuations and rollbacks, as they were recorded when they happened."""
    lines, at = (
        [],
        [str(row["step"]) for row in _read(read_rows, folder / CONTINUATIONS_FILE, amiss) or []],
    )
    if at:
        times = "once" if len(at) == 1 else f"{len(at)} times"
        lines.append(f"It was continued {times}, from the checkpoint of step {', '.join(at)}.")
    for back in (
        _read(lambda path: untrusted.read_json(path, list), folder / "rollbacks.json", amiss) or []
    ):
        lines.append(
            f"The monitor took it back from step {_value(back, 'from')} to step {_value(back, 'to')}, at a lower "
            "learning rate."
        )
    if (folder / "superseded").exists():
        lines.append("What it had written beyond the step that it went on from is in superseded/.")
    return lines


def _ended(how: str) -> str:
    """Return a run's status as the predicate of a sentence."""
    words = {
        "finished": "finished",
        "stopped": "was stopped",
        "collapsed": "was ended by the monitor",
        "failed": "failed",
    }
    return words.get(how, "has no end yet: it is under way, or was killed,")


def _held_out(rows: list[dict], name: str) -> str:
    """Return the first and last score of a held-out set, the latter with its 95 % interval over the
    problems, which is ±1.96 standard errors."""
    scored = [row for row in rows if is_finite(row.get(name))]
    if not scored:
        return f"{name}: no score"
    first, last = scored[0], scored[-1]
    error = last.get(name.rsplit("/", 1)[0] + "/stderr")
    around = f" ± {1.96 * error:.3f} (95 % over its problems)" if is_finite(error) else ""
    return f"{name}: {first[name]:.3f} at step {first['step']}, {last[name]:.3f}{around} at step {last['step']}."


def _episodes(rows: list[dict]) -> list[tuple[str, ...]]:
    """Return the lines of a table of episodes' numbers: each one's mean over the first five and the
    last ten of the batches that have it."""
    lines = []
    for name in sorted({name for row in rows for name in row if name.startswith("episode/")}):
        values = [row[name] for row in rows if is_finite(row.get(name))]
        means = [f"{sum(some) / len(some):.3g}" for some in (values[:5], values[-10:]) if some]
        lines.append((name.removeprefix("episode/"), *(means or ("", ""))))
    return lines


def _best_and_worst(graded: list[dict]) -> list[tuple[str, dict]]:
    """Return the responses with the highest and lowest rewards, each with "good", "bad" or, where
    all rewards of the batch are the same, "equal". A response that was cut off is never good."""
    found = sorted(graded, key=lambda response: -response["reward"])
    middle = (len(found) + 1) // 2
    best = _of_different_problems(found[:middle])
    worst = [
        r for r in _of_different_problems(found[middle:][::-1]) if r["reward"] < best[0]["reward"]
    ]
    if not found:
        return []
    lowest, highest = found[-1]["reward"], found[0]["reward"]

    def kind(response: dict) -> str:
        if lowest == highest:
            return "equal"
        is_good = response["reward"] > lowest and response.get("verdict") != "truncated"
        return "good" if is_good else "bad"

    return [(kind(response), response) for response in [*best, *worst]]


def _graded(path: Path) -> list[dict]:
    """Return the responses of a saved batch that have a reward."""
    rewards = ((response, response.get("reward")) for response in untrusted.read_objects(path))
    return [
        response
        for response, reward in rewards
        if type(reward) in (int, float) and is_finite(reward)
    ]


def _of_different_problems(responses: list[dict]) -> list[dict]:
    """Return the first response to each problem, at most RESPONSES of them."""
    first: dict[tuple, dict] = {}
    for response in responses:
        first.setdefault((str(response.get("task")), str(response.get("prompt"))), response)
    return list(first.values())[:RESPONSES]


def _cost(rows: list[dict]) -> list[tuple[str, str]]:
    """Return the lines of a table of seconds, tokens and FLOPs."""
    sums = {name: sum(row.get(key) or 0.0 for row in rows) for key, name in SECONDS.items()}
    lines = [(name, f"{value:.1f} s") for name, value in sums.items() if value]
    last = rows[-1] if rows else {}
    if is_finite(last.get("compute/seconds")):
        lines.insert(0, ("all", f"{last['compute/seconds'] / 3600:.2f} h"))
    totals = (("compute/tokens", "tokens"), ("compute/flops", "FLOPs"))
    return lines + [(name, f"{last[key]:.3g}") for key, name in totals if is_finite(last.get(key))]


def _profiles(folder: Path, amiss: list[str]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return, for every step that was profiled, its name and the lines of a table of its dearest
    operations.
    """
    return [
        (path.stem, _read(_operations, path, amiss) or [])
        for path in sorted(folder.glob("step_*.json"))
    ]


def _operations(path: Path) -> list[tuple[str, ...]]:
    """Read the lines of such a table. Raises ValueError if the file is damaged."""
    found = untrusted.read_json(path, list)
    try:
        return [
            (
                each["operation"],
                f"{each['share']:.0%}",
                f"{each['cpu_s']:.3f}",
                f"{each['gpu_s']:.3f}",
                each["calls"],
            )
            for each in found
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


# -----------------------------------------------------------------------------------------------------------
# curves
@dataclass(frozen=True)
class Curve:
    """One metric over the steps, as the template draws it. Places are in the units of an SVG
    picture of this size.
    """

    WIDTH, HEIGHT = 330, 170
    LEFT, RIGHT, TOP, BOTTOM = 56, 322, 24, 152  # where the axes are

    name: str
    about: str
    last: int  # step
    ticks: list[tuple[float, str]]  # heights of the grid's lines, and their values
    points: str  # as an SVG attribute
    smooth: str
    # the places of single points: of held-out scores, and where there is one alone
    dots: list[tuple[float, float]]
    # 95 % intervals of held-out scores: x, and the heights of the two ends
    errors: list[tuple[float, float, float]]
    collapse: tuple[float, int] | None  # the place of the collapse on the x axis, and its step
    is_log: bool


def curves(rows: list[dict], custom: dict[str, Metric]) -> list[Curve]:
    """Return one curve per metric that the run has, held-out scores and the user's own metrics
    last. `custom` has the definitions of the latter."""
    recorded = {name for row in rows for name, value in row.items() if is_finite(value)}
    names = [(name, log) for name, log in CURVES if name in recorded]
    for family in ("eval/*/avg@*", "custom/*"):
        names += [(name, False) for name in sorted(recorded) if fnmatchcase(name, family)]
    return [
        curve(rows, custom.get(name) or replace(lookup(name), name=name), log)
        for name, log in names
    ]


def curve(rows: list[dict], metric: Metric, log: bool) -> Curve:
    """Return the curve of one metric. That of the reward also has the smoothed curve and the
    collapse. A held-out score has points with 95 % intervals over its problems, on an axis from 0.
    """
    found = [row for row in rows if is_finite(row.get(metric.name))]
    steps, values = [row["step"] for row in found], [row[metric.name] for row in found]
    log = log and min(values) > 0
    drawn = [math.log10(value) if log else value for value in values]
    low, high, last = min(drawn), max(drawn), max(*steps, 1)
    scores: list[tuple[int, float, float]] = []  # step, and the ends of the interval
    if is_score := fnmatchcase(metric.name, "eval/*/avg@*"):
        stderr = f"{metric.name.rpartition('/')[0]}/stderr"
        for row, value in zip(found, values, strict=True):
            half = 1.96 * row[stderr] if is_finite(row.get(stderr)) else 0.0
            scores.append((row["step"], max(0.0, value - half), value + half))
        low = min(0.0, low)
        high = max([high, *(top for _, _, top in scores)])

    def x(step: int) -> float:
        return round(Curve.LEFT + (Curve.RIGHT - Curve.LEFT) * step / last, 1)

    def y(value: float) -> float:
        # a metric that never changes is in the middle
        share = (high - value) / (high - low) if high > low else 0.5
        return round(Curve.TOP + (Curve.BOTTOM - Curve.TOP) * share, 1)

    def line(series: list[float]) -> str:
        return " ".join(f"{x(step)},{y(value)}" for step, value in zip(steps, series, strict=True))

    grid = [low, (low + high) / 2, high] if high > low else [low]
    reward = metric.name == "reward/mean"
    at = collapse(values) if reward else None
    dots = [(x(step), y(value)) for step, value in zip(steps, drawn, strict=True)]
    return Curve(
        name=metric.name,
        about=f"{metric.name}: {metric.meaning}" + f" [{metric.unit}]" * bool(metric.unit),
        last=last,
        ticks=[(y(value), f"{10**value if log else value:.3g}") for value in grid],
        points=line(drawn),
        smooth=line(levels(values)[0].tolist()) if reward else "",
        dots=dots if is_score or len(found) == 1 else [],
        errors=[(x(step), y(bottom), y(top)) for step, bottom, top in scores if top > bottom],
        collapse=None if at is None else (x(steps[at]), steps[at]),
        is_log=log,
    )
