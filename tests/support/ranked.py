"""Runs a function as several ranks: real processes, forked from this one, that exchange over gloo on this machine."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo.core.ranks import Processes

SECONDS = 120  # for the slowest of them


def ranked(count: int, function: Callable[[Processes], Any], seconds: float = SECONDS) -> list[Any]:
    """What `function(ranks)` returns on each rank within so many seconds. Raises AssertionError with the traces of
    those that fail."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_rank, args=(Path(folder), i, count, function, seconds)) for i in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
        hanging = [process.kill() for process in processes if process.is_alive()]
        ends = [Path(folder) / f"{i}.pickle" for i in range(count)]
        found = [pickle.loads(path.read_bytes()) if path.exists() else (False, "it ended early") for path in ends]
    failed = [f"rank {i}: {value}" for i, (good, value) in enumerate(found) if not good]
    assert not failed and not hanging, "\n".join(failed) or "ranks hang"
    return [value for _, value in found]


def _rank(folder: Path, index: int, count: int, function: Callable[[Processes], Any], seconds: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), count)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=index, world_size=count, timeout=timedelta(seconds=seconds / 2)
        )
        result = True, function(Processes())
    except Exception:  # whatever it is, the test shows it
        result = False, traceback.format_exc()
    (folder / f"{index}.pickle").write_bytes(pickle.dumps(result))
