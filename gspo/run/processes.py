"""The processes that one run was started as: how they find each other, whether they agree, and
which of them ended.

    torchrun --nproc-per-node=2 -m gspo train experiment=micro_moe parallel.mode=replicate

torchrun tells each process its rank in the environment, and so does `join_scheduler` for the tasks
of one job of submitit. Rank 0 writes the run's directory and speaks to the user; the others
compute, and are silent. When one ends before its time, the others notice in their next exchange,
and one of them says which it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

import gspo
from gspo.config.checks import check_processes
from gspo.config.settings import Settings, first_difference
from gspo.distributed.ranks import DistributedRanks, RankLost, Ranks
from gspo.run.entry_point import Ended, explain, stop_signal
from gspo.run.launched import launched

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START = (
    "start the processes by torchrun, for example: torchrun --nproc-per-node=2 -m gspo train ..."
)
PATIENCE = 10.0  # seconds in which a rank that has failed can say why


class Peers:
    """The other processes of the run: who they are, and which of them has ended."""

    def __init__(self, ranks: Ranks, store: dist.Store | None = None):
        self.ranks, self.store = ranks, store
        self.others_wait = True  # whether the other ranks wait for rank 0 to tell them what to do
        self.places = ranks.all_gather((platform.node(), os.getpid()))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context an error of this rank is made known to the others."""
        try:
            yield
        except (RankLost, Ended):  # another rank's
            raise
        except BaseException as error:
            with suppress(RankLost):
                if self.ranks.rank == 0 and self.others_wait:
                    self.dismiss()
                else:
                    self.note("ended", explain(error) or type(error).__name__)
            raise

    def tell(self, lr: float, run: Path, checkpoint: Path | None) -> None:
        """As rank 0, let the others train along, at this learning rate from this checkpoint of the
        run.
        """
        self.ranks.broadcast((lr, run, checkpoint))
        self.others_wait = False

    def dismiss(self) -> None:
        """As rank 0, let the others end."""
        self.ranks.broadcast(None)

    def agree_on_signal(self) -> None:
        """Let every rank know the signal that stopped the run, though one alone may have got it: it
        makes the exit code."""
        numbers = self.ranks.all_gather(int(stop_signal().number))
        # SIGUSR2 queues the job again
        agreed = signal.SIGUSR2 if signal.SIGUSR2 in numbers else max(numbers)
        stop_signal().number = agreed or stop_signal().number
        self.others_wait = True

    @cached_property
    def lost(self) -> tuple[int, str]:
        """Return the rank that has ended, -1 for one that does not answer, and in words which it is
        and why.
        """
        began = time.monotonic()
        self.note("left", "for want of another rank")
        while (now := time.monotonic()) < began + PATIENCE:
            late = now > began + 1  # a rank that failed gets a moment to say why
            for index, (host, pid) in enumerate(self.places):
                if index == self.ranks.rank:
                    continue
                name = f"rank {index} (process {pid} on {host})"
                if reason := self.noted("ended", index):
                    return index, f"{name} has failed: {reason}"
                if (
                    late
                    and host == platform.node()
                    and not alive(pid)
                    and not self.noted("left", index)
                ):
                    perhaps = ", perhaps killed by the kernel for want of memory" if index else ""
                    return index, f"{name} has ended before its time{perhaps}"
            time.sleep(0.1)
        others = ", ".join(f"{index} on {host}" for index, (host, _) in enumerate(self.places))
        return -1, f"a rank has ended or does not answer (the ranks are {others})"

    def note(self, what: str, text: str) -> None:
        """Let the other ranks read a word about this one, if the process that keeps such words is
        still there.
        """
        try:
            if self.store:
                self.store.set(f"{what}/{self.ranks.rank}", text)
        except RuntimeError:  # the store has ended with its process
            self.store = None

    def noted(self, what: str, index: int) -> str:
        """Return what a rank has noted; "" if it has noted nothing."""
        key = f"{what}/{index}"
        try:
            return self.store.get(key).decode() if self.store and self.store.check([key]) else ""
        except RuntimeError:
            self.store = None
            return ""

    def report_loss(self) -> None:
        """Say which rank was lost, if it is rank 0, which cannot say it itself. One of the other
        ranks does.
        """
        index, text = self.lost
        if index == 0 and self.ranks.rank == 1 and not self.noted("ended", 0):
            print(
                f"error: {text}; the same command goes on from the last checkpoint",
                file=sys.__stderr__,
                flush=True,
            )


