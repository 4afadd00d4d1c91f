"""Load runs from wherever they were recorded (sources.py), name their arms, and return them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path

from gspo.analysis import sources
from gspo.analysis.runs import ARMS as ARMS
from gspo.analysis.runs import GRPO, GSPO, GSPO_TOKEN, Data, Run, RunsError, nearest
from gspo.analysis.runs import GRPO_R2 as GRPO_R2
from gspo.analysis.sources import Record

from gspo.io import escaping

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
    "rollout.prompts_per_step": NUMBER,
    "rollout.group_size": NUMBER,
    "trainer.minibatches": NUMBER,
}
MAX_ARMS_NAMED = 6  # arms that a message names
MAX_LOST_NAMED = 3  # lost batches that a message names
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
    "monitor",
    "parallel",
    "runs",
    "on_existing",
    "resume",
    "dry_run",
    "threads",
    "prompt_used",
    "inputs",
)
# Arms differ in these on purpose. Captions state any other difference between compared arms.
MAKES_THE_ARM = ("objective", "outside.objective", "policy.routing_replay")


def load(paths: list[Path | str], where: Mapping[str, object] | None = None) -> Data:
    """Return all runs of these sources with their arms, ordered by source and then by path.

    With `where`, {"optim.lr": 2e-4, ...}, only the runs that have these settings. Raises RunsError
    if there are none, if a source cannot be read, or if two runs have the same arm and seed.
    """
    notes: list[str] = []
    runs_by_key: dict[tuple[Path, str], Run] = {}
    for path in paths:
        try:
            records = sources.records(path)
        except (OSError, ValueError) as error:
            raise RunsError(str(error)) from None
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
        searched = ", ".join(map(str, paths))
        needed = "no folder with settings.yaml and a batch in metrics.jsonl"
        raise RunsError(f"no runs under {searched}: {needed}")
    for key, value in (where or {}).items():
        runs = having(runs, key, value)
    label(runs, notes)
    for run in runs:
        if not run.finished:
            notes.append(f"unfinished: {run.path}, {run.last} of {run.planned} batches")
    for run in runs:
        lost = lost_steps(run)
        if lost:
            notes.append(f"lost: {run.path} has no row of {lost}")
    return Data(runs, notes)


def record_key(record: Record) -> tuple[Path, str]:
    """Return the path and the study, by which two records are the same run."""
    return record.path.resolve(), str(record.settings.get("study"))


# ------------------------------------------------------------------------------------------------
# choosing runs by a setting
def having(runs: list[Run], key: str, value: object) -> list[Run]:
    """Return the runs with this value of a setting; raise RunsError if there are none."""
    key = full_key(runs, key)
    recorded = {
        repr(run.settings.get(key)): run.settings.get(key) for run in runs if key in run.settings
    }
    if not recorded:
        settings = sorted({name for run in runs for name in run.settings})
        suggestion = nearest(key, settings)
        raise RunsError(f"--where {key}={value}: these runs have no setting {key}{suggestion}")
    chosen = [run for run in runs if key in run.settings and same_value(run.settings[key], value)]
    if not chosen:
        values = ", ".join(in_order(recorded.values()))
        raise RunsError(f"--where {key}={value}: no run has it; there are {values}")
    return chosen


def full_key(runs: list[Run], key: str) -> str:
    """Return the full name of a setting: optim.lr for "lr", objective.name for "objective".

    If several settings end in the short name, the only one in which the runs differ is meant. Any
    other name is returned unchanged.
    """
    settings = {name for run in runs for name in run.settings}
    if key in settings:
        return key
    if f"{key}.name" in settings:
        return f"{key}.name"
    matches = [name for name in settings if name.rpartition(".")[2] == key]
    varied = [name for name in matches if len({repr(run.settings.get(name)) for run in runs}) > 1]
    candidates = varied or matches
    return candidates[0] if len(candidates) == 1 else key


def same_value(recorded: object, wanted: object) -> bool:
    """Return whether a recorded value is the wanted value, which may be a command line's text."""
    if isinstance(wanted, str) and not isinstance(recorded, str):
        wanted = parse_value(wanted)
    if isinstance(recorded, bool) != isinstance(wanted, bool):
        return False
    return recorded == wanted or str(recorded) == str(wanted)


def parse_value(text: str) -> object:
    """Return the value of a command line's text: a number, true, false, null, or the text."""
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False, "null": None, "none": None}.get(text.lower(), text)


def in_order(values: Iterable[object]) -> list[str]:
    """Return values as texts, numbers first and by size."""
    ordered = sorted(values, key=numbers_first)
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in ordered]


