"""Errors of settings and rows: one line with key, value, problem and remedy, in every process."""

import pickle

import pytest

from gspo.io.errors import RowError, SettingError, first_line


@pytest.mark.parametrize(
    "error, text",
    [
        (SettingError("a.b", 1, "is too small", remedy="use 2"), "a.b=1: is too small; use 2"),
        (SettingError("a.b", problem="is not given"), "a.b: is not given"),
        (SettingError("a.b", True, remedy="set a.b=false"), "a.b=true: set a.b=false"),
        (SettingError("a.b", None, "is empty"), "a.b=null: is empty"),
        (SettingError("a.b", "", "is empty"), "a.b='': is empty"),
        (SettingError("a.b", "x/y:z", "is wrong"), "a.b=x/y:z: is wrong"),
        (SettingError("a.b", "two\nlines", "is wrong"), r"a.b='two\nlines': is wrong"),
        (SettingError("a.b", ["c"], "is wrong"), "a.b=['c']: is wrong"),
        (RowError("x.jsonl, line 3", "c", "is empty"), "x.jsonl, line 3: the key 'c' is empty"),
        (RowError("x, line 1", "c", "is missing", "there is d"), "x, line 1: the key 'c' is missing; there is d"),
    ],
)  # fmt: skip
def test_the_text_is_one_line_here_and_in_another_process(error, text):
    assert str(error) == text == str(pickle.loads(pickle.dumps(error)))
    assert isinstance(error, ValueError)


def test_the_file_that_has_the_setting_comes_first():
    error = SettingError("a.b", 1, "is too small")
    error.where = "run/settings.yaml"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "run/settings.yaml: a.b=1: is too small"
    assert (again.key, again.value, again.problem, again.remedy) == ("a.b", 1, "is too small", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (NotImplementedError(), "NotImplementedError"),
        (ValueError("\n  \n"), "ValueError"),
        (ValueError("it failed:\n    ValueError: 24 is odd\n"), "it failed: ValueError: 24 is odd"),
        (ValueError("nothing follows:"), "nothing follows:"),
        (KeyError("foo"), "KeyError: 'foo'"),
    ],
)  # fmt: skip
def test_the_first_line_says_what_is_wrong(error, line):
    assert first_line(error) == line
