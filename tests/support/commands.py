"""The program's own commands as processes, and what their runs leave behind."""

import json
import os
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import forked
from gspo.tracking.tracker import read_rows

ROOT = Path(__file__).parents[2]
SMALL = [
    "study=small", "task=math", "steps=12", "cold_start.steps=4", "cold_start.batch_size=8", "threads=1",
    "model.hidden=16", "model.layers=2", "model.heads=2", "model.experts=4", "model.expert_width=8",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=12", "trainer.minibatches=2",
    "evaluation.problems=4", "evaluation.every=2", "checkpoint.every=2", "optim.lr=1e-3", "tracking.rollouts_every=1",
]  # fmt: skip


TIMES = ("time/", "throughput/", "compute/seconds")


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-P", "-m", "gspo", "train", *overrides]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {
        "NETRC": "/nonexistent"
    }


def train(
    cwd: Path, *overrides: str, account: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    there = environment() | (account or {})
    return forked.run(command(*overrides), cwd=cwd, env=there)


def evaluate(run: Path, *overrides: str) -> subprocess.CompletedProcess:
    script = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "evaluate",
        f"run={run}",
        "problems=2",
        "k=1",
        *overrides,
    ]
    return forked.run(script, cwd=run, env=environment())


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs" / "small").glob("*-seed*")
    return run


def comparable(run: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith(TIMES)}
        for row in read_rows(run / "metrics.jsonl")
    ]


def wandb_rows(run: Path) -> list[dict]:
    """History rows of the newest offline segment: 32 KiB LevelDB-log blocks of protobuf records."""
    # here, because other tests of commands need no W&B
    from wandb.proto import wandb_internal_pb2 as pb

    data = sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime)[
        -1
    ].read_bytes()
    rows, position, parts = [], 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, position)
        body = data[position + 7 : position + 7 + length]
        if len(body) < length:
            break
        assert zlib.crc32(body, zlib.crc32(bytes([kind]))) == crc
        position += 7 + length
        parts = body if kind in (1, 2) else parts + body
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(parts)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        i.key or "/".join(i.nested_key): json.loads(i.value_json)
                        for i in record.history.item
                    }
                )
    return rows


def wait_for_step(run_folder: Path, step: int, process: subprocess.Popen | forked.Script) -> None:
    deadline = time.monotonic() + 300  # of a busy machine
    while time.monotonic() < deadline and process.poll() is None:
        for path in (run_folder / "runs" / "small").glob("*-seed*/metrics.jsonl"):
            if any(row["step"] >= step for row in read_rows(path)):
                return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")
