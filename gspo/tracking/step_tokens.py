"""Computes the numbers of a recorded step that pages show: of each token, and of each response.

A row that is in the mini-batches of several updates has a pass in each of them. The tokens of all
passes stand pass after pass, in the order of `record.updates` and of the rows of each update.

Dimensions: B responses, N response tokens, M all tokens, Q passes, P tokens of all passes, L MoE
layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from gspo.data.step_record import ACTIVE, BOUNDED, DUAL, OUTSIDE, StepRecord
from gspo.io.escaping import escape, escape_line

MAX_TOKEN_CHARS = 200  # of a token's text that is shown
MAX_NAME_CHARS = 100  # of a view's name
QUANTILE = 0.99  # the strongest colours stand for values from this quantile on
SHADES = 5  # colours on either side of zero
CHUNK_TOKENS = 4096  # tokens whose experts are compared at once
CLIP_WORDS = {
    ACTIVE: "clipped: no gradient",
    OUTSIDE: "outside the clip range",
    BOUNDED: "beyond the numerical bound of log-ratios",
    DUAL: "clipped by the dual clip",
}


@dataclass
class View:
    """The treatment of a step's tokens by an objective."""

    name: str
    advantages: ndarray  # over the N response tokens
    # The following have an array per update, over the n tokens of its rows. None: not known
    weights: list[ndarray] | None  # the factor of A grad log pi
    clipped: list[ndarray] | None  # uint8, a sum of ACTIVE, OUTSIDE, BOUNDED and DUAL
    gradients: list[ndarray] | None = None  # the derivative of the loss by the log-prob
    # bool over the N response tokens: it is in the loss. None: as in the run
    trained: ndarray | None = None


def recorded_view(record: StepRecord) -> View:
    """Return the view of the objective that trained the step.

    A record from another framework may have neither weights nor clips."""
    objective = record.header.settings.get("objective")
    name = objective.get("name") if isinstance(objective, dict) else None
    return View(
        name=str(name or "recorded objective"),
        advantages=record.advantages,
        weights=_complete([update.weight for update in record.updates]),
        clipped=_complete([update.clipped for update in record.updates]),
    )


def _complete(arrays: Sequence[ndarray | None]) -> list[ndarray] | None:
    """Return the arrays of all updates, None if an update has none."""
    known = [values for values in arrays if values is not None]
    return known if len(known) == len(arrays) else None


class Passes:
    """The passes of a step's rows through its updates."""

    def __init__(self, record: StepRecord):
        lengths = record.response_lengths.astype(np.int64)
        no_rows = np.zeros(0, np.int64)
        rows_of_updates = [update.rows.astype(np.int64) for update in record.updates]
        counts = [len(rows) for rows in rows_of_updates]
        self.rows = np.concatenate([no_rows, *rows_of_updates])  # [Q]
        self.updates = np.repeat(np.arange(1, len(counts) + 1), counts)  # [Q], from 1
        self.lengths = lengths[self.rows]  # [Q]
        self.begins = np.cumsum(self.lengths) - self.lengths  # [Q], among the P tokens
        # the position of each of the P tokens among the N response tokens
        first_tokens = (record.ends - lengths)[self.rows]
        token_count = int(self.lengths.sum())
        self.tokens = np.repeat(first_tokens - self.begins, self.lengths) + np.arange(token_count)
        self.rows_of_tokens = np.repeat(self.rows, self.lengths)  # [P]


def concatenate(arrays: Sequence[ndarray]) -> ndarray:
    """Return the arrays of all updates as a single array, empty without updates."""
    return np.concatenate(arrays) if len(arrays) else np.zeros(0, np.float32)


# --------------------------------------------------------------------------------------------------
# numbers of tokens: NaN if a token has no such number
def log_ratios(record: StepRecord, passes: Passes) -> ndarray:
    """Return log pi / pi_old of the tokens of all passes: float32 [P].

    It is 0 in the first update if the ratio is 1 there by definition."""
    logp = concatenate([update.logp for update in record.updates])
    with np.errstate(invalid="ignore"):  # infinite log-probs
        log_ratio = logp - record.old_logp[passes.tokens]
    if record.header.state.get("starts_at_old_policy") and not _engine_is_old(record):
        first = record.updates[0].logp.size if record.updates else 0
        log_ratio[:first] = 0.0
    return np.where(record.sampled[passes.tokens], log_ratio, np.float32(np.nan))


