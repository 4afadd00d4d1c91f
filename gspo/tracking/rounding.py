"""Sentences about the rounding of sequence ratios, and about the gap between engine and trainer."""

from gspo.tracking.collapse import is_finite

ROUNDING_SHARE = 0.1  # of the clip range: above it, the clipped share measures rounding too

# Nats per token. An engine in bfloat16 is about 0.01 to 0.03 off. An engine that computes another
# function is off by far more.
LARGEST_MISMATCH = 0.1


def floor_in_words(share: float, outside: float) -> str:
    """Return a sentence about how far rounding moves sequence ratios.

    Rounding moves a ratio by `share` of the clip range on average, and moves the share `outside` of
    the responses out of the range."""
    return (
        f"rounding alone moves the ratio of a response by {share:.0%} of its clip range and puts "
        f"{outside:.1%} of the responses outside it, so clipped shares measure rounding "
        "(ratio/floor_of_range, ratio/floor_outside)"
    )


def floor_of_run(rows: list[dict]) -> str | None:
    """Return a sentence if rounding is too large for the clip range in a run's rows, else None."""
    rows = [
        row
        for row in rows
        if is_finite(row.get("ratio/floor_of_range")) and is_finite(row.get("ratio/floor_outside"))
    ]
    if not rows:
        return None
    share = sum(row["ratio/floor_of_range"] for row in rows) / len(rows)
    if share <= ROUNDING_SHARE:
        return None
    outside = sum(row["ratio/floor_outside"] for row in rows) / len(rows)
    return (
        f"Over the run, {floor_in_words(share, outside)}. Use policy.head_dtype=float32 and "
        "policy.old_logprobs=step_start, or float32 layers."
    )


def mismatch_in_words(difference: float) -> str:
    """Return a sentence about the mean difference of the log-probs, in nats per token."""
    return (
        f"the engine's log-probs differ from the trainer's by {difference:.2g} nats per token "
        f"(mismatch/logp_abs, at most {LARGEST_MISMATCH} is usual): responses are sampled from "
        "another policy than the one that is trained"
    )


def mismatch_of_run(rows: list[dict]) -> str | None:
    """Return a sentence if the mismatch in a run's rows is too large, else None."""
    values = [row["mismatch/logp_abs"] for row in rows if is_finite(row.get("mismatch/logp_abs"))]
    if not values:
        return None
    mean = sum(values) / len(values)
    return f"Over the run, {mismatch_in_words(mean)}." if mean > LARGEST_MISMATCH else None
