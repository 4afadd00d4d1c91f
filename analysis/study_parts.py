"""The words and tables of a study's report, as blocks (blocks.py) that become HTML, Markdown or a
W&B Report.

study_report.py writes them to files, and wandb_report.py to W&B.
"""

from __future__ import annotations

from collections.abc import Callable

from gspo.analysis import claims, load, reproduce
from gspo.analysis.blocks import Block, Folded, Heading, Items, Link, Table, Text
from gspo.analysis.load import GRPO, Data, Run
from gspo.analysis.stats import START, WINDOW, number, paired_difference

MEANS = (
    f"Means over seeds. Start: the first {START} batches; end: the last {WINDOW}. "
    "Held-out scores: first -> last evaluation."
)
WIDE = 4  # with more arms than this a table has a row per arm instead of a column
# settings that say nothing about the study
FOLLOWS = ("seed", "tracking", "runs", "resume", "on_existing", "study")


def opening(data: Data, baseline: str) -> list[Block]:
    """Return the report's first part: what was run, its settings, statistics, differences, and the
    paper's claims.
    """
    notes = [Items(tuple(data.notes))] if data.notes else []
    found = claims.all_claims(data)
    judged = (
        [Heading("The paper's claims"), Items(tuple(claim.sentence() for claim in found))]
        if found
        else []
    )
    return [
        *(Heading("What was run"), Text(load.describe(data, data.arms)), *notes),
        *(
            Heading("Settings"),
            settings(data),
            Folded("settings that all runs share", common(data)),
        ),
        *(Heading("Statistics"), Text(MEANS), statistics(data)),
        *differences(data, baseline),
        *judged,
    ]


def settings(data: Data) -> Table:
    """Return a table of the settings in which arms differ, with a row per arm."""
    keys = [key for key in load.differing(data.runs) if key not in ("seed",)]
    rows = []
    for arm in data.arms:
        of_arm = data.of(arm)
        values = [
            ", ".join(sorted({str(run.settings.get(key, "-")) for run in of_arm})) for key in keys
        ]
        rows.append((arm, *values, ", ".join(str(run.seed) for run in of_arm)))
    return Table(("arm", *keys, "seeds"), tuple(rows))


def common(data: Data) -> str:
    """Return a line per setting that is the same in all runs."""
    first = data.runs[0].settings
    alike = (key for key in first if all(run.settings.get(key) == first[key] for run in data.runs))
    return "\n".join(
        f"{key}: {first[key]}" for key in sorted(alike) if key.split(".")[0] not in FOLLOWS
    )


def statistics(data: Data) -> Table:
    """Return a table of what each arm reached, clipped and cost, without quantities that no run has
    reported.
    """
    columns = {arm: reproduce.entries(data, arm) for arm in data.arms}
    names = [
        name
        for name in columns[data.arms[0]]
        if any(column[name] != "-" for column in columns.values())
    ]
    if len(data.arms) > WIDE:
        return Table(
            ("arm", *names),
            tuple((arm, *(columns[arm][name] for name in names)) for arm in data.arms),
        )
    return Table(
        ("", *data.arms),
        tuple((name, *(columns[arm][name] for arm in data.arms)) for name in names),
    )


def differences(data: Data, baseline: str) -> list[Block]:
    """Return the table of each arm's reward minus its rival's, paired by seed and batch, and notes
    on arms without one."""
    rows, alone, pairs = [], [], rivals(data.arms, baseline)
    for arm, rival in pairs.items():
        if (why := load.lacking(data, (arm, rival))) is not None:
            alone.append(f"{arm} is not compared with {rival}: {why}")
            continue
        a_TS, b_TS = claims.last_halves(data, arm, rival)
        interval = paired_difference(a_TS, b_TS)
        p = (
            f"{interval.p():.2g} (least possible {2 / 2**interval.seeds:.2g})"
            if interval.seeds > 1
            else "-"
        )
        if why := load.not_compared(data, (arm, rival)):
            alone.append(f"{arm} against {rival}, {why}")
        batches = f"{a_TS.index[0]}-{a_TS.index[-1]}"
        rows.append((arm, rival, f"{interval.text('+.3f')} {interval.kind}", p, batches))
    others = [arm for arm in data.arms if arm not in pairs and arm not in pairs.values()]
    alone += [
        f"{arm} has no rival under the same settings (--baseline names one)" for arm in others
    ]
    text = "Differences of the reward over the last half of the batches that both arms' runs have, paired by seed;"
    text += " p: exact sign-flip test."
    many = (
        f" {len(rows)} comparisons: one in twenty excludes 0 by chance alone."
        if len(rows) > 1
        else ""
    )
    head = ("arm", "minus", "difference [95 % interval]", "p", "batches")
    return [
        *([Text(text + many), Table(head, tuple(rows))] if rows else []),
        *([Items(tuple(alone))] if alone else []),
    ]


def rivals(arms: list[str], baseline: str) -> dict[str, str]:
    """Return which arm each arm is compared with: the baseline if one is given, else GRPO under the
    same other settings or, if there is no such pair, the first arm."""
    if baseline:
        return {arm: baseline for arm in arms if arm != baseline}
    like = {arm: GRPO + arm[len(arm.split(" [")[0]) :] for arm in arms}
    found = {arm: rival for arm, rival in like.items() if rival in arms and rival != arm}
    return found or {arm: arms[0] for arm in arms[1:]}


def runs(data: Data, link: Callable[[Run], Link | str]) -> Table:
    """Return a table with a row per run; `link(run)` gives the address at which it can be seen."""
    rows = []
    for run in data.of(*data.arms):
        how = run.ended + ("" if run.collapsed is None else f"; collapsed at step {run.collapsed}")
        end = number(run.column("reward/mean").tail(WINDOW).mean(), ".3f")
        rows.append((link(run), run.arm, str(run.seed), f"{run.last}/{run.planned}", end, how))
    return Table(("run", "arm", "seed", "batches", f"reward, last {WINDOW}", "ended"), tuple(rows))