def join(settings: Settings) -> Peers:
    """Join the other processes of the run, if there are any.

    Raises ValueError if the environment and parallel.mode do not fit each other, or if the ranks
    were started with different settings or different code."""
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    mode = settings.parallel.mode
    if launched() > 1 and missing:
        raise ValueError(f"WORLD_SIZE={launched()} without {', '.join(missing)}: {START}")
    if launched() > 1 and mode == "none":
        raise ValueError(
            f"{launched()} processes with parallel.mode=none: say parallel.mode=replicate or shard"
        )
    if mode != "none" and "WORLD_SIZE" not in os.environ:
        raise ValueError(f"parallel.mode={mode} with one process: {START}")
    if (meant := settings.parallel.ranks) not in (0, launched()):
        raise ValueError(
            f"parallel.ranks={meant} with {launched()} processes: start {meant}, or leave it away"
        )
    if launched() == 1 and mode == "shard":
        raise ValueError(
            "parallel.mode=shard with one process: there is nothing to spread weights over; start several"
        )
    if launched() == 1:
        return Peers(Ranks())
    check_processes(settings, launched())
    timeout = timedelta(minutes=settings.parallel.timeout_minutes)
    stay_on_one_machine()
    backend = "gloo"
    if settings.policy.device != "cpu" and torch.cuda.is_available():
        if (here := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > (
            gpus := torch.cuda.device_count()
        ):
            raise ValueError(
                f"{here} processes on a machine with {gpus} GPUs: start one for each, or policy.device=cpu"
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    store, rank, count = next(iter(dist.rendezvous("env://", timeout=timeout)))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=count,
        timeout=timeout,
    )
    peers = Peers(DistributedRanks(timeout), dist.PrefixStore("run", store))
    check_agreement(settings, peers.ranks)
    stop_signal().repeats = 1  # what a terminal sends to all, torchrun passes on once more
    return peers


def stay_on_one_machine() -> None:
    """Let gloo and NCCL listen at the loopback address where all ranks are on this machine, unless
    the user has chosen an interface. By themselves they would listen on the network too."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback:
            os.environ.setdefault(variable, loopback[0])


def check_agreement(settings: Settings, ranks: Ranks) -> None:
    """Raise ValueError on every rank, with the same words, if one has other settings or other code
    than rank 0.
    """
    ours = {
        key: value for key, value in asdict(settings).items() if key not in ("tracking", "runs")
    }
    ours = json.loads(json.dumps(ours, default=str))
    first, *others = ranks.all_gather((ours, code_hash()))
    for index, (content, code) in enumerate(others, start=1):
        if difference := first_difference(content, first[0]):
            raise ValueError(
                f"rank {index} was started with other settings than rank 0: {difference}"
            )
        if code != first[1]:
            raise ValueError(
                f"rank {index} runs other code than rank 0: {code} against {first[1]} (SHA-256)"
            )


def code_hash() -> str:
    """Return a hash of this package's source files; 16 hexadecimal digits."""
    root, found = Path(gspo.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def alive(pid: int) -> bool:
    """Return whether a process of this machine is there and has not ended."""
    try:
        state = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except OSError:
        with suppress(OSError):
            os.kill(pid, 0)
            return not Path("/proc").exists()
        return False
    return state not in "ZX"


def part() -> None:
    """Take down the connections to the other processes, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
