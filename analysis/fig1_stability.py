"""Figure 1: does GSPO train to a higher reward, and to higher held-out scores, than GRPO with
Routing Replay?

    gspo figure stability runs/paper_figures            (run directories, or folders
                                                                    above them)

Expected, if the paper is right: the GSPO curve lies above from about a quarter of the compute on,
and the held-out scores follow. Where no run has Routing Replay (a dense model has nothing to
replay) the rival is GRPO without it; where only one of the two arms is there, it is drawn alone.
The verdict, printed and in the caption, follows the criteria in analysis/claims.py. Writes
fig1_stability.pdf and .png. Training reward: metric reward/mean; compute: compute/flops
(gspo/tracking/metrics.py).
"""

from __future__ import annotations

from pathlib import Path

from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.load import GRPO_R2, GSPO, Data
from gspo.analysis.looks import look
from gspo.analysis.style import View
from matplotlib.axes import Axes

PAPERS = (GSPO, GRPO_R2)
BENCHMARKS = {
    "aime24": ("AIME'24", "%"),
    "livecodebench": ("LiveCodeBench", "%"),
    "codeforces": ("CodeForces", "Elo"),
}
Z = 1.96  # standard errors in a 95 % interval


def judged(data: Data) -> list[claims.Claim]:
    """Return the claims that this figure speaks to."""
    if load.lacking(data, claims.contenders(data)):
        return []
    return [claim for claim in (claims.reward(data), claims.held_out(data)) if claim]


def arms_of(data: Data) -> tuple[str, ...]:
    """Return GSPO and its rival, or the one of them that is there."""
    return tuple(arm for arm in claims.contenders(data) if arm in data.arms)


def lacking(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    arms = arms_of(data)
    return load.lacking(data, arms[:1] or claims.contenders(data))


def draw(data: Data, out: Path, view: View | None = None) -> list[Path]:
    """Draw above the training reward, the paired difference that is judged, and the paper's
    rewards; below the held-out scores and the paper's."""
    if why := lacking(data):
        load.die(f"fig1 {why}")
    arms, view = arms_of(data), view or View()
    alone = load.lacking(data, arms) if len(arms) == 2 else f"only {arms[0]} is there"
    scores = claims.scores(data) + data.metrics("eval/elo")[:1]
    figure = style.canvas(7.6 if scores else 3.5, view)
    rows = figure.subfigures(3, 1, height_ratios=[1.55, 1, 0.9]) if scores else [figure]
    upper = rows[0].subplots(
        1, 2 if alone else 3, width_ratios=[1.75, 1] if alone else [1.6, 0.7, 1]
    )
    panels.reward_against_compute(upper[0], data, arms, view)
    if not alone:
        panels.difference(upper[1], data, *arms)
    panels.paper_rewards(upper[-1], "fig1_reward", PAPERS, view)
    if scores:
        score_row(rows[1], data, scores, arms, view)
        paper_row(rows[2], view)
    return style.save(figure, out, "fig1_stability", caption(data, arms, scores, alone, view), view)


def caption(
    data: Data, arms: tuple[str, ...], scores: list[str], alone: str | None, view: View
) -> str:
    """Return the caption: what was run, what is drawn, and what is judged."""
    words = [
        load.describe(data, list(arms)),
        panels.named(arms),
        panels.how_drawn(data, arms, view),
    ]
    words.append(
        f"No difference is drawn: {alone}." if alone else panels.difference_caption(data, *arms)
    )
    if scores:
        how = ", ".join(sorted({name.split("/")[-1] for name in scores if name != "eval/elo"}))
        words.append(
            f"Held-out scores{f' ({how})' if how else ''}: mean over seeds; bars: 95 % intervals over problems "
            f"(±{Z} standard errors)."
        )
        words += [
            "On the logarithmic axis the evaluation before training is left out."
        ] * view.log_x
    words.append(
        "The paper's points are digitised, of single runs, of GSPO and GRPO + Routing Replay (R2)."
    )
    return "\n".join([" ".join(words), *(claim.sentence() for claim in judged(data))])


def score_row(row, data: Data, scores: list[str], arms: tuple[str, ...], view: View) -> None:
    """Draw our held-out scores, a panel each."""
    axes = row.subplots(1, len(scores), squeeze=False)[0]
    for ax, name in zip(axes, scores, strict=True):
        score_panel(ax, data, name, arms, view)
    axes[0].set_ylabel("score")
    row.supxlabel(
        axes[0].get_xlabel(), fontsize=axes[0].xaxis.label.get_fontsize(), color=style.INK
    )
    for ax in axes:
        ax.set_xlabel("")


def score_panel(ax: Axes, data: Data, name: str, arms: tuple[str, ...], view: View) -> None:
    """Draw one held-out score. Error bars are 95 % over problems; all seeds share the problems, so
    averaging seeds does not shorten them."""
    largest, compute = 0.0, style.has_compute(data, arms)
    error_name = "eval/elo_stderr" if name == "eval/elo" else claims.stderr_of(name)
    for place, arm in enumerate(arms):
        table = data.table(arm, name, first_step=0).dropna()
        x = table.index.to_series()
        if compute:
            x = data.table(arm, style.COMPUTE, first_step=0).fillna(0).loc[table.index].mean(axis=1)
            largest = max(largest, style.finite_max(x))
        errors = Z * data.table(arm, error_name, first_step=0).loc[table.index].mean(axis=1).fillna(
            0
        )
        shown = (x > 0) | (not view.log_x)
        # bars stand side by side
        x = x + 0.012 * place * x.max() if not view.log_x else x * 1.02**place
        own = {
            "ms": 4.5,
            "lw": 1.4,
            "elinewidth": 0.9,
            "capsize": 0,
            "ecolor": look(arm).colour,
            **look(arm).plot(),
        }
        ax.errorbar(x[shown], table.mean(axis=1)[shown], yerr=errors[shown], **own)
    style.training_axis(ax, largest, view)
    if not view.log_x:
        ax.set_xlim(-0.05 * largest if largest else None, 1.05 * largest if largest else None)
    ax.set_title("Elo" if name == "eval/elo" else name.split("/")[1].replace("_", " "))


def paper_row(row, view: View) -> None:
    """Draw the paper's held-out scores, a panel each."""
    axes = row.subplots(1, len(BENCHMARKS))
    for ax, (name, (title, unit)) in zip(axes, BENCHMARKS.items(), strict=True):
        panels.paper_curves(ax, f"fig1_{name}", PAPERS, view, smoothed=False)
        ax.set_title(f"The paper's {title}")
        ax.set_ylabel(unit)


def main() -> None:
    script.run(__doc__, draw, judged)


if __name__ == "__main__":
    script.command(main)
