"""Collects the sums and counts of a training step and turns them into metrics at its end.

Shape suffixes: L MoE layers, E experts.
"""

import math
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gspo.data.batch import to_cpu
from gspo.distributed.ranks import Ranks

Number = Tensor | float
Rows = list[tuple[Number, ...]]
T = TypeVar("T")


class MetricAccumulator:
    """Accumulates means, counts, extremes and seconds over a training step.

    Numbers on a GPU stay there until `result` is called. An earlier read would make the CPU wait
    until the GPU has done all its work.
    """

    def __init__(self):
        # Each call appends a tuple to the list of its metric.
        # `mean`: (total, count)
        self._sums: dict[str, Rows] = defaultdict(list)
        # `ess`: (n, sum w, sum w^2)
        self._moments: dict[str, Rows] = defaultdict(list)
        # `largest` and `smallest`: (value,)
        self._extremes: dict[str, Rows] = defaultdict(list)
        # `group_ess`: (groups, weights)
        self._grouped: dict[str, list[tuple[Tensor, ...]]] = defaultdict(list)
        # `row_weights`: (groups, token counts, sums, sums of squares)
        self._row_weights: dict[str, list[tuple[Tensor, ...]]] = defaultdict(list)
        self._smallest: set[str] = set()  # the names of `smallest`
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._loads_LE: Tensor | None = None

    def mean(self, name: str, total: Number, count: Number = 1) -> None:
        """Add a sum over `count` items to the metric that is the mean over all items."""
        row = (_detached(total), _detached(count))
        self._sums[name].append(row)

    def mean_of(self, name: str, values: Tensor) -> None:
        """Add all elements of a tensor to the metric that is their mean."""
        self.mean(name, values.sum(), values.numel())

    def token_mean(self, name: str, x_BT: Tensor, mask_BT: Tensor, tokens: Tensor) -> None:
        """Add the entries under a mask to the metric that is their mean.

        `tokens` is `mask_BT.sum()`, which callers compute once for several metrics.
        """
        self.mean(name, torch.where(mask_BT, x_BT, 0).sum(), tokens)

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
        row = (weights.numel(), total, square_total)
        self._moments[name].append(row)

    def group_ess(self, name: str, groups: Tensor, weights: Tensor) -> None:
        """Add weights to the metric that is the effective sample size of the groups' mean weights.

        `groups` has the number of each weight's group. A group may be added in several parts.
        """
        self._grouped[name].append((groups.detach(), weights.detach()))

    def row_weights(
        self, family: str, suffix: str, groups_B: Tensor, weight_BT: Tensor, mask_BT: Tensor
    ) -> None:
        """Add weights to the effective sample sizes of tokens, responses and groups.

        The metrics are FAMILY/ess_token, ess_sequence and ess_group with the suffix. The weight of
        a response is the mean over its tokens, and that of a group the mean over its responses. A
        bound makes weights alike and raises the size. Weights of 0 lower it.
        """
        weight_BT = torch.where(mask_BT, weight_BT.detach(), 0.0)
        squares_B = torch.linalg.vecdot(weight_BT, weight_BT)
        row = (groups_B, mask_BT.sum(-1), weight_BT.sum(-1), squares_B)
        self._row_weights[f"{family}/ess_*{suffix}"].append(row)

    def largest(self, name: str, value: Number) -> None:
        """Add a value to the metric that is the largest of the step."""
        self._extremes[name].append((_detached(value),))

    def smallest(self, name: str, value: Number) -> None:
        """Add a value to the metric that is the smallest of the step."""
        self._extremes[name].append((_detached(value),))
        self._smallest.add(name)

    def expert_loads(self, loads_LE: Tensor) -> None:
        """Add the numbers of choices of each expert to the metrics of the experts' loads."""
        if self._loads_LE is not None:
            loads_LE = self._loads_LE + loads_LE
        self._loads_LE = loads_LE

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
        ranks = ranks or Ranks()
        self._read()
        self._add_row_weights()
        local_sums = {name: _column_sums(rows) for name, rows in self._sums.items()}
        local_moments = {name: _column_sums(rows) for name, rows in self._moments.items()}
        local_groups = {name: _group_sums(parts) for name, parts in self._grouped.items()}
        local = (
            local_sums,
            local_moments,
            local_groups,
            self._extremes,
            self._smallest,
            self._loads_LE,
        )
        of_ranks = ranks.all_gather(local)
        sums, moments, grouped, extremes, smallest, loads = zip(*of_ranks, strict=True)
        result: dict[str, float] = {}
        for name, rows in _by_name(sums).items():
            total, count = _column_sums(rows)
            if count:
                result[name] = total / count
        for name, rows in _by_name(moments).items():
            n, weight_sum, square_sum = _column_sums(rows)
            if n and square_sum:
                result[name] = weight_sum * weight_sum / (n * square_sum)
        for name, parts in _by_name(grouped).items():
            size = _effective_share(parts)
            if size is not None:
                result[name] = size
        names_of_smallest = set().union(*smallest)
        for name, rows in _by_name(extremes).items():
            values = list(chain.from_iterable(chain.from_iterable(rows)))
            # NaN is the extreme, wherever it stands
            extreme = np.min if name in names_of_smallest else np.max
            result[name] = float(extreme(values))
        result |= self._seconds
        result |= self._counts
        present = [loads_LE for loads_LE in loads if loads_LE is not None]
        if present:
            total_LE = torch.stack(present).sum(0)
            result |= load_metrics(total_LE)
        return result

    def _read(self) -> None:
        """Turn all numbers on a GPU into floats, and copy all else to the CPU, with one wait."""
        row_lists: list[Rows] = []
        for rows_by_name in (self._sums, self._moments, self._extremes):
            row_lists += rows_by_name.values()
        rows = chain.from_iterable(row_lists)
        numbers = chain.from_iterable(rows)
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if not tensors:
            return
        stacked = torch.stack([tensor.double() for tensor in tensors])
        copied = [stacked]
        if self._loads_LE is not None:
            copied.append(self._loads_LE)
        calls = self._calls_on_gpu()
        vectors = [vector for parts, i in calls for vector in parts[i]]
        if vectors:
            copied.append(torch.cat([vector.double() for vector in vectors]))
        stacked, *others = to_cpu(*copied)
        if vectors:
            parts_of_copy = iter(others.pop().split([len(vector) for vector in vectors]))
            for parts, i in calls:
                parts[i] = tuple(next(parts_of_copy) for _ in parts[i])
        if others:
            self._loads_LE = others.pop()
        floats = iter(stacked.tolist())

        def read(number: Number) -> float:
            return next(floats) if isinstance(number, Tensor) else number

        for row_list in row_lists:
            row_list[:] = [tuple(map(read, row)) for row in row_list]

    def _add_row_weights(self) -> None:
        """Add the rows of `row_weights`, which are on the CPU, to the effective sample sizes."""
        for name, calls in self._row_weights.items():
            for groups_B, counts_B, sums_B, squares_B in calls:
                has_tokens_B = counts_B > 0
                total = float(sums_B.double().sum())
                square_total = float(squares_B.double().sum())
                moments = (int(counts_B.sum()), total, square_total)
                self._moments[name.replace("*", "token")].append(moments)
                means_N = (sums_B.double() / counts_B)[has_tokens_B]
                self.ess(name.replace("*", "sequence"), means_N)
                self.group_ess(name.replace("*", "group"), groups_B[has_tokens_B], means_N)
        self._row_weights.clear()

    def _calls_on_gpu(self) -> list[tuple[list[tuple[Tensor, ...]], int]]:
        """Return the list and the index in it of each call that left vectors on a GPU.

        The vectors of a call have the same length."""
        calls = []
        for parts in (*self._grouped.values(), *self._row_weights.values()):
            for i, vectors in enumerate(parts):
                if vectors[0].device.type != "cpu":
                    calls.append((parts, i))
        return calls


