"""Figure 3: does GRPO on an MoE model need Routing Replay?

    gspo figure routing-replay runs/paper_figures

Expected, if the paper is right: with Routing Replay the reward rises; without it the reward stalls
and then declines (in the paper from .42 to .24), while routers change about 10 % of the experts per
update in both. The verdicts follow the criteria in analysis/claims.py. Writes
fig3_routing_replay.pdf and .png. Metrics: reward/mean, compute/flops, routing/consistency (the
router's own choice, also where a replay overrides it).
"""

from __future__ import annotations

from pathlib import Path

from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.load import GRPO, GRPO_R2, Data
from gspo.analysis.looks import look
from gspo.analysis.style import View
from matplotlib.axes import Axes

NEEDS = (GRPO_R2, GRPO)


def judged(data: Data) -> list[claims.Claim]:
    """Return the claims that this figure speaks to."""
    return [claims.collapse_without_replay(data), claims.replay_helps(data)]


def lacking(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can; it needs both arms."""
    return panels.lacking(data, NEEDS)


def draw(data: Data, out: Path, view: View | None = None) -> list[Path]:
    """Draw the training reward against compute, the paper's curves, the paired difference, and the
    routing consistency of both arms."""
    if why := lacking(data):
        load.die(f"fig3 {why}")
    view = view or View()
    figure = style.canvas(5.8, view)
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    big, companion = upper.subplots(1, 2, width_ratios=[1.6, 1])
    gap, routing = lower.subplots(1, 2, width_ratios=[0.6, 1.6])
    panels.reward_against_compute(big, data, NEEDS, view)
    panels.paper_rewards(companion, "fig3_reward", NEEDS, view)
    panels.difference(gap, data, *NEEDS)
    consistency(routing, data, view)
    words = [
        load.describe(data, list(NEEDS)),
        panels.named(NEEDS),
        panels.how_drawn(data, NEEDS, view),
    ]
    words += [
        panels.difference_caption(data, *NEEDS),
        "The paper's points are digitised, of single runs.",
    ]
    found = "\n".join([" ".join(words), *(claim.sentence() for claim in judged(data))])
    return style.save(figure, out, "fig3_routing_replay", found, view)


def consistency(ax: Axes, data: Data, view: View) -> None:
    """Draw the share of the experts of the step's start that the routers still choose, by batch,
    averaged over layers."""
    ends = []
    for arm in NEEDS:
        table = data.table(arm, "routing/consistency").dropna(how="all")
        ends.append((panels.curve(ax, table, look(arm), view), style.short(arm), look(arm)))
    style.training_axis(ax, 0, view)
    ax.set_ylabel("routing consistency")
    ax.set_title("Routing consistency within a step")
    style.label_ends(ax, ends, letter=0.11)


def main() -> None:
    script.run(__doc__, draw, judged)


if __name__ == "__main__":
    script.command(main)
