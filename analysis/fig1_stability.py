"""Figure 1: does GSPO train to a higher reward, and to higher held-out scores, than GRPO with Routing Replay?

    python analysis/fig1_stability.py runs/paper_figures            (run directories, or folders above them)

Expected, if the paper is right: the GSPO curve lies above from about a quarter of the compute on, and the held-out
scores follow. The verdict printed, and in the caption, follows the criteria in analysis/claims.py.
Writes fig1_stability.pdf and .png. Training reward: metric reward/mean; compute: compute/flops (gspo/metrics.py).
"""

from __future__ import annotations

from pathlib import Path

import claims
import load
import panels
import script
import style
from load import GRPO_R2, GSPO, Data


def judged(data: Data) -> list[claims.Claim]:
    """The claims that this figure speaks to."""
    return [claim for claim in (claims.reward(data), claims.held_out(data)) if claim]


def draw(data: Data, out: Path) -> list[Path]:
    """Top: training reward against compute, the paper's curve beside it. Bottom: one panel per held-out score."""
    arms = claims.contenders(data)
    load.require(data, "fig1", arms)
    scores = claims.scores(data) + data.metrics("eval/elo")[:1]
    figure = style.canvas(5.9 if scores else 3.6)
    rows = figure.subfigures(2, 1, height_ratios=[1.45, 1]) if scores else [figure]
    big, companion = rows[0].subplots(1, 2, width_ratios=[1.75, 1])
    panels.reward_against_compute(big, data, arms)
    big.set_title("Training reward, our runs")
    panels.paper_rewards(companion, "fig1_reward", (GSPO, GRPO_R2))
    for ax, name in zip(rows[1].subplots(1, len(scores), squeeze=False)[0] if scores else [], scores, strict=True):
        score_panel(ax, data, name, arms)
    if scores:
        rows[1].supxlabel(big.get_xlabel(), fontsize=big.xaxis.label.get_fontsize())
    found = [claim.sentence() for claim in judged(data)]
    how = ", ".join(sorted({name.split("/")[-1] for name in scores if name != "eval/elo"}))
    bars = f" Held-out scores ({how}): mean over seeds, bars ±1 standard error over problems." if scores else ""
    described = f"{load.describe(data, list(arms))} {panels.how_drawn(data, arms)}{bars}"
    caption = "\n".join([described, *found])
    return style.save(figure, out, "fig1_stability", caption)


def score_panel(ax, data: Data, name: str, arms: tuple[str, ...]) -> None:
    """One held-out score against compute. Bars: standard error over problems, mean over seeds: the seeds share the
    problems, so averaging seeds does not shrink it."""
    largest = 0.0
    error_name = "eval/elo_stderr" if name == "eval/elo" else claims.stderr_of(name)
    for arm in arms:
        table = data.table(arm, name, first_step=0).dropna()
        flops = data.table(arm, "compute/flops", first_step=0).fillna(0).loc[table.index].mean(axis=1)
        errors = data.table(arm, error_name, first_step=0).loc[table.index].mean(axis=1).fillna(0)
        look = {"color": style.colour(arm), "marker": "o", "ms": 3.5, "lw": 1.6, "elinewidth": 0.9, "capsize": 0}
        ax.errorbar(flops, table.mean(axis=1), yerr=errors, **look)
        largest = max(largest, style.finite_max(flops))
    style.flops_axis(ax, largest)
    ax.set_xlim(-0.03 * largest, 1.03 * largest)
    ax.set_xlabel("")
    ax.set_title("Elo" if name == "eval/elo" else name.split("/")[1].replace("_", " "))


if __name__ == "__main__":
    script.command(lambda: script.run(__doc__, draw, judged))
