"""Runs that the real W&B client has recorded, offline or with the stand-in for its server."""

import json
import sys
import time
from pathlib import Path

import pandas as pd
import yaml

import forked
from commands import environment

LOG = """
import json, sys
from pathlib import Path
from gspo.tracking.metrics import METRICS
from gspo.tracking.tracker import Tracker, supersede
from gspo.tracking.settings import TrackingSettings
folder, settings, rows = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.stdin.read())
tracker = Tracker(folder, TrackingSettings(wandb="auto"), settings, "study", ["tag"])
for row in rows:
    tracker.log(row.pop("step"), {k: float("nan") if v is None else v for k, v in row.items()}, None)
tracker.finish(0)
"""


SETTINGS = {
    "seed": 1, "steps": 40, "study": "known", "objective": {"name": "gspo", "clip_low": 3e-4, "dual_clip": None},
    "policy": {"routing_replay": "none"}, "model": {"name": "tiny_moe"}, "optim": {"lr": 1e-4, "max_grad_norm": 1.0},
    "rollout": {"prompts_per_step": 4, "group_size": 8}, "evaluation": {"sets": ["math", "code"]},
    "trainer": {"minibatches": 4, "aggregation": {"mode": "auto"}},
}  # fmt: skip


def rows(first: int, last: int) -> list[dict]:
    """Row 0 evaluates; the gradient norm of step 3 was not finite; a metric that appears late."""
    made: list[dict] = [{"step": 0, "eval/math/avg@2": 0.25}] if first == 0 else []
    for step in range(max(first, 1), last + 1):
        row = {"step": step, "reward/mean": 0.5 + step / 1000, "clip/token_active": 0.1 / step}
        row |= {
            "optim/grad_norm": None if step == 3 else 0.1 * step,
            "length/mean": 12,
            "clip/weight": 0.9,
        }
        row |= {"clip/token_outside": 0.2} | ({"routing/consistency": 1.0} if step > 20 else {})
        made.append(row)
    return made


def log(folder: Path, made: list[dict], **account: str) -> None:
    """Through the project's own tracker and the real W&B client, in its own process; offline
    without an account.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    command = [sys.executable, "-c", LOG, str(folder), json.dumps(SETTINGS)]
    forked.run(command, folder, environment() | account, input=json.dumps(made)).check_returncode()


def same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    a, b = (frame[sorted(frame)].astype(float).reset_index(drop=True) for frame in (a, b))
    pd.testing.assert_frame_equal(a, b, check_exact=True)


def steps(run) -> list[int]:
    return [run.rows[number]["step"] for number in sorted(run.rows)]


def pause() -> None:
    time.sleep(1.1)  # W&B's folders are named by the second


TABLES = """
import sys
from pathlib import Path
from gspo.data.problems import Problem
from gspo.data.samples import Score, ScoredResponse
from gspo.tracking.tracker import Tracker
from gspo.tracking.settings import TrackingSettings
def response(step, n):
    problem, score = Problem("math", n, f"{n}+1=?", "2"), Score(1.0, "correct")
    return ScoredResponse(problem, n, [1], [1, 2], [0.0, 0.0], "stop", f"answer {n} of step {step}", step, score=score)
first, last = int(sys.argv[2]), int(sys.argv[3])
tracker = Tracker(Path(sys.argv[1]), TrackingSettings(table_rows=2), {"study": "s"}, "study", ["own"])
for step in range(first, last + 1):
    tracker.log(step, {"reward/mean": step / 10}, [response(step, n) for n in range(4)] if step % 2 else None)
tracker.finish(0)
"""


def with_rollouts(folder: Path, first: int, last: int, **account: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", TABLES, str(folder), str(first), str(last)]
    forked.run(command, env=environment() | account).check_returncode()
