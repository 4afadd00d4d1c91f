"""Makes the page of a recorded step, which shows its responses with coloured tokens.

The page is one HTML file that opens from disk without a network. The page's script draws the tokens
of the response that the reader has chosen. The browser runs only this script, because the page
names its digest.

The numbers stand in the page as base64 of arrays in little-endian order. A page has an array in one
of these encodings:

    uint8, uint16, uint32   as they are
    half                    float16, which the script multiplies by `scale`; numbers keep three
                            digits if they are larger than 1e-9 of the largest
    constant                float32, a number per response or pass, if all its tokens have the same

All else stands in the page as JSON. The script inserts texts as text, never as markup.
"""

import base64
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy import ndarray

from gspo.data.step_record import StepRecord
from gspo.data.step_record_files import FOLDER, read_step, record_file
from gspo.io.escaping import escape, escape_line
from gspo.io.files import replace_text
from gspo.io.untrusted import Unreadable, not_plain
from gspo.tracking.pages import TEMPLATES, fill
from gspo.tracking.step_tokens import (
    CLIP_WORDS,
    Passes,
    View,
    ViewTokens,
    changed_experts,
    changes_of_step,
    color_scale,
    entropies,
    largest_mismatches,
    log_ratios,
    mismatches,
    recorded_view,
    row_numbers,
    token_texts,
)

__all__ = ["View", "page_file", "recorded_view", "step_page", "write_step_page"]

HALF_TOP = 2.0**15  # the largest number of an array is at most this when it is stored as float16
MAX_VIEWS = 2
MAX_WORD_CHARS = 100  # of names and values in the page's first lines, and of verdicts
MAX_CLIP_SETTINGS = 20
MAX_NOTES = 20
# bits of the array `flags`: the policy wrote the token; it is in the loss of view 0, 1, ...
SAMPLED = 1
IN_LOSS = 2
KEY_METRICS = {
    "reward/mean": "mean reward",
    "clip/token_active": "clipped share of tokens",
    "clip/sequence_active": "clipped share of responses",
    "ratio/ess_token": "effective sample size of the token ratios",
    "ratio/ess_sequence": "effective sample size of the response ratios",
}
# title, explanation, and whether the numbers have one sign
QUANTITIES = {
    "log_ratio": ("log-ratio", "log-prob in the update minus the old log-prob", False),
    "moved": ("log-ratio after the step", "log-prob after the last update minus the old", False),
    "clip": ("clipped", "the effect of the clip on the token's gradient", False),
    "pull": ("advantage × weight", "the factor of the gradient of the token's log-prob", False),
    "gradient": ("gradient", "the derivative of the whole loss by the token's log-prob", False),
    "entropy": ("entropy", "of the distribution that the token was drawn from, in nats", True),
    "mismatch": ("engine mismatch", "the trainer's log-prob minus the engine's", False),
    "changed": ("changed experts", "share of MoE layers with other experts than before", True),
}


def page_file(run: Path, step: int) -> Path:
    """Return the path of the page of a step's record in a run directory."""
    return record_file(run, step).with_suffix(".html")


def write_step_page(run: Path, step: int) -> Path:
    """Write the page of a recorded step beside its record, and return the page's path.

    Step -1 is the last that was recorded.
    Raises ValueError if the step was not recorded, and Unreadable if the record is damaged."""
    if (run / FOLDER).is_symlink():
        raise Unreadable(not_plain(run / FOLDER))
    record = read_step(run, step)
    path = page_file(run, record.header.step)
    title = f"{run.name}, step {record.header.step}"
    replace_text(path, step_page(record, [recorded_view(record)], title))
    return path


def step_page(record: StepRecord, views: Sequence[View], title: str) -> str:
    """Return the page of a step's record under one view, or under two views side by side.

    Raises ValueError for another number of views, or if the arrays of a view do not fit the
    record."""
    if not 1 <= len(views) <= MAX_VIEWS:
        raise ValueError(f"a page shows one or two views, not {len(views)}")
    for view in views:
        _check_view(record, view)
    passes = Passes(record)
    tokens_of_views = [ViewTokens(record, passes, view) for view in views]
    arrays = _Arrays()
    content = _content(record, passes, tokens_of_views, arrays)
    values = {
        "about": _about(record, views),
        "content": _inert_json(content),
        "arrays": arrays.texts,
    }
    template = TEMPLATES / "step_page.html.j2"
    return fill(template, title, values, script="step_page.js", style="step_page.css")


