"""Read what other frameworks print on a console, which is often all that was kept of a run.

    step:3 - name:value - name:value                        verl
    {'loss': 0.1, 'reward': 0.5, 'epoch': 0.02}             TRL (transformers); also '0.1' in quotes
    {..., 'global_step/max_steps': '5/3766'}                ms-swift
    perf 3: {...}, rollout 3: {...}, step 12: {...}         slime
    metrics_tag: {"step": 3, "metrics": {...}}              ROLL

TRL prints no step. Its rows are numbered. A row whose epoch is before that of the row above comes
from a resumed run, and gets the number of the first row with its epoch.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable

from gspo.tracking.frameworks.translate import Log

CONSOLE = "a console"
ROWS_WITHOUT_STEPS = "a console without steps"
STEPS_AS_TEXT = ("global_step/max_steps", "iteration")
STEP_OF_ALL = re.compile(r"(\d{1,9})/(\d{1,9})")  # ms-swift's "3/160"
COLOURS = re.compile("\x1b\\[[0-9;]*m")
NUMBER = r"(?:np\.\w+\()?([-+]?(?:[0-9][-+0-9.eE]*|\.[-+0-9.eE]+|(?i:inf(?:inity)?|nan)))\)?"

VERL_LINE = re.compile(r"(?:^|\s)step:(\d{1,9}) - (\S.*)")
# a name may have spaces, because names of data sets have
VERL_PAIR = re.compile(rf"(\S.*):{NUMBER}$")
ROUNDED = re.compile(r"[-+]?\d+\.\d{3}")

MAPPING_STARTS = ("{'", '{"')  # as Python and JSON print it
PAIR = re.compile(r"""(['"])([^'"]{1,200})\1\s*:\s*(['"]?)([^'",{}\[\]]{1,60})\3\s*(?=[,}])""")
VALUE = re.compile(NUMBER)
ROLL_WORDS = "metrics_tag:"
SLIME_WORDS = re.compile(r"\b(rollout|perf|passrate|multi_turn|eval|step) (\d{1,9}): *$")
SLIME_AXES = {"step": "train", "eval": "eval"}  # the other words are of a rollout batch
# transformers adds the epoch to each row, and the last row sums the training up
TRL_NAMES = ("loss", "reward")
TRL_EPOCH = "epoch"
TRL_SUMMARY = "train_runtime"
WITHOUT_STEPS = (
    "its rows have no step, so they are numbered: with logging_steps=N, a row is the mean of N "
    "optimizer steps"
)
ROUNDED_NOTE = (
    "its numbers are rounded to 3 decimals, as older versions print them: a 0, such as that of a "
    "learning rate, may be a small number"
)


def kind_of(lines: Iterable[bytes]) -> str:
    """Return CONSOLE or ROWS_WITHOUT_STEPS if one of the lines is a row of a framework, else ""."""
    for line in lines:
        if not may_be_row(line):
            continue
        record, has_step = row_of(plain_text(line))
        if record:
            return CONSOLE if has_step else ROWS_WITHOUT_STEPS
    return ""


def read(log: Log, lines: Iterable[bytes]) -> None:
    """Add the rows of a console's lines to a log, with notes on what they lack."""
    epochs: list[float] = []  # of the numbered rows
    above: dict[str, object] = {}  # the last row without a step
    doubled = 0
    odd_parts = 0
    is_rounded = True
    for line in lines:
        if not may_be_row(line):
            continue
        text = plain_text(line)
        matched = VERL_LINE.search(text)
        if matched:
            record, odd, rounded = verl_row(matched)
            log.records.append(record)
            odd_parts += odd
            is_rounded = is_rounded and rounded
            continue
        record, has_step = row_of(text)
        if not record:
            continue
        is_rounded = False
        take_steps_as_text(record, log)
        if not has_step:
            if record == above:
                doubled += 1
                continue
            above = dict(record)
            if any(name in record for name in TRL_NAMES):
                epoch = as_float(str(record[TRL_EPOCH])) or 0.0
                if epochs and epochs[-1] > epoch:
                    del epochs[bisect_left(epochs, epoch) :]
                epochs.append(epoch)
            record["step"] = max(len(epochs), 1)
        log.records.append(record)
    if log.records and is_rounded:
        log.notes.append(ROUNDED_NOTE)
    if odd_parts:
        log.notes.append(f"left out: {odd_parts} parts of lines that are no name and number")
    if doubled:
        log.notes.append(f"left out: {doubled} rows that are equal to the row above them")
    if epochs:
        log.notes.append(WITHOUT_STEPS)


def may_be_row(line: bytes) -> bool:
    """Return whether a line may be a row. Most lines of a console are none."""
    return b"step:" in line or b"{" in line


def plain_text(line: bytes) -> str:
    """Return a line without colours."""
    return COLOURS.sub("", line.decode(errors="replace"))


def row_of(text: str) -> tuple[dict[str, object], bool]:
    """Return the numbers of a line, empty if it is no row, and whether they say their step."""
    matched = VERL_LINE.search(text)
    if matched:
        return verl_row(matched)[0], True
    starts = [text.find(start) for start in MAPPING_STARTS if start in text]
    if not starts:
        return {}, False
    words = text[: min(starts)].rstrip()
    record = pairs_of(text[min(starts) : text.rfind("}") + 1])
    of_slime = SLIME_WORDS.search(words)
    if of_slime:
        axis = SLIME_AXES.get(of_slime[1], "rollout")
        return record | {f"{axis}/step": int(of_slime[2])}, True
    if words.endswith(ROLL_WORDS):
        return record, "step" in record
    if TRL_EPOCH not in record or TRL_SUMMARY in record:
        return {}, False
    return record, any(key in record for key in STEPS_AS_TEXT)


def verl_row(matched: re.Match[str]) -> tuple[dict[str, object], int, bool]:
    """Return the numbers of verl's line, how many parts are none, and whether all are rounded."""
    record: dict[str, object] = {"step": int(matched[1])}
    odd = 0
    is_rounded = True
    # a progress bar may go on in the same line
    pairs = matched[2].partition("\r")[0]
    for part in pairs.strip().split(" - "):
        pair = VERL_PAIR.fullmatch(part.strip())
        number = as_float(pair[2]) if pair else None
        if pair and number is not None:
            record[pair[1]] = number
            is_rounded = is_rounded and ROUNDED.fullmatch(pair[2]) is not None
        else:
            odd += 1
    return record, odd, is_rounded


def pairs_of(mapping: str) -> dict[str, object]:
    """Return the names and numbers of a printed mapping, also of a mapping in it.

    Of the texts in it, only steps such as "5/3766" are kept.
    """
    record: dict[str, object] = {}
    for _, name, _, value in PAIR.findall(mapping):
        matched = VALUE.fullmatch(value.strip())
        number = as_float(matched[1]) if matched else None
        if number is not None:
            record[name] = int(number) if name == "step" and number.is_integer() else number
        elif name in STEPS_AS_TEXT:
            record[name] = value
    return record


def as_float(text: str) -> float | None:
    """Return the number that a text spells, None if it spells none."""
    try:
        return float(text)
    except ValueError:
        return None


def take_steps_as_text(record: dict[str, object], log: Log) -> None:
    """Replace a step such as "3/160" by its number, and note the planned number in the log."""
    for key in STEPS_AS_TEXT:
        matched = STEP_OF_ALL.fullmatch(str(record.get(key)))
        if matched:
            record[key] = int(matched[1])
            log.planned = int(matched[2])
