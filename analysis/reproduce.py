"""What did the runs find? All figures that they permit, a table, and a verdict on each of the
paper's claims.

    gspo figures runs/paper_figures --beside analysis/data/comfortable.parquet

`make reproduce` ends with this command, and `make figures` repeats it. The studies that --beside
names, here the same arms at a learning rate at which nothing is unstable, stand in fig_contrast
beside the runs.

Prints the table, the findings in words and the paths of the figures; the same text goes to
<out>/summary.md. A claim that is not seen is reported as not seen. The criteria stand in
analysis/claims.py, one docstring per claim.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from gspo.analysis import (
    claims,
    fig1_stability,
    fig2_clipping,
    fig3_routing_replay,
    fig_contrast,
    fig_efficiency,
    fig_routing,
    load,
    script,
)
from gspo.analysis.blocks import aligned_table
from gspo.analysis.load import Data
from gspo.analysis.stats import START, WINDOW, number
from gspo.analysis.style import View

from gspo.io.escaping import escape_markdown
from gspo.io.files import replace_text

ESCAPED = re.compile(r"\\([^\w\s])")  # what Markdown needs and a terminal does not


def main() -> None:
    options = script.parser(__doc__)
    options.add_argument(
        "--beside", nargs="*", default=[], metavar="STUDY", help="other studies, for fig_contrast"
    )
    args = options.parse_args()
    data = script.read(args, notes=False)
    beside = [load.load([study]) for study in args.beside]
    paths, left_out = draw_all(data, args.out, script.view(args), beside)
    text = "\n".join(summary(data, paths, left_out, beside)) + "\n"
    file = args.out / "summary.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, text)
    print(ESCAPED.sub(r"\1", text) + f"\nThe same in {file}")


def draw_all(
    data: Data, out: Path, view: View | None = None, beside: Sequence[Data] = ()
) -> tuple[list[Path], list[str]]:
    """Draw the figures that the runs permit, and the contrast with the studies beside them, if
    there are any. Returns their paths, and a reason for each figure that was left out."""
    paths, left_out = [], []
    for figure in (fig1_stability, fig2_clipping, fig3_routing_replay, fig_efficiency, fig_routing):
        why = figure.lacking(data)
        if why is None:
            paths += figure.draw(data, out, view)
        else:
            left_out.append(f"{figure.__name__.removeprefix('analysis.')} left out: {why}")
    if beside and (why := fig_contrast.lacking([*beside, data])):
        left_out.append(f"fig_contrast left out: {why}")
    elif beside:
        paths += fig_contrast.draw([*beside, data], out, view)
    return paths, left_out


def summary(
    data: Data, paths: list[Path], left_out: list[str], beside: Sequence[Data] = ()
) -> list[str]:
    """Return the lines of the whole text, in Markdown that also reads well in a terminal."""
    notes = [escape_markdown(f"Note: {note}") for note in data.notes]
    lines = [
        "# What the runs show",
        "",
        *notes,
        escape_markdown(load.describe(data, data.arms)),
        "",
    ]
    lines += [
        *table(data),
        "",
        f"Means over seeds. Start: mean of the first {START} batches; end: of the last {WINDOW}.",
    ]
    lines += [
        "Held-out scores: first -> last evaluation. Clipped tokens and routing consistency: mean over all batches.",
        "",
        "## The paper's claims",
        "",
        "Intervals are 95 %. A verdict takes interval and exact p, so 6 seeds or more:",
    ]
    lines += ["fewer point to something (analysis/verdicts.py).", ""]
    if not any(run.moe for run in data.runs):
        lines += [
            "These models are dense: what the paper claims of MoE models and Routing Replay is not judged.",
            "",
        ]
    judged = claims.all_claims(data)
    if not judged:
        lines.append(
            f"- None can be judged: {load.choose_one(data) or 'the arms that they compare are not there'}."
        )
    for claim in judged:
        found, verdict = escape_markdown(claim.found), escape_markdown(claim.verdict)
        lines += [
            f"- {escape_markdown(claim.claim)} ({claim.where})",
            f"  - here: {found}",
            f"  - **{verdict}**",
        ]
    if beside and fig_contrast.lacking([*beside, data]) is None:
        lines += ["", "## Beside other studies", "", *fig_contrast.table([*beside, data])]
    lines += ["", "## Figures", "", *(f"- {escape_markdown(line)}" for line in (*paths, *left_out))]
    return lines


def table(data: Data) -> list[str]:
    """Return the table's lines, with aligned columns: a row per quantity and a column per arm."""
    columns = {arm: entries(data, arm) for arm in data.arms}
    cells = [["", *data.arms]] + [
        [name, *(columns[arm][name] for arm in data.arms)] for name in columns[data.arms[0]]
    ]
    return aligned_table(cells)


def entries(data: Data, arm: str) -> dict[str, str]:
    """Return one arm's column: what it reached, what it clipped, and what it cost; "-" where
    nothing was reported.
    """
    reward = data.table(arm, "reward/mean")
    start, end = (
        reward.head(START).mean().mean(),
        reward.apply(lambda x: x.dropna().tail(WINDOW).mean()).mean(),
    )
    runs = data.of(arm)
    column = {
        "seeds": ", ".join(str(run.seed) for run in runs),
        "batches": ", ".join(sorted({str(run.last) for run in runs})),
        "reward, start": number(start, ".3f"),
        "reward, end": number(end, ".3f"),
        "gain": number(end - start, "+.3f"),
        "clipped tokens, active": number(mean(data.table(arm, "clip/token_active")), ".2g"),
        "clipped tokens, outside": number(mean(data.table(arm, "clip/token_outside")), ".2g"),
        "routing consistency": number(mean(data.table(arm, "routing/consistency")), ".3f"),
    }
    for name in claims.scores(data) + data.metrics("eval/elo")[:1]:
        points = data.table(arm, name, first_step=0).mean(axis=1).dropna()
        form = ".0f" if name == "eval/elo" else ".3f"
        column[name] = (
            f"{points.iloc[0]:{form}} -> {points.iloc[-1]:{form}}" if len(points) else "-"
        )
    column["training compute, FLOPs"] = number(total(data.table(arm, "compute/flops")), ".2e")
    column["training time, minutes"] = number(total(data.table(arm, "compute/seconds")) / 60, ".1f")
    return column


def mean(values: pd.DataFrame) -> float:
    """Return the mean over batches and seeds, or NaN where nothing was reported."""
    return float(values.mean().mean())


def total(cumulative: pd.DataFrame) -> float:
    """Return the last value of a running total, averaged over seeds."""
    return float(cumulative.max().mean())


if __name__ == "__main__":
    script.command(main)
