"""Contrast: does what separates the arms at one learning rate separate them at another?

    gspo figure contrast runs/STUDY runs/OTHER_STUDY

A column for each study, in the order given: above the training reward of the arms, below their
paired differences over the last half of the batches, a dot per seed. Expected, if the paper is
right about stability: no difference where nothing is unstable, and GSPO above GRPO with Routing
Replay above GRPO at the edge. Writes fig_contrast.pdf and .png.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.load import ARMS, Data
from gspo.analysis.looks import look
from gspo.analysis.stats import Interval, paired_difference
from gspo.analysis.style import View
from matplotlib.axes import Axes

SHORT = {
    "optim.lr": "learning rate",
    "trainer.minibatches": "mini-batches",
    "objective.clip_low": "clip range",
}
IMPLIED = ("objective.clip_high",)  # the sides of a clip range change together
MOST = 2  # differences between studies that a title names


def main() -> None:
    args = script.parser(__doc__).parse_args()
    studies = []
    for path in args.runs:
        script.one_study(path)
        studies.append(load.load([path], script.chosen(args)))
    for note in (note for data in studies for note in data.notes):
        print(f"note: {note}")
    paths = draw(studies, args.out, script.view(args))
    print("\n".join([*table(studies), "", *map(str, paths)]))


def pairs(data: Data) -> list[tuple[str, str]]:
    """Return the pairs of the paper's arms that these runs have, the one that should be ahead
    first.
    """
    arms = [arm for arm in ARMS if arm in data.arms]
    return [pair for pair in combinations(arms, 2) if load.lacking(data, pair) is None]


def judged(data: Data) -> dict[tuple[str, str], tuple[Interval, str]]:
    """Return for each pair of arms the paired difference over the last half of the common batches,
    and its verdict.
    """
    found = {}
    for a, b in pairs(data):
        interval, _ = claims.last_half(data, a, b)
        found[a, b] = interval, claims.verdict(data, (a, b), interval, 0, claims.SAME)
    return found


def between(one: Data, other: Data) -> dict[str, Interval]:
    """Return for each arm, over the seeds that it has in both studies, the mean paired difference
    of the training reward, `other` - `one`, over the last half of the batches that all of these
    runs have."""
    found = {}
    for arm in (arm for arm in ARMS if arm in one.arms and arm in other.arms):
        seeds = sorted(set(one.seeds(arm)) & set(other.seeds(arm)))
        last = min(
            (run.last for data in (one, other) for run in data.of(arm) if run.seed in seeds),
            default=0,
        )
        if last > 1:
            steps = range(last // 2 + 1, last + 1)
            found[arm] = paired_difference(
                *(data.table(arm, "reward/mean")[seeds].reindex(steps) for data in (other, one))
            )
    return found


def table(studies: list[Data]) -> list[str]:
    """Return a Markdown row per study and pair of arms, then one per arm and pair of neighbouring
    studies.
    """
    rows = [["study", "difference of the reward", "mean and 95 % interval", "p", "verdict"]]
    names = titles(studies)
    for data, name in zip(studies, names, strict=True):
        for (a, b), (interval, verdict) in judged(data).items():
            rows.append(
                [
                    name,
                    f"{panels.short_name(a)} - {panels.short_name(b)}",
                    *numbers(interval),
                    verdict,
                ]
            )
    for (one, first), (other, second) in pairwise(zip(studies, names, strict=True)):
        for arm, interval in between(one, other).items():
            rows.append([f"{second} - {first}", panels.short_name(arm), *numbers(interval), ""])
    return aligned_table(rows)


def numbers(interval: Interval) -> list[str]:
    """Return the mean with its interval, and the exact p."""
    return [interval.text("+.3f"), f"{interval.p():.2g}" if interval.seeds > 1 else "-"]


def titles(studies: list[Data]) -> list[str]:
    """Return a title per study: the settings in which the studies differ, or its name where there
    are none.

    A setting in which one arm alone differs, such as its clip range, stands behind that arm's name.
    """
    differing = {
        arm: [
            key
            for key in load.differing([data.of(arm)[0] for data in studies])
            if key not in IMPLIED
        ]
        for arm in ARMS
        if all(arm in data.arms for data in studies)
    }
    everywhere = sorted(set.intersection(*map(set, differing.values()))) if differing else []
    found = [(key, list(differing)[:1], "") for key in everywhere]
    for key in sorted({key for keys in differing.values() for key in keys} - set(everywhere)):
        arms = [arm for arm, keys in differing.items() if key in keys]
        found.append((key, arms, f"{panels.short_name(min(arms, key=len))}'s "))
    found.sort(key=lambda each: list(SHORT).index(each[0]) if each[0] in SHORT else len(SHORT))
    if not found:
        return [str(data.runs[0].settings.get("study")) for data in studies]
    left = len(found) - MOST
    more = (
        f", and {left} more {'setting differs' if left == 1 else 'settings differ'}"
        if left > 0
        else ""
    )
    return [
        ", ".join(
            f"{whose}{SHORT.get(key, key)} {short(data.of(arms[0])[0].settings.get(key))}"
            for key, arms, whose in found[:MOST]
        )
        + more
        for data in studies
    ]


def short(value: object) -> str:
    """Return a setting's value as one writes it: 2.5e-4 for 0.00025."""
    if not isinstance(value, float) or not 0 < abs(value) < 0.01:
        return str(value)
    digits, exponent = f"{value:.3e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def lacking(studies: list[Data]) -> str | None:
    """Return why the figure cannot be drawn of these studies, or None."""
    if len(studies) < 2:
        return "needs two studies or more: name the folder of each"
    return next((load.lacking(data, ARMS[:2]) for data in studies if not pairs(data)), None)


