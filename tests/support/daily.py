"""Which cases of a test run at every change, and which once a day (`make test-daily`).

    @pytest.mark.parametrize("case", daily_but(CASES, "gspo", "critic"))

A case is daily if it checks at another size or in another combination what a case that runs at
every change checks too.
"""

from collections.abc import Iterable

import pytest


def daily_but(cases: Iterable[str], *every_change: str) -> list:
    """Return the cases as parameters. All but the named ones have the marker `daily`."""
    names = list(cases)
    unknown = set(every_change) - set(names)
    assert not unknown, f"there are no cases {sorted(unknown)}"
    return [
        name if name in every_change else pytest.param(name, marks=pytest.mark.daily)
        for name in names
    ]
