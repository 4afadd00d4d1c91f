"""docs/metrics.md is what the registry gives, and every metric of the registry is on it."""

from pathlib import Path

from gspo.tracking.metrics import FAMILIES, METRICS, page

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_what_the_registry_gives():
    hint = "write it anew: python -m gspo.tracking.metrics > docs/metrics.md"
    assert PAGE.read_text(encoding="utf-8") == page(), hint


def test_every_metric_is_on_the_page_once():
    assert {metric.name.partition("/")[0] for metric in METRICS} == set(FAMILIES)
    for metric in METRICS:
        assert page().count(f"\n| `{metric.name}` |") == 1, metric.name
