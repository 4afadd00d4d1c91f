"""Run directories written by hand: rows, settings and status of healthy and collapsed runs."""

import json
from dataclasses import asdict
from pathlib import Path

import yaml

from gspo.tracking.monitor import Thresholds

HEALTHY, COLLAPSED = [0.4] * 5 + [0.5] * 85, [0.4] * 30 + [0.1] * 60


def write(folder: Path, name: str, rewards: list[float], seed: int = 1, **changes: object) -> Path:
    """A run of these rewards; `changes` as optim__lr=1e-4."""
    settings = {
        "seed": seed, "steps": len(rewards), "study": "known", "objective": {"name": name, "clip_low": 0.2},
        "policy": {"routing_replay": "none"}, "optim": {"lr": 1e-4}, "rollout": {"staleness": 0, "dtype": "float32"},
        "trainer": {"minibatches": 4}, "cold_start": {"seed": 0}, "monitor": {"thresholds": asdict(Thresholds())},
    }  # fmt: skip
    for key, value in changes.items():
        group, field = key.split("__")
        settings[group][field] = value
    share = 0.2 if name == "gspo" else 0.001
    rows: list[dict] = [{"step": 0, "eval/math/avg@2": 0.1}]
    for step, reward in enumerate(rewards, start=1):
        row = {
            "step": step,
            "reward/mean": reward,
            "clip/token_active": share,
            "clip/token_outside": 2 * share,
        }
        rows.append(row | {"length/mean": 14.0, "mismatch/k3": 0.02 if reward == 0.1 else 1e-5})
    folder = folder / f"{name}-seed{seed}-{abs(hash(tuple(changes.items()))):x}"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
