"""Choose runs by the values of their settings: `where.KEY=VALUE`, and advice on its use."""

from collections.abc import Collection, Iterable
from numbers import Real

from gspo.analysis.runs import Data, Run, RunsError, nearest
from gspo.analysis.sources import Record

# Arms differ in these on purpose. Captions state any other difference between compared arms.
MAKES_THE_ARM = ("objective", "outside.objective", "policy.routing_replay")
# the words of a command line that stand for a value
WORDS = {"true": True, "false": False, "null": None, "none": None}


def recorded_values(runs: Collection[Run | Record], key: str) -> list[object]:
    """Return the different values of a setting in these runs; a run without it has None."""
    values = [run.settings.get(key) for run in runs]
    return list({repr(value): value for value in values}.values())


def having(runs: list[Run], key: str, value: object) -> list[Run]:
    """Return the runs with this value of a setting, or with one of the values [A,B].

    Raises RunsError if there are none."""
    key = full_key(runs, key)
    candidates = [run for run in runs if key in run.settings]
    if not candidates:
        settings = {name for run in runs for name in run.settings}
        suggestion = nearest(key, sorted(settings))
        raise RunsError(f"where.{key}={value}: these runs have no setting {key}{suggestion}")
    recorded = recorded_values(runs, key)
    values = [value]
    is_list = isinstance(value, str) and value.startswith("[") and value.endswith("]")
    if is_list and not any(same_value(other, value) for other in recorded):
        values = [part.strip() for part in value[1:-1].split(",")]
    for wanted in values:
        if not any(same_value(other, wanted) for other in recorded):
            raise RunsError(
                f"where.{key}={wanted}: no run has it; there are {', '.join(in_order(recorded))}"
            )
    # a run without the setting has null there
    return [
        run for run in runs if any(same_value(run.settings.get(key), wanted) for wanted in values)
    ]


def full_key(runs: list[Run], key: str) -> str:
    """Return the full name of a setting: optim.lr for "lr", objective.name for "objective".

    If several settings end in the short name, the only one in which the runs differ is meant. Any
    other name is returned unchanged.
    """
    settings = {name for run in runs for name in run.settings}
    for name in (key, f"{key}.name"):
        if name in settings:
            return name
    matches = [name for name in settings if name.split(".")[-1] == key]
    differing = [name for name in matches if len(recorded_values(runs, name)) > 1]
    candidates = differing or matches
    if len(candidates) == 1:
        return candidates[0]
    return key


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
        return WORDS.get(text.lower(), text)


def in_order(values: Iterable[object]) -> list[str]:
    """Return values as texts, numbers first and by size."""
    return [setting_text(value) for value in sorted(values, key=numbers_first)]


def setting_text(value: object) -> str:
    """Return a value as a text by which where.KEY=VALUE finds it: short if nothing is lost."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def numbers_first(value: object) -> tuple[bool, float, str]:
    """Return the sorting key of a setting's value: numbers by size, then all else by its text."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    size = float(value) if is_number else 0.0
    return not is_number, size, str(value)


def varied(data: Data) -> dict[str, list[str]]:
    """Return the settings, with their values, that vary within an arm's name.

    Settings that make an arm are left out.
    """
    appended = {key for run in data.runs for key in run.appended}
    settings = {}
    for key in sorted(appended):
        if not key.startswith(MAKES_THE_ARM):
            values = recorded_values(data.runs, key)
            settings[key] = in_order(values)
    return settings


def choose_one(data: Data) -> str:
    """Return how to choose a single run of each arm and seed; "" if the runs vary no setting."""
    settings = varied(data)
    if not settings:
        return ""
    run = data.runs[0]
    values = []
    choices = []
    for key, texts in settings.items():
        values.append(f"{key} ({', '.join(texts)})")
        [text] = in_order([run.settings.get(key)])
        choices.append(f"where.{key}={text}")
    in_all = [key for key in settings if all(key in run.settings for run in data.runs)]
    figures = ["`gspo figure curves` draws up to 6 combinations"]
    if in_all:
        figures.insert(0, f"`gspo figure sweep x={in_all[0]}` draws all of them")
    return (
        f"these runs also vary {'; '.join(values)}. Choose one of each, as in "
        f"{' '.join(choices)}; {', and '.join(figures)}"
    )


def too_many(data: Data, maximum: int) -> str:
    """Return why a figure does not show these arms: there are more than `maximum`."""
    advice = choose_one(data) or "name some of the runs"
    return f"shows {maximum} arms at most and not {len(data.arms)}: {advice}"
