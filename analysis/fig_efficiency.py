"""Efficiency: how much compute does GSPO need to reach the final reward of its rival?

    gspo figure efficiency runs/paper_figures

The rival is GRPO with Routing Replay. Expected, if the paper is right: about half (ratio 1.6 to 2
in its Fig. 1). The exact definition of the two ratios and of their intervals is at the top of
analysis/efficiency.py. The verdict is taken on the like-for-like ratio, which is near 1 for equal
arms. Writes fig_efficiency.pdf and .png. Metrics: reward/mean, compute/flops.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.arm_styles import arm_style, tint
from gspo.analysis.efficiency import Efficiency
from gspo.analysis.load import GSPO, Data
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import WINDOW, Interval, trailing_mean
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.analysis.verdicts import Claim, with_verdicts

REFUSED = {"smooth": f"its curves are trailing means of {WINDOW} batches, as the criterion says"}


def judged_claims(data: Data) -> list[Claim]:
    """Return the claims that this figure shows."""
    return [claims.cheaper(data)]


def why_not_drawn(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    arms = claims.contenders(data)
    reason = panels.why_not_comparable(data, arms)
    if reason is None and not style.has_compute(data, arms):
        return f"needs {style.COMPUTE} of every run"
    return reason


def draw(data: Data, out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw the curves up to the rival's final level, and the ratios with their intervals."""
    reason = why_not_drawn(data)
    if reason:
        raise RunsError(f"fig_efficiency {reason}")
    arms = claims.contenders(data)
    result = claims.compute_ratio(data)
    figure = style.canvas(3.4, options)
    left, right = figure.subplots(1, 2, width_ratios=[1.45, 1])
    draw_curves(left, data, result, options)
    draw_ratios(right, arms[1], result)
    thin = " (thin: single seeds)" if options.seeds else ""
    text = (
        f"{load.describe(data, arms)} {panels.arms_sentence(arms)} Left: trailing mean of "
        f"{WINDOW} batches, mean over seeds{thin}; dotted: mean of the rival's last {WINDOW} "
        "batches. Right: 95 % intervals, resampling seeds and blocks of batches; an arrowhead "
        "marks the bound of a ratio whose level was not reached."
    )
    caption = with_verdicts(text, judged_claims(data))
    return style.save(figure, out, "fig_efficiency", caption, options)


def draw_curves(
    ax: Axes,
    data: Data,
    result: Efficiency,
    options: FigureOptions,
) -> None:
    """Draw the trailing means of the rewards against compute.

    A dot marks the first point at which an arm reaches the rival's final level.
    """
    reward, flops, rival_reward, rival_flops = claims.reward_and_flops(data)
    arm, rival = claims.contenders(data)
    curves = (
        (arm, reward, flops, result.need),
        (rival, rival_reward, rival_flops, result.rival_need),
    )
    ends = []
    largest = 0.0
    for name, rewards, x, need in curves:
        line = arm_style(name)
        y = trailing_mean(rewards.mean(axis=1))
        mean_x = x.mean(axis=1)
        if options.seeds:
            thin = {"color": tint(line.colour, 0.45), "lw": 0.8, "zorder": 1}
            for seed in rewards:
                ax.plot(x[seed], trailing_mean(rewards[seed]), **thin)
        every = max(1, len(y) // 8)
        marks = line.plot_options() | {"ms": 5, "markevery": every}
        ax.plot(mean_x, y, lw=2, **marks)
        if np.isfinite(need):
            dot = {"size": 9, "edge": 1, "zorder": 4}
            style.dots(ax, need, result.level, line.colour, line.marker, **dot)
        ends.append((y[-1], style.arm_label(name), line))
        largest = max(largest, style.finite_max(mean_x))
    ax.axhline(result.level, color=style.INK, lw=1, ls=":")
    style.training_axis(ax, largest, options)
    ax.set_ylabel("training reward")
    ax.set_title("Reaching the rival's final level")
    style.label_ends(ax, ends)


def draw_ratios(ax: Axes, rival: str, result: Efficiency) -> None:
    """Draw three ratios on a common axis: like for like, to the rival's whole run, and the paper's.

    Arms are equal at 1.
    """
    published = Interval(claims.paper_compute_ratio())
    ratios = [result.like, result.to_end, published]
    texts = [
        result.like.text(),
        result.to_end.text(),
        f"{published.mean:.2f}",
    ]
    names = [
        "like for like\n(decides)",
        "to the rival's\nwhole run",
        "the paper's points,\nwhole run",
    ]
    ends = [(ratio.mean, ratio.high) for ratio in ratios]
    largest = style.finite_max(ends)
    right = max(2.0, 1.1 * largest)
    for row, (ratio, text) in enumerate(zip(ratios, texts, strict=True)):
        colour = style.MUTED if ratio is published else arm_style(GSPO).colour
        ends = [ratio.low, ratio.high]
        ax.plot(ends, [row, row], color=colour, lw=2)
        if ratio.mean > 0:
            style.dots(ax, ratio.mean, row, colour, "o", 7, edge=1)
        else:  # the level was not reached: the ratio lies somewhere below the bound
            style.dots(ax, ratio.bound, row, colour, "<", 7, edge=1)
        ax.text(
            right,
            row - 0.28,
            text.replace(" (", "\n("),
            ha="right",
            va="center",
            fontsize=8.5,
            bbox={"fc": "white", "ec": "none", "pad": 1},
        )
    ax.axvline(1, color=style.INK, lw=1, ls=":")
    ax.set_yticks(range(3), names)
    ax.set_ylim(2.5, -0.6)
    ax.set_xlim(0, right)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"compute, {panels.short_name(rival)} / {GSPO}")
    ax.set_title("Ratio (over 1: GSPO cheaper)")


def main() -> None:
    script.run(__doc__, draw, judged_claims, REFUSED)


if __name__ == "__main__":
    script.command(main)
