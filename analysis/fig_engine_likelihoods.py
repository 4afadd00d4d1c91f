"""Engine likelihoods: what is lost by taking the engine's log-probs for the old policy's, with GSPO
and with GRPO?

    gspo figure engine-likelihoods runs/engine_likelihoods

Section 5.4 of the GSPO paper argues, without an experiment, that a sequence's likelihood tolerates
the engine's precision, so that the engine's log-probs can be used as they are. Expected, if so: in
bfloat16 GSPO loses less reward by them than GRPO. In float32 the two likelihoods agree to rounding,
so what differs there is chance, and serves as the yardstick. Prints Markdown tables and the verdict
in words; writes fig_engine_likelihoods.pdf and .png. Runs that are missing or unfinished are named
and left out; arms are paired by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from gspo.analysis import load, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.load import GRPO, GSPO, Data
from gspo.analysis.looks import look, tint
from gspo.analysis.stats import (
    START,
    WINDOW,
    Interval,
    estimate,
    number,
    paired_difference,
    ratio,
)
from gspo.analysis.style import View
from gspo.analysis.verdicts import LEVEL
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from gspo.statistics import sign_flip_p

COARSE, FINE, PLAIN, REPLAY, TRAINER, ENGINE = (
    "bfloat16",
    "float32",
    "no replay",
    "R3",
    "trainer",
    "engine",
)
WORDS = {  # the settings that make an arm, and the words for their values
    "rollout.dtype": {"bfloat16": COARSE, "float32": FINE},
    "objective.name": {"gspo": GSPO, "grpo": GRPO},
    "policy.routing_replay": {"none": PLAIN, "r3": REPLAY},
    "policy.old_logprobs": {"step_start": TRAINER, "engine": ENGINE},
}
ARMS = tuple(product(*(words.values() for words in WORDS.values())))
# arms without their log-probs, in which two are compared
CELLS = tuple(dict.fromkeys(arm[:3] for arm in ARMS))
MEANS = {  # the metrics that are averaged over the batches of a run
    "outside, first": "clip/token_outside_minibatch_1",
    "outside, all": "clip/token_outside",
    "active, first": "clip/token_active_minibatch_1",
    "active, all": "clip/token_active",
    "k3": "mismatch/k3",
    "abs log s": "mismatch/sequence_log_abs",
    "F(2)": "mismatch/beyond_2",
    "agreement": "routing/engine_agreement",
    "grad norm": "optim/grad_norm",
}
SHARES = {"outside": "Outside the clip range", "active": "Gradient removed"}  # a panel for each
# log-probs, column, height in the row, marker
MARKS = (
    (ENGINE, ", first", -0.24, "D"),
    (ENGINE, ", all", 0.0, "o"),
    (TRAINER, ", all", 0.24, "o"),
)
PAIR = ((ENGINE, "", -0.15, "o"), (TRAINER, "", 0.15, "o"))
GAPS = {  # title of a panel, what it shows in which unit, and that unit as a number
    "k3": ("Gap of tokens", "k3 ($10^{-4}$ nats)", 1e-4),
    "abs log s": ("Gap of sequences", "mean |log s| ($10^{-3}$ nats)", 1e-3),
    "F(2)": ("Off by a factor of 2", "share of tokens ($10^{-4}$)", 1e-4),
    "agreement": ("Same experts", "share of experts", 1),
}


def main() -> None:
    args = script.parser(__doc__, refused=script.DOTS | script.NO_CURVES).parse_args()
    loaded = script.read(args, notes=False)
    data = chosen(loaded)
    print("\n".join(f"note: {note}" for note in loaded.notes + data.notes))
    paths = draw(data, args.out, script.view(args))
    print(
        "\n".join(
            [
                "",
                *arm_table(data),
                "",
                *effect_table(data),
                "",
                *verdict(data),
                "",
                *map(str, paths),
            ]
        )
    )


# -------------------------------------------------------------------------------------------------------------
# runs
def name(dtype: str, objective: str, *others: str) -> str:
    """Return the name of an arm: the objective first, then the precision and the rest."""
    return ", ".join([objective, dtype, *others])


def chosen(data: Data) -> Data:
    """Return the finished runs of the arms, renamed, cut to their common batches, with a note on
    what is missing. Raises Refused where no two arms can be compared."""
    runs: dict[tuple[str, int], load.Run] = {}
    seeds = set()
    for run in data.runs:
        words = tuple(names.get(run.settings.get(key)) for key, names in WORDS.items())
        seeds |= {run.seed} if words in ARMS else set()
        if words in ARMS and run.last >= run.planned:
            new = replace(run, arm=name(*words))
            if (other := runs.setdefault((new.arm, run.seed), new)) is not new:
                load.die(
                    f"the same arm and seed twice ({new.arm}, seed {run.seed}): {other.path} and {run.path}"
                )
    if not any(
        (name(*cell, TRAINER), s) in runs and (name(*cell, ENGINE), s) in runs
        for cell in CELLS
        for s in seeds
    ):
        needs = "finished runs of gspo or grpo with policy.old_logprobs=step_start and =engine, else alike, of one seed"
        load.die(
            f"fig_engine_likelihoods needs {needs}; found: {'; '.join(sorted({a for a, _ in runs})) or 'none'}"
        )
    shortest = min(runs.values(), key=lambda run: run.last)
    if shortest.last < (least := START + WINDOW):
        load.die(
            f"fig_engine_likelihoods needs {least} batches of every run; {shortest.path} has {shortest.last}"
        )
    end = {"steps": shortest.last}  # so that all of them count as finished
    cut = [
        replace(r, rows=r.rows[r.rows["step"] <= shortest.last], settings=r.settings | end)
        for r in runs.values()
    ]
    others = [
        key for key in load.differing(cut) if key not in WORDS and not key.startswith("objective.")
    ]
    notes = [f"the runs differ also in {', '.join(others)}"] if others else []
    return Data(cut, notes + missing(set(runs), seeds))


def missing(there: set[tuple[str, int]], seeds: set[int]) -> list[str]:
    """Return at most one line, which names the arms and seeds of the full design that have no
    finished run.
    """
    gaps = {
        arm: [s for s in sorted(seeds) if (arm, s) not in there]
        for arm in (name(*words) for words in ARMS)
    }
    count = sum(map(len, gaps.values()))
    texts = [f"{arm}: {', '.join(map(str, gap))}" for arm, gap in gaps.items() if gap]
    line = f"missing or unfinished, left out: {count} of {len(ARMS) * len(seeds)} runs (arm: seeds): {'; '.join(texts)}"
    return [line] if count else []


# ----------------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data) -> pd.DataFrame:
    """Return a row per arm and seed: start, end and gain of the reward, then MEANS; NaN where not
    reported.
    """
    rows = data.rows[data.rows["step"] >= 1].sort_values("step")
    runs = rows.reindex(columns=["arm", "seed", "reward/mean", *MEANS.values()]).groupby(
        ["arm", "seed"]
    )
    start = runs["reward/mean"].apply(lambda rewards: rewards.head(START).mean())
    last = runs["reward/mean"].apply(lambda rewards: rewards.tail(WINDOW).mean())
    numbers = pd.DataFrame({"start": start, "last": last, "gain": last - start})
    numbers = numbers.join(runs[list(MEANS.values())].mean().set_axis(list(MEANS), axis=1))
    return pd.concat([numbers.loc[[name(*arm)]] for arm in ARMS if name(*arm) in data.arms])


def shared(data: Data, metric: str, *arms: tuple[str, ...]) -> list[pd.DataFrame] | None:
    """Return the metric of these arms for the seeds that all have, or None if there is no such
    seed.
    """
    names = tuple(name(*arm) for arm in arms)
    return None if load.lacking(data, names) else data.paired(metric, *names)


def effect(data: Data, *cell: str) -> tuple[Interval, pd.Series] | None:
    """Return the interval and the seeds' values of the reward, engine's log-probs minus trainer's;
    None if unpaired.
    """
    if not (tables := shared(data, "reward/mean", (*cell, ENGINE), (*cell, TRAINER))):
        return None
    difference = (tables[0] - tables[1]).tail(WINDOW)
    return estimate(difference), difference.mean()


def contrast(data: Data, dtype: str, replay: str) -> tuple[Interval, float, pd.DataFrame] | None:
    """Return GSPO's effect minus GRPO's: its interval, its exact sign-flip p, and both effects of
    each seed.
    """
    arms = [
        (dtype, objective, replay, old) for objective in (GSPO, GRPO) for old in (ENGINE, TRAINER)
    ]
    if not (tables := shared(data, "reward/mean", *arms)):
        return None
    gspo, grpo = ((tables[i] - tables[i + 1]).tail(WINDOW) for i in (0, 2))
    both = pd.DataFrame({GSPO: gspo.mean(), GRPO: grpo.mean()})
    return paired_difference(gspo, grpo), sign_flip_p(both[GSPO] - both[GRPO]), both


def clip_range(data: Data) -> tuple[float, float] | None:
    """Return GSPO's objective.clip_low and clip_high, or None if its runs differ or have none."""
    sides = ("objective.clip_low", "objective.clip_high")
    bands = {
        tuple(map(run.settings.get, sides)) for run in data.runs if run.arm.startswith(f"{GSPO},")
    }
    return bands.pop() if len(bands) == 1 and None not in next(iter(bands)) else None


