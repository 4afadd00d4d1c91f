"""What did the runs find? Every figure that they permit, a table, and a verdict on each claim.

    gspo figures runs/effect beside=[runs/effect_comfortable,runs/effect_range]

`make reproduce` ends with this command, and `make figures` repeats it. Its first picture,
fig_contrast, shows the runs and then the studies of `beside`. In `make reproduce` these are the
paper's comparison near the rate at which training breaks, the same at a comfortable rate, and a
narrower clip range for GRPO, which may explain the difference. The differences in the studies of
`recorded` are printed only.

Prints the differences, a table, the findings in words and the paths of the figures. The same text
goes to <out>/summary.md. A claim that is not seen is reported as not seen. The criteria stand in
analysis/claims.py and analysis/stability_claims.py, one docstring per claim.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gspo.analysis import (
    choosing,
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
from gspo.analysis.blocks import markdown_table
from gspo.analysis.load import Data
from gspo.analysis.stats import START, WINDOW, number
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.io.arguments import command_options, option
from gspo.io.escaping import escape_markdown
from gspo.io.files import replace_text

ESCAPED = re.compile(r"\\([^\w\s])")  # escapes that Markdown needs and a terminal does not
FIGURES = (fig1_stability, fig2_clipping, fig3_routing_replay, fig_efficiency, fig_routing)


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this command."""

    beside: tuple[str, ...] = option((), "other studies, for the figure contrast")
    recorded: tuple[str, ...] = option((), "recorded studies, whose differences are printed")


def main() -> None:
    options = command_options(Options, __doc__)
    data = script.read(options, notes=None)
    for study in (*options.beside, *options.recorded):
        script.check_one_study(study)
    other_studies = [load.load([study], options.where) for study in options.beside]
    recorded = [load.load([study], options.where) for study in options.recorded]
    paths, left_out = draw_all(data, options.out, options, other_studies)
    text = "\n".join(summary(data, paths, left_out, other_studies, recorded)) + "\n"
    file = options.out / "summary.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, text)
    print(ESCAPED.sub(r"\1", text) + f"\nThe same in {file}")


def draw_all(
    data: Data,
    out: Path,
    options: FigureOptions = DEFAULTS,
    other_studies: Sequence[Data] = (),
) -> tuple[list[Path], list[str]]:
    """Draw the contrast with the other studies, and then the figures that the runs permit.

    Returns their paths, and a reason for each figure that was left out.
    """
    paths = []
    left_out = []
    if other_studies:
        studies = fig_contrast.completed([data, *other_studies])
        reason = fig_contrast.why_not_drawn(studies)
        if reason is None:
            paths += fig_contrast.draw(studies, out, options)
        else:
            left_out.append(f"fig_contrast left out: {reason}")
    for figure in FIGURES:
        reason = figure.why_not_drawn(data)
        if reason is None:
            paths += figure.draw(data, out, options)
        else:
            left_out.append(f"{figure.__name__.rpartition('.')[2]} left out: {reason}")
    return paths, left_out


