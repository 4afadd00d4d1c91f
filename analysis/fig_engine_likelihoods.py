"""Engine likelihoods: what is lost by taking the engine's log-probs for the old policy's, with GSPO and with GRPO?

    python analysis/fig_engine_likelihoods.py runs/engine_likelihoods

Section 5.4 of the GSPO paper argues, without an experiment, that a sequence's likelihood tolerates the engine's
precision, so that the engine's log-probs can be used as they are. Expected, if so: in bfloat16 GSPO loses less reward
by them than GRPO. In float32 the two likelihoods agree to rounding: what differs there is chance, the yardstick.
Prints Markdown tables and the verdict in words; writes fig_engine_likelihoods.pdf and .png. Runs that are missing or
unfinished are named and left out; arms are paired by seed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import load
import numpy as np
import pandas as pd
import script
import style
from load import GRPO, GSPO, Data
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from stats import START, WINDOW, Interval, estimate, paired_difference, ratio, sign_flip_p

COARSE, FINE, PLAIN, REPLAY, TRAINER, ENGINE = "bfloat16", "float32", "no replay", "R3", "trainer", "engine"
WORDS = {  # what makes an arm: the settings, and the words for their values
    "rollout.dtype": {"bfloat16": COARSE, "float32": FINE},
    "objective.name": {"gspo": GSPO, "grpo": GRPO},
    "policy.routing_replay": {"none": PLAIN, "r3": REPLAY},
    "policy.old_logprobs": {"step_start": TRAINER, "engine": ENGINE},
}
ARMS = tuple(product(*(words.values() for words in WORDS.values())))
CELLS = tuple(dict.fromkeys(arm[:3] for arm in ARMS))  # an arm without its log-probs: what is compared
MEANS = {  # what is averaged over the batches of a run
    "outside, first": "clip/token_outside_minibatch_1",
    "outside, all": "clip/token_outside",
    "active, first": "clip/token_active_minibatch_1",
    "active, all": "clip/token_active",
    "k3": "mismatch/k3",
    "|log s|": "mismatch/sequence_log_abs",
    "F(2)": "mismatch/beyond_2",
    "agreement": "routing/engine_agreement",
    "grad norm": "optim/grad_norm",
}
SHARES = {"outside": "Outside the clip range", "active": "Gradient removed"}  # a panel each
MARKS = ((ENGINE, "first", -0.24, "D"), (ENGINE, "all", 0.0, "o"), (TRAINER, "all", 0.24, "o"))  # height in the row
GAPS = {"k3": "k3 (nats)", "|log s|": "mean |log s| (nats)", "F(2)": "share of tokens", "agreement": "share of experts"}
TITLES = ("Gap: k3", "Gap of sequences", "Off by a factor of 2", "Same experts")  # of GAPS


def main() -> None:
    args = script.arguments(__doc__)
    loaded = load.load(args.runs)
    data = chosen(loaded)
    print("\n".join(f"note: {note}" for note in loaded.notes + data.notes))
    paths = draw(data, args.out)
    print("\n".join(["", *arm_table(data), "", *effect_table(data), "", *verdict(data), "", *map(str, paths)]))


# ------------------------------------------------------------------------------------------------------------- runs
def name(dtype: str, objective: str, *others: str) -> str:
    return ", ".join([objective, dtype, *others])


def chosen(data: Data) -> Data:
    """The finished runs of the arms, under their names here, cut to the batches that all have. Notes: what is missing.
    Dies where there are no two arms to compare."""
    runs: dict[tuple[str, int], load.Run] = {}
    seeds = set()
    for run in data.runs:
        words = tuple(known.get(run.settings.get(key)) for key, known in WORDS.items())
        seeds |= {run.seed} if words in ARMS else set()
        if words in ARMS and run.last >= run.planned:
            new = replace(run, arm=name(*words))
            if (other := runs.setdefault((new.arm, run.seed), new)) is not new:
                same = f"the same arm and seed twice ({new.arm}, seed {run.seed})"
                load.die(f"{same}: {other.path} and {run.path}; give one")
    if not any((name(*cell, TRAINER), s) in runs and (name(*cell, ENGINE), s) in runs for cell in CELLS for s in seeds):
        needs = "finished runs of gspo or grpo with policy.old_logprobs=step_start and =engine, else alike, of one seed"
        load.die(f"fig_engine_likelihoods needs {needs}; found: {', '.join(sorted({a for a, _ in runs})) or 'none'}")
    shortest = min(runs.values(), key=lambda run: run.last)
    if shortest.last < START + WINDOW:
        least = f"{START + WINDOW} rollout batches of every run"
        load.die(f"fig_engine_likelihoods needs {least}; {shortest.path} has {shortest.last}")
    cut = [replace(run, rows=run.rows[run.rows["step"] <= shortest.last]) for run in runs.values()]
    return Data(cut, missing(set(runs), seeds))


def missing(there: set[tuple[str, int]], seeds: set[int]) -> list[str]:
    """At most one line: the arms and seeds of the full design that have no finished run."""
    gaps = {arm: [s for s in sorted(seeds) if (arm, s) not in there] for arm in (name(*words) for words in ARMS)}
    count = sum(map(len, gaps.values()))
    texts = [f"{arm}: {', '.join(map(str, gap))}" for arm, gap in gaps.items() if gap]
    line = f"missing or unfinished, left out: {count} of {len(ARMS) * len(seeds)} runs (arm: seeds): {'; '.join(texts)}"
    return [line] if count else []


# ---------------------------------------------------------------------------------------------------------- numbers
def measure(data: Data) -> pd.DataFrame:
    """A row per arm and seed: start, last, gain of the reward, then MEANS; NaN where a metric was not reported."""
    frames = {}
    for arm in (name(*words) for words in ARMS):
        if arm in data.arms:
            reward = data.table(arm, "reward/mean")
            frame = pd.DataFrame({"start": reward.head(START).mean(), "last": reward.tail(WINDOW).mean()})
            means = {column: data.table(arm, metric).mean() for column, metric in MEANS.items()}
            frames[arm] = frame.assign(gain=frame["last"] - frame["start"], **means)
    return pd.concat(frames, names=["arm", "seed"])


def shared(data: Data, metric: str, *arms: tuple[str, ...]) -> list[pd.DataFrame] | None:
    """The metric of these arms for the seeds that all have; None if there is no such seed."""
    names = tuple(name(*arm) for arm in arms)
    return None if load.lacking(data, names) else data.paired(metric, *names)


def effect(data: Data, *cell: str) -> tuple[Interval, pd.Series] | None:
    """Reward of the last batches, engine's log-probs minus trainer's: interval of the mean, and each seed."""
    if not (tables := shared(data, "reward/mean", (*cell, ENGINE), (*cell, TRAINER))):
        return None
    difference = (tables[0] - tables[1]).tail(WINDOW)
    return estimate(difference), difference.mean()


def contrast(data: Data, dtype: str, replay: str) -> tuple[Interval, float, pd.DataFrame] | None:
    """Difference of differences, the effect with GSPO minus the effect with GRPO: its interval, its exact sign-flip p,
    and both effects of each seed."""
    arms = [(dtype, objective, replay, old) for objective in (GSPO, GRPO) for old in (ENGINE, TRAINER)]
    if not (tables := shared(data, "reward/mean", *arms)):
        return None
    gspo, grpo = ((tables[i] - tables[i + 1]).tail(WINDOW) for i in (0, 2))
    both = pd.DataFrame({GSPO: gspo.mean(), GRPO: grpo.mean()})
    return paired_difference(gspo, grpo), sign_flip_p(both[GSPO] - both[GRPO]), both


def routing_share(data: Data, objective: str) -> Interval | None:
    """Share of k3 that is gone with R3, in bfloat16, with the trainer's log-probs: 1 - k3 with R3 / k3 without."""
    tables = shared(data, MEANS["k3"], *((COARSE, objective, replay, TRAINER) for replay in (REPLAY, PLAIN)))
    if not tables or any(table.isna().all(axis=None) for table in tables):
        return None
    left = ratio(*tables)
    return Interval(1 - left.mean, 1 - left.high, 1 - left.low, left.seeds)