# ------------------------------------------------------------------------------------------------------------
# words
def verdict(data: Data) -> list[str]:
    """Return in words what the runs say: the question, then the yardstick of chance, the clip, and
    the gap.
    """
    lines = [answer(data, COARSE, replay) for replay in (PLAIN, REPLAY)]
    if fine := [
        found[1].abs().max() for cell in CELLS if cell[0] == FINE and (found := effect(data, *cell))
    ]:
        text = f"Yardstick: in float32, where only rounding differs, single seeds differ by up to {max(fine):.3f}"
        lines.append(f"{text}: an effect of that size can be chance.")
    means = measure(data).groupby(level="arm").mean()
    lines += [
        line for replay in (PLAIN, REPLAY) for line in clip_words(means, replay, clip_range(data))
    ]
    return lines + routing_words(data, GSPO) + routing_words(data, GRPO)


def answer(data: Data, dtype: str, replay: str) -> str:
    """Return in words whether GSPO loses less than GRPO, which takes an interval over seeds that
    excludes 0.
    """
    head = f"GSPO against GRPO, {dtype}, {replay}:"
    if not (found := contrast(data, dtype, replay)):
        return f"{head} not judged, its four arms have no finished seed in common."
    interval, p, both = found
    amount = "less (or gains more)" if interval.low > 0 else "more (or gains less)"
    text = f"{head} the engine's log-probs change the reward of the last {WINDOW} batches by {both[GSPO].mean():+.3f} "
    text += f"with GSPO, by {both[GRPO].mean():+.3f} with GRPO; GSPO - GRPO {interval.text('+.3f')}"
    if (seeds := interval.seeds) == 1:
        return f"{text} (interval {interval.kind}). Not judged: one seed says nothing about others."
    text += f" (95 % t interval over {seeds} seeds; exact sign-flip p = {p:.2g}: {seeds} seeds cannot go below "
    text += f"{2 / 2**seeds:.2g}). "
    if interval.low > 0 or interval.high < 0:
        sure, tail = (
            ("Told apart", "") if p < LEVEL else ("Points to this", f"; p is not below {LEVEL:g}")
        )
        return f"{text}{sure}: GSPO loses {amount} than GRPO{tail}."
    return f"{text}Not told apart: the interval includes 0, and any difference within it remains possible."


