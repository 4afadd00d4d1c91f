"""Finds and recognises the rollouts that other frameworks save.

    framework   file                                       in the file
    NeMo-RL     train_data_step7.jsonl                     token IDs, both log-probs, advantages
    prime-rl    token_exports/step_7/rank_0.jsonl          the same, and entropies
    verl        rollout_data_dir/7.jsonl                   texts and scores
    TRL         completions/completions_00007.parquet      texts, rewards, advantages
    ms-swift    completions.jsonl                          texts, rewards, advantages
    ROLL        rollout_dump_data.step_7.jsonl             texts and scores
    slime       7.pt                                       a pickle
    SkyRL       global_step_7_training_input.pkl           a pickle

gspo.data.foreign_records reads the first two. The next four hold no token IDs and no log-probs. A
pickle is never read, because unpickling runs the code that it holds.

This module does not import torch.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.io.untrusted import OWN_RUN_FACTOR, Unreadable, is_step, open_plain_file, read_lines

NEMO_RL = "nemo-rl"
PRIME_RL = "prime-rl"
VERL = "verl"
TRL = "trl"
MS_SWIFT = "ms-swift"
ROLL = "roll"

# prime-rl's rows have about 400 characters per token, so this holds 150,000 tokens
MAX_LINE_BYTES = 64 << 20
MAX_FOLDER_ENTRIES = 100_000
MAX_NAMED_STEPS = 5  # a message names so many steps
FIRST_BYTES = 4096  # in which the format shows

# the step in the name of a file
FILE_NAMES = (
    re.compile(r"train_data_step(\d{1,9})\.jsonl"),
    re.compile(r"completions_(\d{1,9})\.parquet"),
    re.compile(r"rollout_dump_data\.step_(\d{1,9})\.jsonl"),
    re.compile(r"(\d{1,9})\.jsonl"),
    re.compile(r"(\d{1,9})\.pt"),
    re.compile(r"global_step_(\d{1,9})_training_input\.pkl"),
)
PRIME_RL_FOLDER = re.compile(r"step_(\d{1,9})")
RANK_FILES = "rank_*.jsonl"
# folders in a run's folder that hold the dumps
SUBFOLDERS = ("", "token_exports", "completions")

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".npy", ".npz")
# a pickle, a zip archive of torch.save or numpy.savez, an array of numpy.save
PICKLE_STARTS = (*(bytes([0x80, protocol]) for protocol in range(6)), b"PK\x03\x04", b"\x93NUMPY")
SLIME_NAME = re.compile(r"(eval_)?\d+\.pt")
SKYRL_NAME = re.compile(r".*training_input\.pkl")
PARQUET_START = b"PAR1"


@dataclass
class Dump:
    """The files that a framework saved for a step."""

    framework: str
    step: int | None  # None: no name says it
    files: list[Path]


def find_dump(path: Path, step: int | None) -> Dump:
    """Return the dump at a path, which is a file or a folder. `step` chooses among the files.

    Raises FileNotFoundError for a missing path, and Unreadable for a pickle, for an unknown format,
    and for a step that is not there."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        chosen, files = _choose(path, _steps_of(path), step)
    else:
        chosen = _step_of(path)
        files = [path]
        if chosen is not None and step not in (None, chosen):
            raise Unreadable(f"{path} holds step {chosen}, not step {step}")
    return Dump(_framework_of(files[0]), step if chosen is None else chosen, files)


def _steps_of(folder: Path) -> dict[int | None, list[Path]]:
    """Return the files of each step in a folder. The key None has a file without a step."""
    if PRIME_RL_FOLDER.fullmatch(folder.name):
        rank_files = sorted(folder.glob(RANK_FILES))
        if rank_files:
            return {_step_of(rank_files[0]): rank_files}
    for name in SUBFOLDERS:
        subfolder = folder / name
        # a link may lead out of the folder
        if not subfolder.is_dir() or (name and subfolder.is_symlink()):
            continue
        entries = []
        for entry in subfolder.iterdir():
            entries.append(entry)
            if len(entries) > MAX_FOLDER_ENTRIES:
                raise Unreadable(f"{subfolder} has more than {MAX_FOLDER_ENTRIES:,} files")
        entries.sort()
        steps: dict[int | None, list[Path]] = {}
        for entry in entries:
            if entry.is_symlink():
                continue
            if PRIME_RL_FOLDER.fullmatch(entry.name) and entry.is_dir():
                rank_files = sorted(entry.glob(RANK_FILES))
                if rank_files:
                    steps[_step_of(rank_files[0])] = rank_files
        if steps:
            return steps
        for pattern in FILE_NAMES:
            files = [entry for entry in entries if pattern.fullmatch(entry.name)]
            if files:
                return {_step_of(file): [file] for file in files}
        if subfolder / "completions.jsonl" in entries:
            return {None: [subfolder / "completions.jsonl"]}
    raise Unreadable(f"{folder} has no dump of NeMo-RL's, prime-rl's or another known framework's")