def clip_range(data: Data) -> tuple[float, float]:
    """GSPO's objective.clip_low and clip_high; NaN if its runs differ or there are none."""
    sides = [{run.settings.get(f"objective.clip_{side}") for run in data.runs if run.settings["objective.name"] == "gspo"}
             for side in ("low", "high")]  # fmt: skip
    return tuple(float(side.pop()) if len(side) == 1 and None not in side else math.nan for side in sides)


# ------------------------------------------------------------------------------------------------------------ words
def verdict(data: Data) -> list[str]:
    """What the runs say: the question first, then the yardstick of chance, the clip, and the gap."""
    lines = [answer(data, COARSE, replay) for replay in (PLAIN, REPLAY)]
    if fine := [found[1].abs().max() for cell in CELLS if cell[0] == FINE and (found := effect(data, *cell))]:
        text = f"Yardstick: in float32, where the log-probs differ by rounding, single seeds differ by up to {max(fine):.3f}"
        lines.append(f"{text}: an effect of that size can be chance.")
    return lines + clip_words(data) + gap_words(data)


def answer(data: Data, dtype: str, replay: str) -> str:
    """Does GSPO lose less than GRPO? Told apart only if the interval over seeds excludes 0."""
    head = f"GSPO against GRPO, {dtype}, {replay}:"
    if not (found := contrast(data, dtype, replay)):
        return f"{head} not judged, its four arms have no finished seed in common."
    interval, p, both = found
    text = f"{head} the engine's log-probs change the reward of the last {WINDOW} batches by {both[GSPO].mean():+.3f} with "
    text += f"GSPO and by {both[GRPO].mean():+.3f} with GRPO; GSPO - GRPO {interval.text('+.3f')}"
    if interval.seeds == 1:
        return f"{text} (interval {interval.kind}). Not judged: one seed says nothing about others."
    text += f" (95 % t interval {interval.kind}; exact sign-flip p = {p:.2g}, which {interval.seeds} seeds cannot bring below "
    text += f"{2 / 2**interval.seeds:.2g}). "
    if interval.low > 0:
        return f"{text}Told apart: GSPO loses less (or gains more) than GRPO."
    if interval.high < 0:
        return f"{text}Told apart: GSPO loses more (or gains less) than GRPO."
    return f"{text}Not told apart: the interval includes 0, and any difference within it remains possible."


