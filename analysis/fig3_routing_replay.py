"""Figure 3: does GRPO on an MoE model need Routing Replay?

    gspo figure routing-replay runs/paper_figures

Expected, if the paper is right: with Routing Replay the reward rises. Without it the reward stalls
and then declines (in the paper from .42 to .24). Routers change about 10 % of the experts per
update in both. The verdicts follow the criteria in analysis/claims.py and stability_claims.py.
Writes fig3_routing_replay.pdf and .png. Metrics: reward/mean, compute/flops, routing/consistency
(the router's own choice, also if a replay overrides it).
"""

from pathlib import Path

from matplotlib.axes import Axes

from gspo.analysis import claims, load, panels, script, stability_claims, style
from gspo.analysis.arm_styles import arm_style
from gspo.analysis.load import GRPO, GRPO_R2, Data
from gspo.analysis.runs import RunsError
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.analysis.verdicts import Claim, with_verdicts

ARMS = (GRPO_R2, GRPO)


def judged_claims(data: Data) -> list[Claim]:
    """Return the claims that this figure shows."""
    return [
        stability_claims.collapse_without_replay(data),
        claims.replay_helps(data),
    ]


def why_not_drawn(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can; it needs both arms."""
    return panels.why_not_comparable(data, ARMS)


def draw(data: Data, out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw our rewards and the paper's above, the paired difference and the routing below."""
    reason = why_not_drawn(data)
    if reason:
        raise RunsError(f"fig3 {reason}")
    figure = style.canvas(5.8, options)
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    reward_panel, paper_panel = upper.subplots(1, 2, width_ratios=[1.6, 1])
    difference_panel, routing_panel = lower.subplots(1, 2, width_ratios=[0.6, 1.6])
    panels.reward_against_compute(reward_panel, data, ARMS, options)
    panels.paper_rewards(paper_panel, "fig3_reward", ARMS, options)
    panels.difference(difference_panel, data, *ARMS)
    draw_consistency(routing_panel, data, options)
    text = (
        f"{load.describe(data, ARMS)} {panels.arms_sentence(ARMS)} "
        f"{panels.how_drawn(data, ARMS, options)} {panels.difference_caption(data, *ARMS)} "
        "The paper's points are digitised, of single runs."
    )
    caption = with_verdicts(text, judged_claims(data))
    return style.save(figure, out, "fig3_routing_replay", caption, options)


def draw_consistency(ax: Axes, data: Data, options: FigureOptions) -> None:
    """Draw the routing consistency by batch, averaged over layers.

    It is the share of the experts of the step's start that the routers still choose.
    """
    ends = []
    for arm in ARMS:
        line = arm_style(arm)
        table = data.table(arm, "routing/consistency").dropna(how="all")
        end = panels.curve(ax, table, line, options)
        ends.append((end, style.arm_label(arm), line))
    style.training_axis(ax, 0, options)
    ax.set_ylabel("routing consistency")
    ax.set_title("Routing consistency within a step")
    style.label_ends(ax, ends, line_height=0.11)


def main() -> None:
    script.run(__doc__, draw, judged_claims)


if __name__ == "__main__":
    script.command(main)
