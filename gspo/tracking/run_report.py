"""Makes the page of a run: report.html, one HTML file that opens from disk without a network.

The page describes the run in words and answers the three questions of stability. It shows curves,
warnings, the best and worst responses of the batch that was saved last, time and cost, and the
settings. Everything comes from the run directory's files. So the page can be made at any time, also
of a run that is under way or was killed.
"""

import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from gspo.io import untrusted
from gspo.io.files import (
    CONTINUATIONS_FILE,
    ENDED_EARLY,
    METRICS_FILE,
    SETTINGS_FILE,
    check_run_directory,
    read_events,
    read_status,
    replace_text,
)
from gspo.io.rows import read_rows
from gspo.tracking.collapse import best, collapse, is_finite
from gspo.tracking.curves import curves
from gspo.tracking.episodes import reward, turns_of
from gspo.tracking.metrics import HELD_OUT_MEANS, custom_metrics, stderr_of
from gspo.tracking.monitor import stability_report
from gspo.tracking.pages import TEMPLATES, fill
from gspo.tracking.rounding import floor_of_run, mismatch_of_run
from gspo.tracking.step_excerpts import recorded_section, write_newest_pages

PAGE = "report.html"
RESPONSES = 3  # the number of best responses that are shown, and of worst responses
SECONDS = {
    "time/rollout_s": "sampling",
    "time/environment_s": "environments, a part of sampling",
    "time/score_s": "grading",
    "time/behaviour_s": "log-probs of the sampling weights",
    "time/sync_s": "sending the weights to the engine",
    "time/train_s": "training",
    "time/record_s": "recording steps for replay",
    "time/eval_s": "evaluation",
    "time/checkpoint_s": "checkpoints",
    "time/monitor_s": "monitor",
}


def write_page(folder: Path) -> Path:
    """Write the page of a run directory and those of its newest recorded steps.

    Returns the path of the run's page. Raises ValueError if `folder` is no run directory."""
    check_run_directory(folder)
    problems: list[str] = []
    write_newest_pages(folder, _read, problems)
    replace_text(folder / PAGE, page(folder, problems))
    return folder / PAGE


def page(folder: Path, known_problems: Sequence[str] = ()) -> str:
    """Return the page's HTML.

    `known_problems` are reasons why other pages could not be written, which this page tells.
    Raises ValueError if the settings cannot be read. The page names other files that cannot be
    read."""
    settings = untrusted.read_yaml(folder / SETTINGS_FILE)
    problems = list(known_problems)  # why files could not be read
    rows = _read(read_rows, folder / METRICS_FILE, problems) or []
    events = _read(read_events, folder / "monitor.jsonl", problems) or []
    custom = _read(custom_metrics, folder, problems) or {}
    status = read_status(folder)
    batches = (folder / "rollouts").glob("step_*.jsonl")
    batch = max(batches, key=lambda path: (len(path.name), path.name), default=None)
    subtitle = _subtitle(folder, settings, problems)
    responses = _read(_graded, batch, problems) if batch else None
    values = {
        "name": folder.name,
        "subtitle": subtitle,
        "stability": stability_report(rows, status.get("how", "")).splitlines(),
        "curves": curves(rows, custom) if len(rows) > 2 else [],
        "events": [(event["step"], event["kind"], event["text"]) for event in events],
        "batch": batch and batch.name,
        "episodes": _episodes(rows),
        "responses": _best_and_worst(responses or []),
        "turns_of": turns_of,
        "reward": reward,
        "cost": _cost(rows),
        "recorded": recorded_section(folder, _read, problems),
        "profiles": _profiles(folder / "profile", problems),
        "settings": yaml.safe_dump(settings, sort_keys=False),
    }
    story = _story(settings, rows, status) + _continuations(folder, problems)
    values["story"] = story + [
        f"A file is left out: {problem}" for problem in dict.fromkeys(problems)
    ]
    title = f"{_value(settings, 'study')}: {folder.name}"
    return fill(TEMPLATES / "run_report.html.j2", title, values)


