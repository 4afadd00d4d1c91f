"""Load the runs of any source (sources.py), name their arms, and return them together."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd

from gspo.analysis import foreign_search, sources
from gspo.analysis.choosing import (
    MAKES_THE_ARM,
    choose_one,
    having,
    numbers_first,
    recorded_values,
)
from gspo.analysis.foreign import (
    BATCHES_PER_ROW,
    FRAMEWORK,
    LOG,
    OF_THE_LOG,
    distinct_ends,
    is_their_own,
)
from gspo.analysis.runs import ARMS as ARMS
from gspo.analysis.runs import GRPO, GSPO, GSPO_TOKEN, Data, Run, RunsError
from gspo.analysis.runs import GRPO_R2 as GRPO_R2
from gspo.analysis.sources import Record
from gspo.analysis.stats import WINDOW
from gspo.io import escaping
from gspo.tracking.foreign_options import NOTHING_SAID, ForeignOptions
from gspo.tracking.frameworks.columns import lost_batches

OBJECTIVES = {  # from objective.name to the arm's name; GRPO_R2 is GRPO with a further setting
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "gspo_all_tokens": "GSPO, all tokens",
    "luspo": "LUSPO",
    "gmpo": "GMPO",
    "grpo": GRPO,
    "drgrpo": "Dr.GRPO",
    "dapo": "DAPO",
    "ppo": "PPO",
    "reinforce": "REINFORCE",
    "cispo": "CISPO",
    "minirl": "MiniRL",
    "dppo": "DPPO",
    "sapo": "SAPO",
    "gspo_turn": "GSPO-turn",
    "vespo": "VESPO",
    "ctpo": "CTPO",
    "ctpo_la": "CTPO-LA",
    "dro": "DRO",
    "prime_rl": "prime-rl",
    "prime_rl_ipo": "prime-rl, IPO",
    "p3o": "P3O",
}

# a record without one of these settings is no training run
NEEDED = ("seed", "steps", "objective.name")
NUMBER = (int, float, type(None))
NAME = (str, type(None))
# The types of the settings that figures and tables rely on. Other settings may be any number or
# text.
KINDS = {
    "seed": (int,),
    "steps": (int,),
    "objective.name": (str,),
    "study": NAME,
    "model.name": NAME,
    "policy.routing_replay": NAME,
    "objective.clip_low": NUMBER,
    "objective.clip_high": NUMBER,
    "optim.lr": NUMBER,
    "optim.max_grad_norm": NUMBER,
    BATCHES_PER_ROW: (int, type(None)),
    "rollout.prompts_per_step": NUMBER,
    "rollout.group_size": NUMBER,
    "trainer.minibatches": NUMBER,
}
MAX_NOTES = 5  # notes in the message that there are no runs
MAX_ARMS_NAMED = 6  # arms that a message names
MAX_SETTING_CHARS = 2000  # of a setting's name and value
MAX_STUDY_CHARS = 100  # of the study's name, after which files are named
# These may differ between two runs of one arm: who ran it, for how long, where it was written.
NOT_THE_ARM = (
    "seed",
    "steps",
    "study",
    "options",
    "tracking",
    "profile",
    "metrics",
    "allow_outside_code",
    "checkpoint",
    "monitor",  # but for ROLLBACK, of a run that rolls back
    "parallel",
    "runs",
    "on_existing",
    "resume",
    "dry_run",
    "threads",
    "prompt_used",
    "inputs",
)
# with monitor.action=rollback these change what is trained
ROLLBACK = ("monitor.action", "monitor.rollbacks", "monitor.rollback_lr")


def load(
    paths: Sequence[Path | str],
    where: Mapping[str, object] | None = None,
    foreign_options: ForeignOptions = NOTHING_SAID,
) -> Data:
    """Return all runs of these sources with their arms, ordered by source and then by path.

    With `where`, {"optim.lr": 2e-4, ...}, only the runs that have these settings. The foreign
    options apply to runs of other frameworks. Raises RunsError if there are no runs, if a source
    cannot be read, if two runs have the same arm and seed, or if a foreign option has no effect.
    """
    notes: list[str] = []
    empty_paths: list[Path | str] = []
    runs_by_key: dict[tuple[Path, str], Run] = {}
    for path in paths:
        try:
            records = sources.records(path, foreign_options)
        except (OSError, ValueError) as error:
            raise RunsError(str(error)) from None
        if not records:
            empty_paths.append(path)
        for record in sorted(records, key=record_key):
            run = as_run(record, notes)
            if run is None:
                continue
            key = record_key(record)
            earlier = runs_by_key.get(key)
            if earlier is not None and earlier.id != run.id:
                ids = f"{earlier.id} and {run.id}"
                notes.append(f"{run.path}: two W&B runs, {ids}; the newer one counts")
            runs_by_key[key] = run
    runs = list(runs_by_key.values())
    if not runs:
        raise RunsError(why_no_runs(paths, notes))
    if foreign_options.given() and not any(FRAMEWORK in run.settings for run in runs):
        raise RunsError("; ".join([foreign_options.without_effect(), *notes[:MAX_NOTES]]))
    notes += [f"left out: {path}, it holds no run" for path in empty_paths]
    name_logs(runs)
    for key, value in (where or {}).items():
        runs = having(runs, key, value)
    label(runs, notes)
    unfinished = [run for run in runs if not run.finished]
    notes += [f"unfinished: {run.path}, {run.last} of {run.planned} batches" for run in unfinished]
    open_runs = [run for run in unfinished if not run.settled]
    if open_runs and any(run.collapsed is not None for run in runs):
        notes.append(
            f"unfinished: {len(open_runs)} runs may still end well, so shares of collapsed runs are "
            "too large until they have ended"
        )
    for run in runs:
        # the notes of runs of other frameworks have it
        lost = "" if FRAMEWORK in run.settings else lost_steps(run)
        if lost:
            notes.append(f"lost: {run.path} has no row of {lost}")
        notes += notes_on_rewards(run)
    return Data(runs, notes)


def notes_on_rewards(run: Run) -> list[str]:
    """Return a note if a run's rewards end before the run, as after NaN."""
    rewards = run.column("reward/mean")
    # nearly all runs have a reward in their last row
    if not len(rewards) or rewards.index[-1] == run.last or len(run.last_rewards(WINDOW)):
        return []
    return [
        f"no reward: {run.path} has none after batch {rewards.index[-1]} of {run.last}, so means of "
        "the last rewards leave it out"
    ]