def clip_words(data: Data) -> list[str]:
    """The first mini-batch in bfloat16, where only the engine's log-probs can leave the range."""
    means, lines = measure(data).groupby(level="arm").mean(), []
    for replay in (PLAIN, REPLAY):
        arms = {objective: name(COARSE, objective, replay, ENGINE) for objective in (GSPO, GRPO)}
        parts = [
            f"{share(means['outside, first'][arm])} of {objective}'s tokens outside the clip range "
            f"({share(means['active, first'][arm])} without gradient)"
            for objective, arm in arms.items()
            if arm in means.index
        ]
        if parts:
            text = f"First mini-batch, {COARSE}, {replay}, engine's log-probs: {', '.join(parts)}"
            lines.append(f"{text}; with the trainer's 0 by construction.")
    return lines


def gap_words(data: Data) -> list[str]:
    """The gap of sequences against GSPO's range, and how much of the gap is routing; bfloat16, trainer's log-probs."""
    means, (low, high), lines = measure(data).groupby(level="arm").mean(), clip_range(data), []
    for replay in (PLAIN, REPLAY):
        if (arm := name(COARSE, GSPO, replay, TRAINER)) in means.index:
            gap = means["|log s|"][arm]
            text = (
                f"Gap, {COARSE}, {replay}: mean |log s| {gap:.2g}, {gap / low:.2g} times the lower side of GSPO's clip "
            )
            lines.append(f"{text}range (-{low:.2g}, +{high:.2g}).")
    for objective in (GSPO, GRPO):
        if part := routing_share(data, objective):
            text = f"Routing, {objective}, {COARSE}: with R3 a share of {part.text('.2f')} of k3 is gone"
            lines.append(f"{text} (interval {part.kind}).")
    return lines


def share(value: float) -> str:
    return "-" if np.isnan(value) else "0" if value == 0 else f"{value:.2g}"


def arm_table(data: Data) -> list[str]:
    """Markdown: a line per arm, means over seeds; the gain with its smallest and largest seed."""
    cells = [["arm", "seeds", "reward, start", f"last {WINDOW}", "gain [min, max over seeds]", *MEANS]]
    for arm, own in measure(data).groupby(level="arm", sort=False):
        mean, gains = own.mean(), own["gain"]
        spread = f" [{gains.min():+.3f}, {gains.max():+.3f}]" if len(own) > 1 else ""
        line = [arm, ", ".join(map(str, own.index.get_level_values("seed"))), f"{mean['start']:.3f}"]
        line += [f"{mean['last']:.3f}", f"{mean['gain']:+.3f}{spread}"]
        cells.append(line + [f"{mean[c]:.4f}" if c == "agreement" else share(mean[c]) for c in MEANS])
    return markdown(cells)


def effect_table(data: Data) -> list[str]:
    """Markdown: a line per pair of arms, the effect on the reward with its interval and each seed."""
    cells = [["reward, engine - trainer", "mean [95 % interval]", "interval", "each seed"]]
    for dtype, objective, replay in CELLS:
        if found := effect(data, dtype, objective, replay):
            seeds = ", ".join(f"{seed}: {value:+.3f}" for seed, value in found[1].items())
            cells.append([name(dtype, objective, replay), found[0].text("+.3f"), found[0].kind, seeds])
    return markdown(cells)


