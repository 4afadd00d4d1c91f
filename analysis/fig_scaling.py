"""Scaling: what does a training step cost against response length, batch, width and experts?

    gspo figure scaling runs/benchmarks/scaling.json
    python experiments/benchmark.py curves=true      # measures and draws

Expected: seconds grow as the tokens do, so seconds per token stay level until attention shows at
the longest responses. With the model's width, seconds grow more slowly than the arithmetic, which
grows as the square. With the number of experts they hardly grow, since a token visits the same few.
Memory stays level except for the tensors of a micro-batch. Prints a Markdown table of the same
numbers with the exponents between points. Writes fig_scaling.pdf and .png.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from gspo.analysis import script, style
from gspo.analysis.arm_styles import BLUE, VERMILION
from gspo.analysis.blocks import markdown_table
from gspo.analysis.runs import RunsError
from gspo.analysis.style import FigureOptions
from gspo.io.arguments import command_options, option
from gspo.tracking import foreign_options

ROWS = {"total_s": "seconds per step", "peak_memory_mib": "peak memory (MiB)"}
# by number of threads: line, marker, colour
THREAD_STYLES = {1: ("-", "o", BLUE), 2: ("--", "s", VERMILION)}
REFUSED = (
    foreign_options.REFUSED
    | script.NO_CURVES
    | {
        "seeds": "it measures time, once for each point",
        "where": "it reads no runs",
    }
)
CAPTION = (
    "One training step, rollout to diagnostics, of a Qwen3-MoE with 6 layers on a CPU; one thing "
    "changed at a time around 64 responses of 128 tokens, width 64, 16 experts of which a token "
    "visits 2 (lengths: 32 responses; widths: 64 tokens)."
)
# the points of every curve and number of threads, sorted by x
Lines = dict[tuple[str, int], list[dict]]


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    paths: tuple[str, ...] = option(meaning="the file of the benchmark")


# what every point of the benchmark's file has
NEEDED = ("curve", "threads", "x", "tokens", "total_s", "rollout_s", "update_s", "peak_memory_mib")


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    if len(options.paths) > 1:
        raise RunsError(f"the figure is of one file, and {len(options.paths)} are given")
    path = Path(options.paths[0])
    if not path.is_file():
        problem = "is a folder, not the benchmark's file" if path.is_dir() else "is not there"
        raise RunsError(
            f"{path} {problem}; make one with `python experiments/benchmark.py curves=true`"
        )
    try:
        records = json.loads(path.read_text(encoding="utf-8"))["points"]
        check_records(records)
    except (ValueError, KeyError, TypeError) as error:
        raise RunsError(f"{path} was not written by the benchmark ({error})") from None
    paths = draw(records, options.out, options)
    script.print_lines(table(records), paths)


def check_records(records: list[dict]) -> None:
    """Raise ValueError unless every point has all numbers, and every curve is of one thread too."""
    if not records:
        raise ValueError("it has no points")
    for record in records:
        missing = [name for name in NEEDED if name not in record]
        if missing:
            raise ValueError(f"a point has no {missing[0]}")
    points = lines(records)
    for curve, _ in points:
        if (curve, 1) not in points:
            raise ValueError(f"the curve {curve!r} was not measured with one thread")


def lines(records: list[dict]) -> Lines:
    """Return the points of every curve and number of threads, sorted by x."""
    points: Lines = {}
    for record in sorted(records, key=lambda record: record["x"]):
        key = (record["curve"], record["threads"])
        points.setdefault(key, []).append(record)
    return points


def exponent(points: list[dict], key: str) -> float:
    """Return d log y / d log x between the last two points; 1 means linear growth."""
    a, b = points[-2:]
    growth = b[key] / a[key]
    x_growth = b["x"] / a["x"]
    return math.log(growth) / math.log(x_growth)


def table(records: list[dict]) -> list[str]:
    """Return the numbers as a Markdown table."""
    head = ["curve", "threads", "x", "s/step", "rollout", "update", "microseconds/token", "MiB"]
    rows = [[*head, "exponent of s/step"]]
    for (curve, threads), points in lines(records).items():
        for index, point in enumerate(points):
            row = [curve, threads, f"{point['x']:,}"]
            row += [f"{point[name]:.2f}" for name in ("total_s", "rollout_s", "update_s")]
            row.append(f"{point['total_s'] / point['tokens'] * 1e6:.0f}")
            row.append(f"{point['peak_memory_mib']:,.0f}")
            row.append(f"{exponent(points[: index + 1], 'total_s'):.2f}" if index else "")
            rows.append(row)
    return markdown_table(rows)


def draw(records: list[dict], out: Path, options: FigureOptions) -> list[Path]:
    """Draw a column per curve, with time above and memory below."""
    points = lines(records)
    curves = list(dict.fromkeys(curve for curve, _ in points))
    figure = style.canvas(4.2, options)
    axes = figure.subplots(
        len(ROWS),
        len(curves),
        squeeze=False,
        sharex="col",
        sharey="row",
    )
    for column, curve in enumerate(curves):
        for ax, key in zip(axes[:, column], ROWS, strict=True):
            draw_panel(ax, points, curve, key)
        axes[-1, column].set_xlabel(curve)
    for row, label in enumerate(ROWS.values()):
        axes[row, 0].set_ylabel(label)
    axes[0, 0].legend(fontsize=8)
    return style.save(figure, out, "fig_scaling", CAPTION, options)


def draw_panel(ax: Axes, points: Lines, curve: str, key: str) -> None:
    """Draw a quantity of a curve, a line per number of threads."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    for threads, (line, marker, colour) in THREAD_STYLES.items():
        measured = points.get((curve, threads))
        if measured:
            label = f"{threads} thread{'s' if threads > 1 else ''}"
            x = [point["x"] for point in measured]
            y = [point[key] for point in measured]
            ax.plot(
                x,
                y,
                line,
                color=colour,
                marker=marker,
                ms=3.5,
                label=label,
            )
    single_thread = points[curve, min(THREAD_STYLES)]
    x = [point["x"] for point in single_thread]
    if key == "total_s":
        first = single_thread[0]
        linear = [first[key] * value / first["x"] for value in x]
        ax.plot(x, linear, color=style.MUTED, lw=0.8, ls=":", label="linear")
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.minorticks_off()
    ax.set_xticks(x)
    ax.tick_params(axis="x", labelsize=7, rotation=45)


if __name__ == "__main__":
    script.command(main)