def why_no_runs(paths: Sequence[Path | str], notes: Sequence[str]) -> str:
    """Return why there are no runs under these paths, and what the paths hold."""
    searched = ", ".join(map(str, paths))
    reasons = ["no folder with settings.yaml and a batch in metrics.jsonl"]
    reasons += notes[:MAX_NOTES]
    if len(notes) > MAX_NOTES:
        reasons.append(f"and {len(notes) - MAX_NOTES} more notes")
    if not notes:
        files = [Path(path) for path in paths if not str(path).startswith(sources.SERVER)]
        reasons += [f"{path}: {foreign_search.content_of(path)}" for path in files]
    return f"no runs under {searched}: {'; '.join(reasons)}"


def record_key(record: Record) -> tuple[Path, str]:
    """Return the path and the study, by which two records are the same run."""
    return record.path.resolve(), str(record.settings.get("study"))


# ------------------------------------------------------------------------------------------------
# records as runs
def lost_steps(run: Run) -> str:
    """Return the rollout batches before the last that have no row, as "batches 7, 8", or ""."""
    return "" if run.batches_per_row > 1 else lost_batches(run.rows["step"])


def as_run(record: Record, notes: list[str]) -> Run | None:
    """Return a record as a run, or None with a note if it is no training run or has no batch."""
    notes += record.notes
    settings = record.settings
    if record.notes and not settings and not len(record.rows):
        return None  # the notes say why nothing could be read
    missing = [key for key in NEEDED if settings.get(key) is None]
    wrong = [f"{key}={str(settings[key])[:40]}" for key in settings if not fits(key, settings[key])]
    steps = record.rows["step"] if len(record.rows) else pd.Series(dtype=int)
    repeated = steps[steps.duplicated()]
    if missing:
        reason = f"its settings have no {', '.join(missing)}"
    elif wrong:
        reason = f"its settings cannot be: {', '.join(wrong[:3])}"
    elif not (steps > 0).any():
        reason = "no rollout batch yet"
    elif len(repeated):
        reason = f"step {repeated.iloc[0]} stands twice in its metrics.jsonl"
    else:
        return Run(record.path, settings, record.rows, id=record.id)
    notes.append(f"left out: {record.path}, {reason}")
    return None


def fits(key: str, value: object) -> bool:
    """Return whether a setting may have this value, by its type and its length."""
    kind = type(value)
    if kind not in KINDS.get(key, (kind,)):
        return False
    if len(f"{key}{value}") > MAX_SETTING_CHARS:
        return False
    if key == "study" and value is not None:
        printable = escaping.escape_line(value) == value
        return "/" not in value and len(value) <= MAX_STUDY_CHARS and printable
    if key.startswith("monitor.thresholds."):
        return kind in NUMBER
    return kind is not int or abs(value) < 2**53


