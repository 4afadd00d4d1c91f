"""Contrast: are the arms that differ in one setting different in another too?

    gspo figure contrast runs/effect runs/effect_comfortable runs/effect_range

A column for each study, in the given order: above the training reward of the arms, below their
paired differences over the last half of the batches, a dot per seed. Expected, if the paper is
right about stability: no difference if nothing is unstable, and GSPO above GRPO with Routing Replay
above GRPO at the edge.

A study without GSPO shows GSPO's runs of the first study, if all other settings are equal. If
GSPO's settings are those of the first study, the paired gains of the other arms since the first
study are printed too, and drawn if there is room. Writes fig_contrast.pdf and .png.
"""

import math
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.arm_styles import arm_style
from gspo.analysis.blocks import markdown_table
from gspo.analysis.choosing import MAKES_THE_ARM
from gspo.analysis.grid import difference_cells
from gspo.analysis.load import ARMS, GSPO, Data
from gspo.analysis.runs import Run, RunsError
from gspo.analysis.stats import NO_INTERVAL, Interval, paired_difference
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.io.arguments import command_options
from gspo.tracking import foreign_options

SETTING_NAMES = {
    "optim.lr": "learning rate",
    "trainer.minibatches": "mini-batches",
    "objective.clip_low": "clip range",
}
IMPLIED = ("objective.clip_high",)  # the sides of a clip range change together
REFUSED = dict.fromkeys(
    foreign_options.REFUSED, "it compares the paper's arms, which are our runs'"
)
TABLE_HEAD = ["study", "difference of the reward", "mean and 95 % interval", "p", "verdict"]
MAX_TITLE_SETTINGS = 2  # differences between studies that a title names
MAX_DIFFERENCES = 3  # in a panel, so that their names do not overlap


def main() -> None:
    options = command_options(script.Options, __doc__, REFUSED)
    studies = []
    for path in options.paths:
        script.check_one_study(path)
        studies.append(load.load([path], options.where))
    studies = completed(studies)
    for data in studies:
        script.print_notes(data)
    paths = draw(studies, options.out, options)
    print("\n".join(table(studies)))
    script.print_lines(paths)


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
        verdict = claims.verdict(data, pair, interval, 0, claims.SAME)
        results[pair] = interval, verdict
    return results


