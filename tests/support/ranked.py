"""Runs a function as several ranks: real processes that exchange over gloo on this machine.

They are forked by the server of forked.py, which has imported everything and has never computed.
This process has, and its children could wait for ever for threads of OpenMP or locks of MKL, whose
other side a fork does not copy. So the function goes to its ranks as a pickle: they have this
process's environment, folder and import path, and of its objects what the function names. What
monkeypatch.setattr has changed here is not changed there, unless the function does it.
"""

import faulthandler
import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

import forked
from gspo.distributed.ranks import DistributedRanks

SECONDS = 120  # for the slowest of them


def ranked(
    count: int, function: Callable[[DistributedRanks], Any], seconds: float = SECONDS
) -> list[Any]:
    """What `function(ranks)` returns on each rank within so many seconds. Raises AssertionError
    with the traces of those that fail, hang or are killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked").write_bytes(pickle.dumps((sys.path, cloudpickle.dumps(function))))
        command = [sys.executable, __file__, name, str(count), str(seconds)]
        done = forked.run(command, seconds=int(seconds) + 60)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        assert done.returncode == 0, (
            f"the ranks could not be started, or not be ended: {done.stderr[-3000:]}"
        )
        codes = json.loads((folder / "codes").read_text())
        found = [_end(folder, index, code, seconds) for index, code in enumerate(codes)]
    failed = [f"rank {index} {value}" for index, (good, value) in enumerate(found) if not good]
    assert not failed, "\n".join(failed)
    return [value for _, value in found]


def _end(folder: Path, index: int, code: int, seconds: float) -> tuple[bool, Any]:
    """Whether the rank has returned something, and what; else how it ended."""
    if trace := (folder / f"{index}.trace").read_text():
        return False, f"hangs after {seconds:g} s:\n{trace}"
    if code:
        return (
            False,
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}",
        )
    return pickle.loads((folder / f"{index}.result").read_bytes())


def main() -> None:
    """Fork the ranks, and wait until they have ended, which they do by themselves."""
    folder, count, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    numbers: dict[int, int] = {}
    for index in range(count):
        if not (pid := os.fork()):
            _rank(folder, index, count, seconds)
        numbers[pid] = index
    codes = [0] * count
    for _ in range(count):
        pid, status = os.wait()
        codes[numbers[pid]] = os.waitstatus_to_exitcode(status)
    (folder / "codes").write_text(json.dumps(codes))


def _rank(folder: Path, index: int, count: int, seconds: float) -> None:
    """This process is a rank: it leaves what it has found in the folder, or the traces of its
    threads if it hangs.
    """
    with open(folder / f"{index}.trace", "w") as trace:
        faulthandler.dump_traceback_later(seconds, exit=True, file=trace)
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), count)
        try:
            # who waits for a rank that hangs says so, and is not killed too
            patience = timedelta(seconds=seconds / 2)
            dist.init_process_group(
                "gloo", store=store, rank=index, world_size=count, timeout=patience
            )
            ranks = DistributedRanks(patience)
            # one that ended now would be missed by those who have yet to connect with all others
            dist.barrier()
            sys.path[:], function = pickle.loads((folder / "asked").read_bytes())
            result = True, cloudpickle.loads(function)(ranks)
        except Exception:  # whatever it is, the test shows it
            result = False, f"fails:\n{traceback.format_exc()}"
        (folder / f"{index}.result").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
