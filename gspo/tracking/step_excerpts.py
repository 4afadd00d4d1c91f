"""Selects what the page of a run shows of its recorded steps.

These are links to the pages of the steps, and the most notable responses of the newest step, with
coloured tokens. They need no script.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from gspo.data.step_record import StepRecord
from gspo.data.step_record_files import FOLDER, read_record, record_file, recorded_steps
from gspo.io.untrusted import Unreadable, not_plain
from gspo.tracking.step_page import page_file, write_step_page
from gspo.tracking.step_tokens import (
    ACTIVE,
    BOUNDED,
    DUAL,
    OUTSIDE,
    Passes,
    ViewTokens,
    clip_words,
    color_scale,
    largest_mismatches,
    log_ratios,
    mismatches,
    recorded_view,
    row_numbers,
    shade,
    token_texts,
)

PAGES = 3  # pages are written of at most so many of the newest records
MAX_RECORD_BYTES = 128 << 20  # of a record whose page is written without being asked for
RESPONSES = 3  # with the highest numbers of each kind
MAX_TOKENS = 400  # of a response that are shown
MAX_LINKS = 200  # steps that are listed
# from the strongest mark to the weakest
CLIP_CLASSES = {DUAL: "dual", ACTIVE: "active", BOUNDED: "bounded", OUTSIDE: "outside"}
HEAD = ("response", "it has", "reward", "tokens", "clipped", "weight", "largest mismatch")

# it reads a file of the run, or returns None and notes the problem
Reader = Callable[[Callable[[Path], Any], Path, list[str]], Any]


@dataclass
class Excerpt:
    """The first tokens of a response."""

    title: str
    tokens: list[tuple[str, str, str]]  # CSS classes, numbers in words, text
    hidden: int  # the number of further tokens


@dataclass
class RecordedSteps:
    """What a run's page shows of the recorded steps."""

    count: int
    links: list[dict[str, str]]  # the newest steps in ascending order; address: of its page, or ""
    step: int | None  # whose responses are shown
    scale: str  # the log-ratio at which the strongest colour begins
    rows: list[tuple[object, ...]]  # the lines of the table of responses
    excerpts: list[Excerpt]
    head: tuple[str, ...] = HEAD


def write_newest_pages(run: Path, read: Reader, problems: list[str]) -> None:
    """Write the pages of the newest records, except of very large ones."""
    for step in recorded_steps(run)[-PAGES:]:
        read(lambda path, step=step: _write_page(run, step, path), record_file(run, step), problems)


def _write_page(run: Path, step: int, path: Path) -> None:
    if path.lstat().st_size <= MAX_RECORD_BYTES:
        write_step_page(run, step)


def recorded_section(run: Path, read: Reader, problems: list[str]) -> RecordedSteps | None:
    """Return the recorded steps of a run, None if it has none.

    The responses are those of the newest record that can be read and is not very large."""
    steps = recorded_steps(run)
    if not steps:
        return None
    links = []
    for step in steps[-MAX_LINKS:]:
        path = page_file(run, step)
        address = f"{FOLDER}/{path.name}" if path.exists() else ""
        links.append({"text": str(step), "address": address})
    section = RecordedSteps(len(steps), links, None, "", [], [])
    for step in reversed(steps[-PAGES:]):
        record = read(_read_moderate, record_file(run, step), problems)
        if record is not None:
            _add_responses(section, record, page_file(run, step))
            break
    return section


def _read_moderate(path: Path) -> StepRecord | None:
    """Return a record, None if it is very large."""
    if path.parent.is_symlink():
        raise Unreadable(not_plain(path.parent))
    return read_record(path) if path.lstat().st_size <= MAX_RECORD_BYTES else None


def _add_responses(section: RecordedSteps, record: StepRecord, page: Path) -> None:
    """Add the responses with the most clipped tokens, most weight and largest mismatch."""
    passes = Passes(record)
    view = ViewTokens(record, passes, recorded_view(record))
    numbers = row_numbers(record, passes, view)
    mismatch = largest_mismatches(record, mismatches(record, passes))
    reasons: dict[int, list[str]] = {}
    kinds = {
        "many clipped tokens": numbers.clipped,
        "much weight": numbers.weight,
        "a large mismatch": mismatch,
    }
    for reason, values in kinds.items():
        for row in _highest(values):
            reasons.setdefault(row, []).append(reason)
    log_ratio = log_ratios(record, passes)
    scale = color_scale([log_ratio])
    section.step = record.header.step
    section.scale = f"{scale:.4g}"
    for row, words in reasons.items():
        name: object = str(row)
        if page.exists():
            name = {"text": str(row), "address": f"{FOLDER}/{page.name}#{row}"}
        section.rows.append(
            (
                name,
                ", ".join(words),
                f"{record.rewards[row]:.4g}",
                f"{record.response_lengths[row]:,}",
                _known(numbers.clipped[row], ".1%"),
                _known(numbers.weight[row], ".1%"),
                _known(mismatch[row], ".3g"),
            )
        )
        section.excerpts.append(_excerpt(record, passes, view, log_ratio, scale, row))


def _known(value: float, form: str) -> str:
    """Return a number as text, "" if it is not known."""
    return "" if np.isnan(value) else format(float(value), form)


def _highest(values: ndarray) -> list[int]:
    """Return the rows with the highest values, without rows whose value is 0 or NaN."""
    order = np.argsort(-np.nan_to_num(values, nan=0.0), kind="stable")
    return [int(row) for row in order[:RESPONSES] if values[row] > 0]


def _excerpt(
    record: StepRecord,
    passes: Passes,
    view: ViewTokens,
    log_ratio: ndarray,
    scale: float,
    row: int,
) -> Excerpt:
    """Return the first tokens of a response, with the numbers of its first pass."""
    _, token_ids = record.prompt_and_response(row)
    first_token = record.tokens_of(row).start
    passes_of_row = np.flatnonzero(passes.rows == row)
    tokens = []
    for i, text in enumerate(token_texts(record, token_ids[:MAX_TOKENS])):
        words = [f"token {i + 1}"]
        classes = ["token"]
        if not record.sampled[first_token + i]:
            words.append("written by the environment")
            classes.append("written")
        elif not record.trained[first_token + i]:
            words.append("out of the loss")
            classes.append("untrained")
        if len(passes_of_row):
            position = passes.begins[passes_of_row[0]] + i
            value = float(log_ratio[position])
            color = shade(value, scale)
            if color is not None:
                words.append(f"log-ratio {value:.4g}")
                classes.append(f"shade-{color}")
            if record.trained[first_token + i]:
                bits = int(view.clipped[position])
                words.append(f"weight {view.weights[position]:.4g}")
                words.append(f"advantage {view.advantages[first_token + i]:.4g}")
                if view.knows_clips:
                    words.append(clip_words(bits))
                classes += [mark for bit, mark in CLIP_CLASSES.items() if bits & bit][:1]
        tokens.append((" ".join(classes), ", ".join(words), visible(text)))
    title = f"response {row}: reward {record.rewards[row]:.4g}, {len(token_ids):,} tokens"
    return Excerpt(title, tokens, max(len(token_ids) - MAX_TOKENS, 0))


def visible(text: str) -> str:
    """Return the text of a token with its white space visible."""
    if not text.strip(" "):
        return "␣" * len(text)
    return text.replace("\n", "↵\n").replace("\t", "⇥")