def draw(studies: list[Data], out: Path, view: View | None = None) -> list[Path]:
    """Draw a column per study; the rows share their y axes."""
    if why := lacking(studies):
        load.die(f"fig_contrast {why}")
    view = view or View()
    figure = style.canvas(6.2, view)
    axes = figure.subplots(2, len(studies), sharey="row", squeeze=False, height_ratios=[1.3, 1])
    for column, (data, title) in enumerate(zip(studies, titles(studies), strict=True)):
        curves(axes[0, column], data, view, title)
        differences(axes[1, column], data)
    axes[0, 0].set_ylabel("training reward (mean of batch)")
    axes[1, 0].set_ylabel("paired difference of the reward,\nlast half of the batches")
    style.key(
        axes[0, -1],
        {arm: look(arm) for arm in ARMS if any(arm in d.arms for d in studies)},
        loc="best",
    )
    return style.save(figure, out, "fig_contrast", caption(studies, view), view)


def curves(ax: Axes, data: Data, view: View, title: str) -> None:
    """Draw the training reward of the paper's arms over the batches."""
    for arm in (arm for arm in ARMS if arm in data.arms):
        panels.curve(ax, data.table(arm, "reward/mean"), look(arm), view)
    style.training_axis(ax, 0, view)
    ax.set_title(title.replace(", ", "\n"))


def differences(ax: Axes, data: Data) -> None:
    """Draw each pair's difference: a dot per seed, the mean with its 95 % interval, and the exact
    p.
    """
    ax.axhline(0, color=style.INK, lw=1.2, zorder=1)
    ax.axhspan(-claims.SAME, claims.SAME, color=style.STRIP, zorder=0)
    names, found = [], judged(data)
    for place, ((a, b), (interval, _)) in enumerate(found.items()):
        shift = (
            np.linspace(-0.16, 0.16, len(interval.values)) if len(interval.values) > 1 else [0.0]
        )
        ax.plot(
            place + np.array(shift),
            interval.values or [interval.mean],
            "o",
            ms=4,
            color=style.MUTED,
            mec="white",
        )
        ax.plot([place + 0.3] * 2, [interval.low, interval.high], color=style.INK, lw=2)
        ax.plot(place + 0.3, interval.mean, "_", ms=11, mew=2.4, color=style.INK)
        p = (
            f"\n{interval.mean:+.3f}\np = {interval.p():.2g}"
            if interval.seeds > 1
            else f"\n{interval.mean:+.3f}"
        )
        names.append(f"{panels.short_name(a)}\n- {panels.short_name(b)}{p}")
    ax.set_xticks(range(len(found)), names, fontsize=8)
    ax.set_xlim(-0.5, len(found) - 0.3)
    ax.margins(y=0.12)


def caption(studies: list[Data], view: View) -> str:
    """Return the caption: what was run, what is drawn, and the verdicts."""
    lines = []
    for data, title in zip(studies, titles(studies), strict=True):
        said = [
            f"{panels.short_name(a)} - {panels.short_name(b)}: {v}"
            for (a, b), (_, v) in judged(data).items()
        ]
        lines.append(
            f"{title[:1].upper()}{title[1:]}: {load.describe(data, data.arms)} {'; '.join(said)}."
        )
    words = panels.how_drawn(studies[-1], [arm for arm in ARMS if arm in studies[-1].arms], view)
    words += " Below: dots are seeds, bars 95 % intervals over seeds (Student's t), p is that of the exact sign-flip"
    words += f" test; grey: within ±{claims.SAME}, which counts as the same."
    return "\n".join([*lines, words])


if __name__ == "__main__":
    script.command(main)
