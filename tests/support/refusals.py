"""Expect the refusal of a setting by its key and value, not by its wording."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import ANY

import pytest

from gspo.io.errors import SettingError


@contextmanager
def refuses(key: str, value: Any = ANY, problem: str = "") -> Iterator[None]:
    """Expect a SettingError of this key and value, with these words in its problem or remedy.

    Its text must be one line."""
    with pytest.raises(SettingError) as caught:
        yield
    error = caught.value
    assert error.key == key, str(error)
    assert error.value == value or repr(error.value) == repr(value), str(error)  # NaN
    assert problem in f"{error.problem}; {error.remedy}", str(error)
    assert "\n" not in str(error)
