"""Contrast: are the arms that differ at one learning rate different at another too?

    gspo figure contrast runs/STUDY runs/OTHER_STUDY

A column for each study, in the given order: above the training reward of the arms, below their
paired differences over the last half of the batches, a dot per seed. Expected, if the paper is
right about stability: no difference if nothing is unstable, and GSPO above GRPO with Routing Replay
above GRPO at the edge. Writes fig_contrast.pdf and .png.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.arm_styles import arm_style
from gspo.analysis.blocks import markdown_table
from gspo.analysis.grid import difference_cells
from gspo.analysis.load import ARMS, Data
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import Interval, paired_difference
from gspo.analysis.style import FigureOptions
from gspo.io.arguments import command_options

SETTING_NAMES = {
    "optim.lr": "learning rate",
    "trainer.minibatches": "mini-batches",
    "objective.clip_low": "clip range",
}
IMPLIED = ("objective.clip_high",)  # the sides of a clip range change together
MAX_TITLE_SETTINGS = 2  # differences between studies that a title names


def main() -> None:
    options = command_options(script.Options, __doc__)
    studies = []
    for path in options.paths:
        script.check_one_study(path)
        studies.append(load.load([path], options.where))
    for data in studies:
        for note in data.notes:
            print(f"note: {note}")
    paths = draw(studies, options.out, options)
    print("\n".join([*table(studies), "", *map(str, paths)]))


def arms_in(data: Data) -> list[str]:
    """Return the paper's arms that these runs have."""
    return [arm for arm in ARMS if arm in data.arms]


def pairs(data: Data) -> list[tuple[str, str]]:
    """Return the pairs of the paper's arms that can be compared, the expected winner first."""
    candidates = combinations(arms_in(data), 2)
    return [pair for pair in candidates if load.why_not_comparable(data, pair) is None]


def judged(data: Data) -> dict[tuple[str, str], tuple[Interval, str]]:
    """Return for each pair of arms the paired difference and its verdict.

    The difference is over the last half of the common batches.
    """
    results = {}
    for pair in pairs(data):
        interval, _ = claims.last_half(data, *pair)
        results[pair] = interval, claims.verdict(data, pair, interval, 0, claims.SAME)
    return results