def clip_words(means: pd.DataFrame, replay: str, band: tuple[float, float] | None) -> list[str]:
    """Return in words what bfloat16 does to the first mini-batch's tokens and to the likelihood of
    sequences.
    """
    parts = []
    for objective in (GSPO, GRPO):
        if (arm := name(COARSE, objective, replay, ENGINE)) in means.index:
            first = [share(means[f"{what}, first"][arm]) for what in SHARES]
            parts.append(f"{first[0]} of {objective}'s tokens ({first[1]} clipped)")
    text = f"First mini-batch, {COARSE}, {replay}, engine's log-probs, outside the clip range: {', '.join(parts)}"
    lines = [f"{text}; with the trainer's 0 by construction."] if parts else []
    if band and (arm := name(COARSE, GSPO, replay, TRAINER)) in means.index:
        low, gap = band[0], means["abs log s"][arm]
        text = f"Gap, {COARSE}, {replay}, trainer's log-probs: mean |log s| {share(gap)}, {share(gap / low)} times the "
        lines.append(f"{text}lower side of GSPO's clip range (-{low:.2g}, +{band[1]:.2g}).")
    return lines


def routing_words(data: Data, objective: str) -> list[str]:
    """Return in words how much of the gap is due to routing: 1 - (k3 with R3) / (k3 without), in
    bfloat16.
    """
    tables = shared(
        data, MEANS["k3"], *((COARSE, objective, replay, TRAINER) for replay in (REPLAY, PLAIN))
    )
    if not tables or any(table.isna().all(axis=None) for table in tables):
        return []
    left, (new, old) = ratio(*tables), [float(table.mean().mean()) for table in tables]
    gone = Interval(1 - left.mean, 1 - left.high, 1 - left.low, left.seeds)
    text = f"Routing, {objective}, {COARSE}, trainer's log-probs: k3 {old:.2g} without R3, {new:.2g} with: a share of "
    return [f"{text}{gone.text('.2f')} is gone (interval {gone.kind})."]