def markdown(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


# ---------------------------------------------------------------------------------------------------------- figure
def draw(data: Data, out: Path) -> list[Path]:
    """Above, a row per pair of arms: reward, clip. Below, the gap in bfloat16."""
    numbers = measure(data)
    figure = style.canvas(5.9)
    grid = figure.add_gridspec(2, 12, height_ratios=[8, 4.6])
    upper = [figure.add_subplot(grid[0, columns]) for columns in (slice(0, 6), slice(6, 9), slice(9, 12))]
    lower = [figure.add_subplot(grid[1, 3 * i : 3 * i + 3]) for i in range(4)]
    reward_panel(upper[0], data)
    for ax, (column, title) in zip(upper[1:], SHARES.items(), strict=True):
        share_panel(ax, numbers, column, title)
    for ax, (column, label), title in zip(lower, GAPS.items(), TITLES, strict=True):
        gap_panel(ax, numbers, column, clip_range(data))
        ax.set(xlabel=label, title=title)
    for axes, cells in ((upper, CELLS), (lower, CELLS[: len(CELLS) // 2])):
        for ax in axes:
            ax.grid(axis="y", visible=True)
            ax.tick_params(axis="y", length=0)
            ax.set(ylim=(len(cells) - 0.45, -0.55), yticks=range(len(cells)), yticklabels=[])
        axes[0].set_yticklabels([f"{o} {d}{' + R3' * (r == REPLAY)}" for d, o, r in cells], fontweight="bold")
        for text, cell in zip(axes[0].get_yticklabels(), cells, strict=True):
            text.set_color(style.colour(cell[1]))
    return style.save(figure, out, "fig_engine_likelihoods", caption(data))


def reward_panel(ax: Axes, data: Data) -> None:
    """Effect on the reward: seeds as dots, mean and interval as a bar."""
    ax.axvline(0, color=style.MUTED, lw=1, zorder=2)
    for row, cell in enumerate(CELLS):
        if found := effect(data, *cell):
            interval, seeds, hue = *found, style.colour(cell[1])
            ax.plot([interval.low, interval.high], [row, row], color=style.tint(hue, 0.45), lw=1.6, zorder=2)
            ax.plot(seeds, np.full(len(seeds), row), "o", ms=5, color=style.tint(hue, 0.6), mec="white", mew=0.5)
            ax.plot(interval.mean, row, "|", ms=12, mew=2.4, color=hue, zorder=4)
    ax.set(
        title="Reward: engine's log-probs - trainer's", xlabel=f"difference of the mean reward, last {WINDOW} batches"
    )


def mark(ax: Axes, y: float, seeds: pd.Series, hue: str, old: str, symbol: str) -> None:
    """Seeds of one arm; filled: the engine's log-probs, hollow: the trainer's."""
    look = {"mfc": style.tint(hue, 0.75), "mec": "white", "mew": 0.4} if old == ENGINE else {"mfc": "white", "mec": hue}
    ax.plot(seeds, np.full(len(seeds), y), symbol, ms=4.5 if symbol == "o" else 4, zorder=3, **look)


def share_panel(ax: Axes, numbers: pd.DataFrame, column: str, title: str) -> None:
    """A share of tokens in three versions per row, on an axis that is logarithmic above 1e-4 and holds 0."""
    ax.set_xscale("symlog", linthresh=1e-4, linscale=0.6)
    for row, cell in enumerate(CELLS):
        for old, when, shift, symbol in MARKS:
            if (arm := name(*cell, old)) in numbers.index:
                mark(ax, row + shift, numbers.loc[arm, f"{column}, {when}"], style.colour(cell[1]), old, symbol)
    ax.set(title=title, xlabel="share of tokens", xlim=(-2e-5, 1.5), xticks=[0, 1e-4, 1e-2, 1])
    ax.xaxis.set_minor_locator(NullLocator())


def gap_panel(ax: Axes, numbers: pd.DataFrame, column: str, band: tuple[float, float]) -> None:
    """One measure of the gap in bfloat16; in that of the sequences GSPO's clip range."""
    for row, cell in enumerate(CELLS[: len(CELLS) // 2]):
        for old, shift in ((ENGINE, -0.15), (TRAINER, 0.15)):
            if (arm := name(*cell, old)) in numbers.index:
                mark(ax, row + shift, numbers.loc[arm, column], style.colour(cell[1]), old, "o")
    if column == "|log s|" and not np.isnan(band).any():
        for side in band:
            ax.axvline(side, color=style.MUTED, lw=1, ls="--", zorder=1)
    if column != "agreement":
        ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def caption(data: Data) -> str:
    runs = data.runs
    seeds = load.count_seeds(sorted({run.seed for run in runs}))
    text = f"Run: {runs[0].settings.get('model.name', 'model not named')}, {len(runs)} runs, {seeds}, {runs[0].last} "
    text += "batches. Filled: the engine's log-probs as the old policy's (diamonds: first mini-batch; circles: all); hollow: "
    text += "the trainer's (first mini-batch: 0 by construction). Dots are seeds, bars means with 95 % intervals. Rows without "
    text += "a mark: no finished run. Below: bfloat16; dashes: GSPO's clip range."
    return text + "\n" + "\n".join(verdict(data)[:2])


if __name__ == "__main__":
    main()
