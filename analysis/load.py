"""Load runs from wherever they were recorded (sources.py), find out which arm each is, and return
one tidy frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gspo.analysis import sources
from gspo.analysis.runs import ARMS as ARMS
from gspo.analysis.runs import GRPO, GSPO, GSPO_TOKEN, Data, Run, die, nearest
from gspo.analysis.runs import GRPO_R2 as GRPO_R2
from gspo.analysis.runs import Refused as Refused
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

# settings without which a record is not a training run
NEEDED = ("seed", "steps", "objective.name")
NUMBER, NAME = (int, float, type(None)), (str, type(None))
# the types of the settings that figures and tables rely on; other settings may be any number or
# text
KINDS = {
    "seed": (int,), "steps": (int,), "objective.name": (str,), "study": NAME, "model.name": NAME,
    "policy.routing_replay": NAME, "objective.clip_low": NUMBER, "objective.clip_high": NUMBER, "optim.lr": NUMBER,
    "optim.max_grad_norm": NUMBER, "rollout.prompts_per_step": NUMBER, "rollout.group_size": NUMBER,
    "trainer.minibatches": NUMBER,
}  # fmt: skip
MOST_NAMED = 6  # most arms that a message names
LONGEST = 2000  # most characters of a setting's name and value
FOLDER = 100  # most characters of the study's name, after which files are named
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
# Arms differ in these on purpose; any other difference between compared arms is stated in the
# caption.
MAKES_THE_ARM = ("objective", "outside.objective", "policy.routing_replay")


def load(paths: list[Path | str], where: Mapping[str, object] | None = None) -> Data:
    """Return all runs of these sources with their arms, in the order of the sources and within each
    by path.

    With `where`, {"optim.lr": 2e-4, ...}, only the runs that have these settings. Raises Refused if
    there are none, if a source cannot be read, or if two runs have the same arm and seed."""
    notes: list[str] = []
    runs = {}
    for path in paths:
        try:
            found = sources.records(path)
        except (OSError, ValueError) as error:
            die(str(error))
        for record in sorted(
            found, key=lambda record: (record.path.resolve(), str(record.settings.get("study")))
        ):
            if (run := as_run(record, notes)) is not None:
                key = record.path.resolve(), str(record.settings.get("study"))
                if key in runs and runs[key].id != run.id:
                    notes.append(
                        f"{run.path}: two W&B runs, {runs[key].id} and {run.id}; the newer one counts"
                    )
                runs[key] = run
    runs = list(runs.values())
    if not runs:
        die(
            f"no runs under {', '.join(map(str, paths))}: no folder with settings.yaml and a batch in metrics.jsonl"
        )
    for key, value in (where or {}).items():
        runs = having(runs, key, value)
    label(runs, notes)
    notes += [
        f"unfinished: {run.path}, {run.last} of {run.planned} batches"
        for run in runs
        if not run.finished
    ]
    notes += [f"lost: {run.path} has no row of {lost}" for run in runs if (lost := lost_steps(run))]
    return Data(runs, notes)


def having(runs: list[Run], key: str, value: object) -> list[Run]:
    """Return the runs with this value of a setting. Raises Refused if there are none, with the
    values that there are."""
    key = full_key(runs, key)
    found = {
        repr(run.settings.get(key)): run.settings.get(key) for run in runs if key in run.settings
    }
    if not found:
        settings = sorted({name for run in runs for name in run.settings})
        die(f"--where {key}={value}: these runs have no setting {key}{nearest(key, settings)}")
    kept = [run for run in runs if key in run.settings and same_value(run.settings[key], value)]
    if not kept:
        die(
            f"--where {key}={value}: no run has it; there are {', '.join(in_order(found.values()))}"
        )
    return kept


def full_key(runs: list[Run], key: str) -> str:
    """Return the setting that a short name stands for: "lr" for optim.lr, "objective" for
    objective.name. Of several settings with this ending those in which the runs differ are meant.
    Other names are returned as they are."""
    settings = {name for run in runs for name in run.settings}
    if key in settings:
        return key
    if f"{key}.name" in settings:
        return f"{key}.name"
    alike = [name for name in settings if name.rpartition(".")[2] == key]
    varied = [name for name in alike if len({repr(run.settings.get(name)) for run in runs}) > 1]
    if len(varied or alike) == 1:
        return (varied or alike)[0]
    return key


def same_value(recorded: object, wanted: object) -> bool:
    """Return whether a recorded value is the wanted one, which may be a text from a command line."""
    if isinstance(wanted, str) and not isinstance(recorded, str):
        wanted = as_value(wanted)
    if isinstance(recorded, bool) != isinstance(wanted, bool):
        return False
    return recorded == wanted or str(recorded) == str(wanted)


def as_value(text: str) -> object:
    """Return what a text of a command line stands for: a number, true, false, null, or the text."""
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False, "null": None, "none": None}.get(text.lower(), text)


def in_order(values: Iterable[object]) -> list[str]:
    """Return values as texts, numbers first and by size."""
    ordered = sorted(values, key=numbers_first)
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in ordered]


def numbers_first(value: object) -> tuple[bool, float, str]:
    """Return what a setting's value is sorted by: numbers by size, then everything else by its
    text.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number, float(value) if is_number else 0.0, str(value)


