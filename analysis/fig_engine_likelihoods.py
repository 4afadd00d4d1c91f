"""Engine likelihoods: what do GSPO and GRPO lose with the engine's log-probs as the old policy's?

    gspo figure engine-likelihoods runs/engine_likelihoods

Section 5.4 of the GSPO paper argues, without an experiment, that a sequence's likelihood tolerates
the engine's precision, so that the engine's log-probs can be used unchanged. Expected, if so: in
bfloat16 GSPO loses less reward by them than GRPO. In float32 the two likelihoods agree to rounding.
So a difference there is chance, and serves as the yardstick. Prints Markdown tables and the verdict
in words. Writes fig_engine_likelihoods.pdf and .png. Runs that are missing or unfinished are named
and left out. Arms are paired by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from gspo.analysis import load, script, style
from gspo.analysis.arm_styles import arm_style, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.grid import gain_text, name_rows
from gspo.analysis.load import GRPO, GSPO, Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import (
    START,
    WINDOW,
    Interval,
    estimate,
    number,
    paired_difference,
    ratio,
)
from gspo.analysis.style import FigureOptions
from gspo.analysis.verdicts import MAX_P
from gspo.io.arguments import command_options
from gspo.statistics import sign_flip_p

COARSE = "bfloat16"
FINE = "float32"
PLAIN = "no replay"
REPLAY = "R3"
TRAINER = "trainer"
ENGINE = "engine"
WORDS = {  # the settings that make an arm, and the words for their values
    "rollout.dtype": {"bfloat16": COARSE, "float32": FINE},
    "objective.name": {"gspo": GSPO, "grpo": GRPO},
    "policy.routing_replay": {"none": PLAIN, "r3": REPLAY},
    "policy.old_logprobs": {"step_start": TRAINER, "engine": ENGINE},
}
ARMS = tuple(product(*(words.values() for words in WORDS.values())))
# the pairs of arms that are compared: arms without the source of their log-probs
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
GAPS = {  # title of a panel, label of its x axis, and its unit as a number
    "k3": ("Gap of tokens", "k3 ($10^{-4}$ nats)", 1e-4),
    "abs log s": ("Gap of sequences", "mean |log s| ($10^{-3}$ nats)", 1e-3),
    "F(2)": ("Off by a factor of 2", "share of tokens ($10^{-4}$)", 1e-4),
    "agreement": ("Same experts", "share of experts", 1),
}


def main() -> None:
    options = command_options(script.Options, __doc__, script.DOTS | script.NO_CURVES)
    loaded = script.read(options, notes=False)
    data = chosen(loaded)
    print("\n".join(f"note: {note}" for note in loaded.notes + data.notes))
    paths = draw(data, options.out, options)
    script.print_lines(arm_table(data), effect_table(data), verdict(data), paths)


# -------------------------------------------------------------------------------------------------------------
# runs
def arm_name(dtype: str, objective: str, *parts: str) -> str:
    """Return the name of an arm: the objective first, then the precision and the rest."""
    return ", ".join([objective, dtype, *parts])


def chosen(data: Data) -> Data:
    """Return the finished runs of the arms, renamed and cut to their common batches.

    A note says which runs are missing. Raises RunsError if no two arms can be compared.
    """
    runs: dict[tuple[str, int], Run] = {}
    seeds = set()
    for run in data.runs:
        words = tuple(names.get(run.settings.get(key)) for key, names in WORDS.items())
        if words not in ARMS:
            continue
        seeds.add(run.seed)
        if not run.finished:
            continue
        renamed = replace(run, arm=arm_name(*words))
        other = runs.setdefault((renamed.arm, run.seed), renamed)
        if other is not renamed:
            raise RunsError(
                f"the same arm and seed twice ({renamed.arm}, seed {run.seed}): {other.path} and "
                f"{run.path}"
            )
    check_pairs(set(runs), seeds)
    shortest = min(runs.values(), key=lambda run: run.last)
    minimum = START + WINDOW
    if shortest.last < minimum:
        raise RunsError(
            f"fig_engine_likelihoods needs {minimum} batches of every run; {shortest.path} has "
            f"{shortest.last}"
        )
    end = {"steps": shortest.last}  # so that all of them count as finished
    cut = []
    for run in runs.values():
        rows = run.rows[run.rows["step"] <= shortest.last]
        cut.append(replace(run, rows=rows, settings=run.settings | end))
    notes = []
    differing = load.differing(cut)
    unexpected = [key for key in differing if key not in WORDS and not key.startswith("objective.")]
    if unexpected:
        notes.append(f"the runs differ also in {', '.join(unexpected)}")
    return Data(cut, notes + missing(set(runs), seeds))


def check_pairs(finished: set[tuple[str, int]], seeds: set[int]) -> None:
    """Raise RunsError unless some pair of arms has a finished seed in common."""
    for cell in CELLS:
        trainer = arm_name(*cell, TRAINER)
        engine = arm_name(*cell, ENGINE)
        if any((trainer, seed) in finished and (engine, seed) in finished for seed in seeds):
            return
    arms = "; ".join(sorted({arm for arm, _ in finished})) or "none"
    raise RunsError(
        "fig_engine_likelihoods needs finished runs of gspo or grpo with "
        "policy.old_logprobs=step_start and =engine, else alike, of one seed; found: " + arms
    )


def missing(finished: set[tuple[str, int]], seeds: set[int]) -> list[str]:
    """Return no line, or a line that names the arms and seeds of the design without finished run."""
    count = 0
    texts = []
    for words in ARMS:
        arm = arm_name(*words)
        gaps = [str(seed) for seed in sorted(seeds) if (arm, seed) not in finished]
        if gaps:
            count += len(gaps)
            texts.append(f"{arm}: {', '.join(gaps)}")
    if not texts:
        return []
    total = len(ARMS) * len(seeds)
    return [
        f"missing or unfinished, left out: {count} of {total} runs (arm: seeds): {'; '.join(texts)}"
    ]


# ----------------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data) -> pd.DataFrame:
    """Return a row per arm and seed: start, last and gain of the reward, then MEANS.

    A metric that was not reported is NaN.
    """
    rows = data.rows[data.rows["step"] >= 1].sort_values("step")
    columns = ["arm", "seed", "reward/mean", *MEANS.values()]
    runs = rows.reindex(columns=columns).groupby(["arm", "seed"])
    start = runs["reward/mean"].apply(lambda rewards: rewards.head(START).mean())
    last = runs["reward/mean"].apply(lambda rewards: rewards.tail(WINDOW).mean())
    numbers = pd.DataFrame({"start": start, "last": last, "gain": last - start})
    numbers = numbers.join(runs[list(MEANS.values())].mean().set_axis(list(MEANS), axis=1))
    arms = [arm for arm in (arm_name(*words) for words in ARMS) if arm in data.arms]
    return pd.concat([numbers.loc[[arm]] for arm in arms])


def tables_of(data: Data, metric: str, *arms: tuple[str, ...]) -> list[pd.DataFrame] | None:
    """Return the metric of these arms for the seeds that all have, or None without such a seed."""
    names = tuple(arm_name(*arm) for arm in arms)
    return None if load.why_not_comparable(data, names) else data.paired(metric, *names)


def effect(data: Data, *cell: str) -> tuple[Interval, pd.Series] | None:
    """Return the reward with the engine's log-probs minus that with the trainer's.

    The result is the interval and the values of the seeds, or None if there are no pairs.
    """
    tables = tables_of(data, "reward/mean", (*cell, ENGINE), (*cell, TRAINER))
    if not tables:
        return None
    engine, trainer = tables
    difference = (engine - trainer).tail(WINDOW)
    return estimate(difference), difference.mean()


def contrast(data: Data, dtype: str, replay: str) -> tuple[Interval, float, pd.DataFrame] | None:
    """Return GSPO's effect minus GRPO's: its interval, its exact p, and both effects of each seed."""
    objectives = (GSPO, GRPO)
    arms = [(dtype, name, replay, old) for name in objectives for old in (ENGINE, TRAINER)]
    tables = tables_of(data, "reward/mean", *arms)
    if not tables:
        return None
    gspo_engine, gspo_trainer, grpo_engine, grpo_trainer = tables
    gspo = (gspo_engine - gspo_trainer).tail(WINDOW)
    grpo = (grpo_engine - grpo_trainer).tail(WINDOW)
    effects = pd.DataFrame({GSPO: gspo.mean(), GRPO: grpo.mean()})
    return paired_difference(gspo, grpo), sign_flip_p(effects[GSPO] - effects[GRPO]), effects


def clip_range(data: Data) -> tuple[float, float] | None:
    """Return GSPO's objective.clip_low and clip_high, or None if its runs differ or have none."""
    ranges = set()
    for run in data.runs:
        if run.arm.startswith(f"{GSPO},"):
            low = run.settings.get("objective.clip_low")
            ranges.add((low, run.settings.get("objective.clip_high")))
    if len(ranges) != 1:
        return None
    low, high = ranges.pop()
    return None if low is None or high is None else (low, high)