def base_arm(settings: Mapping[str, object], with_replay: bool = True) -> str:
    """Return the objective's name, with its Routing Replay unless `with_replay` is false."""
    objective = settings["objective.name"]
    arm = OBJECTIVES.get(objective, objective)
    if FRAMEWORK in settings:
        arm += f" ({settings[FRAMEWORK]})"
    replay = settings.get("policy.routing_replay")
    if with_replay and replay not in (None, "none"):
        arm += f" + Routing Replay ({str(replay).upper()})"
    return arm


def name_logs(runs: Sequence[Run]) -> None:
    """Set the setting `log` of runs of other frameworks: the end of the path that others lack."""
    foreign_runs = [run for run in runs if FRAMEWORK in run.settings]
    ends = distinct_ends([run.path for run in foreign_runs])
    for run, end in zip(foreign_runs, ends, strict=True):
        run.settings = run.settings | {LOG: end}


def label(runs: list[Run], notes: list[str]) -> None:
    """Set each run's arm.

    If runs with the same name and seed differ in other settings, these settings are appended. The
    logs of other frameworks may say nothing in which two runs differ. Then the arms are named after
    the logs.
    """
    runs_by_base: dict[str, list[Run]] = {}
    for run in runs:
        runs_by_base.setdefault(base_arm(run.settings), []).append(run)
    for base, group in sorted(runs_by_base.items()):
        name_arms(group, base)
        name_after_logs(group, base, notes)
        runs_by_arm: dict[str, dict[int, Run]] = {}
        for run in group:
            other = runs_by_arm.setdefault(run.arm, {}).setdefault(run.seed, run)
            if other is not run:
                raise RunsError(
                    f"the same arm and seed twice ({run.arm}, seed {run.seed}): {other.path} and "
                    f"{run.path}; give one"
                )
        for arm, seeds in sorted(runs_by_arm.items()):
            keys = differing(seeds.values())
            if keys:
                notes.append(f"seeds of {arm} differ also in {', '.join(keys)}")


def name_arms(group: list[Run], base: str) -> None:
    """Set the arms of an objective's runs; settings in which runs of a seed differ are appended."""
    runs_by_seed: dict[int, list[Run]] = {}
    for run in group:
        runs_by_seed.setdefault(run.seed, []).append(run)
    keys: set[str] = set()
    for runs in runs_by_seed.values():
        keys.update(differing(runs))
    for run in group:
        run.arm = base
        if keys:
            run.base = base
            run.appended = {key: run.settings.get(key) for key in sorted(keys)}
            run.arm = arm_with(base, run.appended)


def name_after_logs(group: list[Run], base: str, notes: list[str]) -> None:
    """Append the log to the arms of runs of another framework that have the same arm and seed."""
    runs_by_name: dict[tuple[str, int], list[Run]] = {}
    for run in group:
        runs_by_name.setdefault((run.arm, run.seed), []).append(run)
    for (arm, seed), same in runs_by_name.items():
        if len(same) < 2 or any(FRAMEWORK not in run.settings for run in same):
            continue
        notes.append(
            f"{len(same)} runs are {arm} with seed {seed}, and their logs say nothing in which they "
            "differ: the arms are named after the logs"
        )
        for run in same:
            run.base = base
            run.appended = run.appended | {LOG: run.settings[LOG]}
            run.arm = arm_with(base, run.appended)


def arm_with(base: str, appended: Mapping[str, object]) -> str:
    """Return an arm's name with settings, as in "GRPO [optim.lr=0.001]"."""
    if not appended:
        return base
    settings = [f"{key}={value}" for key, value in appended.items()]
    return f"{base} [{', '.join(settings)}]"


def differing(runs: Collection[Run | Record]) -> list[str]:
    """Return the settings in which these runs differ, without the settings in NOT_THE_ARM.

    If a log lacks a setting of its framework, the setting counts as unknown, not as different."""
    ignored = {*NOT_THE_ARM, *OF_THE_LOG}
    keys = {key for run in runs for key in run.settings if key.split(".")[0] not in ignored}
    if any(run.settings.get("monitor.action") == "rollback" for run in runs):
        keys.update(ROLLBACK)
    different = []
    for key in sorted(keys):
        compared = runs
        if is_their_own(key):
            compared = [run for run in runs if key in run.settings]
        if len(recorded_values(compared, key)) > 1:
            different.append(key)
    return different