def changes_of_step(record: StepRecord, passes: Passes) -> ndarray | None:
    """Return the change of log-probs from the old policy to the policy after the last update.

    The result is float32 [P], or None if the record has no log-probs after the last update."""
    if record.after_logp is None:
        return None
    with np.errstate(invalid="ignore"):  # infinite log-probs
        change = (record.after_logp - record.old_logp)[passes.tokens]
    return np.where(record.sampled[passes.tokens], change, np.float32(np.nan))


def mismatches(record: StepRecord, passes: Passes) -> ndarray:
    """Return the trainer's log-probs minus the engine's at the start of the step: float32 [N].

    The trainer's log-probs are the old ones. If those came from the engine, the log-probs of the
    first update stand for them, and tokens that only later updates train on have NaN. If older
    weights sampled the responses, the first update cannot stand for them, and all are NaN."""
    state = record.header.state
    trainer_logp = record.old_logp
    if state.get("skips_old_pass") or _engine_is_old(record):
        trainer_logp = np.full(len(record.old_logp), np.nan, np.float32)
        if record.updates and state.get("starts_at_old_policy", True):
            first = record.updates[0].logp
            trainer_logp[passes.tokens[: len(first)]] = first
    with np.errstate(invalid="ignore"):  # infinite log-probs
        mismatch = trainer_logp - record.engine_logp
    return np.where(record.sampled, mismatch, np.float32(np.nan))


def _engine_is_old(record: StepRecord) -> bool:
    policy = record.header.settings.get("policy")
    return isinstance(policy, dict) and policy.get("old_logprobs") == "engine"


def entropies(record: StepRecord, passes: Passes) -> ndarray | None:
    """Return the entropy of the tokens of all passes: float32 [P], None if none was recorded."""
    if all(update.entropy is None for update in record.updates):
        return None
    parts = [
        np.full(len(update.logp), np.nan, np.float32) if update.entropy is None else update.entropy
        for update in record.updates
    ]
    return np.where(record.sampled[passes.tokens], concatenate(parts), np.float32(np.nan))


def changed_experts(record: StepRecord, passes: Passes) -> ndarray | None:
    """Return the share of layers in which the experts are not those of the old policy.

    The experts are compared at the position that predicts the token, which is the position before
    it. Layers without a record of the old experts do not count. The result is float32 [P], or None
    for a dense model."""
    old_MLK = record.old_experts
    if old_MLK is None or all(update.experts is None for update in record.updates):
        return None
    prompt_tokens = np.cumsum(record.prompt_lengths, dtype=np.int64)
    positions = np.arange(len(record.trained)) + np.repeat(prompt_tokens, record.response_lengths)
    predicting = positions[passes.tokens] - 1
    shares = np.full(len(predicting), np.nan, np.float32)
    begin = 0
    for update in record.updates:
        end = begin + len(update.logp)
        for chunk in range(begin, end, CHUNK_TOKENS):
            chunk_end = min(chunk + CHUNK_TOKENS, end)
            if update.experts is not None:
                experts = update.experts[chunk - begin : chunk_end - begin]
                old_experts = old_MLK[predicting[chunk:chunk_end]]
                shares[chunk:chunk_end] = _changed_share(experts, old_experts)
        begin = end
    return np.where(record.sampled[passes.tokens], shares, np.float32(np.nan))


def _changed_share(experts_nLK: ndarray, old_nLK: ndarray) -> ndarray:
    """Return the share of layers with other experts, in any order: float32 [n]."""
    is_known_nL = (old_nLK >= 0).all(-1)
    changed_nL = (experts_nLK != old_nLK).any(-1)
    # the experts of most layers are the same in the same order
    sorted_experts = np.sort(experts_nLK[changed_nL], axis=-1)
    sorted_old = np.sort(old_nLK[changed_nL], axis=-1)
    changed_nL[changed_nL] = (sorted_experts != sorted_old).any(-1)
    known = is_known_nL.sum(-1)
    changed = (changed_nL & is_known_nL).sum(-1)
    shares = np.full(len(known), np.nan, np.float32)
    np.divide(changed, known, out=shares, where=known > 0, casting="unsafe")
    return shares


