"""Compares two replays of a step: which responses carry the gradients, and how alike these are.

A gradient is the derivative of the loss by the log-probs of all tokens in all updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from gspo.data.step_record import ACTIVE, StepRecord
from gspo.train.replay import ReplayedStep

# Sums in another order differ by this much at most, relative to the number or absolutely.
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-6
SMALL_METRIC = 1e-3  # the difference of a smaller metric is taken relative to this


@dataclass
class ResponseWeights:
    """How a replay treats each of the B responses, over all updates."""

    share: ndarray  # [B], its share of sum |gradient|
    clipped: ndarray  # [B], the share of its trained tokens whose gradient the clip removed
    # [B], the mean log-ratio of its trained tokens, in the last update that contained it
    log_ratio: ndarray


def response_weights(record: StepRecord, replayed: ReplayedStep) -> ResponseWeights:
    """Sum the gradients and clips of each response over all updates."""
    rows = len(record)
    gradient_sums = np.zeros(rows)
    clipped_counts = np.zeros(rows)
    token_counts = np.zeros(rows)
    log_ratios = np.zeros(rows)
    for update in replayed.updates:
        end = 0
        for row in update.rows.tolist():
            begin = end
            end += int(record.response_lengths[row])
            trained = replayed.trained[record.tokens_of(row)]
            tokens = int(trained.sum())
            gradient_sums[row] += np.abs(update.gradient[begin:end]).sum()
            if tokens:
                is_clipped = (update.clipped[begin:end] & ACTIVE) > 0
                clipped_counts[row] += is_clipped[trained].sum()
                token_counts[row] += tokens
                log_ratios[row] = update.log_ratio[begin:end][trained].mean()
    total = gradient_sums.sum()
    return ResponseWeights(
        share=gradient_sums / total if total else gradient_sums,
        clipped=clipped_counts / np.maximum(token_counts, 1),
        log_ratio=log_ratios,
    )


def effective_responses(share: ndarray) -> float:
    """Compute how many responses of equal shares would carry the gradient: 1 / sum share^2.

    It is 0 without a gradient."""
    square_sum = float(np.square(share).sum())
    return 1 / square_sum if square_sum else 0.0


def gradient_norm(replayed: ReplayedStep) -> float:
    """Compute the norm of the gradient by the log-probs, over all updates."""
    squares = [float(np.square(update.gradient.astype(float)).sum()) for update in replayed.updates]
    return float(np.sqrt(sum(squares)))


def cosines(a: ReplayedStep, b: ReplayedStep) -> list[float]:
    """Compute the cosine between two gradients: over all updates, then of each update.

    It is NaN if a gradient is 0."""
    pairs = [
        (update_a.gradient.astype(float), update_b.gradient.astype(float))
        for update_a, update_b in zip(a.updates, b.updates, strict=True)
    ]
    if not pairs:
        return [float("nan")]
    whole = (np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]))
    return [cosine(x, y) for x, y in [whole, *pairs]]


def cosine(x: ndarray, y: ndarray) -> float:
    """Compute the cosine of the angle between two vectors, NaN if one is 0."""
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norms if norms else float("nan")


@dataclass
class Agreement:
    """How a replay agrees with the metrics that the run has written."""

    compared: int  # the number of metrics that both have
    # the metrics beyond the tolerance, as (name, the replay's, the run's)
    differing: list[tuple[str, float, float]]
    largest: float  # the largest relative difference
    largest_name: str


def without_balance(
    row: Mapping[str, float | None], coefficient: float, record: StepRecord
) -> Mapping[str, float | None]:
    """Return a step's row with a loss that lacks the balancing loss of routers, as a replay's does.

    `coefficient` is trainer.router_aux_loss_coef. `routing/balance` is the mean over the updates
    with tokens in the loss, and `optim/loss` the mean over all updates."""
    loss = row.get("optim/loss")
    balance = row.get("routing/balance")
    if not coefficient or loss is None or balance is None:
        return row
    responses = range(len(record.rewards))
    has_tokens_B = np.array([record.trained[record.tokens_of(i)].any() for i in responses])
    with_tokens = [has_tokens_B[update.rows].any() for update in record.updates]
    share = float(np.mean(with_tokens)) if with_tokens else 1.0
    return {**row, "optim/loss": loss - coefficient * balance * share}


def agreement(replayed: Mapping[str, float], row: Mapping[str, float | None]) -> Agreement:
    """Compare the metrics of a replay with the step's row in metrics.jsonl."""
    differing = []
    largest = 0.0
    largest_name = ""
    compared = 0
    for name, value in sorted(replayed.items()):
        recorded = row.get(name)
        if recorded is None:
            continue
        compared += 1
        difference = abs(value - recorded)
        relative = difference / max(abs(recorded), SMALL_METRIC)
        if relative > largest:
            largest = relative
            largest_name = name
        if not difference <= ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(recorded):
            differing.append((name, value, recorded))
    return Agreement(compared, differing, largest, largest_name)
