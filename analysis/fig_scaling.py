"""Scaling: what does a training step cost against response length, batch, model width and number of
experts?

    python experiments/benchmark.py curves=true                 measures and draws
    gspo figure scaling runs/benchmarks/scaling.json

Expected: seconds grow as the tokens do, so seconds per token stay level until attention shows at
the longest responses. With the width, seconds grow more slowly than the arithmetic, which grows as
the square. With the number of experts they hardly grow, since a token visits the same few. Memory
stays level except for what a micro-batch holds. Prints a Markdown table of the same numbers with
the exponents between points; writes fig_scaling.pdf and .png.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from gspo.analysis import script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.looks import BLUE, VERMILION
from gspo.analysis.style import View
from matplotlib.ticker import NullLocator, ScalarFormatter

ROWS = (("total_s", "seconds per step"), ("peak_memory_mib", "peak memory (MiB)"))
LINES = {1: ("-", "o", BLUE), 2: ("--", "s", VERMILION)}  # by number of threads
REFUSED = script.NO_CURVES | {"seeds": "it measures time, once for each point"}


def main() -> None:
    args = script.parser(__doc__, refused=REFUSED).parse_args()
    path = Path(args.runs[0])
    if not path.is_file():
        sys.exit(
            f"error: {path} is not there; make it with `python experiments/benchmark.py curves=true`"
        )
    records = json.loads(path.read_text(encoding="utf-8"))["points"]
    print(
        "\n".join(["", *table(records), "", *map(str, draw(records, args.out, script.view(args)))])
    )


def lines(records: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """Return the points of every curve and number of threads, sorted by x."""
    found: dict[tuple[str, int], list[dict]] = {}
    for record in sorted(records, key=lambda r: r["x"]):
        found.setdefault((record["curve"], record["threads"]), []).append(record)
    return found


def exponent(points: list[dict], key: str) -> float:
    """Return d log y / d log x between the last two points; 1 means linear growth."""
    a, b = points[-2:]
    return math.log(b[key] / a[key]) / math.log(b["x"] / a["x"])


def table(records: list[dict]) -> list[str]:
    """Return the numbers as a Markdown table."""
    head = (
        "curve",
        "threads",
        "x",
        "s/step",
        "rollout",
        "update",
        "microseconds/token",
        "MiB",
        "exponent of s/step",
    )
    rows = [head]
    for (curve, threads), points in lines(records).items():
        for i, p in enumerate(points):
            slope = f"{exponent(points[: i + 1], 'total_s'):.2f}" if i else ""
            seconds = [f"{p[name]:.2f}" for name in ("total_s", "rollout_s", "update_s")]
            token, memory = (
                f"{p['total_s'] / p['tokens'] * 1e6:.0f}",
                f"{p['peak_memory_mib']:,.0f}",
            )
            rows.append((curve, threads, f"{p['x']:,}", *seconds, token, memory, slope))
    return aligned_table(rows)


def draw(records: list[dict], out: Path, view: View) -> list[Path]:
    """Draw a column per curve, with time above and memory below."""
    found = lines(records)
    curves = list(dict.fromkeys(curve for curve, _ in found))
    figure = style.canvas(4.2, view)
    axes = figure.subplots(len(ROWS), len(curves), squeeze=False, sharex="col", sharey="row")
    for column, curve in enumerate(curves):
        for row, (key, label) in enumerate(ROWS):
            ax = axes[row][column]
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            for threads, (dash, mark, hue) in LINES.items():
                points = found.get((curve, threads))
                if points:
                    text = f"{threads} thread{'s' * (threads > 1)}"
                    ys = [p[key] for p in points]
                    ax.plot(
                        [p["x"] for p in points],
                        ys,
                        dash,
                        color=hue,
                        marker=mark,
                        ms=3.5,
                        label=text,
                    )
            if row == 0:
                first = found[curve, min(LINES)][0]
                xs = [p["x"] for p in found[curve, min(LINES)]]
                ax.plot(
                    xs,
                    [first[key] * x / first["x"] for x in xs],
                    color=style.MUTED,
                    lw=0.8,
                    ls=":",
                    label="linear",
                )
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xticks([p["x"] for p in found[curve, min(LINES)]])
            ax.tick_params(axis="x", labelsize=7, rotation=45)
            if row:
                ax.set_xlabel(curve)
            if not column:
                ax.set_ylabel(label)
    axes[0][0].legend(fontsize=8)
    return style.save(
        figure,
        out,
        "fig_scaling",
        "One training step, rollout to diagnostics, of a Qwen3-MoE with 6 layers on a CPU; one thing changed at a time "
        "around 64 responses of 128 tokens, width 64, 16 experts of which a token visits 2 (lengths: 32 responses; "
        "widths: 64 tokens).",
        view,
    )


if __name__ == "__main__":
    script.command(main)