# ------------------------------------------------------------------------------------------------------------
# words
def verdict(data: Data) -> list[str]:
    """Return the results in words: the question, the yardstick of chance, the clip, the gap."""
    lines = [answer(data, COARSE, replay) for replay in (PLAIN, REPLAY)]
    float32_effects = [effect(data, *cell) for cell in CELLS if cell[0] == FINE]
    largest = [each[1].abs().max() for each in float32_effects if each]
    if largest:
        lines.append(
            "Yardstick: in float32, where only rounding differs, single seeds differ by up to "
            f"{max(largest):.3f}: an effect of that size can be chance."
        )
    means = measure(data).groupby(level="arm").mean()
    for replay in (PLAIN, REPLAY):
        lines += clip_words(means, replay, clip_range(data))
    return lines + routing_words(data, GSPO) + routing_words(data, GRPO)


def answer(data: Data, dtype: str, replay: str) -> str:
    """Return in words whether GSPO loses less than GRPO.

    That takes an interval over seeds that excludes 0.
    """
    head = f"GSPO against GRPO, {dtype}, {replay}:"
    result = contrast(data, dtype, replay)
    if not result:
        return f"{head} not judged, its four arms have no finished seed in common."
    interval, p, effects = result
    seeds = interval.seeds
    text = (
        f"{head} the engine's log-probs change the reward of the last {WINDOW} batches by "
        f"{effects[GSPO].mean():+.3f} with GSPO, by {effects[GRPO].mean():+.3f} with GRPO; "
        f"GSPO - GRPO {interval.text('+.3f')}"
    )
    if seeds == 1:
        return f"{text} (interval {interval.kind}). Not judged: one seed says nothing about others."
    text += (
        f" (95 % t interval over {seeds} seeds; exact sign-flip p = {p:.2g}: {seeds} seeds cannot "
        f"go below {2 / 2**seeds:.2g}). "
    )
    if interval.low <= 0 <= interval.high:
        return f"{text}Not told apart: the interval includes 0, and any difference within it remains possible."
    amount = "less (or gains more)" if interval.low > 0 else "more (or gains less)"
    if p < MAX_P:
        return f"{text}Told apart: GSPO loses {amount} than GRPO."
    return f"{text}Points to this: GSPO loses {amount} than GRPO; p is not below {MAX_P:g}."


