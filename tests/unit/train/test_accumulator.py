"""The accumulator reads all numbers that lie on a GPU by one copy, and gives what it would give on
a CPU.
"""

import math

import pytest
import torch

from gspo.train import accumulator as accumulators
from gspo.train.accumulator import MetricAccumulator


def filled() -> MetricAccumulator:
    accumulator = MetricAccumulator()
    for total, count in ((1.5, 2), (torch.tensor(2.5), torch.tensor(2)), (torch.tensor(0.0), 0)):
        accumulator.mean("a", total, count)
    accumulator.mean("none", torch.tensor(0.0), torch.tensor(0))
    accumulator.ess("b", torch.tensor([1.0, 3.0]))
    accumulator.ess("b", torch.tensor([2.0]))
    for value in (torch.tensor(-2.0), 4.0, torch.tensor(1)):
        accumulator.largest("c", value)
        accumulator.smallest("d", value)
    accumulator.expert_loads(torch.tensor([[1, 1, 2, 0]]))
    return accumulator


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0)])
def test_an_extreme_is_nan_wherever_the_nan_stands(values):
    accumulator = MetricAccumulator()
    for value in values:
        accumulator.largest("c", value)
        accumulator.smallest("d", torch.tensor(value))
    result = accumulator.result()
    assert math.isnan(result["c"])
    assert math.isnan(result["d"])


def test_numbers_kept_as_tensors_are_read_at_once_and_are_the_same(monkeypatch):
    plain = filled().result()
    assert plain["a"] == pytest.approx(1.0)
    assert plain["b"] == pytest.approx(36 / (3 * 14))
    assert (plain["c"], plain["d"]) == (4.0, -2.0)
    assert "none" not in plain
    assert plain["routing/unused_experts"] == 0.25

    monkeypatch.setattr(
        accumulators, "_detached", lambda x: x.detach() if torch.is_tensor(x) else float(x)
    )
    accumulator = filled()
    reads = []
    stack = torch.stack
    monkeypatch.setattr(
        accumulators.torch, "stack", lambda tensors: reads.append(len(tensors)) or stack(tensors)
    )
    assert accumulator.result() == plain
    # 5 of the means, 4 of the effective sample sizes, 2 of each extreme, all in one; then the loads
    assert reads == [5 + 4 + 2 + 2, 1]
