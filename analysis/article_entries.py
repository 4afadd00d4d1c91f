"""The entries of the article's numbers: their texts, and each number's interval and p.

An entry of the JSON file has these fields:

    text        the number as the article prints it, with its interval if it has one
    mean        the number alone, as text
    p           the exact p as text, "" if there is none
    value       the number
    low, high   the ends of its interval, or null
    seeds       the number of seeds, 0 if it is no mean over seeds
"""

import math
from dataclasses import dataclass, field

from gspo.analysis.foresight import Value
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import Interval


def plain(value: float, form: str) -> str:
    """Return a number as the article prints it: a true minus, and no 0 before the point.

    >>> plain(-0.0125, "+.3f")
    '−.013'
    """
    text = f"{value:{form}}"
    sign = text[0] if text[0] in "+-" else ""
    digits = text.removeprefix(sign)
    if digits.startswith("0."):
        digits = digits[1:]
    return sign.replace("-", "−") + digits


def p_text(p: float) -> str:
    """Return a p with two digits, or with three decimals below .01."""
    if p >= 0.01:
        return plain(float(f"{p:.2g}"), ".2f" if p >= 0.1 and p < 1 else ".3g")
    return plain(p, ".3f") if p >= 0.0005 else plain(p, ".1g")


def percent(share: Interval, factor: float = 100.0) -> Interval:
    """Return an interval times 100, or times -100 for a decline that is printed as a change."""
    low, high = sorted((factor * share.low, factor * share.high))
    return Interval(factor * share.mean, low, high, share.seeds)


@dataclass
class Numbers:
    """The entries of the JSON file by name, and for the verdicts each number's interval and p."""

    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    judged: dict[str, tuple[Interval | Value, float]] = field(default_factory=dict)

    def add(
        self, name: str, interval: Interval | Value, form: str, p: float = math.nan, unit: str = ""
    ) -> None:
        """Add a number with its interval. Raises RunsError if the rows do not give it."""
        value = interval.value if isinstance(interval, Value) else interval.mean
        if math.isnan(value):
            raise RunsError(f"the article's number {name} is missing: the recorded rows lack it")
        mean = plain(value, form)
        text = mean + unit
        bounded = not math.isnan(interval.low)
        if bounded:
            text = f"{mean} [{plain(interval.low, form)}, {plain(interval.high, form)}]{unit}"
        self.judged[name] = (interval, p)
        self.entries[name] = {
            "text": text,
            "mean": mean + unit,
            "p": "" if math.isnan(p) else p_text(p),
            "value": value,
            "low": interval.low if bounded else None,
            "high": interval.high if bounded else None,
            "seeds": getattr(interval, "seeds", 0),
        }

    def difference(self, name: str, interval: Interval, form: str = "+.3f") -> None:
        """Add a paired difference with the exact p of no difference."""
        self.add(name, interval, form, interval.p())

    def value(self, name: str, value: float, form: str, unit: str = "") -> None:
        """Add a number without an interval."""
        self.add(name, Interval(float(value), seeds=0), form, unit=unit)

    def count(self, name: str, count: int) -> None:
        """Add a whole number."""
        self.value(name, count, ",.0f")
