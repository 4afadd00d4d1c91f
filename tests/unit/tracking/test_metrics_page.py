"""docs/metrics.md is what the registry gives, and a run directory may define metrics of the user's
own.
"""

import json
from pathlib import Path

import pytest

from gspo.tracking.metrics import CUSTOM, FAMILIES, METRICS, Metric, custom_metrics, lookup, page

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_what_the_registry_gives():
    hint = "write it anew: python -m gspo.tracking.metrics > docs/metrics.md"
    assert PAGE.read_text(encoding="utf-8") == page(), hint


def test_every_metric_is_on_the_page_once():
    assert {metric.name.partition("/")[0] for metric in METRICS} == set(FAMILIES)
    for metric in METRICS:
        assert page().count(f"\n| `{metric.name}` |") == 1, metric.name


def test_a_run_directory_defines_the_users_own_metrics(tmp_path):
    assert custom_metrics(tmp_path) == {} and lookup("custom/answers").name == "custom/*"
    entries = {
        "custom/answers": {"unit": "share of responses", "meaning": "responses with an answer"},
        "custom/long": {"unit": "u" * 10_000, "meaning": "m" * 10_000},
        "reward/mean": {"unit": "1", "meaning": "not the registry's"},
        "custom/number": {"unit": 1, "meaning": "a unit that is no text"},
        "custom/text": "no mapping",
    }
    (tmp_path / CUSTOM).write_text(json.dumps(entries))
    found = custom_metrics(tmp_path)
    assert found.keys() == {"custom/answers", "custom/long"}
    assert found["custom/answers"] == Metric(
        "custom/answers", "share of responses", "responses with an answer"
    )
    assert len(found["custom/long"].unit + found["custom/long"].meaning) < 2000
    (tmp_path / CUSTOM).write_text('{"custom/answers": ')
    with pytest.raises(ValueError, match=f"{CUSTOM} is damaged"):
        custom_metrics(tmp_path)