def share(value: float, form: str = ".2g") -> str:
    return "0" if value == 0 else number(value, form)


def arm_table(data: Data) -> list[str]:
    """Return a Markdown row per arm with means over seeds, and the gain with its smallest and
    largest seed.
    """
    cells = [
        ["arm", "seeds", "reward, start", f"last {WINDOW}", "gain [min, max over seeds]", *MEANS]
    ]
    for arm, own in measure(data).groupby(level="arm", sort=False):
        mean, gains = own.mean(), own["gain"]
        spread = f" [{gains.min():+.3f}, {gains.max():+.3f}]" if len(own) > 1 else ""
        line = [
            arm,
            ", ".join(map(str, own.index.get_level_values("seed"))),
            f"{mean['start']:.3f}",
        ]
        line += [f"{mean['last']:.3f}", f"{mean['gain']:+.3f}{spread}"]
        cells.append(line + [share(mean[c], ".4f" if c == "agreement" else ".2g") for c in MEANS])
    return aligned_table(cells)


def effect_table(data: Data) -> list[str]:
    """Return a Markdown row per pair of arms with the effect on the reward, its interval, and each
    seed.
    """
    cells = [["reward, engine - trainer", "mean [95 % interval]", "interval", "each seed"]]
    for dtype, objective, replay in CELLS:
        if found := effect(data, dtype, objective, replay):
            seeds = ", ".join(f"{seed}: {value:+.3f}" for seed, value in found[1].items())
            cells.append(
                [name(dtype, objective, replay), found[0].text("+.3f"), found[0].kind, seeds]
            )
    return aligned_table(cells)