def _choose(
    folder: Path, steps: dict[int | None, list[Path]], step: int | None
) -> tuple[int | None, list[Path]]:
    """Return the step and its files. Raises Unreadable if the step is missing or not stated."""
    if len(steps) == 1 and (step is None or None in steps):
        return next(iter(steps.items()))
    if step in steps:
        return step, steps[step]
    numbers = [number for number in steps if number is not None]
    if step is None:
        names = ", ".join(map(str, sorted(numbers)[:MAX_NAMED_STEPS]))
        raise Unreadable(f"{folder} has {len(numbers)} steps ({names}, ...): set step=N")
    numbers.sort(key=lambda number: (abs(number - step), number))
    names = ", ".join(map(str, numbers[:MAX_NAMED_STEPS]))
    raise Unreadable(f"{folder} has no step {step}; the nearest steps are {names}")


def _step_of(file: Path) -> int | None:
    """Return the step that the name of a file, or of its folder, states."""
    for pattern in FILE_NAMES:
        match = pattern.fullmatch(file.name)
        if match:
            break
    else:
        match = PRIME_RL_FOLDER.fullmatch(file.resolve().parent.name)
        if not file.match(RANK_FILES) or not match:
            return None
    step = int(match[1])
    if not is_step(step):
        raise Unreadable(f"{file} is of step {step}, which is too large")
    return step


def _framework_of(file: Path) -> str:
    """Return the framework that wrote a file. Raises Unreadable for a pickle or another format."""
    with open_plain_file(file) as opened:
        start = opened.read(FIRST_BYTES)
    if start.startswith(PICKLE_STARTS) or file.suffix in PICKLE_SUFFIXES:
        raise Unreadable(_pickle_message(file))
    if start.startswith(PARQUET_START):
        return TRL
    row: dict[str, Any] = {}
    for line in dump_lines(file):
        row = parse_row(line) or {}
        if row:
            break
    keys = row.keys()
    if keys >= {"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}:
        return PRIME_RL
    if keys >= {"generation_logprobs", "prev_logprobs"}:
        return NEMO_RL
    if keys >= {"input", "output", "score"}:
        return VERL
    if keys >= {"prompt", "responses", "scores"}:
        return ROLL
    if keys >= {"prompt", "completion"} and isinstance(row["prompt"], list):
        return MS_SWIFT
    shown = [repr(key[:40]) for key in list(keys)[:10]]
    contents = "it has no rows in JSON"
    if shown:
        contents = f"its first row has the keys {', '.join(shown)}"
    raise Unreadable(f"{file} is no dump that is known: {contents}")


def _pickle_message(file: Path) -> str:
    """Return the reason why a pickle is not read, with the framework if its name tells it."""
    writer = ""
    if SLIME_NAME.fullmatch(file.name):
        writer = " as slime's --save-debug-rollout-data writes it"
    elif SKYRL_NAME.fullmatch(file.name) or file.parent.name == "dumped_data":
        writer = " as SkyRL's dump_data_batch writes it"
    return (
        f"{file} is a pickle{writer}: unpickling runs the code that the file holds, "
        "so it is not read"
    )


def text_only_message(dump: Dump) -> str:
    """Return the reason why a dump without token IDs is not read as it is."""
    remedy = "so it cannot be replayed"
    if dump.framework in (VERL, TRL):
        remedy = "so set model=PATH to score the texts"
    return (
        f"{dump.files[0]} is a dump of {dump.framework}: it has texts, but no token IDs and no "
        f"log-probs, {remedy}"
    )


def dump_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a dump, which may be longer and more than those of our own files."""
    return read_lines(file, OWN_RUN_FACTOR, MAX_LINE_BYTES)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the mapping of a JSON line, None if it holds none. Numbers may be NaN or infinite."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