def varied(data: Data) -> dict[str, list[str]]:
    """Return the settings, beside those that make an arm, in which runs of one arm differ, with
    their values.
    """
    keys = {key for run in data.runs for key in run.beside if not key.startswith(MAKES_THE_ARM)}
    return {
        key: in_order(
            {repr(run.settings.get(key)): run.settings.get(key) for run in data.runs}.values()
        )
        for key in sorted(keys)
    }


def choose_one(data: Data) -> str:
    """Return how to get one run of each arm and seed from runs that vary a setting; "" if they vary
    none.
    """
    found = varied(data)
    if not found:
        return ""
    values = "; ".join(f"{key} ({', '.join(texts)})" for key, texts in found.items())
    choice = " ".join(f"{key}={texts[0]}" for key, texts in found.items())
    return (
        f"these runs also vary {values}. Choose one of each, as in --where {choice}; `gspo figure sweep --x "
        f"{next(iter(found))}` draws all of them, and `gspo figure curves` those of up to 6 combinations"
    )


def too_many(data: Data, most: int) -> str:
    """Return why a figure does not show these arms: there are more than `most`."""
    way = choose_one(data) or "name some of the runs"
    return f"shows {most} arms at most and not {len(data.arms)}: {way}"


def lost_steps(run: Run) -> str:
    """Return the rollout batches before the last that have no row, as "batch 7" or "batches 7, 8";
    empty if there are none."""
    lost = sorted(set(range(1, run.last)) - set(run.rows["step"]))
    some = ", ".join(map(str, lost[:3])) + (f", ... ({len(lost)} in all)" if len(lost) > 3 else "")
    return f"batch{'es' if len(lost) > 1 else ''} {some}" if lost else ""


def as_run(record: Record, notes: list[str]) -> Run | None:
    """Return a record as a run, or None (and add a note) if it is not a training run or has no
    rollout batch yet.
    """
    notes += record.notes
    missing = [key for key in NEEDED if record.settings.get(key) is None]
    if missing:
        notes.append(f"left out: {record.path}, its settings have no {', '.join(missing)}")
        return None
    if odd := [
        f"{key}={str(value)[:40]}" for key, value in record.settings.items() if not fits(key, value)
    ]:
        notes.append(f"left out: {record.path}, its settings cannot be: {', '.join(odd[:3])}")
        return None
    if not len(record.rows) or not (record.rows["step"] > 0).any():
        notes.append(f"left out: {record.path}, no rollout batch yet")
        return None
    twice = record.rows["step"][record.rows["step"].duplicated()]
    if len(twice):
        notes.append(
            f"left out: {record.path}, step {twice.iloc[0]} stands twice in its metrics.jsonl"
        )
        return None
    return Run(record.path, record.settings, record.rows, id=record.id)


def fits(key: str, value: object) -> bool:
    """Return whether a setting may have this value: it has the setting's type and a bounded length."""
    if type(value) not in KINDS.get(key, (type(value),)) or len(f"{key}{value}") > LONGEST:
        return False
    if key == "study" and value is not None:
        return "/" not in value and len(value) <= FOLDER and escaping.escape_line(value) == value
    threshold = key.startswith("monitor.thresholds.")
    return type(value) in NUMBER if threshold else type(value) is not int or abs(value) < 2**53


