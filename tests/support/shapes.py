"""Recorded studies of any shape: some arms, some settings that vary, metrics that are missing, long
names.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import yaml

METRICS = (
    "clip/token_active", "clip/token_outside", "routing/consistency", "policy/entropy", "optim/grad_norm",
    "length/mean", "compute/flops",
)  # fmt: skip
ARMS = [
    ("gspo", "none"), ("grpo", "none"), ("grpo", "r2"), ("gspo_token", "none"), ("luspo", "none"), ("gmpo", "none"),
    ("drgrpo", "none"), ("dapo", "none"), ("cispo", "none"), ("minirl", "none"), ("sapo", "none"), ("ppo", "none"),
    ("my_package.losses_of_mine:AVeryLongNameOfAnObjective", "none"),
]  # fmt: skip
VALUES = {
    "optim.lr": [2e-4, 1e-3, 5e-3],
    "trainer.minibatches": [4, 16],
    "rollout.max_new_tokens": [80, 1024],
}


def write_study(
    folder: Path,
    arms: int = 2,
    varied: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (1, 2, 3),
    missing: tuple[str, ...] = (),
    steps: int = 40,
    long_name: bool = False,
    collapsed: bool = False,
) -> Path:
    """Write runs of the first `arms` arms (with `long_name` the last one has a long name) at every
    combination of the varied settings' values, and return the study's folder. The metrics in
    `missing` are not recorded."""
    chosen = ARMS[: arms - long_name] + ARMS[-1:] * long_name
    study = folder / "study"
    for number, (name, replay) in enumerate(chosen):
        for values in itertools.product(*(VALUES[key] for key in varied)):
            for seed in seeds:
                settings = {
                    "study": "shapes",
                    "seed": seed,
                    "steps": steps,
                    "objective": {"name": name, "clip_low": 3e-4, "clip_high": 4e-4},
                    "policy": {"routing_replay": replay},
                    "optim": {"lr": 1e-3},
                    "rollout": {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 80},
                    "trainer": {"minibatches": 4},
                    "model": {"name": "tiny_moe"},
                }
                for key, value in zip(varied, values, strict=True):
                    group, field = key.split(".")
                    settings[group][field] = value
                text = "-".join([name.replace(":", "."), replay, *map(str, values), str(seed)])
                run = study / text
                run.mkdir(parents=True)
                (run / "settings.yaml").write_text(yaml.safe_dump(settings))
                rows = rows_of(number, seed, steps, missing, collapsed and number == 1)
                (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return study


def rows_of(
    number: int, seed: int, steps: int, missing: tuple[str, ...], collapsed: bool
) -> list[dict]:
    """Return the rows of one run of arm `number`."""
    noise = np.random.default_rng([number, seed])
    rows = []
    for step in range(steps + 1):
        row: dict = {"step": step}
        if step % 10 == 0:
            row |= {
                "eval/math_heldout/avg@4": 0.3 + 0.2 * step / steps,
                "eval/math_heldout/stderr": 0.02,
            }
        if step:
            fall = 0.05 if collapsed and step > steps // 3 else 1.0
            row["reward/mean"] = max(0.0, (0.3 + 0.3 * step / steps + noise.normal(0, 0.04)) * fall)
            values = {
                "clip/token_active": 0.002 * (number + 1) * noise.uniform(0.5, 1.5),
                "clip/token_outside": 0.004 * (number + 1) * noise.uniform(0.5, 1.5),
                "clip/token_active_minibatch_1": 0.0,
                "clip/token_active_minibatch_2": 0.003 * (number + 1),
                "routing/consistency": 0.95 - 0.005 * number,
                "routing/consistency_layer_0": 0.96,
                "routing/consistency_layer_1": 0.93,
                "policy/entropy": abs(noise.normal(0.02, 0.05)),
                "optim/grad_norm": noise.uniform(0.1, 0.5),
                "length/mean": 40 + 5 * number + noise.normal(0, 3),
                "compute/flops": 3e9 * step,
                "compute/tokens": 4000 * step,
                "compute/seconds": 2.0 * step,
            }
            row |= {
                key: value for key, value in values.items() if not key.startswith(missing or ("-",))
            }
        rows.append(row)
    return rows