class ViewTokens:
    """The numbers of a view, over the tokens of all passes. Tokens out of the loss have none."""

    def __init__(self, record: StepRecord, passes: Passes, view: View):
        self.in_loss = record.trained if view.trained is None else view.trained  # [N]
        trained = self.in_loss[passes.tokens]
        self.name = escape_line(view.name[:MAX_NAME_CHARS])
        nan = np.float32(np.nan)
        self.advantages = np.where(self.in_loss, view.advantages, nan)  # [N]
        self.weights = np.full(len(trained), nan)  # [P]
        if view.weights is not None:
            self.weights = np.where(trained, concatenate(view.weights), nan)
        self.knows_clips = view.clipped is not None
        self.clipped = np.zeros(len(trained), np.uint8)  # [P]
        if view.clipped is not None:
            clipped = concatenate(view.clipped).astype(np.uint8)
            self.clipped = np.where(trained, clipped, np.uint8(0))
        with np.errstate(invalid="ignore", over="ignore"):
            self.pulls = self.weights * self.advantages[passes.tokens]  # advantage x weight: [P]
        self.gradients: ndarray | None = None
        if view.gradients is not None:
            self.gradients = np.where(trained, concatenate(view.gradients), nan)


# --------------------------------------------------------------------------------------------------
# numbers of responses
@dataclass
class RowNumbers:
    """The numbers of each response under a view. Each array is float64 [B], NaN if not known."""

    clipped: ndarray  # the clipped share of its tokens in the loss, over all its passes
    weight: ndarray  # its share in the sum of |advantage x weight|, or of |gradient| if it is known


def row_numbers(record: StepRecord, passes: Passes, tokens: ViewTokens) -> RowNumbers:
    """Compute the numbers of each response. A response without tokens in the loss has zeros."""
    rows = len(record)
    trained = tokens.in_loss[passes.tokens]
    is_active = (tokens.clipped & ACTIVE) > 0
    trained_counts = np.bincount(passes.rows_of_tokens, trained, rows)
    clipped_counts = np.bincount(passes.rows_of_tokens, is_active, rows)
    pulls = np.abs(tokens.pulls if tokens.gradients is None else tokens.gradients)
    finite_pulls = np.where(np.isfinite(pulls), pulls, 0.0).astype(np.float64)
    sums = np.bincount(passes.rows_of_tokens, finite_pulls, rows)
    clipped = clipped_counts / np.maximum(trained_counts, 1)
    weight = sums / (sums.sum() or 1.0)
    if not tokens.knows_clips:
        clipped[:] = np.nan
    if np.isnan(pulls).all():
        weight[:] = np.nan
    return RowNumbers(clipped, weight)


def largest_mismatches(record: StepRecord, mismatch: ndarray) -> ndarray:
    """Return each response's largest |mismatch|: float32 [B], NaN if none is known."""
    lengths = record.response_lengths.astype(np.int64)
    return np.fmax.reduceat(np.abs(mismatch), record.ends - lengths)


# --------------------------------------------------------------------------------------------------
# colours and texts
def color_scale(arrays: Sequence[ndarray]) -> float:
    """Return the 99th percentile of the absolute values that are finite and not 0.

    It is 1 if all values are 0."""
    parts = []
    for values in arrays:
        sizes = np.abs(values)
        parts.append(sizes[np.isfinite(sizes) & (sizes > 0)])
    sizes = concatenate(parts)
    if not len(sizes):
        return 1.0
    return float(np.quantile(sizes, QUANTILE, method="higher"))


def shade(value: float, scale: float) -> int | None:
    """Return the number of a value's colour, from 0 (-scale or less) to 10 (scale or more).

    It is None if the value is NaN. 5 stands for values around zero."""
    if np.isnan(value):
        return None
    bounded = min(max(value / scale, -1.0), 1.0)
    return SHADES + round(bounded * SHADES)


def token_texts(record: StepRecord, token_ids: ndarray) -> list[str]:
    """Return the text of tokens as pages show it: without characters that act or deceive."""
    vocabulary = record.header.vocabulary
    texts = []
    for token in token_ids.tolist():
        text = vocabulary.get(str(token))
        if not text:
            texts.append(f"⟨{token}⟩")
        elif len(text) > MAX_TOKEN_CHARS:
            texts.append(escape(text[:MAX_TOKEN_CHARS]) + f"… ({len(text):,} characters)")
        else:
            texts.append(escape(text))
    return texts


def clip_words(bits: int) -> str:
    """Return the clip bits of a token in words."""
    words = [word for bit, word in CLIP_WORDS.items() if bits & bit]
    return ", ".join(words) or "not clipped"
