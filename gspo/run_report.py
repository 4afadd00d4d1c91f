"""The report of a run: one HTML page that opens from disk without a network.

What happened in words, the three questions of stability, curves, warnings, the best and worst responses that were saved
last, time and cost, settings. Everything comes from the run directory's files, so it can be made of a run under way, of
one that was killed, and again at any time.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path

import yaml

from gspo.collapse import collapse, known, levels
from gspo.metrics import lookup
from gspo.monitor import report
from gspo.run_files import CONTINUED, read_rows, replace_text, said

PAGE = "report.html"
CURVES = (  # metric, and whether its axis is logarithmic; those that a run has not reported are left out
    ("reward/mean", False), ("policy/entropy", False), ("optim/grad_norm", True), ("clip/token_active", True),
    ("routing/consistency", False), ("length/mean", False), ("length/truncated", False), ("mismatch/k3", True),
    ("ratio/ess_token", False), ("group/zero_variance", False),
)  # fmt: skip
RESPONSES = 3  # best ones, and as many worst ones
SECONDS = {
    "time/rollout_s": "sampling",
    "time/score_s": "grading",
    "time/train_s": "training",
    "time/eval_s": "evaluation",
    "time/checkpoint_s": "checkpoints",
    "time/monitor_s": "monitor",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 330, 170, 56, 24, 18  # of a curve, in SVG's units
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


def write(folder: Path) -> Path:
    """Make the page of a run directory. Raises ValueError if it is none."""
    if not (folder / "settings.yaml").exists():
        raise ValueError(f"{folder} has no settings.yaml: name a run directory, such as runs/STUDY/RUN")
    replace_text(folder / PAGE, page(folder))
    return folder / PAGE


def page(folder: Path) -> str:
    settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    rows = read_rows(folder / "metrics.jsonl")
    status, title = said(folder), f"{settings['study']}: {folder.name}"
    sections = [
        ("What happened", _list(_story(folder, settings, rows, status))),
        ("Is it stable?", _list(report(rows, status.get("how", "")).splitlines())),
        ("Curves", f'<div class="curves">{"".join(curves(rows))}</div>' if len(rows) > 2 else "<p>too few rows</p>"),
        ("Warnings", _warnings(folder)),
        ("Responses", _responses(folder)),
        ("Time and cost", _cost(rows)),
        ("Settings", _settings(settings)),
    ]
    body = "".join(f"<h2>{name}</h2>{text}" for name, text in sections)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_e(title)}</title><style>{STYLE}</style>'
        f'<h1>{_e(folder.name)}</h1><p class="muted">{_e(_subtitle(folder, settings))}</p>{body}</html>\n'
    )


def _e(text: object) -> str:
    """Escaped; of what a model wrote, half characters and control characters become question marks."""
    kept = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text))
    return html.escape(kept.encode(errors="replace").decode())


def _list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{_e(line)}</li>" for line in lines) + "</ul>"


def _table(rows: list[list[object]], head: tuple[str, ...] = ()) -> str:
    top = "<tr>" + "".join(f"<th>{_e(name)}</th>" for name in head) + "</tr>" if head else ""
    return (
        "<table>" + top + "".join(f"<tr>{''.join(f'<td>{_e(c)}</td>' for c in row)}</tr>" for row in rows) + "</table>"
    )


def _json(path: Path) -> dict | list:
    """A file that a run writes whole; empty if it is not there or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _subtitle(folder: Path, settings: dict) -> str:
    code = dict(_json(folder / "code.json"))
    changed = ", with changed files" if code.get("changed_files") else ""
    parts = [
        f"study {settings['study']}",
        f"objective {settings.get('options', {}).get('objective', settings['objective']['name'])}",
        f"model {settings['model']['name']}",
    ]
    parts += [f"seed {settings['seed']}", f"commit {(code.get('commit') or 'unknown')[:10]}{changed}"]
    versions = code.get("versions", {})
    return ", ".join([*parts, *(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)])


# ------------------------------------------------------------------------------------------------------------ words
def _story(folder: Path, settings: dict, rows: list[dict], status: dict) -> list[str]:
    """What happened, in sentences."""
    batches = [row for row in rows if row["step"] > 0]
    step = rows[-1]["step"] if rows else 0
    reason = f": {status['reason']}" if status.get("reason") else ""
    lines = [f"The run {_ended(status.get('how', ''))} at step {step} of {settings['steps']}{reason}."]
    rewards = [row["reward/mean"] for row in batches if known(row.get("reward/mean"))]
    if rewards:
        first, last = rewards[:5], rewards[-10:]
        before, after, top = sum(first) / len(first), sum(last) / len(last), levels(rewards)[0].max()
        lines.append(
            f"The reward went from {before:.3f} (first {len(first)} batches) to {after:.3f} (last {len(last)}); "
            f"the highest smoothed value was {top:.3f}."
        )
        at = collapse(rewards)
        if at is not None:
            lines.append(f"It collapsed at step {batches[at]['step']} by the registered rule (gspo/collapse.py).")
    lines += [_held_out(rows, name) for name in sorted({n for row in rows for n in row if "/avg@" in n})]
    return lines + _went_on(folder)


