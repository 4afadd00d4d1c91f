"""Collects the sums and counts of a training step and turns them into metrics at its end.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gspo.data.batch import to_cpu
from gspo.distributed.ranks import Ranks

Number = Tensor | float


class MetricAccumulator:
    """Accumulates means, counts, extremes and seconds over a training step.

    Numbers on a GPU stay there until `result` is called: reading one earlier would make the CPU
    wait until the GPU has done all the work that it was given.
    """

    def __init__(self):
        self._sums: dict[str, list[tuple[Number, Number]]] = defaultdict(list)
        self._moments: dict[str, list[tuple[Number, ...]]] = defaultdict(list)
        self._extremes: dict[str, list[Number]] = defaultdict(list)
        self._signs: dict[str, int] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self.expert_loads_LE: Tensor | None = None

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Add `total`, a sum over `count` items, to the metric that is the mean over all items of
        the step.
        """
        self._sums[name].append((_kept(total), _kept(count)))

    def count(self, name: str, number: float) -> None:
        """Add a number to the metric that is the sum over the step."""
        self._counts[name] += number

    def ess(self, name: str, weights: Tensor) -> None:
        """Add importance weights to the metric that is their effective sample size, as a share of
        their number n.

        (sum w)^2 / (n sum w^2)
        """
        weights = weights.double()
        self._moments[name].append(
            (weights.numel(), _kept(weights.sum()), _kept(weights.square().sum()))
        )

    def largest(self, name: str, value: Number) -> None:
        """Add a value to the metric that is the largest of the step."""
        self._extremes[name].append(_kept(value))
        self._signs[name] = 1

    def smallest(self, name: str, value: Number) -> None:
        """Add a value to the metric that is the smallest of the step."""
        self._extremes[name].append(_kept(value))
        self._signs[name] = -1

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to a metric.

        On a GPU this is the time for handing over the work, unless something in the block waits for
        the result.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def result(self, ranks: Ranks | None = None) -> dict[str, float]:
        """Return all metrics by name. A mean over no items is left out rather than reported as 0.

        With `ranks` means, effective sample sizes, extremes and loads are those of all ranks
        together; what every rank has measured alike stays what it is. Counts are alike on all
        ranks, and seconds each rank's own.
        """
        sums, moments, extremes, loads = self._together(ranks or Ranks())
        means = {name: total / count for name, (total, count) in sums.items() if count}
        shares = {name: s * s / (n * ss) for name, (n, s, ss) in moments.items() if n and ss}
        result = means | shares | extremes | self._seconds | self._counts
        if loads is not None and loads.sum() > 0:
            result["routing/load_entropy"] = load_entropy(loads)
            result["routing/load_max"] = load_max(loads)
            result["routing/unused_experts"] = float((loads == 0).double().mean())
        return result

    def _read(self) -> None:
        """Turn all numbers that lie on a GPU into floats, and copy the loads to the CPU, with one
        wait for all.
        """
        rows = [*self._sums.values(), *self._moments.values()]
        kept = [value for several in rows for row in several for value in row]
        kept += [value for several in self._extremes.values() for value in several]
        tensors = [value for value in kept if isinstance(value, Tensor)]
        if not tensors:
            return
        stacked = torch.stack([value.double() for value in tensors])
        if self.expert_loads_LE is None:
            (stacked,) = to_cpu(stacked)
        else:
            stacked, self.expert_loads_LE = to_cpu(stacked, self.expert_loads_LE)
        read = iter(stacked.tolist())

        def number(value: Number) -> float:
            return next(read) if isinstance(value, Tensor) else value

        for several in rows:
            several[:] = [tuple(number(value) for value in row) for row in several]
        for several in self._extremes.values():
            several[:] = [number(value) for value in several]

    def _together(self, ranks: Ranks) -> tuple[dict, dict, dict[str, float], Tensor | None]:
        """Return the column sums of means and of moments, the extremes, and the loads, of all
        ranks.
        """
        self._read()
        own = (
            {name: _column_sums(rows) for name, rows in self._sums.items()},
            {name: _column_sums(rows) for name, rows in self._moments.items()},
            {name: (self._signs[name], values) for name, values in self._extremes.items()},
            self.expert_loads_LE,
        )
        sums, moments, extremes, loads = zip(*ranks.all_gather(own), strict=True)
        found = [load for load in loads if load is not None]
        return (
            {name: _column_sums(rows) for name, rows in _by_name(sums).items()},
            {name: _column_sums(rows) for name, rows in _by_name(moments).items()},
            {
                name: (sign := parts[0][0])
                * max(sign * value for _, values in parts for value in values)
                for name, parts in _by_name(extremes).items()
            },
            torch.stack(found).sum(0) if found else None,
        )


def _kept(value: Number) -> Number:
    """Convert a number to what is kept until the end of the step: a float, or a tensor if it lies
    on a GPU.
    """
    return (
        value.detach() if isinstance(value, Tensor) and value.device.type != "cpu" else float(value)
    )


def _by_name(parts: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Collect the values of several dictionaries by their keys."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return found


def _column_sums(rows: Sequence[tuple[Number, ...]]) -> list[float]:
    return [sum(map(float, column)) for column in zip(*rows, strict=True)]


def load_entropy(loads_LE: Tensor) -> float:
    """Compute the entropy of the expert loads divided by log E, as the mean over layers.

    1 means that all experts are used equally, 0 that a single one is used.
    """
    share_LE = loads_LE.double() / loads_LE.sum(-1, keepdim=True)
    return float((torch.special.entr(share_LE).sum(-1) / math.log(loads_LE.shape[-1])).mean())


def load_max(loads_LE: Tensor) -> float:
    """Compute the largest load of an expert divided by the mean load, as the mean over layers.

    1 means that all experts are used equally, E / K that every token goes to the same ones.
    """
    return float((loads_LE.max(-1).values / loads_LE.double().mean(-1)).mean())
