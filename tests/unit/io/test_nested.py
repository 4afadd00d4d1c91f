"""Nested dictionaries and lists: dotted keys, and a change of every value."""

import doctest
import json
import math

from gspo.io import nested
from gspo.io.nested import dotted, finite_or_none, mapped


def test_dotted_keys_reach_every_value_and_keep_what_is_empty():
    assert doctest.testmod(nested).attempted == 1
    content = {"a": {"b": {"c": 1}, "d": {}}, "e": [{"f": 2}]}
    assert dotted(content) == {"a.b.c": 1, "a.d": {}, "e": [{"f": 2}]}
    assert dotted({}) == {}


def test_every_value_is_changed_and_json_holds_the_result():
    content = {"a": (math.nan, 1), "b": [{"c": -math.inf, "d": "nan", "e": True}], "f": None}
    changed = mapped(content, finite_or_none)
    assert changed == {"a": [None, 1], "b": [{"c": None, "d": "nan", "e": True}], "f": None}
    assert json.loads(json.dumps(changed, allow_nan=False)) == changed
