"""Profiles some steps of a run with PyTorch's profiler (`profile.steps=[3,5]`).

Each of them leaves two files in the run directory: profile/step_000003.trace.json.gz, which
Chrome's chrome://tracing and https://ui.perfetto.dev show on a time line, and
profile/step_000003.json with the ten dearest operations, which the run's page shows as a table. The
times are those of rank 0, of the whole step: sampling, scoring, updates, and held-out problems
where they are due. Profiling makes a step slower; its row of metrics is no measure of speed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from gspo.io.files import errors_of_the_disk, replace_text
from gspo.train.extensions import Callback

FOLDER = "profile"
DEAREST = 10  # operations in the table


@dataclass
class Profiler(Callback):
    """Profiles the steps that `steps` names, and writes what it finds into the folder of a run."""

    steps: list[int] = field(default_factory=list)
    run: Path = Path()

    def before_step(self, step: int, trainer: Any) -> None:
        """Begin to profile if this step is one of those."""
        self.profile = None
        if step in self.steps:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self.profile.start()

    def after_step(self, step: int, trainer: Any, metrics: dict[str, float]) -> None:
        """Write what was found."""
        if self.profile is None:
            return
        self.profile.stop()
        folder = self.run / FOLDER
        with errors_of_the_disk(folder):
            folder.mkdir(exist_ok=True)
            self.profile.export_chrome_trace(str(folder / f"step_{step:06d}.trace.json.gz"))
        replace_text(
            folder / f"step_{step:06d}.json",
            json.dumps(dearest(list(self.profile.key_averages())), indent=1),
        )
        self.profile = None


def dearest(averages: list[FunctionEventAvg]) -> list[dict[str, Any]]:
    """Return the operations that took most time by themselves, without those that they called:
    name, seconds on the CPU and on the GPU, calls, and share of all that time. On a GPU its time
    decides, as the CPU mostly waits."""
    gpu = any(each.self_device_time_total for each in averages)

    def own(each: FunctionEventAvg) -> float:
        return each.self_device_time_total if gpu else each.self_cpu_time_total

    total = sum(map(own, averages)) or 1.0
    return [
        {
            "operation": each.key,
            "cpu_s": each.self_cpu_time_total / 1e6,
            "gpu_s": each.self_device_time_total / 1e6,
            "calls": each.count,
            "share": own(each) / total,
        }
        for each in sorted(averages, key=own, reverse=True)[:DEAREST]
    ]
