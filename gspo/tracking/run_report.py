"""Makes the page of a run: report.html, one HTML file that opens from disk without a network.

It says in words what happened, answers the three questions of stability, and shows curves, warnings, the best and worst
responses of the batch that was saved last, time and cost, and the settings. Everything comes from the run directory's
files, so the page can be made of a run under way, of one that was killed, and again at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from gspo.core import untrusted
from gspo.core.escaping import head, in_html
from gspo.core.files import CONTINUED, read_events, read_rows, read_status, replace_text
from gspo.tracking.collapse import collapse, is_finite, levels
from gspo.tracking.metrics import Metric, custom_metrics, lookup
from gspo.tracking.monitor import stability_report

PAGE = "report.html"
CURVES = (  # each metric, and whether its axis is logarithmic; metrics that a run does not have are left out
    ("reward/mean", False), ("policy/entropy", False), ("optim/grad_norm", True), ("clip/token_active", True),
    ("routing/consistency", False), ("length/mean", False), ("length/truncated", False), ("mismatch/k3", True),
    ("ratio/ess_token", False), ("group/zero_variance", False),
)  # fmt: skip
RESPONSES = 3  # how many of the best responses are shown, and of the worst
SECONDS = {
    "time/rollout_s": "sampling",
    "time/score_s": "grading",
    "time/train_s": "training",
    "time/eval_s": "evaluation",
    "time/checkpoint_s": "checkpoints",
    "time/monitor_s": "monitor",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 330, 170, 56, 24, 18  # sizes of a curve, in SVG's units
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; font-size: .87rem }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: .82rem }
.muted { color: #6b6b6b }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem }
.good { border-left: 4px solid #009e73; padding-left: .6rem; margin: .6rem 0 }
.bad { border-left: 4px solid #d55e00; padding-left: .6rem; margin: .6rem 0 }
"""


def write_page(folder: Path) -> Path:
    """Write the page of a run directory, and return its path. Raises ValueError if `folder` is no run directory."""
    if not (folder / "settings.yaml").exists():
        raise ValueError(f"{folder} has no settings.yaml: name a run directory, such as runs/STUDY/RUN")
    replace_text(folder / PAGE, page(folder))
    return folder / PAGE


def page(folder: Path) -> str:
    """Return the page's HTML. Raises ValueError if the settings cannot be read; other files that cannot be read are
    named on the page."""
    settings, amiss = untrusted.read_yaml(folder / "settings.yaml"), []
    rows = _read(read_rows, folder / "metrics.jsonl", amiss) or []
    status, title = read_status(folder), f"{_value(settings, 'study')}: {folder.name}"
    subtitle, events = _subtitle(folder, settings, amiss), _read(read_events, folder / "monitor.jsonl", amiss) or []
    story = _story(settings, rows, status) + _went_on(folder, amiss)
    responses, custom = _responses(folder, amiss), _read(custom_metrics, folder, amiss) or {}
    sections = [
        ("What happened", _list([*story, *(f"A file is left out: {what}" for what in amiss)])),
        ("Is it stable?", _list(stability_report(rows, status.get("how", "")).splitlines())),
        (
            "Curves",
            f'<div class="curves">{"".join(curves(rows, custom))}</div>' if len(rows) > 2 else "<p>too few rows</p>",
        ),
        ("Warnings", _warnings(events)),
        ("Responses", responses),
        ("Time and cost", _cost(rows)),
        ("Settings", _settings(settings)),
    ]
    body = "".join(f"<h2>{name}</h2>{text}" for name, text in sections)
    return (
        head(title, STYLE) + f'<h1>{in_html(folder.name)}</h1><p class="muted">{in_html(subtitle)}</p>{body}</html>\n'
    )


def _read(how: Callable[[Path], Any], path: Path, amiss: list[str]) -> Any:
    """Read a file of the run with `how`; None if it is not there or cannot be read. The latter is noted in `amiss`."""
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


def _list(lines: list[str]) -> str:
    """Return lines as an HTML list."""
    return "<ul>" + "".join(f"<li>{in_html(line)}</li>" for line in lines) + "</ul>"