def _check_view(record: StepRecord, view: View) -> None:
    sizes = [len(update.logp) for update in record.updates]
    fits = len(view.advantages) == len(record.trained)
    fits = fits and (view.trained is None or len(view.trained) == len(record.trained))
    for arrays in (view.weights, view.clipped, view.gradients):
        fits = fits and (arrays is None or [len(values) for values in arrays] == sizes)
    if not fits:
        raise ValueError(f"the arrays of the view {view.name!r} do not fit the record")


# --------------------------------------------------------------------------------------------------
# arrays
class _Arrays:
    """The arrays of a page in base64, and their encodings."""

    def __init__(self) -> None:
        self.texts: dict[str, Markup] = {}
        self.encodings: dict[str, dict[str, Any]] = {}

    def add(self, name: str, values: ndarray, encoding: str, scale: float = 1.0) -> None:
        """Add an array. base64 has no character that is markup."""
        content = values.astype(values.dtype.newbyteorder("<")).tobytes()
        self.texts[name] = Markup(base64.b64encode(content).decode())
        self.encodings[name] = {"encoding": encoding, "scale": scale}

    def add_half(self, name: str, values: ndarray) -> None:
        sizes = np.abs(values[np.isfinite(values)])
        largest = float(sizes.max()) if len(sizes) else 0.0
        # a power of two, which changes no digit
        scale = 2.0 ** math.ceil(math.log2(largest / HALF_TOP)) if largest else 1.0
        scaled = np.divide(values, scale, dtype=np.float64)
        self.add(name, scaled.astype(np.float16), "half", scale)

    def add_segments(self, name: str, values: ndarray, begins: ndarray) -> None:
        """Add numbers of tokens that may be constant from each of `begins` to the next."""
        if len(values):
            # without the NaN of tokens that are out of the loss
            smallest = np.fmin.reduceat(values, begins)
            largest = np.fmax.reduceat(values, begins)
            if ((smallest == largest) | np.isnan(smallest)).all():
                self.add(name, smallest.astype(np.float32), "constant")
                return
        self.add_half(name, values)


def _content(
    record: StepRecord, passes: Passes, views: Sequence[ViewTokens], arrays: _Arrays
) -> dict[str, Any]:
    """Return the page's content in JSON, and add the arrays of the tokens to `arrays`."""
    token_ids, positions = np.unique(record.token_ids, return_inverse=True)
    kind = "uint16" if len(token_ids) <= 1 << 16 else "uint32"
    arrays.add("tokens", positions.astype(kind), kind)
    flags = SAMPLED * record.sampled.astype(np.uint8)
    for number, view in enumerate(views):
        flags += (IN_LOSS << number) * view.in_loss.astype(np.uint8)
    in_every_loss = np.all([view.in_loss for view in views], axis=0)
    arrays.add("flags", flags.astype(np.uint8), "uint8")

    scales: dict[str, float | None] = {}
    shared = {
        "log_ratio": log_ratios(record, passes),
        "moved": changes_of_step(record, passes),
        "entropy": entropies(record, passes),
        "mismatch": mismatches(record, passes),
        "changed": changed_experts(record, passes),
    }
    for name, values in shared.items():
        if values is not None and np.isfinite(values).any():
            arrays.add_half(name, values)
            scales[name] = color_scale([values])
    row_begins = record.ends - record.response_lengths
    for number, view in enumerate(views):
        arrays.add_segments(f"weight_{number}", view.weights, passes.begins)
        arrays.add_segments(f"advantage_{number}", view.advantages, row_begins)
        if view.knows_clips:
            arrays.add(f"clip_{number}", view.clipped, "uint8")
            scales["clip"] = None
        if view.gradients is not None:
            arrays.add_half(f"gradient_{number}", view.gradients)
    if any(np.isfinite(view.pulls).any() for view in views):
        scales["pull"] = color_scale([view.pulls for view in views])
    gradients = [view.gradients for view in views if view.gradients is not None]
    if len(gradients) == len(views):
        scales["gradient"] = color_scale(gradients)
    bits = [int(np.bitwise_or.reduce(view.clipped)) for view in views]
    return {
        "clip_bits": int(np.bitwise_or.reduce(bits)),
        "has_untrained": bool((record.sampled & ~in_every_loss).any()),
        "has_written": bool((~record.sampled).any()),
        "views": [view.name for view in views],
        "quantities": [_quantity(key, scales[key]) for key in QUANTITIES if key in scales],
        "clip_words": {str(bit): words for bit, words in CLIP_WORDS.items()},
        "encodings": arrays.encodings,
        "token_ids": token_ids.tolist(),
        "texts": token_texts(record, token_ids),
        "passes": {
            "rows": passes.rows.tolist(),
            "updates": passes.updates.tolist(),
            "begins": passes.begins.tolist(),
        },
        "rows": _rows(record, passes, views, largest_mismatches(record, shared["mismatch"])),
    }