def clip_words(means: pd.DataFrame, replay: str, limits: tuple[float, float] | None) -> list[str]:
    """Return in words the effects of bfloat16 on the clip.

    These are the effects on the first mini-batch's tokens and on the likelihood of sequences.
    """
    parts = []
    for objective in (GSPO, GRPO):
        arm = arm_name(COARSE, objective, replay, ENGINE)
        if arm in means.index:
            outside = share(means["outside, first"][arm])
            active = share(means["active, first"][arm])
            parts.append(f"{outside} of {objective}'s tokens ({active} clipped)")
    lines = []
    if parts:
        lines.append(
            f"First mini-batch, {COARSE}, {replay}, engine's log-probs, outside the clip range: "
            f"{', '.join(parts)}; with the trainer's 0 by construction."
        )
    arm = arm_name(COARSE, GSPO, replay, TRAINER)
    if limits and arm in means.index:
        low, high = limits
        gap = means["abs log s"][arm]
        lines.append(
            f"Gap, {COARSE}, {replay}, trainer's log-probs: mean |log s| {share(gap)}, "
            f"{share(gap / low)} times the lower side of GSPO's clip range (-{low:.2g}, "
            f"+{high:.2g})."
        )
    return lines


def routing_words(data: Data, objective: str) -> list[str]:
    """Return in words how much of the gap is due to routing, in bfloat16.

    That is 1 - (k3 with R3) / (k3 without).
    """
    replayed = (COARSE, objective, REPLAY, TRAINER)
    plain = (COARSE, objective, PLAIN, TRAINER)
    tables = tables_of(data, MEANS["k3"], replayed, plain)
    if not tables or any(table.isna().all(axis=None) for table in tables):
        return []
    rest = ratio(*tables)
    with_replay, without = (float(table.mean().mean()) for table in tables)
    gone = Interval(1 - rest.mean, 1 - rest.high, 1 - rest.low, rest.seeds)
    return [
        f"Routing, {objective}, {COARSE}, trainer's log-probs: k3 {without:.2g} without R3, "
        f"{with_replay:.2g} with: a share of {gone.text('.2f')} is gone (interval {gone.kind})."
    ]