def _detached(number: Number) -> Number:
    """Return a float, or a tensor without gradient if the number is on a GPU."""
    if isinstance(number, Tensor) and number.device.type != "cpu":
        return number.detach()
    return float(number)


def _by_name(parts: Iterable[dict[str, T]]) -> dict[str, list[T]]:
    """Collect the values of all ranks' dictionaries by their keys."""
    collected: dict[str, list[T]] = {}
    for part in parts:
        for name, value in part.items():
            collected.setdefault(name, []).append(value)
    return collected


def _column_sums(rows: Sequence[tuple[Number, ...]]) -> tuple[float, ...]:
    """Return the sum of each column."""
    columns = zip(*rows, strict=True)
    return tuple(sum(map(float, column)) for column in columns)


def _group_sums(parts: list[tuple[Tensor, ...]]) -> dict[int, tuple[float, int]]:
    """Return the sum and the number of the weights of each group."""
    all_groups = torch.cat([groups for groups, _ in parts])
    all_weights = torch.cat([weights.double() for _, weights in parts])
    distinct, index, counts = all_groups.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(distinct), dtype=torch.float64).index_add(0, index, all_weights)
    numbers = zip(sums.tolist(), counts.tolist(), strict=True)
    return dict(zip(distinct.tolist(), numbers, strict=True))


def _effective_share(parts: list[dict[int, tuple[float, int]]]) -> float | None:
    """Return the effective sample size of the groups' means as a share, None if all are 0."""
    totals: dict[int, tuple[float, int]] = {}
    for part in parts:
        for group, (weight, count) in part.items():
            earlier_weight, earlier_count = totals.get(group, (0.0, 0))
            totals[group] = (earlier_weight + weight, earlier_count + count)
    means = [weight / count for weight, count in totals.values()]
    squares = sum(mean * mean for mean in means)
    return sum(means) ** 2 / (len(means) * squares) if squares else None


def load_metrics(loads_LE: Tensor) -> dict[str, float]:
    """Return the metrics of the expert loads, none of them if no expert was chosen.

    load_entropy     the entropy of the loads divided by log E, as the mean over layers: 1 if all
                     experts are used equally, 0 if a single expert is used
    load_max         the largest load divided by the mean load, as the mean over layers: 1 if all
                     experts are used equally, E / K if every token goes to the same experts
    unused_experts   the share of experts without a token
    """
    if loads_LE.sum() <= 0:
        return {}
    counts_LE = loads_LE.double()
    share_LE = counts_LE / loads_LE.sum(-1, keepdim=True)
    entropy_L = torch.special.entr(share_LE).sum(-1)
    relative_entropy_L = entropy_L / math.log(loads_LE.shape[-1])
    relative_max_L = counts_LE.amax(-1) / counts_LE.mean(-1)
    unused_LE = (loads_LE == 0).double()
    return {
        "routing/load_entropy": relative_entropy_L.mean().item(),
        "routing/load_max": relative_max_L.mean().item(),
        "routing/unused_experts": unused_LE.mean().item(),
    }
