"""Hand-made runs of the paper's three arms with a chosen effect and noise."""

import json
import math
from pathlib import Path

import numpy as np
import yaml

from gspo.analysis.load import GRPO, GRPO_R2, GSPO

KINDS = {
    GSPO: ("gspo", "none", 3e-4, 4e-4),
    GRPO_R2: ("grpo", "r2", 0.2, 0.27),
    GRPO: ("grpo", "none", 0.2, 0.27),
}
CLIPPED = {GSPO: (0.15, 0.3), GRPO_R2: (0.0016, 0.004), GRPO: (0.004, 0.009)}  # active, outside


def write_run(
    folder: Path, arm: str, seed: int, start: float, gain: float, steps: int = 80, **settings
) -> Path:
    """A run directory whose expected reward is known. A seed's arms share the problems' difficulty
    (sd 0.08).
    """
    name, replay, low, high = KINDS[arm]
    tree = {
        "study": "synthetic",
        "seed": seed,
        "steps": steps,
        "objective": {"name": name, "clip_low": low, "clip_high": high},
        "policy": {"routing_replay": replay},
        "rollout": {"prompts_per_step": 16, "group_size": 8},
        "trainer": {"minibatches": 4, "epochs": 1},
        "optim": {"lr": 1e-3},
        "model": {"name": "tiny_moe"},
    }
    difficulty = np.random.default_rng(seed).normal(0, 0.08, steps + 1)
    noise = np.random.default_rng([seed, sum(map(ord, arm))])
    rows = [
        one_row(arm, s, start + gain * (1 - math.exp(-2 * s / steps)) / 0.865, steps, noise)
        for s in range(steps + 1)
    ]
    for s, row in enumerate(rows[1:], start=1):
        row["reward/mean"] = round(row["reward/mean"] + difficulty[s], 4)
    folder = folder / f"{name}-{replay}-seed{seed}"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(tree | settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def one_row(arm: str, s: int, expected: float, steps: int, noise: np.random.Generator) -> dict:
    row: dict = {"step": s}
    if s % 20 == 0:
        for name, shift in (("math_heldout", 0.03), ("math_hard", -0.2), ("code_heldout", 0.1)):
            row |= {
                f"eval/{name}/avg@4": expected + shift + noise.normal(0, 0.01),
                f"eval/{name}/stderr": 0.02,
            }
        row |= {
            "eval/elo": 1500 + 800 * (expected - 0.25) + noise.normal(0, 10),
            "eval/elo_stderr": 20.0,
        }
    if s == 0:
        return row
    active, outside = (
        share * (0.7 + 0.6 * s / steps) * noise.uniform(0.8, 1.2) for share in CLIPPED[arm]
    )
    row |= {
        "reward/mean": expected + noise.normal(0, 0.04),
        "optim/grad_norm": None,
        "policy/entropy": 0.5,
    }
    row |= {"clip/token_active": active, "clip/token_outside": outside}
    row |= {f"clip/token_active_minibatch_{n}": active * (n - 1) / 1.5 for n in range(1, 5)}
    kept = [
        0.97 - 0.015 * layer - 0.03 * s / steps * (arm == GRPO) + noise.normal(0, 0.006)
        for layer in range(4)
    ]
    row |= {f"routing/consistency_layer_{layer}": value for layer, value in enumerate(kept)}
    tokens = 4000 * s * (1.03 if arm == GSPO else 1.0)
    return row | {
        "routing/consistency": float(np.mean(kept)),
        "compute/tokens": tokens,
        "compute/flops": tokens * 9e6,
        "compute/seconds": 6.0 * s,
    }


def write_arms(folder: Path, effects: dict, seeds=(1, 2, 3), steps: int = 80) -> Path:
    for arm, (start, gain) in effects.items():
        for seed in seeds:
            write_run(folder, arm, seed, start, gain, steps)
    return folder