def between(first: Data, second: Data) -> dict[str, Interval]:
    """Return for each arm the mean paired difference of the training reward, second - first.

    It is over the seeds that the arm has in both studies, and over the last half of the batches
    that all of these runs have.
    """
    differences = {}
    for arm in arms_in(first):
        if arm not in second.arms:
            continue
        seeds = sorted(set(first.seeds(arm)) & set(second.seeds(arm)))
        runs = [run for run in (*first.of(arm), *second.of(arm)) if run.seed in seeds]
        last = min((run.last for run in runs), default=0)
        if last > 1:
            steps = range(last // 2 + 1, last + 1)
            rewards = [
                data.table(arm, "reward/mean")[seeds].reindex(steps) for data in (second, first)
            ]
            differences[arm] = paired_difference(*rewards)
    return differences


def table(studies: list[Data]) -> list[str]:
    """Return a Markdown row per study and pair of arms.

    Below them stands a row per arm and pair of neighbouring studies.
    """
    rows = [["study", "difference of the reward", "mean and 95 % interval", "p", "verdict"]]
    titled = list(zip(studies, titles(studies), strict=True))
    for data, title in titled:
        for (a, b), (interval, verdict) in judged(data).items():
            arms = f"{panels.short_name(a)} - {panels.short_name(b)}"
            rows.append([title, arms, *difference_cells(interval), verdict])
    for (first, first_title), (second, second_title) in pairwise(titled):
        for arm, interval in between(first, second).items():
            title = f"{second_title} - {first_title}"
            rows.append([title, panels.short_name(arm), *difference_cells(interval), ""])
    return markdown_table(rows)


def titles(studies: list[Data]) -> list[str]:
    """Return a title per study: the settings in which the studies differ, or its name.

    A setting in which a single arm differs, such as its clip range, stands behind that arm's name.
    """
    keys_by_arm = {}
    for arm in ARMS:
        if all(arm in data.arms for data in studies):
            keys = load.differing([data.of(arm)[0] for data in studies])
            keys_by_arm[arm] = [key for key in keys if key not in IMPLIED]
    all_keys = sorted({key for keys in keys_by_arm.values() for key in keys})
    parts = []  # (setting, an arm that has it, the words before it)
    for key in all_keys:
        arms = [arm for arm, keys in keys_by_arm.items() if key in keys]
        everywhere = len(arms) == len(keys_by_arm)
        owner = "" if everywhere else f"{panels.short_name(min(arms, key=len))}'s "
        parts.append((key, arms[0], owner))
    ranks = list(SETTING_NAMES)

    def order(part: tuple[str, str, str]) -> tuple[int, bool]:
        key, _, owner = part
        return ranks.index(key) if key in ranks else len(ranks), bool(owner)

    parts.sort(key=order)
    if not parts:
        return [str(data.runs[0].settings.get("study")) for data in studies]
    unnamed = len(parts) - MAX_TITLE_SETTINGS
    suffix = ""
    if unnamed > 0:
        suffix = f", and {unnamed} more {'setting differs' if unnamed == 1 else 'settings differ'}"
    study_titles = []
    for data in studies:
        texts = []
        for key, arm, owner in parts[:MAX_TITLE_SETTINGS]:
            value = scientific(data.of(arm)[0].settings.get(key))
            texts.append(f"{owner}{SETTING_NAMES.get(key, key)} {value}")
        study_titles.append(", ".join(texts) + suffix)
    return study_titles


def scientific(value: object) -> str:
    """Return a setting's value in short form: 2.5e-4 for 0.00025."""
    if not isinstance(value, float) or not 0 < abs(value) < 0.01:
        return str(value)
    digits, exponent = f"{value:.3e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def why_not_drawn(studies: list[Data]) -> str | None:
    """Return why the figure cannot be drawn of these studies, or None."""
    if len(studies) < 2:
        return "needs two studies or more: name the folder of each"
    for data in studies:
        if not pairs(data):
            return load.why_not_comparable(data, ARMS[:2])
    return None


def draw(studies: list[Data], out: Path, options: FigureOptions | None = None) -> list[Path]:
    """Draw a column per study; the rows share their y axes."""
    reason = why_not_drawn(studies)
    if reason:
        raise RunsError(f"fig_contrast {reason}")
    options = options or FigureOptions()
    figure = style.canvas(6.2, options)
    axes = figure.subplots(2, len(studies), sharey="row", squeeze=False, height_ratios=[1.3, 1])
    for column, (data, title) in enumerate(zip(studies, titles(studies), strict=True)):
        draw_curves(axes[0, column], data, options, title)
        draw_differences(axes[1, column], data)
    axes[0, 0].set_ylabel("training reward (mean of batch)")
    axes[1, 0].set_ylabel("paired difference of the reward,\nlast half of the batches")
    arms = [arm for arm in ARMS if any(arm in data.arms for data in studies)]
    style.legend(axes[0, -1], {arm: arm_style(arm) for arm in arms}, loc="best")
    return style.save(figure, out, "fig_contrast", caption(studies, options), options)


def draw_curves(ax: Axes, data: Data, options: FigureOptions, title: str) -> None:
    """Draw the training reward of the paper's arms over the batches."""
    for arm in arms_in(data):
        panels.curve(ax, data.table(arm, "reward/mean"), arm_style(arm), options)
    style.training_axis(ax, 0, options)
    ax.set_title(title.replace(", ", "\n"))


def draw_differences(ax: Axes, data: Data) -> None:
    """Draw each pair's difference: a dot per seed, the mean with its 95 % interval, the exact p."""
    ax.axhline(0, color=style.INK, lw=1.2, zorder=1)
    ax.axhspan(-claims.SAME, claims.SAME, color=style.STRIP, zorder=0)
    ticks = []
    for index, ((a, b), (interval, _)) in enumerate(judged(data).items()):
        values = interval.values or (interval.mean,)
        shifts = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(1)
        ax.plot(index + shifts, values, "o", ms=4, color=style.MUTED, mec="white")
        mean_x = index + 0.3
        ax.plot([mean_x] * 2, [interval.low, interval.high], color=style.INK, lw=2)
        ax.plot(mean_x, interval.mean, "_", ms=11, mew=2.4, color=style.INK)
        text = f"{panels.short_name(a)}\n- {panels.short_name(b)}\n{interval.mean:+.3f}"
        if interval.seeds > 1:
            text += f"\np = {interval.p_text()}"
        ticks.append(text)
    ax.set_xticks(range(len(ticks)), ticks, fontsize=8)
    ax.set_xlim(-0.5, len(ticks) - 0.3)
    ax.margins(y=0.12)


def caption(studies: list[Data], options: FigureOptions) -> str:
    """Return the caption, which describes the runs and the panels and states the verdicts."""
    lines = []
    for data, title in zip(studies, titles(studies), strict=True):
        verdicts = []
        for (a, b), (_, verdict) in judged(data).items():
            verdicts.append(f"{panels.short_name(a)} - {panels.short_name(b)}: {verdict}")
        heading = f"{title[:1].upper()}{title[1:]}"
        lines.append(f"{heading}: {load.describe(data, data.arms)} {'; '.join(verdicts)}.")
    last = studies[-1]
    lines.append(
        f"{panels.how_drawn(last, arms_in(last), options)} Below: dots are seeds, bars 95 % "
        "intervals over seeds (Student's t), p is that of the exact sign-flip test; grey: within "
        f"±{claims.SAME}, which counts as the same."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    script.command(main)
