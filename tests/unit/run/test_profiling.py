"""The table of the most expensive operations of a profiled step."""

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from gspo.run.profiling import most_expensive


def average(name: str, device: DeviceType, cpu_us: float, gpu_us: float) -> FunctionEventAvg:
    """An entry of `key_averages()`, whose own times are these."""
    entry = FunctionEventAvg()
    entry.key = name
    entry.count = 1
    entry.device_type = device
    entry.self_cpu_time_total = cpu_us
    entry.self_device_time_total = gpu_us
    return entry


def test_a_kernel_counts_once_for_the_operation_that_launched_it():
    averages = [
        average("aten::mm", DeviceType.CPU, 10, 300),
        average("aten::add", DeviceType.CPU, 20, 100),
        average("gemm_kernel", DeviceType.CUDA, 0, 300),
        average("add_kernel", DeviceType.CUDA, 0, 100),
    ]
    table = most_expensive(averages)
    assert [row["operation"] for row in table] == ["aten::mm", "aten::add"]
    assert [row["share"] for row in table] == pytest.approx([0.75, 0.25])
    assert table[0]["gpu_s"] == pytest.approx(3e-4)


def test_without_a_gpu_the_time_on_the_cpu_decides():
    averages = [average("a", DeviceType.CPU, 10, 0), average("b", DeviceType.CPU, 30, 0)]
    table = most_expensive(averages)
    assert [row["operation"] for row in table] == ["b", "a"]
    assert table[0]["share"] == pytest.approx(0.75)