def numbers_first(value: object) -> tuple[bool, float, str]:
    """Return the sorting key of a setting's value: numbers by size, then all else by its text."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return not is_number, float(value) if is_number else 0.0, str(value)


def varied(data: Data) -> dict[str, list[str]]:
    """Return the settings that vary within an arm's name and do not make an arm, with their values."""
    keys = {key for run in data.runs for key in run.appended if not key.startswith(MAKES_THE_ARM)}
    values = {}
    for key in sorted(keys):
        recorded = {repr(run.settings.get(key)): run.settings.get(key) for run in data.runs}
        values[key] = in_order(recorded.values())
    return values


def choose_one(data: Data) -> str:
    """Return how to choose a single run of each arm and seed; "" if the runs vary no setting."""
    settings = varied(data)
    if not settings:
        return ""
    values = "; ".join(f"{key} ({', '.join(texts)})" for key, texts in settings.items())
    choice = " ".join(f"{key}={texts[0]}" for key, texts in settings.items())
    first = next(iter(settings))
    return (
        f"these runs also vary {values}. Choose one of each, as in --where {choice}; "
        f"`gspo figure sweep --x {first}` draws all of them, and `gspo figure curves` those of up "
        "to 6 combinations"
    )


def too_many(data: Data, maximum: int) -> str:
    """Return why a figure does not show these arms: there are more than `maximum`."""
    advice = choose_one(data) or "name some of the runs"
    return f"shows {maximum} arms at most and not {len(data.arms)}: {advice}"


# ------------------------------------------------------------------------------------------------
# records as runs
def lost_steps(run: Run) -> str:
    """Return the rollout batches before the last that have no row, as "batches 7, 8", or ""."""
    lost = sorted(set(range(1, run.last)) - set(run.rows["step"]))
    if not lost:
        return ""
    text = ", ".join(map(str, lost[:MAX_LOST_NAMED]))
    if len(lost) > MAX_LOST_NAMED:
        text += f", ... ({len(lost)} in all)"
    return f"batches {text}" if len(lost) > 1 else f"batch {text}"


def as_run(record: Record, notes: list[str]) -> Run | None:
    """Return a record as a run, or None with a note if it is no training run or has no batch yet."""
    notes += record.notes
    missing = [key for key in NEEDED if record.settings.get(key) is None]
    wrong = [
        f"{key}={str(value)[:40]}" for key, value in record.settings.items() if not fits(key, value)
    ]
    if missing:
        reason = f"its settings have no {', '.join(missing)}"
    elif wrong:
        reason = f"its settings cannot be: {', '.join(wrong[:3])}"
    elif not len(record.rows) or not (record.rows["step"] > 0).any():
        reason = "no rollout batch yet"
    elif record.rows["step"].duplicated().any():
        repeated = record.rows["step"][record.rows["step"].duplicated()].iloc[0]
        reason = f"step {repeated} stands twice in its metrics.jsonl"
    else:
        return Run(record.path, record.settings, record.rows, id=record.id)
    notes.append(f"left out: {record.path}, {reason}")
    return None


def fits(key: str, value: object) -> bool:
    """Return whether a setting may have this value, by its type and its length."""
    if type(value) not in KINDS.get(key, (type(value),)):
        return False
    if len(f"{key}{value}") > MAX_SETTING_CHARS:
        return False
    if key == "study" and value is not None:
        printable = escaping.escape_line(value) == value
        return "/" not in value and len(value) <= MAX_STUDY_CHARS and printable
    if key.startswith("monitor.thresholds."):
        return type(value) in NUMBER
    return type(value) is not int or abs(value) < 2**53


def base_arm(settings: Mapping[str, object], with_replay: bool = True) -> str:
    """Return the objective's name, with its Routing Replay unless `with_replay` is false."""
    objective = settings["objective.name"]
    arm = OBJECTIVES.get(objective, objective)
    replay = settings.get("policy.routing_replay")
    if with_replay and replay not in (None, "none"):
        arm += f" + Routing Replay ({str(replay).upper()})"
    return arm


def label(runs: list[Run], notes: list[str]) -> None:
    """Set each run's arm.

    If runs with the same name and seed differ in other settings, these settings are appended.
    """
    for run in runs:
        run.arm = base_arm(run.settings)
    for base in sorted({run.arm for run in runs}):
        group = [run for run in runs if run.arm == base]
        append_settings(group, base)
        by_arm_and_seed: dict[tuple[str, int], Run] = {}
        for run in group:
            other = by_arm_and_seed.setdefault((run.arm, run.seed), run)
            if other is not run:
                raise RunsError(
                    f"the same arm and seed twice ({run.arm}, seed {run.seed}): {other.path} and "
                    f"{run.path}; give one"
                )
        for arm in sorted({run.arm for run in group}):
            keys = differing([run for run in group if run.arm == arm])
            if keys:
                notes.append(f"seeds of {arm} differ also in {', '.join(keys)}")


