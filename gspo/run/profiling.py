"""Profile some steps of a run with PyTorch's profiler (`profile.steps=[3,5]`).

Each profiled step leaves two files in the run directory. Chrome's chrome://tracing and
https://ui.perfetto.dev show profile/step_000003.trace.json.gz on a time line. The run's page shows
profile/step_000003.json, the ten most expensive operations, as a table. The times are of rank 0 and
of the whole step: sampling, scoring, updates, and held-out problems if they are due. Profiling
makes a step slower, so its row of metrics is no measure of speed.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from gspo.io.files import errors_of_the_disk, replace_text
from gspo.train.extensions import Callback

FOLDER = "profile"
MAX_OPERATIONS = 10  # in the table


@dataclass
class Profiler(Callback):
    """A callback that profiles the steps in `steps`, and writes the results to a run's folder."""

    steps: list[int] = field(default_factory=list)
    run: Path = Path()

    def before_step(self, step: int, trainer: Any) -> None:
        """Begin to profile if this step is in `steps`."""
        self.profile = None
        if step in self.steps:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self.profile.start()

    def after_step(self, step: int, trainer: Any, metrics: dict[str, float]) -> None:
        """Write the trace and the table of a profiled step."""
        if self.profile is None:
            return
        self.profile.stop()
        folder = self.run / FOLDER
        with errors_of_the_disk(folder):
            folder.mkdir(exist_ok=True)
            self.profile.export_chrome_trace(str(folder / f"step_{step:06d}.trace.json.gz"))
        replace_text(
            folder / f"step_{step:06d}.json",
            json.dumps(most_expensive(list(self.profile.key_averages())), indent=1),
        )
        self.profile = None


def most_expensive(averages: list[FunctionEventAvg]) -> list[dict[str, Any]]:
    """Return the operations with the largest time of their own, without the operations they call.

    Each has its name, seconds on the CPU and on the GPU, calls, and share of the time of all. With
    a GPU the time on the GPU decides, as the CPU mostly waits."""
    # A kernel's time also counts for the operation that launched it. Entries of the kernels
    # themselves would double the total, and list each operation twice.
    operations = [event for event in averages if event.device_type == DeviceType.CPU]
    has_gpu_times = any(event.self_device_time_total for event in operations)

    def self_time(event: FunctionEventAvg) -> float:
        return event.self_device_time_total if has_gpu_times else event.self_cpu_time_total

    total = sum(map(self_time, operations)) or 1.0
    return [
        {
            "operation": event.key,
            "cpu_s": event.self_cpu_time_total / 1e6,
            "gpu_s": event.self_device_time_total / 1e6,
            "calls": event.count,
            "share": self_time(event) / total,
        }
        for event in sorted(operations, key=self_time, reverse=True)[:MAX_OPERATIONS]
    ]
