"""Figure 3: does GRPO on an MoE model need Routing Replay?

    python analysis/fig3_routing_replay.py runs/paper_figures

Expected, if the paper is right: with Routing Replay the reward rises; without it the reward stalls and then declines
(in the paper from .42 to .24), while routers change about 10 % of the experts per update in both. The verdicts follow
the criteria in analysis/claims.py.
Writes fig3_routing_replay.pdf and .png. Metrics: reward/mean, compute/flops, routing/consistency (the router's own
choice, also where a replay overrides it).
"""

from __future__ import annotations

from pathlib import Path

import claims
import load
import panels
import script
import style
from load import GRPO, GRPO_R2, Data
from matplotlib.axes import Axes
from stats import WINDOW, centred_mean

NEEDS = (GRPO_R2, GRPO)


def judged(data: Data) -> list[claims.Claim]:
    """The claims that this figure speaks to."""
    return [claims.collapse_without_replay(data), claims.replay_helps(data)]


def draw(data: Data, out: Path) -> list[Path]:
    """Training reward against compute, the paper's curve, and the routing consistency of both arms."""
    load.require(data, "fig3", NEEDS)
    figure = style.canvas(5.4)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.5, 1])
    big, companion, routing = (figure.add_subplot(grid[place]) for place in ((slice(None), 0), (0, 1), (1, 1)))
    panels.reward_against_compute(big, data, NEEDS)
    big.set_title("Training reward, our runs")
    panels.paper_rewards(companion, "fig3_reward", NEEDS)
    consistency(routing, data)
    described = f"{load.describe(data, list(NEEDS))} {panels.how_drawn(data, NEEDS)}"
    caption = "\n".join([described, *(claim.sentence() for claim in judged(data))])
    return style.save(figure, out, "fig3_routing_replay", caption)


def consistency(ax: Axes, data: Data) -> None:
    """Share of the step-start experts that the routers still choose, by batch; mean over layers and seeds, smoothed."""
    ends = []
    for arm in NEEDS:
        table = data.table(arm, "routing/consistency").dropna()
        if table.empty:
            continue
        mean, hue = table.mean(axis=1), style.colour(arm)
        ax.plot(mean.index, mean, color=style.tint(hue, 0.4), lw=0.8)
        smooth = centred_mean(mean, WINDOW)
        ax.plot(mean.index, smooth, color=hue, lw=1.8)
        ends.append((smooth[-1], style.short(arm), hue))
    ax.set_xlabel("rollout batch")
    ax.set_title("Routing consistency within a step")
    style.label_ends(ax, ends)


if __name__ == "__main__":
    script.command(lambda: script.run(__doc__, draw, judged))
