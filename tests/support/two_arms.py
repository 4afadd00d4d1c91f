"""Hand-made runs of the paper's arms with chosen rewards."""

import json
import math
from pathlib import Path

import yaml

from gspo.analysis.load import GRPO, GRPO_R2, GSPO

ARM = {GSPO: ("gspo", "none"), GRPO_R2: ("grpo", "r2"), GRPO: ("grpo", "none")}


def write(
    folder: Path,
    arm: str,
    seed: int,
    rewards: list[float],
    steps: int = 0,
    model: str = "tiny_moe",
    **more,
):
    """A run with these rewards (NaN: the row is lost), of `steps` planned batches; `more` are
    metrics of every row.
    """
    name, replay = ARM[arm]
    settings = {
        "seed": seed,
        "steps": steps or len(rewards),
        "study": "known",
        "objective": {"name": name},
    }
    settings |= {"policy": {"routing_replay": replay}, "model": {"name": model}}
    folder = folder / f"{name}-{replay}-seed{seed}"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    rows = [
        {"step": s, "reward/mean": r, "compute/flops": 10 * s} | more
        for s, r in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(r)}\n" for r in rows if not math.isnan(r["reward/mean"]))
    )
    return folder