# ----------------------------------------------------------------------------------------------------------
# figure
def draw(data: Data, out: Path, view: View | None = None) -> list[Path]:
    """Draw a row per pair of arms above (reward, clip), and the gap in bfloat16 below."""
    numbers, coarse = measure(data), [cell for cell in CELLS if cell[0] == COARSE]
    figure = style.canvas(6.2, view := view or View())
    grid = figure.add_gridspec(2, 4, height_ratios=[8, 4.6])
    upper = [figure.add_subplot(grid[0, columns]) for columns in (slice(0, 2), 2, 3)]
    lower = [figure.add_subplot(grid[1, i]) for i in range(4)]
    reward_panel(upper[0], data)
    for ax, (column, title) in zip(upper[1:], SHARES.items(), strict=True):
        marks(ax, numbers, CELLS, column, MARKS)
        # logarithmic above 1e-4, with room for 0
        ax.set_xscale("symlog", linthresh=1e-4, linscale=0.6)
        ax.set(title=title, xlabel="share of tokens", xlim=(-2e-5, 1.5), xticks=[0, 1e-4, 1e-2, 1])
        ax.xaxis.set_major_formatter(
            lambda x, _: f"$10^{{{np.log10(x):.0f}}}$" if 0 < x < 1 else f"{x:g}"
        )
        ax.xaxis.set_minor_locator(NullLocator())
    for ax, (column, (title, label, unit)) in zip(lower, GAPS.items(), strict=True):
        marks(ax, numbers / unit, coarse, column, PAIR)
        for side in clip_range(data) or () if column == "abs log s" else ():
            ax.axvline(side / unit, color=style.MUTED, lw=1, ls="--", zorder=1)
        ax.set(title=title, xlabel=label, xlim=(None, 1) if column == "agreement" else (0, None))
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    for ax in upper:
        ax.axhspan(
            len(coarse) - 0.5, len(CELLS) - 0.45, color=tint(style.FAINT, 0.3), lw=0, zorder=0
        )
    for axes, cells in ((upper, CELLS), (lower, coarse)):
        for ax in axes:
            ax.grid(axis="y", visible=True)
            ax.tick_params(axis="y", length=0)
            ax.set(ylim=(len(cells) - 0.45, -0.55), yticks=range(len(cells)), yticklabels=[])
        axes[0].set_yticklabels(
            [f"{o} {d}{' + R3' * (r == REPLAY)}" for d, o, r in cells], color=style.INK
        )
    texts = [
        f"{old}'s log-probs{when} mini-batch{'es' * (when == ', all')}" for old, when, _, _ in MARKS
    ]
    handles = [
        Line2D([], [], label=t, **shape(style.INK, m[0], m[3]))
        for t, m in zip(texts, MARKS, strict=True)
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(MARKS))
    return style.save(figure, out, "fig_engine_likelihoods", caption(data), view)


def reward_panel(ax: Axes, data: Data) -> None:
    """Draw the effect on the reward: each seed as a dot, the mean with its interval as a bar."""
    ax.axvline(0, color=style.MUTED, lw=1, zorder=2)
    for row, cell in enumerate(CELLS):
        if found := effect(data, *cell):
            interval, seeds, hue = *found, look(cell[1]).colour
            ax.plot(
                [interval.low, interval.high], [row, row], color=tint(hue, 0.45), lw=1.6, zorder=2
            )
            ax.plot(
                seeds,
                np.full(len(seeds), row),
                "o",
                ms=5,
                color=tint(hue, 0.6),
                mec="white",
                mew=0.5,
            )
            ax.plot(interval.mean, row, "|", ms=12, mew=2.4, color=hue, zorder=4)
    ax.set(
        title="Reward: engine's log-probs - trainer's",
        xlabel=f"difference, mean of the last {WINDOW} batches",
    )


def marks(
    ax: Axes, numbers: pd.DataFrame, cells: Sequence[tuple], column: str, kinds: tuple
) -> None:
    """Draw a row per pair of arms with the seeds of each kind of mark, each kind at its own height."""
    for row, cell in enumerate(cells):
        for old, when, shift, symbol in kinds:
            if (arm := name(*cell, old)) in numbers.index:
                seeds = numbers.loc[arm, column + when]
                ax.plot(
                    seeds,
                    np.full(len(seeds), row + shift),
                    **shape(look(cell[1]).colour, old, symbol),
                )


def shape(hue: str, old: str, symbol: str) -> dict:
    """Return the marker's style: filled for the engine's log-probs, hollow for the trainer's."""
    common = {"ls": "", "marker": symbol, "ms": 4.5, "clip_on": False, "zorder": 3}
    filled = {"mfc": tint(hue, 0.75), "mec": "white", "mew": 0.4}
    return common | (filled if old == ENGINE else {"mfc": "white", "mec": hue})


def caption(data: Data) -> str:
    seeds, first = sorted({run.seed for run in data.runs}), data.runs[0]
    model, full = first.settings.get("model.name", "model not named"), len(ARMS) * len(seeds)
    text = f"Run: {model}, {first.last} rollout batches, {len(data.runs)} of {full} runs, {load.count_seeds(seeds)}. "
    text += "Dots: seeds. Bars: mean, 95 % interval (of a single seed: within the run). Grey: float32, only rounding "
    text += "differs. Lower row: the gap in bfloat16; dashes: GSPO's clip range."
    return "\n".join([text, *verdict(data)[:2]])


if __name__ == "__main__":
    script.command(main)