def share(value: float, form: str = ".2g") -> str:
    return "0" if value == 0 else number(value, form)


def arm_table(data: Data) -> list[str]:
    """Return a Markdown row per arm with means over seeds.

    The gain has its smallest and largest seed.
    """
    head = ["arm", "seeds", "reward, start", f"last {WINDOW}", "gain [min, max over seeds]"]
    rows = [[*head, *MEANS]]
    for arm, runs in measure(data).groupby(level="arm", sort=False):
        mean = runs.mean()
        seeds = ", ".join(map(str, runs.index.get_level_values("seed")))
        row = [arm, seeds, f"{mean['start']:.3f}", f"{mean['last']:.3f}", gain_text(runs["gain"])]
        for name in MEANS:
            row.append(share(mean[name], ".4f" if name == "agreement" else ".2g"))
        rows.append(row)
    return markdown_table(rows)


def effect_table(data: Data) -> list[str]:
    """Return a Markdown row per pair of arms: the effect on the reward, its interval, each seed."""
    rows = [["reward, engine - trainer", "mean [95 % interval]", "interval", "each seed"]]
    for cell in CELLS:
        result = effect(data, *cell)
        if result:
            interval, values = result
            seeds = ", ".join(f"{seed}: {value:+.3f}" for seed, value in values.items())
            rows.append([arm_name(*cell), interval.text("+.3f"), interval.kind, seeds])
    return markdown_table(rows)


# ----------------------------------------------------------------------------------------------------------
# figure
def draw(data: Data, out: Path, options: FigureOptions | None = None) -> list[Path]:
    """Draw a row per pair of arms above (reward, clip), and the gap in bfloat16 below."""
    options = options or FigureOptions()
    numbers = measure(data)
    coarse = [cell for cell in CELLS if cell[0] == COARSE]
    figure = style.canvas(6.2, options)
    grid = figure.add_gridspec(2, 4, height_ratios=[8, 4.6])
    upper = [figure.add_subplot(grid[0, columns]) for columns in (slice(0, 2), 2, 3)]
    lower = [figure.add_subplot(grid[1, column]) for column in range(4)]
    draw_rewards(upper[0], data)
    for ax, (column, title) in zip(upper[1:], SHARES.items(), strict=True):
        draw_marks(ax, numbers, CELLS, column, MARKS)
        share_axis(ax)
        ax.set(title=title, xlabel="share of tokens")
    for ax, (column, (title, label, unit)) in zip(lower, GAPS.items(), strict=True):
        draw_marks(ax, numbers / unit, coarse, column, PAIR)
        limits = clip_range(data)
        if column == "abs log s" and limits:
            for side in limits:
                ax.axvline(side / unit, color=style.MUTED, lw=1, ls="--", zorder=1)
        ax.set(title=title, xlabel=label, xlim=(None, 1) if column == "agreement" else (0, None))
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    for ax in upper:
        float32_rows = (len(coarse) - 0.5, len(CELLS) - 0.45)
        ax.axhspan(*float32_rows, color=tint(style.FAINT, 0.3), lw=0, zorder=0)
    for axes, cells in ((upper, CELLS), (lower, coarse)):
        for ax in axes[1:]:
            ax.set_yticks(range(len(cells)), [""] * len(cells))
        name_rows(axes, [row_name(*cell) for cell in cells], 0.55)
    handles = []
    for old, when, _, marker in MARKS:
        minibatches = "mini-batches" if when == ", all" else "mini-batch"
        label = f"{old}'s log-probs{when} {minibatches}"
        handles.append(Line2D([], [], label=label, **mark_options(style.INK, old, marker)))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(MARKS))
    return style.save(figure, out, "fig_engine_likelihoods", caption(data), options)


