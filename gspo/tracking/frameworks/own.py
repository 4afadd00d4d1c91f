"""The table of a trainer of your own: which of its metrics are ours, as foreign_run.yaml says."""

from collections.abc import Mapping

from gspo.tracking.frameworks.table import Axis, Table, is_registered, same

NAME = "own"
STEP_KEYS = ("step", "global_step", "_step")


def own_table(names: Mapping[object, object], step: str = "", count: str = "batches") -> Table:
    """Return the table of a trainer whose metrics `names` maps to ours.

    `step` is the key of a record's step, and `count` what it counts: batches or updates. Every name
    that is not in `names` stays what it is, behind "own/". Raises ValueError, with the key and the
    value, for a name that we do not have and for a metric of ours that is given twice."""
    entries = []
    sources: dict[str, str] = {}
    for theirs, ours in names.items():
        if not isinstance(theirs, str) or not isinstance(ours, str):
            raise ValueError(f"names: {theirs}: {ours} must be two names")
        if "*" in theirs:
            raise ValueError(f"names: {theirs[:80]}: a star is no pattern here: give each name")
        if not is_registered(ours) or "*" in ours or ours == "step":
            raise ValueError(
                f"names: {theirs[:80]}: {ours[:80]} is none of our metrics (docs/metrics.md has them)"
            )
        if ours in sources:
            raise ValueError(f"names: {theirs[:80]} and {sources[ours][:80]} are both {ours}")
        sources[ours] = theirs
        entries.append(same(theirs, ours))
    keys = (step,) if step else STEP_KEYS
    return Table(
        name=NAME,
        title="your trainer",
        version="",
        entries=tuple(entries),
        axes=tuple(Axis(key, count) for key in keys),
        proofs=(),
        gradient_norm="optim/grad_norm" if "optim/grad_norm" in sources else "",
    )
