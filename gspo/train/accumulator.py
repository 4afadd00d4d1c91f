"""Collects the sums and counts of a training step and turns them into metrics at its end.

Shape suffixes: L MoE layers, E experts.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from gspo.data.batch import to_cpu
from gspo.distributed.ranks import Ranks

Number = Tensor | float
Rows = list[tuple[Number, ...]]
Sums = dict[str, list[float]]
T = TypeVar("T")


@dataclass
class StepTotals:
    """The numbers of a step, over all ranks, by the names of their metrics."""

    sums: Sums  # total, count
    moments: Sums  # n, sum w, sum w^2
    extremes: dict[str, float]
    loads_LE: Tensor | None


class MetricAccumulator:
    """Accumulates means, counts, extremes and seconds over a training step.

    Numbers on a GPU stay there until `result` is called. An earlier read would make the CPU wait
    until the GPU has done all its work.
    """

    def __init__(self):
        # (total, count) of each call of `mean`
        self._sums: dict[str, Rows] = defaultdict(list)
        # (n, sum w, sum w^2) of each call of `ess`
        self._moments: dict[str, Rows] = defaultdict(list)
        self._extremes: dict[str, list[Number]] = defaultdict(list)
        self._signs: dict[str, int] = {}  # of extremes: 1 for the largest, -1 for the smallest
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._loads_LE: Tensor | None = None

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Add a sum over `count` items to the metric that is the mean over all items."""
        self._sums[name].append((_detached(total), _detached(count)))

    def mean_of(self, name: str, values: Tensor) -> None:
        """Add all elements of a tensor to the metric that is their mean."""
        self.mean(name, values.sum(), values.numel())

    def count(self, name: str, number: float) -> None:
        """Add a number to the metric that is the sum over the step."""
        self._counts[name] += number

    def ess(self, name: str, weights: Tensor) -> None:
        """Add importance weights to the metric that is their effective sample size.

        It is a share of the number n of weights: (sum w)^2 / (n sum w^2)
        """
        weights = weights.double()
        total = _detached(weights.sum())
        square_total = _detached(weights.square().sum())
        self._moments[name].append((weights.numel(), total, square_total))

    def largest(self, name: str, value: Number) -> None:
        """Add a value to the metric that is the largest of the step."""
        self._extremes[name].append(_detached(value))
        self._signs[name] = 1

    def smallest(self, name: str, value: Number) -> None:
        """Add a value to the metric that is the smallest of the step."""
        self._extremes[name].append(_detached(value))
        self._signs[name] = -1

    def expert_loads(self, loads_LE: Tensor) -> None:
        """Add the numbers of choices of each expert to the metrics of the experts' loads."""
        self._loads_LE = loads_LE if self._loads_LE is None else self._loads_LE + loads_LE

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
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

        With `ranks`, means, effective sample sizes, extremes and loads are over all ranks. A number
        that every rank has measured alike stays the same. Counts are alike on all ranks, and
        seconds are this rank's.
        """
        totals = self._over_ranks(ranks or Ranks())
        result: dict[str, float] = {}
        for name, (total, count) in totals.sums.items():
            if count:
                result[name] = total / count
        for name, (n, weight_sum, square_sum) in totals.moments.items():
            if n and square_sum:
                result[name] = weight_sum * weight_sum / (n * square_sum)
        result |= totals.extremes
        result |= self._seconds
        result |= self._counts
        loads_LE = totals.loads_LE
        if loads_LE is not None and loads_LE.sum() > 0:
            result["routing/load_entropy"] = load_entropy(loads_LE)
            result["routing/load_max"] = load_max(loads_LE)
            result["routing/unused_experts"] = float((loads_LE == 0).double().mean())
        return result

    def _read(self) -> None:
        """Turn all numbers on a GPU into floats, and copy the loads to the CPU, with one wait."""
        row_lists = [*self._sums.values(), *self._moments.values()]
        numbers = [number for rows in row_lists for row in rows for number in row]
        numbers += [number for values in self._extremes.values() for number in values]
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if not tensors:
            return
        stacked = torch.stack([tensor.double() for tensor in tensors])
        if self._loads_LE is None:
            (stacked,) = to_cpu(stacked)
        else:
            stacked, self._loads_LE = to_cpu(stacked, self._loads_LE)
        floats = iter(stacked.tolist())

        def read(number: Number) -> float:
            return next(floats) if isinstance(number, Tensor) else number

        for rows in row_lists:
            rows[:] = [tuple(read(number) for number in row) for row in rows]
        for values in self._extremes.values():
            values[:] = [read(number) for number in values]

    def _over_ranks(self, ranks: Ranks) -> StepTotals:
        """Return the numbers of all ranks together."""
        self._read()
        signed = {
            name: [self._signs[name] * value for value in values]
            for name, values in self._extremes.items()
        }
        local = (
            _sum_by_name(self._sums),
            _sum_by_name(self._moments),
            signed,
            self._signs,
            self._loads_LE,
        )
        sums, moments, signed_extremes, signs, loads = zip(*ranks.all_gather(local), strict=True)
        sign_of = {name: sign for of_rank in signs for name, sign in of_rank.items()}
        extremes: dict[str, float] = {}
        for name, values in _by_name(signed_extremes).items():
            extremes[name] = sign_of[name] * max(chain.from_iterable(values))
        present = [loads_LE for loads_LE in loads if loads_LE is not None]
        return StepTotals(
            sums=_sum_by_name(_by_name(sums)),
            moments=_sum_by_name(_by_name(moments)),
            extremes=extremes,
            loads_LE=torch.stack(present).sum(0) if present else None,
        )


def _detached(number: Number) -> Number:
    """Return a float, or a tensor without gradient if the number is on a GPU."""
    if isinstance(number, Tensor) and number.device.type != "cpu":
        return number.detach()
    return float(number)


def _by_name(parts: Iterable[dict[str, T]]) -> dict[str, list[T]]:
    """Collect the values of several dictionaries by their keys."""
    collected: dict[str, list[T]] = {}
    for part in parts:
        for name, value in part.items():
            collected.setdefault(name, []).append(value)
    return collected


def _sum_by_name(rows_by_name: Mapping[str, Sequence[Sequence[Number]]]) -> Sums:
    """Return the sum of each column of the rows of each name."""
    sums: Sums = {}
    for name, rows in rows_by_name.items():
        columns = zip(*rows, strict=True)
        sums[name] = [sum(map(float, column)) for column in columns]
    return sums


def load_entropy(loads_LE: Tensor) -> float:
    """Compute the entropy of the expert loads divided by log E, as the mean over layers.

    1 means that all experts are used equally, 0 that a single expert is used.
    """
    experts = loads_LE.shape[-1]
    share_LE = loads_LE.double() / loads_LE.sum(-1, keepdim=True)
    entropy_L = torch.special.entr(share_LE).sum(-1)
    return float((entropy_L / math.log(experts)).mean())


def load_max(loads_LE: Tensor) -> float:
    """Compute the largest load of an expert divided by the mean load, as the mean over layers.

    1 means that all experts are used equally, E / K that every token goes to the same experts.
    """
    largest_L = loads_LE.max(-1).values
    mean_L = loads_LE.double().mean(-1)
    return float((largest_L / mean_L).mean())