def _read(reader: Callable[[Path], Any], path: Path, problems: list[str]) -> Any:
    """Return a file of the run as `reader` reads it, None if it does not exist or cannot be read.

    If it cannot be read, the reason is added to `problems`."""
    try:
        return reader(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return None


def _value(tree: object, key: str, unknown: object = "unknown") -> object:
    """Return a nested mapping's value by its dotted key, `unknown` if it has none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return unknown if tree is None else tree


def _subtitle(folder: Path, settings: dict, problems: list[str]) -> str:
    """Return study, objective, model, seed, commit and versions in one line."""
    code = _read(untrusted.read_json, folder / "code.json", problems) or {}
    changed = ", with changed files" if code.get("changed_files") else ""
    objective = _value(settings, "options.objective", _value(settings, "objective.name"))
    words = [
        f"study {_value(settings, 'study')}",
        f"objective {objective}",
        f"model {_value(settings, 'model.name')}",
    ]
    varied = code.get("varied")
    if isinstance(varied, str) and varied:
        words.append(f"varied in its sweep: {varied}")
    words += [
        f"seed {_value(settings, 'seed')}",
        f"commit {str(code.get('commit') or 'unknown')[:10]}{changed}",
    ]
    if any(folder.glob("code.[0-9]*.json")):
        words[-1] += " (begun with other code: code.1.json)"
    for package in ("torch", "transformers"):
        version = _value(code, f"versions.{package}", "")
        if version:
            words.append(f"{package} {version}")
    return ", ".join(words)


def _story(settings: dict, rows: list[dict], status: dict) -> list[str]:
    """Return sentences about the run's course and results."""
    batches = [row for row in rows if row["step"] > 0]
    step = rows[-1]["step"] if rows else 0
    reason = f": {status['reason']}" if status.get("reason") else ""
    end = _ended(status.get("how", ""))
    lines = [f"The run {end} at step {step} of {_value(settings, 'steps')}{reason}."]
    with_reward = [row for row in batches if is_finite(row.get("reward/mean"))]
    rewards = [row["reward/mean"] for row in with_reward]
    if rewards:
        first = rewards[:5]
        last = rewards[-10:]
        peak, _ = best(rewards)
        lines.append(
            f"The reward went from {sum(first) / len(first):.3f} (first {len(first)} batches) "
            f"to {sum(last) / len(last):.3f} (last {len(last)}); "
            f"the highest smoothed value was {peak:.3f}."
        )
        collapse_index = collapse(rewards)
        if collapse_index is not None:
            lines.append(
                f"It collapsed at step {with_reward[collapse_index]['step']} by the registered rule "
                "(gspo/tracking/collapse.py)."
            )
    lines += filter(None, (floor_of_run(batches), mismatch_of_run(batches)))
    metrics = {name for row in rows for name in row}
    held_out = fnmatch.filter(metrics, HELD_OUT_MEANS)
    return lines + [_held_out(rows, name) for name in sorted(held_out)]


def _continuations(folder: Path, problems: list[str]) -> list[str]:
    """Return sentences about continuations and rollbacks, from the files that recorded them."""
    lines = []
    continuations = _read(read_rows, folder / CONTINUATIONS_FILE, problems) or []
    if continuations:
        times = "once" if len(continuations) == 1 else f"{len(continuations)} times"
        steps = ", ".join(str(row["step"]) for row in continuations)
        lines.append(f"It was continued {times}, from the checkpoint of step {steps}.")
    rollbacks = _read(
        lambda path: untrusted.read_json(path, list), folder / "rollbacks.json", problems
    )
    for rollback in rollbacks or []:
        lines.append(
            f"The monitor took it back from step {_value(rollback, 'from')} "
            f"to step {_value(rollback, 'to')}, at a lower learning rate."
        )
    if (folder / "superseded").exists():
        lines.append("What it had written beyond the step that it went on from is in superseded/.")
    return lines


def _ended(how: str) -> str:
    """Return a run's status as the predicate of a sentence."""
    words = {
        "finished": "finished",
        ENDED_EARLY: "was ended by a callback",
        "stopped": "was stopped",
        "collapsed": "was ended by the monitor",
        "failed": "failed",
    }
    return words.get(how, "has no end yet: it is under way, or was killed,")


def _held_out(rows: list[dict], name: str) -> str:
    """Return a sentence with the first and the last score of a held-out set.

    The last score has its 95 % interval over the problems, which is ±1.96 standard errors. Equal
    scores of all problems have none, since they say nothing of other problems."""
    scored = [row for row in rows if is_finite(row.get(name))]
    if not scored:
        return f"{name}: no score"
    first = scored[0]
    last = scored[-1]
    error = last.get(stderr_of(name))
    interval = ""
    if is_finite(error) and error > 0:
        interval = f" ± {1.96 * error:.3f} (95 % over its problems)"
    return (
        f"{name}: {first[name]:.3f} at step {first['step']}, "
        f"{last[name]:.3f}{interval} at step {last['step']}."
    )


def _episodes(rows: list[dict]) -> list[tuple[str, ...]]:
    """Return the lines of a table of the episodes' metrics: name, mean at first, mean at last.

    The means are over the first five and the last ten batches that have the metric."""
    lines = []
    for name in sorted({name for row in rows for name in row if name.startswith("episode/")}):
        values = [row[name] for row in rows if is_finite(row.get(name))]
        means = ["", ""]
        if values:
            parts = (values[:5], values[-10:])
            means = [f"{sum(part) / len(part):.3g}" for part in parts]
        lines.append((name.removeprefix("episode/"), *means))
    return lines


def _best_and_worst(graded: list[dict]) -> list[tuple[str, dict]]:
    """Return the responses with the highest and lowest rewards, each with its kind.

    The kind is "good" or "bad", or "equal" if all rewards of the batch are the same. A truncated
    response is never good."""
    if not graded:
        return []
    ordered = sorted(graded, key=lambda response: -response["reward"])
    highest = ordered[0]["reward"]
    lowest = ordered[-1]["reward"]
    middle = (len(ordered) + 1) // 2
    highest_rewards = _of_different_problems(ordered[:middle])
    lowest_rewards = [
        r for r in _of_different_problems(ordered[middle:][::-1]) if r["reward"] < highest
    ]

    def kind(response: dict) -> str:
        if lowest == highest:
            return "equal"
        is_good = response["reward"] > lowest and response.get("verdict") != "truncated"
        return "good" if is_good else "bad"

    return [(kind(response), response) for response in [*highest_rewards, *lowest_rewards]]


def _graded(path: Path) -> list[dict]:
    """Return the responses of a saved batch that have a reward."""
    graded = []
    for response in untrusted.read_objects(path):
        reward = response.get("reward")
        if type(reward) in (int, float) and is_finite(reward):
            graded.append(response)
    return graded


def _of_different_problems(responses: list[dict]) -> list[dict]:
    """Return the first response to each problem, for at most RESPONSES problems."""
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
        lines.insert(0, ("sampling and training", f"{last['compute/seconds'] / 3600:.2f} h"))
    totals = (("compute/tokens", "tokens"), ("compute/flops", "FLOPs"))
    return lines + [(name, f"{last[key]:.3g}") for key, name in totals if is_finite(last.get(key))]


def _profiles(folder: Path, problems: list[str]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return each profiled step's name, and a table's lines of its most expensive operations."""
    return [
        (path.stem, _read(_operations, path, problems) or [])
        for path in sorted(folder.glob("step_*.json"))
    ]


def _operations(path: Path) -> list[tuple[str, ...]]:
    """Return the table's lines of a profile. Raises ValueError if the file is damaged."""
    operations = untrusted.read_json(path, list)
    try:
        return [
            (
                operation["operation"],
                f"{operation['share']:.0%}",
                f"{operation['cpu_s']:.3f}",
                f"{operation['gpu_s']:.3f}",
                operation["calls"],
            )
            for operation in operations
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