def append_settings(group: list[Run], base: str) -> None:
    """Append the settings in which runs of the same seed differ to the arms' names."""
    keys: set[str] = set()
    for seed in {run.seed for run in group}:
        keys.update(differing([run for run in group if run.seed == seed]))
    if not keys:
        return
    for run in group:
        run.base = base
        run.appended = {key: run.settings.get(key) for key in sorted(keys)}
        run.arm = arm_with(base, run.appended)


def arm_with(base: str, appended: Mapping[str, object]) -> str:
    """Return an arm's name with settings, as in "GRPO [optim.lr=0.001]"."""
    if not appended:
        return base
    return f"{base} [{', '.join(f'{key}={value}' for key, value in appended.items())}]"


def differing(runs: list[Run] | list[Record]) -> list[str]:
    """Return the settings in which these runs differ, without the settings in NOT_THE_ARM."""
    keys = {key for run in runs for key in run.settings if key.split(".")[0] not in NOT_THE_ARM}
    return sorted(key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1)


# ------------------------------------------------------------------------------------------------
# comparing arms
def why_not_comparable(data: Data, arms: tuple[str, ...]) -> str | None:
    """Return why these arms cannot be compared, or None if they can."""
    if any(arm not in data.arms for arm in arms):
        advice = choose_one(data)
        if advice and set(arms) <= {run.base or run.arm for run in data.runs}:
            return f"compares {' and '.join(arms)} at one setting, and {advice}"
        names = ", ".join(data.arms[:MAX_ARMS_NAMED])
        if len(data.arms) > MAX_ARMS_NAMED:
            names += ", ..."
        return f"needs arms {' and '.join(arms)}; found: {names}"
    if not data.seeds(*arms):
        names = ", ".join(arms)
        return f"needs a seed that all arms have (they are paired by seed): {names} share none"
    compared = data.compared(*arms)
    if any(len(run.column("reward/mean")) == 0 for run in compared):
        return "needs reward/mean of every run"
    if min(run.last for run in compared) < 2:
        return "needs at least 2 rollout batches of every run"
    return None


def not_compared(data: Data, arms: tuple[str, ...]) -> str:
    """Return the runs that a comparison of these arms leaves out, with the reasons, or ""."""
    seeds = data.seeds(*arms)
    texts = []
    for run in data.left_out(*arms):
        if run.collapsed is not None:
            reason = f"{run.last} of {run.planned} batches, collapsed at step {run.collapsed}"
        elif not run.finished:
            reason = f"{run.last} of {run.planned} batches"
        elif run.seed in seeds:
            reason = "its other run is unfinished"
        else:
            reason = "no run of that seed to compare with"
        texts.append(f"{run.arm}, seed {run.seed} ({reason})")
    return f"left out: {'; '.join(texts)}" if texts else ""


def describe(data: Data, arms: list[str]) -> str:
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
    prompts = setting_values(runs, "rollout.prompts_per_step")
    responses = setting_values(runs, "rollout.group_size")
    minibatches = setting_values(runs, "trainer.minibatches")
    text = (
        f"Run: {model}, rollout batches of {prompts} prompts x {responses} responses in "
        f"{minibatches} mini-batches; {seeds_text}; {data.common_step(*arms)} batches common to "
        "all runs."
    )
    for run in runs:
        if run.last < run.planned:
            text += f" Unfinished: {run.arm}, seed {run.seed}, {run.last} of {run.planned} batches."
    unknown = [arm for arm in arms if data.table(arm, "compute/flops").isna().all(axis=None)]
    if unknown:
        text += f" Training compute is not known of {', '.join(unknown)}: the runs report no compute/flops."
    unexpected = [key for key in differing(runs) if not key.startswith(MAKES_THE_ARM)]
    if unexpected:
        text += f" The runs differ also in {', '.join(unexpected)}."
    return text


def setting_values(runs: list[Run], key: str, unknown: str = "?") -> str:
    """Return the values of a setting in these runs, as in "4" or "4 or 16"."""
    values = {run.settings.get(key, unknown) for run in runs}
    ordered = sorted(values, key=lambda v: (not isinstance(v, int | float), str(v)))
    return " or ".join(map(str, ordered))


def count_seeds(seeds: list[int]) -> str:
    """Return the number of seeds and the seeds, as in "1 seed (0)" or "3 seeds (0, 1, 2)"."""
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"