def _quantity(key: str, scale: float | None) -> dict[str, Any]:
    """Return a quantity by which tokens are coloured, in JSON."""
    title, about, one_sign = QUANTITIES[key]
    return {"key": key, "title": title, "about": about, "one_sign": one_sign, "scale": scale}


def _rows(
    record: StepRecord, passes: Passes, views: Sequence[ViewTokens], mismatch: ndarray
) -> dict[str, Any]:
    """Return the columns of the list of responses."""
    header = record.header
    numbers = [row_numbers(record, passes, view) for view in views]
    turns = {
        row: [[author, tokens, _number(reward)] for author, tokens, reward in turns]
        for row, turns in header.turns.items()
    }
    return {
        "prompt_tokens": record.prompt_lengths.tolist(),
        "tokens": record.response_lengths.tolist(),
        "group": record.groups.tolist(),
        "problem": record.problems.tolist(),
        "sample": record.samples.tolist(),
        "policy_step": record.policy_steps.tolist(),
        "reward": _numbers(record.rewards),
        "task": [_word(task) for task in header.tasks],
        "finish": [_word(reason) for reason in header.finish_reasons],
        "verdict": [_word(verdict) for verdict in header.verdicts],
        "clipped": [_numbers(view.clipped) for view in numbers],
        "weight": [_numbers(view.weight) for view in numbers],
        "mismatch": _numbers(mismatch),
        "turns": turns,
    }


def _numbers(values: Iterable[float]) -> list[float | str]:
    return [_number(value) for value in values]


def _number(value: float) -> float | str:
    """Return a number with six digits. JSON has no infinity and no NaN: they become words."""
    value = float(f"{float(value):.6g}")
    return value if math.isfinite(value) else str(value)


def _word(text: object) -> str:
    return escape_line(str(text)[:MAX_WORD_CHARS])


def _inert_json(content: object) -> Markup:
    """Return JSON that can stand in a script element: it has no character of markup."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


# --------------------------------------------------------------------------------------------------
# the first lines
def _about(record: StepRecord, views: Sequence[View]) -> list[str]:
    """Return sentences about the step, its objective and its metrics."""
    header = record.header
    lines = []
    if header.label:
        lines.append(f"Run: {escape(header.label[: 5 * MAX_WORD_CHARS])}.")
    updates = len(record.updates)
    lines.append(
        f"Step {header.step}, recorded by {_word(header.source)}: {len(record):,} responses in "
        f"{int(record.groups[-1]) + 1:,} groups, {len(record.trained):,} response tokens, "
        f"{int(record.trained.sum()):,} of them in the loss; "
        f"{updates:,} update{'' if updates == 1 else 's'}."
    )
    if len(views) > 1:
        names = " and ".join(_word(view.name) for view in views)
        lines.append(f"The responses are shown under {names}.")
    lines.append(_objective_words(header.settings.get("objective")))
    metrics = [
        f"{words} {header.metrics[name]:.4g}"
        for name, words in KEY_METRICS.items()
        if header.metrics.get(name) is not None
    ]
    if metrics:
        lines.append(f"Metrics of the recorded step: {', '.join(metrics)}.")
    lines += [escape(note[: 5 * MAX_WORD_CHARS]) for note in header.notes[:MAX_NOTES]]
    if not header.complete:
        error = escape(header.error[: 5 * MAX_WORD_CHARS]) or "an error that was not recorded"
        lines.append(f"The record is not complete. The step ended with: {error}")
    return lines


def _objective_words(objective: object) -> str:
    """Return the recorded objective and its settings as a sentence."""
    if not isinstance(objective, dict):
        return "The record does not name its objective."
    settings = [
        f"{_word(key)} {_word(value)}"
        for key, value in list(objective.items())[:MAX_CLIP_SETTINGS]
        if key != "name" and value is not None and not isinstance(value, dict | list)
    ]
    words = f"Objective of the run: {_word(objective.get('name'))}"
    return f"{words}, with {', '.join(settings)}." if settings else f"{words}."