def _went_on(folder: Path) -> list[str]:
    """Continuations and rollbacks, as they were recorded when they happened."""
    lines, at = [], [str(row["step"]) for row in read_rows(folder / CONTINUED)]
    if at:
        times = "once" if len(at) == 1 else f"{len(at)} times"
        lines.append(f"It was continued {times}, from the checkpoint of step {', '.join(at)}.")
    for back in _json(folder / "rollbacks.json"):
        lines.append(
            f"The monitor took it back from step {back['from']} to step {back['to']}, at a lower learning rate."
        )
    if (folder / "superseded").exists():
        lines.append("What it had written beyond the step that it went on from is in superseded/.")
    return lines


def _ended(how: str) -> str:
    words = {
        "finished": "finished",
        "stopped": "was stopped",
        "collapsed": "was ended by the monitor",
        "failed": "failed",
    }
    return words.get(how, "has no end yet: it is under way, or was killed,")


def _held_out(rows: list[dict], name: str) -> str:
    """First and last score of a set, with its 95 % interval over the problems: ±1.96 standard errors."""
    scored = [row for row in rows if known(row.get(name))]
    if not scored:
        return f"{name}: no score"
    first, last = scored[0], scored[-1]
    error = last.get(name.rsplit("/", 1)[0] + "/stderr")
    around = f" ± {1.96 * error:.3f} (95 % over its problems)" if known(error) else ""
    return f"{name}: {first[name]:.3f} at step {first['step']}, {last[name]:.3f}{around} at step {last['step']}."


def _warnings(folder: Path) -> str:
    events = read_rows(folder / "monitor.jsonl")
    if not events:
        return "<p>none</p>"
    return _table([[event["step"], event["kind"], event["text"]] for event in events], ("step", "", ""))


def _responses(folder: Path) -> str:
    """Of the rollout batch that was saved last."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    if not files:
        return "<p>none was saved</p>"
    found = []
    for line in files[-1].read_text(errors="replace", encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    found = sorted((r for r in found if known(r.get("reward"))), key=lambda r: -r["reward"])
    middle = (len(found) + 1) // 2
    best = _of_different_problems(found[:middle])
    worst = [r for r in _of_different_problems(found[middle:][::-1]) if r["reward"] < best[0]["reward"]]
    shown = [("good", response) for response in best] + [("bad", response) for response in worst]
    top = f'<p class="muted">highest and lowest reward of {files[-1].name}</p>'
    return top + "".join(_response(kind, response) for kind, response in shown)


def _of_different_problems(responses: list[dict]) -> list[dict]:
    """The first of each problem, RESPONSES at most."""
    first: dict[tuple, dict] = {}
    for response in responses:
        first.setdefault((response.get("task"), response.get("prompt")), response)
    return list(first.values())[:RESPONSES]


def _response(kind: str, response: dict) -> str:
    about = f"{response.get('verdict', '')}, {response.get('length', '?')} tokens, {response.get('finish_reason', '')}"
    prompt = response.get("rendered") or response["prompt"]  # what the policy saw; older runs did not keep it
    texts = f'<pre class="muted">{_e(prompt)}</pre><pre>{_e(response["response"])}</pre>'
    return f'<div class="{kind}"><b>{_e(response["reward"])}</b> {_e(about)}{texts}</div>'


def _cost(rows: list[dict]) -> str:
    sums = {name: sum(row.get(key) or 0.0 for row in rows) for key, name in SECONDS.items()}
    lines: list[list[object]] = [[name, f"{value:.1f} s"] for name, value in sums.items() if value]
    last = rows[-1] if rows else {}
    if known(last.get("compute/seconds")):
        lines.insert(0, ["all", f"{last['compute/seconds'] / 3600:.2f} h"])
    lines += [[name, f"{last[key]:.3g}"] for key, name in (("compute/tokens", "tokens"), ("compute/flops", "FLOPs"))
              if known(last.get(key))]  # fmt: skip
    return _table(lines)


def _settings(settings: dict) -> str:
    return (
        f"<details><summary>all of them</summary><pre>{_e(yaml.safe_dump(settings, sort_keys=False))}</pre></details>"
    )


# ----------------------------------------------------------------------------------------------------------- curves
def curves(rows: list[dict]) -> list[str]:
    """SVG, one per metric that the run has, held-out scores last."""
    names = [(name, log) for name, log in CURVES if any(known(row.get(name)) for row in rows)]
    sets = {name for row in rows for name in row if name.startswith("eval/") and "/avg@" in name}
    return [curve(rows, name, log) for name, log in [*names, *((name, False) for name in sorted(sets))]]


def curve(rows: list[dict], name: str, log: bool) -> str:
    """One metric over the steps; of the reward the smoothed curve too, and the collapse as a dashed line."""
    points = [(row["step"], row[name]) for row in rows if known(row.get(name))]
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

    parts = [f'<text x="0" y="12" font-weight="bold">{_e(name)}</text>']
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
    about = f"<title>{_e(name)}: {_e(lookup(name).meaning)} [{_e(lookup(name).unit)}]</title>"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="10" fill="#333">{about}{"".join(parts)}</svg>'