def summary(
    data: Data,
    paths: list[Path],
    left_out: list[str],
    other_studies: Sequence[Data] = (),
    recorded: Sequence[Data] = (),
) -> list[str]:
    """Return the lines of the whole text, in Markdown that also reads well in a terminal."""
    lines = ["# What the runs show", ""]
    lines += [escape_markdown(f"Note: {note}") for note in data.notes]
    studies = fig_contrast.completed([data, *other_studies])
    if other_studies and fig_contrast.why_not_drawn(studies) is None:
        lines += [
            "## The studies beside each other",
            "",
            "Paired differences of the training reward over the last half of the batches, in the "
            "order of fig_contrast.",
            "",
            *fig_contrast.table(studies),
            "",
        ]
    if recorded:
        lines += [
            "## Recorded studies, which were not run now",
            "",
            "experiments/STUDIES.md has their questions and settings.",
            "",
            *recorded_table(recorded),
            "",
        ]
    if other_studies or recorded:
        lines += ["## The runs", ""]
    lines += [escape_markdown(load.describe(data, data.arms)), "", *table(data), ""]
    lines += [
        f"Means over seeds. Start: mean of the first {START} batches; end: of the last {WINDOW}.",
        "Held-out scores: first -> last evaluation of each seed. Clipped tokens and routing "
        "consistency: mean over all batches.",
        "",
        "## The paper's claims",
        "",
        "Intervals are 95 %. A verdict takes interval and exact p, so 6 seeds or more:",
        "fewer point to something (analysis/verdicts.py).",
        "",
    ]
    if not any(run.moe for run in data.runs):
        lines += [
            "These models are dense: what the paper claims of MoE models and Routing Replay is not "
            "judged.",
            "",
        ]
    judged = claims.all_claims(data)
    if not judged:
        reason = choosing.choose_one(data) or "the arms that they compare are not there"
        lines.append(f"- None can be judged: {reason}.")
    for claim in judged:
        lines.append(f"- {escape_markdown(claim.claim)} ({claim.where})")
        lines.append(f"  - here: {escape_markdown(claim.finding)}")
        lines.append(f"  - **{escape_markdown(claim.verdict)}**")
    lines += ["", "## Figures", ""]
    lines += [f"- {escape_markdown(line)}" for line in (*paths, *left_out)]
    return lines


def table(data: Data) -> list[str]:
    """Return the table's lines, with aligned columns: a row per quantity and a column per arm."""
    columns = pd.DataFrame({arm: entries(data, arm) for arm in data.arms})
    return markdown_table([["", *data.arms], *columns.itertuples(name=None)])


def recorded_table(recorded: Sequence[Data]) -> list[str]:
    """Return a Markdown row per recorded study and pair of arms, with the difference of rewards."""
    rows = [fig_contrast.TABLE_HEAD]
    for data in recorded:
        run = data.runs[0]
        rate = fig_contrast.scientific(run.settings.get("optim.lr"))
        rows += fig_contrast.difference_rows(data, f"{run.study}, learning rate {rate}")
    return markdown_table(rows)


def entries(data: Data, arm: str) -> dict[str, str]:
    """Return an arm's column: its rewards, scores, clipped share and cost; "-" if unreported."""
    reward = data.table(arm, "reward/mean")
    start = reward.head(START).mean().mean()
    runs = data.of(arm)
    end = pd.Series([run.last_rewards(WINDOW).mean() for run in runs]).mean()
    batches = sorted({run.last for run in runs})
    active = data.table(arm, "clip/token_active")
    outside = data.table(arm, "clip/token_outside")
    consistency = data.table(arm, "routing/consistency")
    column = {
        "seeds": ", ".join(str(run.seed) for run in runs),
        "batches": ", ".join(map(str, batches)),
        "reward, start": number(start, ".3f"),
        "reward, end": number(end, ".3f"),
        "gain": number(end - start, "+.3f"),
        "clipped tokens, active": number(mean(active), ".2g"),
        "clipped tokens, outside": number(mean(outside), ".2g"),
        "routing consistency": number(mean(consistency), ".3f"),
    }
    for name in claims.scores(data) + data.metrics("eval/elo")[:1]:
        scores = data.table(arm, name, first_step=0)
        # a run that ended when it collapsed has its own last score
        first = scores.bfill().iloc[0].mean()
        last = scores.ffill().iloc[-1].mean()
        form = ".0f" if name == "eval/elo" else ".3f"
        column[name] = "-"
        if not math.isnan(last):
            column[name] = f"{first:{form}} -> {last:{form}}"
    flops = total(data.table(arm, "compute/flops"))
    minutes = total(data.table(arm, "compute/seconds")) / 60
    column["training compute, FLOPs"] = number(flops, ".2e")
    column["training time, minutes"] = number(minutes, ".1f")
    return column


def mean(values: pd.DataFrame) -> float:
    """Return the mean over batches and seeds, or NaN if nothing was reported."""
    return float(values.mean().mean())


def total(cumulative: pd.DataFrame) -> float:
    """Return the last value of a running total, averaged over seeds."""
    return float(cumulative.max().mean())


if __name__ == "__main__":
    script.command(main)
