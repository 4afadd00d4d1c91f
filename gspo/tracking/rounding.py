"""Says in words how much of a clip range rounding takes up, and how far engine and trainer are
apart.
"""

from __future__ import annotations

from gspo.tracking.collapse import is_finite

ROUNDING_SHARE = 0.1  # of the clip range: with more, the clipped share measures rounding too

# nats per token: an engine in bfloat16 is about 0.01 to 0.03 off, and one that computes something
# else by far more
LARGEST_MISMATCH = 0.1


def floor_in_words(share: float, outside: float) -> str:
    """Return how far rounding moves sequence ratios. `share` is its mean as a share of the clip
    range, `outside` the share of responses that it moves out of the range."""
    return (
        f"rounding alone moves the ratio of a response by {share:.0%} of its clip range and puts {outside:.1%} of the "
        "responses outside it, so clipped shares measure rounding (ratio/floor_of_range, ratio/floor_outside)"
    )


def floor_of_run(rows: list[dict]) -> str | None:
    """Return a sentence about the rounding in a run's rows where it takes up too much of the clip
    range, else None.
    """
    rows = [row for row in rows if is_finite(row.get("ratio/floor_of_range"))]
    if not rows:
        return None
    share = sum(row["ratio/floor_of_range"] for row in rows) / len(rows)
    if share <= ROUNDING_SHARE:
        return None
    words = floor_in_words(share, sum(row["ratio/floor_outside"] for row in rows) / len(rows))
    return f"Over the run, {words}. Use policy.head_dtype=float32 and policy.old_logprobs=step_start, or float32 layers."


def mismatch_in_words(off: float) -> str:
    """Return how far engine and trainer are apart. `off` is the mean difference of a token's
    log-probs, in nats.
    """
    return (
        f"the engine's log-probs differ from the trainer's by {off:.2g} nats per token (mismatch/logp_abs, at most "
        f"{LARGEST_MISMATCH} is usual): responses are sampled from another policy than the one that is trained"
    )


def mismatch_of_run(rows: list[dict]) -> str | None:
    """Return a sentence about the mismatch in a run's rows where it is too large, else None."""
    offs = [row["mismatch/logp_abs"] for row in rows if is_finite(row.get("mismatch/logp_abs"))]
    if not offs or sum(offs) / len(offs) <= LARGEST_MISMATCH:
        return None
    return f"Over the run, {mismatch_in_words(sum(offs) / len(offs))}."