def _table(rows: list[list[object]], names: tuple[str, ...] = ()) -> str:
    """Return rows as an HTML table; `names` are its column heads."""
    top = "<tr>" + "".join(f"<th>{in_html(name)}</th>" for name in names) + "</tr>" if names else ""
    lines = ("".join(f"<td>{in_html(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + top + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _subtitle(folder: Path, settings: dict, amiss: list[str]) -> str:
    """Return study, objective, model, seed, commit and versions in one line."""
    code = _read(untrusted.read_json, folder / "code.json", amiss) or {}
    changed = ", with changed files" if code.get("changed_files") else ""
    objective = _value(settings, "options.objective", _value(settings, "objective.name"))
    words = [f"study {_value(settings, 'study')}", f"objective {objective}", f"model {_value(settings, 'model.name')}"]
    words += [f"seed {_value(settings, 'seed')}", f"commit {str(code.get('commit') or 'unknown')[:10]}{changed}"]
    versions = {name: _value(code, f"versions.{name}", "") for name in ("torch", "transformers")}
    return ", ".join([*words, *(f"{name} {version}" for name, version in versions.items() if version)])


# ------------------------------------------------------------------------------------------------------------ words
def _story(settings: dict, rows: list[dict], status: dict) -> list[str]:
    """Return what happened, in sentences."""
    batches = [row for row in rows if row["step"] > 0]
    step = rows[-1]["step"] if rows else 0
    reason = f": {status['reason']}" if status.get("reason") else ""
    lines = [f"The run {_ended(status.get('how', ''))} at step {step} of {_value(settings, 'steps')}{reason}."]
    rewards = [row["reward/mean"] for row in batches if is_finite(row.get("reward/mean"))]
    if rewards:
        first, last = rewards[:5], rewards[-10:]
        before, after, top = sum(first) / len(first), sum(last) / len(last), levels(rewards)[0].max()
        lines.append(
            f"The reward went from {before:.3f} (first {len(first)} batches) to {after:.3f} (last {len(last)}); "
            f"the highest smoothed value was {top:.3f}."
        )
        at = collapse(rewards)
        if at is not None:
            lines.append(
                f"It collapsed at step {batches[at]['step']} by the registered rule (gspo/tracking/collapse.py)."
            )
    return lines + [_held_out(rows, name) for name in sorted({n for row in rows for n in row if "/avg@" in n})]


def _went_on(folder: Path, amiss: list[str]) -> list[str]:
    """Return sentences about continuations and rollbacks, as they were recorded when they happened."""
    lines, at = [], [str(row["step"]) for row in _read(read_rows, folder / CONTINUED, amiss) or []]
    if at:
        times = "once" if len(at) == 1 else f"{len(at)} times"
        lines.append(f"It was continued {times}, from the checkpoint of step {', '.join(at)}.")
    for back in _read(lambda path: untrusted.read_json(path, list), folder / "rollbacks.json", amiss) or []:
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
    """Return the first and last score of a held-out set, the latter with its 95 % interval over the problems, which is
    ±1.96 standard errors."""
    scored = [row for row in rows if is_finite(row.get(name))]
    if not scored:
        return f"{name}: no score"
    first, last = scored[0], scored[-1]
    error = last.get(name.rsplit("/", 1)[0] + "/stderr")
    around = f" ± {1.96 * error:.3f} (95 % over its problems)" if is_finite(error) else ""
    return f"{name}: {first[name]:.3f} at step {first['step']}, {last[name]:.3f}{around} at step {last['step']}."


def _warnings(events: list[dict]) -> str:
    """Return the monitor's events as a table."""
    if not events:
        return "<p>none</p>"
    return _table([[event["step"], event["kind"], event["text"]] for event in events], ("step", "", ""))


def _responses(folder: Path, amiss: list[str]) -> str:
    """Return the best and worst responses of the rollout batch that was saved last."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    if not files:
        return "<p>none was saved</p>"
    found = sorted(_read(_graded, files[-1], amiss) or [], key=lambda r: -r["reward"])
    middle = (len(found) + 1) // 2
    best = _of_different_problems(found[:middle])
    worst = [r for r in _of_different_problems(found[middle:][::-1]) if r["reward"] < best[0]["reward"]]
    shown = [("good", response) for response in best] + [("bad", response) for response in worst]
    top = f'<p class="muted">highest and lowest reward of {in_html(files[-1].name)}</p>'
    return top + "".join(_response(kind, response) for kind, response in shown)


def _graded(path: Path) -> list[dict]:
    """Return the responses of a saved batch that have a reward; lines that cannot be read are left out."""
    found = []
    for line in untrusted.lines(path):
        try:
            response = untrusted.parse_json(line)
        except ValueError:
            continue
        if (
            isinstance(response, dict)
            and type(response.get("reward")) in (int, float)
            and is_finite(response["reward"])
        ):
            found.append(response)
    return found


def _of_different_problems(responses: list[dict]) -> list[dict]:
    """Return the first response to each problem, at most RESPONSES of them."""
    first: dict[tuple, dict] = {}
    for response in responses:
        first.setdefault((str(response.get("task")), str(response.get("prompt"))), response)
    return list(first.values())[:RESPONSES]


def _response(kind: str, response: dict) -> str:
    """Return a response with its prompt, reward and verdict; `kind` is "good" or "bad"."""
    about = f"{response.get('verdict', '')}, {response.get('length', '?')} tokens, {response.get('finish_reason', '')}"
    prompt = response.get("rendered") or response.get("prompt")  # the rendered prompt, if the file has it
    texts = f'<pre class="muted">{in_html(prompt)}</pre><pre>{in_html(response.get("response"))}</pre>'
    return f'<div class="{kind}"><b>{in_html(response["reward"])}</b> {in_html(about)}{texts}</div>'


def _cost(rows: list[dict]) -> str:
    """Return a table of seconds, tokens and FLOPs."""
    sums = {name: sum(row.get(key) or 0.0 for row in rows) for key, name in SECONDS.items()}
    lines: list[list[object]] = [[name, f"{value:.1f} s"] for name, value in sums.items() if value]
    last = rows[-1] if rows else {}
    if is_finite(last.get("compute/seconds")):
        lines.insert(0, ["all", f"{last['compute/seconds'] / 3600:.2f} h"])
    lines += [[name, f"{last[key]:.3g}"] for key, name in (("compute/tokens", "tokens"), ("compute/flops", "FLOPs"))
              if is_finite(last.get(key))]  # fmt: skip
    return _table(lines)


def _settings(settings: dict) -> str:
    """Return all settings, folded away."""
    return (
        "<details><summary>all of them</summary>"
        f"<pre>{in_html(yaml.safe_dump(settings, sort_keys=False))}</pre></details>"
    )


# ----------------------------------------------------------------------------------------------------------- curves
def curves(rows: list[dict], custom: dict[str, Metric]) -> list[str]:
    """Return one SVG curve per metric that the run has, held-out scores and the user's own metrics last. `custom` has
    the definitions of the latter."""
    names = [(name, log) for name, log in CURVES if any(is_finite(row.get(name)) for row in rows)]
    for family in ("eval/*/avg@*", "custom/*"):
        found = {name for row in rows for name in row if fnmatchcase(name, family) and is_finite(row[name])}
        names += [(name, False) for name in sorted(found)]
    return [curve(rows, custom.get(name) or replace(lookup(name), name=name), log) for name, log in names]


def curve(rows: list[dict], metric: Metric, log: bool) -> str:
    """Return the SVG curve of one metric over the steps. That of the reward also has the smoothed curve, and a dashed
    line at the collapse."""
    name, unit = metric.name, f" [{metric.unit}]" * bool(metric.unit)
    points = [(row["step"], row[name]) for row in rows if is_finite(row.get(name))]
    steps, values = [step for step, _ in points], [value for _, value in points]
    log = log and min(values) > 0
    drawn = [math.log10(value) if log else value for value in values]
    low, high = min(drawn), max(drawn)
    span, last = high - low or 1.0, max(max(steps), 1)

    def place(step: float, value: float) -> str:
        x, y = LEFT + (WIDTH - LEFT - 8) * step / last, TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / span
        return f"{x:.1f},{y:.1f}"

    def line(series: list[float], look: str) -> str:
        return f'<polyline fill="none" {look} points="{" ".join(map(place, steps, series))}"/>'

    parts = [f'<text x="0" y="12" font-weight="bold">{in_html(name)}</text>']
    for share in (0.0, 0.5, 1.0):
        value = low + span * share
        x, y = place(0, value).split(",")
        parts.append(f'<line x1="{x}" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#e5e5e5"/>')
        parts.append(
            f'<text x="{LEFT - 4}" y="{float(y) + 4}" text-anchor="end">{10**value if log else value:.3g}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 3}">0</text>')
    parts.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 3}" text-anchor="end">step {last}</text>')
    smooth = name == "reward/mean"
    parts.append(
        line(drawn, f'stroke="#0072B2" stroke-width="{1 if smooth else 1.4}" opacity="{0.4 if smooth else 1}"')
    )
    if smooth:
        parts.append(line(levels(values)[0].tolist(), 'stroke="#0072B2" stroke-width="2"'))
        if (at := collapse(values)) is not None:
            x = place(steps[at], 0).split(",")[0]
            parts.append(
                f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#D55E00" stroke-dasharray="4 3"/>'
            )
    about = f"<title>{in_html(f'{name}: {metric.meaning}{unit}')}</title>"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="10" fill="#333">{about}{"".join(parts)}</svg>'
