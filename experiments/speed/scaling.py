"""Scaling curves: what a step costs against response length, batch, model width and number of
experts.

One thing is changed at a time around a small base. No response ends before the limit, so that the
tokens are known. Every point is measured in a process of its own, so that its peak memory is its
own.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
BASE = {
    "prompts": 8,
    "group_size": 8,
    "new_tokens": 128,
    "micro_batch_size": 16,
    "mean_length": 10**9,
}
KEPT = (
    "rollout_s",
    "update_s",
    "total_s",
    "peak_memory_mib",
    "tokens",
    "active_parameters",
    "matmul_gflops",
)


@dataclass
class Curve:
    """One thing that is changed, and its values."""

    label: str
    key: str
    values: tuple[int, ...]
    others: dict[str, int]


CURVES = (
    Curve("response tokens", "new_tokens", (64, 128, 256, 512, 1024, 2048), {"prompts": 4}),
    Curve("responses per batch", "prompts", (4, 8, 16, 32, 64), {}),
    Curve("hidden width", "hidden", (32, 64, 128, 256, 512), {"new_tokens": 64}),
    Curve("experts", "experts", (4, 8, 16, 32, 64), {}),
)


def measure_curves(threads: list[int], runs: str) -> Iterator[dict]:
    """Yield a record per curve, value and number of threads, as soon as it is there. Raises
    RuntimeError if a point fails."""
    points = [
        (curve, value, count) for count in threads for curve in CURVES for value in curve.values
    ]
    with tempfile.TemporaryDirectory() as folder, tqdm(points, disable=None, unit="point") as bar:
        for curve, value, count in bar:
            bar.set_description(f"{curve.label} {value}, {count} thread{'s' * (count > 1)}")
            out = Path(folder) / "point.json"
            sizes = BASE | curve.others | {curve.key: value}
            if curve.key == "hidden":
                sizes["width"] = value // 2
            changes = [f"size.{key}={size}" for key, size in sizes.items()]
            command = [
                sys.executable,
                str(ROOT / "experiments" / "benchmark.py"),
                "workload=long",
                "batches=1",
            ]
            done = subprocess.run(
                [*command, f"threads={count}", f"runs={runs}", f"out={out}", *changes],
                capture_output=True,
                text=True,
                check=False,
                encoding="utf-8",
            )
            if done.returncode:
                raise RuntimeError(f"{curve.label} {value} failed:\n{done.stderr[-2000:]}")
            record = json.loads(out.read_text(encoding="utf-8"))
            x = value * BASE["group_size"] if curve.key == "prompts" else value
            yield {"curve": curve.label, "x": x, "threads": count} | {
                key: record[key] for key in KEPT
            }