# ------------------------------------------------------------------------------------------------
# comparing arms
def why_not_comparable(data: Data, arms: tuple[str, ...]) -> str | None:
    """Return why these arms cannot be compared, or None if they can."""
    if not set(arms) <= set(data.arms):
        wanted = " and ".join(arms)
        advice = choose_one(data)
        if advice and set(arms) <= {run.base or run.arm for run in data.runs}:
            return f"compares {wanted} at one setting, and {advice}"
        names = ", ".join(data.arms[:MAX_ARMS_NAMED])
        if len(data.arms) > MAX_ARMS_NAMED:
            names += ", ..."
        return f"needs arms {wanted}; found: {names}"
    if not data.seeds(*arms):
        names = ", ".join(arms)
        return f"needs a seed that all arms have (they are paired by seed): {names} share none"
    compared = data.compared(*arms)
    if any(run.column("reward/mean").empty for run in compared):
        return "needs reward/mean of every run"
    if min(run.last for run in compared) < 2:
        return "needs at least 2 rollout batches of every run"
    return None


def not_compared(data: Data, arms: tuple[str, ...]) -> str:
    """Return the runs that a comparison of these arms leaves out, with the reasons, or ""."""
    seeds = data.seeds(*arms)
    texts = []
    for run in data.left_out(*arms):
        if not run.finished:
            reason = f"{run.last} of {run.planned} batches"
            if run.collapsed is not None:
                reason += f", collapsed at step {run.collapsed}"
        elif run.seed in seeds:
            reason = "its other run did not finish"
        else:
            reason = "no run of that seed to compare with"
        texts.append(f"{run.arm}, seed {run.seed} ({reason})")
    return f"left out: {'; '.join(texts)}" if texts else ""


def describe(data: Data, arms: Sequence[str]) -> str:
    """Return the first sentences of a caption: model, batches, seeds, unfinished runs.

    It also names the differences between the runs that do not make the arms.
    """
    runs = data.of(*arms)
    arms_by_seeds: dict[str, list[str]] = {}
    for arm in arms:
        seeds = count_seeds([run.seed for run in data.of(arm)])
        arms_by_seeds.setdefault(seeds, []).append(arm)
    if len(arms_by_seeds) == 1:
        seeds_text = next(iter(arms_by_seeds))
    else:
        texts = [f"{', '.join(names)}: {seeds}" for seeds, names in arms_by_seeds.items()]
        seeds_text = "; ".join(texts)
    model = setting_values(runs, "model.name", "model not named")
    # `micro_moe` and `tiny_moe` are two sizes of the model tiny_moe
    if all("model.layers" in run.settings and "model.hidden" in run.settings for run in runs):
        layers = setting_values(runs, "model.layers")
        model += f" ({layers} layers of width {setting_values(runs, 'model.hidden')})"
    prompts = setting_values(runs, "rollout.prompts_per_step")
    responses = setting_values(runs, "rollout.group_size")
    minibatches = setting_values(runs, "trainer.minibatches")
    text = (
        f"Run: {model}, rollout batches of {prompts} prompts x {responses} responses in "
        f"{minibatches} mini-batches; {seeds_text}; {data.common_step(*arms)} batches common to "
        "all runs."
    )
    for run in runs:
        if not run.finished:
            text += f" Unfinished: {run.arm}, seed {run.seed}, {run.last} of {run.planned} batches."
    unknown = [arm for arm in arms if data.table(arm, "compute/flops").isna().all(axis=None)]
    if unknown:
        text += (
            f" Training compute is not known of {', '.join(unknown)}: the runs report no "
            "compute/flops."
        )
    unexpected = [key for key in differing(runs) if not key.startswith(MAKES_THE_ARM)]
    unexpected = [key for key in unexpected if key != FRAMEWORK]  # the arm's name has it
    # a log of another framework does not state most of our settings
    ours = [run for run in runs if FRAMEWORK not in run.settings]
    stated = []
    for key in unexpected:
        stating = [run for run in runs if key in run.settings]
        if len(recorded_values(stating, key)) > 1:
            stated.append(key)
    if len(ours) in (0, len(runs)):
        stated = unexpected
    if stated:
        text += f" The runs differ also in {', '.join(stated)}."
    if len(stated) < len(unexpected):
        unstated = len(unexpected) - len(stated)
        text += f" Not all of the logs state {unstated} other settings."
    return text


def setting_values(runs: list[Run], key: str, unknown: str = "?") -> str:
    """Return the values of a setting in these runs, as in "4" or "4 or 16"."""
    values = {run.settings.get(key, unknown) for run in runs}
    return " or ".join(map(str, sorted(values, key=numbers_first)))


def count_seeds(seeds: list[int]) -> str:
    """Return the number of seeds and the seeds, as in "1 seed (0)" or "3 seeds (0, 1, 2)"."""
    plural = "s" if len(seeds) > 1 else ""
    return f"{len(seeds)} seed{plural} ({', '.join(map(str, seeds))})"