def label(runs: list[Run], notes: list[str]) -> None:
    """Set each run's arm. Where runs with the same name and seed differ in other settings, these
    settings are appended."""
    for run in runs:
        name, replay = run.settings["objective.name"], run.settings.get("policy.routing_replay")
        run.arm = OBJECTIVES.get(name, name)
        if replay not in (None, "none"):
            run.arm += f" + Routing Replay ({str(replay).upper()})"
    for base in sorted({run.arm for run in runs}):
        group = [run for run in runs if run.arm == base]
        keys = {
            key
            for seed in {r.seed for r in group}
            for key in differing([r for r in group if r.seed == seed])
        }
        for run in group if keys else []:
            run.base, run.beside = base, {key: run.settings.get(key) for key in sorted(keys)}
            run.arm = (
                base + " [" + ", ".join(f"{key}={value}" for key, value in run.beside.items()) + "]"
            )
        seen: dict[tuple[str, int], Run] = {}
        for run in group:
            other = seen.setdefault((run.arm, run.seed), run)
            if other is not run:
                die(
                    f"the same arm and seed twice ({run.arm}, seed {run.seed}): {other.path} and {run.path}; give one"
                )
        for arm in sorted({run.arm for run in group}):
            keys = differing([run for run in group if run.arm == arm])
            notes += [f"seeds of {arm} differ also in {', '.join(keys)}"] if keys else []


def differing(runs: list[Run] | list[Record]) -> list[str]:
    """Return the settings in which these runs differ, without those that may differ between runs of
    one arm.
    """
    keys = {key for run in runs for key in run.settings if key.split(".")[0] not in NOT_THE_ARM}
    return sorted(key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1)


def lacking(data: Data, arms: tuple[str, ...]) -> str | None:
    """Return why these arms cannot be compared, or None if they can."""
    if any(arm not in data.arms for arm in arms):
        if set(arms) <= {run.base or run.arm for run in data.runs} and (way := choose_one(data)):
            return f"compares {' and '.join(arms)} at one setting, and {way}"
        named = ", ".join(data.arms[:MOST_NAMED]) + (", ..." if len(data.arms) > MOST_NAMED else "")
        return f"needs arms {' and '.join(arms)}; found: {named}"
    if not data.seeds(*arms):
        return f"needs a seed that all arms have (they are paired by seed): {', '.join(arms)} share none"
    if any(len(run.column("reward/mean")) == 0 for run in data.compared(*arms)):
        return "needs reward/mean of every run"
    if min(run.last for run in data.compared(*arms)) < 2:
        return "needs at least 2 rollout batches of every run"
    return None


def not_compared(data: Data, arms: tuple[str, ...]) -> str:
    """Return the runs that a comparison of these arms leaves out, with the reasons, or "" if there
    are none.
    """
    runs, seeds = data.left_out(*arms), data.seeds(*arms)
    texts = []
    for run in runs:
        why = f"{run.last} of {run.planned} batches"
        if run.collapsed is not None:
            why += f", collapsed at step {run.collapsed}"
        elif run.finished:
            why = (
                "its other run is unfinished"
                if run.seed in seeds
                else "no run of that seed to compare with"
            )
        texts.append(f"{run.arm}, seed {run.seed} ({why})")
    return f"left out: {'; '.join(texts)}" if texts else ""


def describe(data: Data, arms: list[str]) -> str:
    """Return what was run, for captions: model, batches, seeds, unfinished runs, and differences
    that do not make the arms."""
    runs = data.of(*arms)
    arms_with: dict[str, list[str]] = {}
    for arm in arms:
        arms_with.setdefault(count_seeds([run.seed for run in data.of(arm)]), []).append(arm)
    batch = f"{_all(runs, 'rollout.prompts_per_step')} prompts x {_all(runs, 'rollout.group_size')} responses"
    text = f"Run: {_all(runs, 'model.name', 'model not named')}, rollout batches of {batch} in "
    text += f"{_all(runs, 'trainer.minibatches')} mini-batches; "
    several = len(arms_with) > 1
    text += "; ".join(
        f"{', '.join(names)}: {seeds}" if several else seeds for seeds, names in arms_with.items()
    )
    text += f"; {data.common_step(*arms)} batches common to all runs."
    for run in runs:
        if run.last < run.planned:
            text += f" Unfinished: {run.arm}, seed {run.seed}, {run.last} of {run.planned} batches."
    unknown = [arm for arm in arms if data.table(arm, "compute/flops").isna().all(axis=None)]
    if unknown:
        text += f" Training compute is not known of {', '.join(unknown)}: the runs report no compute/flops."
    others = [key for key in differing(runs) if not key.startswith(MAKES_THE_ARM)]
    return text + (f" The runs differ also in {', '.join(others)}." if others else "")


def _all(runs: list[Run], key: str, unknown: str = "?") -> str:
    """Return the values that a setting has in these runs, as in "4" or "4 or 16"."""
    values = {run.settings.get(key, unknown) for run in runs}
    return " or ".join(
        str(value)
        for value in sorted(values, key=lambda v: (not isinstance(v, int | float), str(v)))
    )


def count_seeds(seeds: list[int]) -> str:
    """Return the number of seeds and the seeds, as in "1 seed (0)" or "3 seeds (0, 1, 2)"."""
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"
