"""The words and tables of a study's report, as blocks (blocks.py).

study_report.py writes them to files as HTML and Markdown, and wandb_report.py to W&B.
"""

from collections.abc import Callable

import pandas as pd

from gspo.analysis import claims, load, reproduce
from gspo.analysis.blocks import Block, Folded, Heading, Items, Link, Table, Text
from gspo.analysis.load import GRPO, Data, Run
from gspo.analysis.stats import START, WINDOW, number, paired_difference

MEANS = (
    f"Means over seeds. Start: the first {START} batches; end: the last {WINDOW}. "
    "Held-out scores: first -> last evaluation of each seed."
)
DIFFERENCES = (
    "Differences of the reward over the last half of the batches that both arms' runs have, paired "
    "by seed; p: exact sign-flip test."
)
MAX_ARM_COLUMNS = 4  # with more arms than this a table has a row per arm instead of a column
# settings that say nothing about the study
UNINFORMATIVE = ("seed", "tracking", "runs", "resume", "on_existing", "study")


def opening(data: Data, baseline: str) -> list[Block]:
    """Return the report's first part.

    It has the runs, their settings, statistics, differences, and the paper's claims.
    """
    blocks: list[Block] = [
        Heading("What was run"),
        Text(load.describe(data, data.arms)),
    ]
    if data.notes:
        blocks.append(Items(tuple(data.notes)))
    blocks += [
        Heading("Settings"),
        settings(data),
        Folded("settings that all runs share", common(data)),
        Heading("Statistics"),
        Text(MEANS),
        statistics(data),
        *differences(data, baseline),
    ]
    judged = claims.all_claims(data)
    if judged:
        sentences = tuple(claim.sentence() for claim in judged)
        blocks += [Heading("The paper's claims"), Items(sentences)]
    return blocks


def settings(data: Data) -> Table:
    """Return a table of the settings in which arms differ, with a row per arm."""
    keys = load.differing(data.runs)
    rows = []
    for arm in data.arms:
        runs = data.of(arm)
        cells = [arm]
        for key in keys:
            values = {str(run.settings.get(key, "-")) for run in runs}
            cells.append(", ".join(sorted(values)))
        seeds = [str(run.seed) for run in runs]
        rows.append((*cells, ", ".join(seeds)))
    return Table(("arm", *keys, "seeds"), tuple(rows))


def common(data: Data) -> str:
    """Return a line per setting that is the same in all runs."""
    lines = []
    for key, value in sorted(data.runs[0].settings.items()):
        same = all(run.settings.get(key) == value for run in data.runs)
        group = key.split(".")[0]
        if same and group not in UNINFORMATIVE:
            lines.append(f"{key}: {value}")
    return "\n".join(lines)


def statistics(data: Data) -> Table:
    """Return a table of the results and costs of each arm, without unreported quantities."""
    columns = pd.DataFrame({arm: reproduce.entries(data, arm) for arm in data.arms})
    columns = columns[(columns != "-").any(axis=1)]
    corner = ""
    if len(data.arms) > MAX_ARM_COLUMNS:
        columns = columns.T
        corner = "arm"
    return Table((corner, *columns), tuple(columns.itertuples(name=None)))


def differences(data: Data, baseline: str) -> list[Block]:
    """Return the table of each arm's reward minus its rival's, paired by seed and batch.

    Remarks name the arms without a comparison.
    """
    rows = []
    remarks = []
    pairs = rivals(data.arms, baseline)
    for arm, rival in pairs.items():
        reason = load.why_not_comparable(data, (arm, rival))
        if reason is not None:
            remarks.append(f"{arm} is not compared with {rival}: {reason}")
            continue
        undecided = claims.without_collapsed(data, (arm, rival))
        if undecided:
            remarks.append(
                f"{arm} is not compared with {rival}: {undecided}. The other seeds are no fair "
                "sample of the arm"
            )
            continue
        a_TS, b_TS = claims.last_halves(data, arm, rival)
        interval = paired_difference(a_TS, b_TS)
        p = interval.p_text()
        if interval.seeds > 1:
            p += f" (least possible {2 / 2**interval.seeds:.2g})"
        left_out = load.not_compared(data, (arm, rival))
        if left_out:
            remarks.append(f"{arm} against {rival}, {left_out}")
        batches = f"{a_TS.index[0]}-{a_TS.index[-1]}"
        rows.append((arm, rival, f"{interval.text('+.3f')} {interval.kind}", p, batches))
    for arm in data.arms:
        if arm not in pairs and arm not in pairs.values():
            remarks.append(f"{arm} has no rival under the same settings (baseline=ARM names one)")
    text = DIFFERENCES
    if len(rows) > 1:
        text += f" {len(rows)} comparisons: one in twenty excludes 0 by chance alone."
    blocks: list[Block] = []
    if rows:
        head = ("arm", "minus", "difference [95 % interval]", "p", "batches")
        blocks += [Text(text), Table(head, tuple(rows))]
    if remarks:
        blocks.append(Items(tuple(remarks)))
    return blocks


def rivals(arms: list[str], baseline: str) -> dict[str, str]:
    """Return the arm that each arm is compared with.

    That is the baseline if it is given, else GRPO under the same other settings. If there is no
    such pair, it is the first arm.
    """
    if baseline:
        return {arm: baseline for arm in arms if arm != baseline}
    pairs = {}
    for arm in arms:
        appended = arm[len(arm.split(" [")[0]) :]
        rival = GRPO + appended
        if rival in arms and rival != arm:
            pairs[arm] = rival
    return pairs or {arm: arms[0] for arm in arms[1:]}


def runs(data: Data, link: Callable[[Run], Link | str]) -> Table:
    """Return a table with a row per run; `link(run)` gives the address of its page."""
    rows = []
    for run in data.of(*data.arms):
        ended = run.ended
        if run.collapsed is not None:
            ended += f"; collapsed at step {run.collapsed}"
        reward = run.last_rewards(WINDOW).mean()
        batches = f"{run.last}/{run.planned}"
        seed = str(run.seed)
        rows.append((link(run), run.arm, seed, batches, number(reward, ".3f"), ended))
    head = ("run", "arm", "seed", "batches", f"reward, last {WINDOW}", "ended")
    return Table(head, tuple(rows))