def between(first: Data, second: Data) -> dict[str, Interval]:
    """Return for each arm the mean paired difference of the training reward, second - first.

    It is over the seeds of which the arm has finished in both studies, and over the last half of
    the batches. While there is no such seed, it is over the seeds that both have begun and the
    batches that all of these runs have. There is none if a run ended when it collapsed: the other
    seeds are then no fair sample.
    """
    differences = {}
    for arm in arms_in(first):
        if arm not in second.arms:
            continue
        common = set(first.seeds(arm)) & set(second.seeds(arm))
        runs = runs_of_common_seeds(first, second, arm)
        if claims.undecided_without(runs):
            differences[arm] = NO_INTERVAL
            continue
        unfinished = {run.seed for run in runs if not run.finished}
        seeds = sorted(common - unfinished or common)
        last = min((run.last for run in runs if run.seed in seeds), default=0)
        if last > 1:
            steps = range(last // 2 + 1, last + 1)
            before = first.table(arm, "reward/mean")[seeds]
            after = second.table(arm, "reward/mean")[seeds]
            interval = paired_difference(after.reindex(steps), before.reindex(steps))
            differences[arm] = interval
    return differences


def runs_of_common_seeds(first: Data, second: Data, arm: str) -> list[Run]:
    """Return the runs of an arm with the seeds that both studies have."""
    common = set(first.seeds(arm)) & set(second.seeds(arm))
    return [run for run in first.of(arm) + second.of(arm) if run.seed in common]


def completed(studies: list[Data]) -> list[Data]:
    """Return the studies. Each without GSPO gets GSPO's runs of the first study.

    A study that changes only GRPO need not run GSPO again. If the study differs from GSPO's runs in
    more than what makes an arm, it is returned as it is.
    """
    gspo_runs = studies[0].of(GSPO)
    results = []
    for data in studies:
        has_gspo = any(GSPO in (run.arm, run.base) for run in data.runs)
        if gspo_runs and not has_gspo:
            differing = load.differing([gspo_runs[0], data.runs[0]])
            if all(key.startswith(MAKES_THE_ARM) for key in differing):
                data = Data([*gspo_runs, *data.runs], data.notes)
        results.append(data)
    return results


def gains(first: Data, data: Data) -> dict[str, Interval]:
    """Return for each arm but GSPO its paired gain since the first study.

    It is empty unless GSPO has the same settings in both studies. Then only the settings of the
    other arms explain a change.
    """
    if data is first or not (first.of(GSPO) and data.of(GSPO)):
        return {}
    if load.differing([first.of(GSPO)[0], data.of(GSPO)[0]]):
        return {}
    return {arm: interval for arm, interval in between(first, data).items() if arm != GSPO}


def pair_name(a: str, b: str) -> str:
    """Return the name of the difference of two arms."""
    return f"{panels.short_name(a)} - {panels.short_name(b)}"


def table(studies: list[Data]) -> list[str]:
    """Return a Markdown row per study and pair of arms.

    Below them stands a row per arm and pair of neighbouring studies, then a row per gain since the
    first study.
    """
    rows = [TABLE_HEAD]
    titled = list(zip(studies, titles(studies), strict=True))
    for data, title in titled:
        rows += difference_rows(data, title)
    for (first, first_title), (second, second_title) in pairwise(titled):
        title = f"{second_title} - {first_title}"
        for arm, interval in between(first, second).items():
            cells = difference_cells(interval)
            remark = claims.undecided_without(runs_of_common_seeds(first, second, arm))
            rows.append([title, panels.short_name(arm), *cells, remark])
    first, first_title = titled[0]
    # the second study's gains stand among the neighbours already
    for data, data_title in titled[2:]:
        for arm, interval in gains(first, data).items():
            cells = difference_cells(interval)
            title = f"{data_title} - {first_title}"
            remark = claims.undecided_without(runs_of_common_seeds(first, data, arm))
            rows.append([title, panels.short_name(arm), *cells, remark])
    return markdown_table(rows)


def difference_rows(data: Data, title: str) -> list[list[str]]:
    """Return a row for TABLE_HEAD per pair of a study's arms; `title` names the study."""
    rows = []
    for pair, (interval, verdict) in judged(data).items():
        cells = difference_cells(interval)
        rows.append([title, pair_name(*pair), *cells, verdict])
    return rows


def titles(studies: list[Data]) -> list[str]:
    """Return a title per study: the settings in which the studies differ, or its name.

    A setting in which some arms differ, or which has one value per arm, such as the clip range,
    stands behind the arm's name.
    """
    keys_by_arm = {}
    for arm in ARMS:
        if all(arm in data.arms for data in studies):
            first_runs = [data.of(arm)[0] for data in studies]
            keys_by_arm[arm] = load.differing(first_runs)
    arms_by_key: dict[str, list[str]] = {}
    for arm, keys in keys_by_arm.items():
        for key in keys:
            if key not in IMPLIED:
                arms_by_key.setdefault(key, []).append(arm)
    ranks = list(SETTING_NAMES)

    def order(key: str) -> tuple[int, bool, str]:
        rank = ranks.index(key) if key in ranks else len(ranks)
        in_some_arms = len(arms_by_key[key]) < len(keys_by_arm)
        return rank, in_some_arms, key

    keys = sorted(arms_by_key, key=order)
    if not keys:
        return [data.runs[0].study for data in studies]
    unnamed = len(keys) - MAX_TITLE_SETTINGS
    suffix = ""
    if unnamed == 1:
        suffix = ", and 1 more setting differs"
    elif unnamed > 1:
        suffix = f", and {unnamed} more settings differ"
    study_titles = []
    for data in studies:
        texts = []
        for key in keys[:MAX_TITLE_SETTINGS]:
            name = SETTING_NAMES.get(key, key)
            arms = arms_by_key[key]
            arms_by_value: dict[str, list[str]] = {}
            for arm in arms:
                value = scientific(data.of(arm)[0].settings.get(key))
                arms_by_value.setdefault(value, []).append(arm)
            if len(arms_by_value) == 1 and len(arms) == len(keys_by_arm):
                texts.append(f"{name} {value}")
                continue
            for value, arms_of_value in arms_by_value.items():
                owner = panels.short_name(min(arms_of_value, key=len))
                texts.append(f"{owner}'s {name} {value}")
        study_titles.append(", ".join(texts) + suffix)
    return study_titles


def scientific(value: object) -> str:
    """Return a setting's value in short form: 2.5e-4 for 0.00025."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return np.format_float_scientific(
            value,
            precision=3,
            trim="-",
            exp_digits=1,
        )
    return str(value)


def why_not_drawn(studies: list[Data]) -> str | None:
    """Return why the figure cannot be drawn of these studies, or None."""
    if len(studies) < 2:
        return "needs two studies or more: name the folder of each"
    for data in studies:
        if not pairs(data):
            expected = ARMS[:2]
            return load.why_not_comparable(data, expected)
    return None


def draw(studies: list[Data], out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw a column per study; the rows share their y axes."""
    reason = why_not_drawn(studies)
    if reason:
        raise RunsError(f"fig_contrast {reason}")
    figure = style.canvas(6.2, options)
    axes = figure.subplots(
        2,
        len(studies),
        sharey="row",
        squeeze=False,
        height_ratios=[1.3, 1],
    )
    curve_panels, difference_panels = axes
    for index, title in enumerate(titles(studies)):
        data = studies[index]
        draw_curves(curve_panels[index], data, options, title)
        draw_differences(difference_panels[index], data, gains(studies[0], data))
    curve_panels[0].set_ylabel("training reward (mean of batch)")
    difference_panels[0].set_ylabel("paired difference of the reward,\nlast half of the batches")
    drawn = {arm for data in studies for arm in arms_in(data)}
    styles = {arm: arm_style(arm) for arm in ARMS if arm in drawn}
    style.legend(curve_panels[-1], styles, loc="best")
    return style.save(figure, out, "fig_contrast", caption(studies, options), options)


def draw_curves(
    ax: Axes,
    data: Data,
    options: FigureOptions,
    title: str,
) -> None:
    """Draw the training reward of the paper's arms over the batches."""
    for arm in arms_in(data):
        rewards = data.table(arm, "reward/mean")
        panels.curve(ax, rewards, arm_style(arm), options)
    style.training_axis(ax, 0, options)
    ax.set_title(title.replace(", ", "\n"))


def draw_differences(ax: Axes, data: Data, gain_by_arm: dict[str, Interval]) -> None:
    """Draw each pair's difference, then the gains of arms since the first study if there is room.

    A difference has a dot per seed, the mean with its 95 % interval, and the exact p.
    """
    panels.zero_line(ax)
    ax.axhspan(-claims.SAME, claims.SAME, color=style.STRIP, zorder=0)
    differences = []
    for (a, b), (interval, _) in judged(data).items():
        differences.append((f"{panels.short_name(a)}\n- {panels.short_name(b)}", interval))
    if len(differences) + len(gain_by_arm) <= MAX_DIFFERENCES:
        for arm, interval in gain_by_arm.items():
            differences.append((f"{panels.short_name(arm)}\nhere - left", interval))
    ticks = []
    for index, (name, interval) in enumerate(differences):
        if math.isnan(interval.mean):
            ticks.append(f"{name}\nundecided")
            continue
        values = interval.values or (interval.mean,)
        shifts = [0.0]
        if len(values) > 1:
            shifts = np.linspace(-0.16, 0.16, len(values))
        x = np.add(index, shifts)
        style.dots(ax, x, values, style.MUTED, size=4, edge=1)
        panels.mean_bar(ax, index + 0.3, interval, 11)
        text = f"{name}\n{interval.mean:+.3f}"
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
        for pair, (_, verdict) in judged(data).items():
            verdicts.append(f"{pair_name(*pair)}: {verdict}")
        heading = title[:1].upper() + title[1:]
        runs = load.describe(data, data.arms)
        lines.append(f"{heading}: {runs} {'; '.join(verdicts)}.")
    last = studies[-1]
    lines.append(
        f"{panels.how_drawn(last, arms_in(last), options)} Below: dots are seeds, bars 95 % "
        "intervals over seeds (Student's t), p is that of the exact sign-flip test; grey: within "
        f"±{claims.SAME}, which counts as the same."
    )
    if any(gains(studies[0], data) for data in studies):
        lines.append("Here - left: the arm in this column minus the same arm in the first.")
    return "\n".join(lines)


if __name__ == "__main__":
    script.command(main)
