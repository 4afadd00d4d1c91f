"""Figure 1: does GSPO reach a higher reward and higher held-out scores than GRPO with replay?

    gspo figure stability runs/paper_figures      (run directories, or folders above them)

Expected, if the paper is right: the GSPO curve lies above from about a quarter of the compute on,
and the held-out scores follow. If no run has Routing Replay (a dense model has nothing to replay),
the rival is GRPO without it. If only one of the two arms is there, it is drawn alone. The verdict,
printed and in the caption, follows the criteria in analysis/claims.py. Writes fig1_stability.pdf
and .png. Training reward: metric reward/mean. Compute: compute/flops (gspo/tracking/metrics.py).
"""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.arm_styles import arm_style
from gspo.analysis.load import GRPO_R2, GSPO, Data
from gspo.analysis.runs import RunsError
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.analysis.verdicts import Claim, with_verdicts
from gspo.tracking.metrics import stderr_of

PAPER_ARMS = (GSPO, GRPO_R2)
BENCHMARKS = {
    "aime24": ("AIME'24", "%"),
    "livecodebench": ("LiveCodeBench", "%"),
    "codeforces": ("CodeForces", "Elo"),
}
ELO = "eval/elo"


def judged_claims(data: Data) -> list[Claim]:
    """Return the claims that this figure shows."""
    if load.why_not_comparable(data, claims.contenders(data)):
        return []
    judged = [claims.reward(data), claims.held_out(data)]
    return [claim for claim in judged if claim]


def arms_of(data: Data) -> tuple[str, ...]:
    """Return GSPO and its rival, or only the arm of the two that the runs have."""
    return tuple(arm for arm in claims.contenders(data) if arm in data.arms)


def why_not_drawn(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    arms = arms_of(data)
    return load.why_not_comparable(data, arms[:1] or claims.contenders(data))


def draw(data: Data, out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw our rewards, the paired difference and the paper's rewards above, the scores below."""
    reason = why_not_drawn(data)
    if reason:
        raise RunsError(f"fig1 {reason}")
    arms = arms_of(data)
    if len(arms) == 2:
        no_difference = load.why_not_comparable(data, arms)
    else:
        no_difference = f"only {arms[0]} is there"
    scores = claims.scores(data) + data.metrics(ELO)[:1]
    if scores:
        figure = style.canvas(7.6, options)
        upper, middle, lower = figure.subfigures(3, 1, height_ratios=[1.55, 1, 0.9])
    else:
        figure = style.canvas(3.5, options)
        upper = figure
    if no_difference:
        reward_panel, paper_panel = upper.subplots(1, 2, width_ratios=[1.75, 1])
    else:
        axes = upper.subplots(1, 3, width_ratios=[1.6, 0.7, 1])
        reward_panel, difference_panel, paper_panel = axes
        panels.difference(difference_panel, data, *arms)
    panels.reward_against_compute(reward_panel, data, arms, options)
    panels.paper_rewards(paper_panel, "fig1_reward", PAPER_ARMS, options)
    if scores:
        draw_scores(middle, data, scores, arms, options)
        draw_paper_scores(lower, options)
    text = caption(data, arms, scores, no_difference, options)
    return style.save(figure, out, "fig1_stability", text, options)


def caption(
    data: Data,
    arms: tuple[str, ...],
    scores: list[str],
    no_difference: str | None,
    options: FigureOptions,
) -> str:
    """Return the caption, which describes the runs and the panels and states the verdicts."""
    sentences = [
        load.describe(data, arms),
        panels.arms_sentence(arms),
        panels.how_drawn(data, arms, options),
    ]
    if no_difference:
        sentences.append(f"No difference is drawn: {no_difference}.")
    else:
        sentences.append(panels.difference_caption(data, *arms))
    if scores:
        kinds = sorted({name.split("/")[-1] for name in scores if name != ELO})
        kind_text = f" ({', '.join(kinds)})" if kinds else ""
        bars = f"bars: ±{claims.NORMAL_QUANTILE} standard errors over problems"
        if ELO in scores:
            bars += " (of Elo: from the curvature of the posterior, with attempts as independent)"
        sentences.append(f"Held-out scores{kind_text}: mean over seeds; {bars}.")
        if options.log_x:
            sentences.append("On the logarithmic axis the evaluation before training is left out.")
    sentences.append(
        "The paper's points are digitised, of single runs, of GSPO and GRPO + Routing Replay (R2)."
    )
    return with_verdicts(" ".join(sentences), judged_claims(data))


def draw_scores(
    row: SubFigure,
    data: Data,
    scores: list[str],
    arms: tuple[str, ...],
    options: FigureOptions,
) -> None:
    """Draw our held-out scores, a panel each."""
    axes = row.subplots(1, len(scores), squeeze=False)[0]
    for ax, name in zip(axes, scores, strict=True):
        draw_score(ax, data, name, arms, options)
    axes[0].set_ylabel("score")
    label_size = axes[0].xaxis.label.get_fontsize()
    row.supxlabel(axes[0].get_xlabel(), fontsize=label_size, color=style.INK)
    for ax in axes:
        ax.set_xlabel("")


def draw_score(
    ax: Axes,
    data: Data,
    name: str,
    arms: tuple[str, ...],
    options: FigureOptions,
) -> None:
    """Draw a held-out score.

    Error bars are 95 % over problems. All seeds share the problems, so averaging seeds does not
    shorten them.
    """
    largest = 0.0
    has_compute = style.has_compute(data, arms)
    error_name = "eval/elo_stderr" if name == ELO else stderr_of(name)
    for index, arm in enumerate(arms):
        table = data.table(arm, name, first_step=0).dropna()
        x = table.index.to_series()
        if has_compute:
            flops = data.table(arm, style.COMPUTE, first_step=0).fillna(0)
            x = flops.loc[table.index].mean(axis=1)
            largest = max(largest, style.finite_max(x))
        stderrs = data.table(arm, error_name, first_step=0)
        stderrs = stderrs.mean(axis=1).fillna(0)
        points = pd.DataFrame({"x": x, "mean": table.mean(axis=1)})
        points["error"] = claims.NORMAL_QUANTILE * stderrs[table.index]
        # the arms' bars stand side by side
        if options.log_x:
            points["x"] *= 1.02**index
            points = points[points["x"] > 0]
        else:
            points["x"] += 0.012 * index * points["x"].max()
        ax.errorbar(
            points["x"],
            points["mean"],
            yerr=points["error"],
            ms=4.5,
            lw=1.4,
            elinewidth=0.9,
            capsize=0,
            ecolor=arm_style(arm).colour,
            **arm_style(arm).plot_options(),
        )
    style.training_axis(ax, largest, options)
    if not options.log_x and largest:
        ax.set_xlim(-0.05 * largest, 1.05 * largest)
    title = "Elo" if name == ELO else name.split("/")[1]
    ax.set_title(title.replace("_", " "))


def draw_paper_scores(row: SubFigure, options: FigureOptions) -> None:
    """Draw the paper's held-out scores, a panel each."""
    axes = row.subplots(1, len(BENCHMARKS))
    for ax, name in zip(axes, BENCHMARKS, strict=True):
        title, unit = BENCHMARKS[name]
        panels.paper_curves(ax, f"fig1_{name}", PAPER_ARMS, options, smoothed=False)
        ax.set_title(f"The paper's {title}")
        ax.set_ylabel(unit)


def main() -> None:
    script.run(__doc__, draw, judged_claims)


if __name__ == "__main__":
    script.command(main)