def row_name(dtype: str, objective: str, replay: str) -> str:
    suffix = " + R3" if replay == REPLAY else ""
    return f"{objective} {dtype}{suffix}"


def share_axis(ax: Axes) -> None:
    """Set up an x axis of shares that is logarithmic above 1e-4, with room for 0."""
    ax.set_xscale("symlog", linthresh=1e-4, linscale=0.6)
    ax.set(xlim=(-2e-5, 1.5), xticks=[0, 1e-4, 1e-2, 1])

    def power(x: float, _: int) -> str:
        return f"$10^{{{np.log10(x):.0f}}}$" if 0 < x < 1 else f"{x:g}"

    ax.xaxis.set_major_formatter(power)
    ax.xaxis.set_minor_locator(NullLocator())


def draw_rewards(ax: Axes, data: Data) -> None:
    """Draw the effect on the reward: each seed as a dot, the mean with its interval as a bar."""
    ax.axvline(0, color=style.MUTED, lw=1, zorder=2)
    for row, cell in enumerate(CELLS):
        result = effect(data, *cell)
        if not result:
            continue
        interval, seeds = result
        colour = arm_style(cell[1]).colour
        ends = [interval.low, interval.high]
        ax.plot(ends, [row, row], color=tint(colour, 0.45), lw=1.6, zorder=2)
        dots = {"ms": 5, "color": tint(colour, 0.6), "mec": "white", "mew": 0.5}
        ax.plot(seeds, np.full(len(seeds), row), "o", **dots)
        ax.plot(interval.mean, row, "|", ms=12, mew=2.4, color=colour, zorder=4)
    ax.set(
        title="Reward: engine's log-probs - trainer's",
        xlabel=f"difference, mean of the last {WINDOW} batches",
    )


def draw_marks(
    ax: Axes, numbers: pd.DataFrame, cells: Sequence[tuple], column: str, kinds: tuple
) -> None:
    """Draw a row per pair of arms with a mark per seed, each kind of mark at its own height."""
    for row, cell in enumerate(cells):
        for old, when, shift, marker in kinds:
            arm = arm_name(*cell, old)
            if arm in numbers.index:
                seeds = numbers.loc[arm, column + when]
                heights = np.full(len(seeds), row + shift)
                ax.plot(seeds, heights, **mark_options(arm_style(cell[1]).colour, old, marker))


def mark_options(colour: str, old: str, marker: str) -> dict:
    """Return the marker's style: filled for the engine's log-probs, hollow for the trainer's."""
    common = {"ls": "", "marker": marker, "ms": 4.5, "clip_on": False, "zorder": 3}
    if old == ENGINE:
        return common | {"mfc": tint(colour, 0.75), "mec": "white", "mew": 0.4}
    return common | {"mfc": "white", "mec": colour}


def caption(data: Data) -> str:
    seeds = sorted({run.seed for run in data.runs})
    first = data.runs[0]
    model = first.settings.get("model.name", "model not named")
    text = (
        f"Run: {model}, {first.last} rollout batches, {len(data.runs)} of {len(ARMS) * len(seeds)} "
        f"runs, {load.count_seeds(seeds)}. Dots: seeds. Bars: mean, 95 % interval (of a single "
        "seed: within the run). Grey: float32, only rounding differs. Lower row: the gap in "
        "bfloat16; dashes: GSPO's clip range."
    )
    return "\n".join([text, *verdict(data)[:2]])


if __name__ == "__main__":
    script.command(main)
