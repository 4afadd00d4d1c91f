"""Expect the refusal of a setting, by its key and value instead of its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gspo.io.errors import NOT_GIVEN, SettingError


@contextmanager
def refuses(key: str, value: Any = NOT_GIVEN, problem: str = "") -> Iterator[None]:
    """Expect a SettingError of this key, and of this value and with these words in its reasons.

    Without a value any value will do."""
    with pytest.raises(SettingError) as caught:
        yield
    error = caught.value
    assert error.key == key, str(error)
    assert value is NOT_GIVEN or error.value == value, str(error)
    assert problem in f"{error.problem}; {error.remedy}", str(error)
