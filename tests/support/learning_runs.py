"""Settings of short runs that learn, and what it means that two of them have the same numbers but
for rounding.
"""

import pytest

from commands import SMALL

# Rewards differ by length; all do the same passes; with the usual eps of 1e-15 rounding alone would
# diverge.
LEARNING = (
    *SMALL,
    "policy.old_pass=always",
    "reward.overlong_cache=11",
    "optim.eps=1e-6",
    "on_existing=resume",
)
COPY = ("mismatch/", "routing/engine_")
ROUNDING = "ratio/floor_"  # such metrics measure rounding, which is what such runs may differ by


def near(rows: list[dict], others: list[dict]) -> None:
    """Rows of spread weights measure the engine's copy too, which other runs do not have."""
    for row, other in zip(rows, others, strict=True):
        apart = [name for name in row.keys() ^ other.keys() if not name.startswith(COPY)]
        assert not apart, apart
    assert sum(row.get("optim/grad_norm", 0) > 0 for row in rows) > 6, "they learn"
    for row, other in zip(rows, others, strict=True):
        for name in row.keys() & other.keys():
            if name.startswith(ROUNDING):
                continue
            assert other[name] == pytest.approx(row[name], rel=2e-3, abs=2e-4), (row["step"], name)
