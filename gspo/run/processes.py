"""The ranks of a run as processes: how they find each other, agree, and notice the loss of a rank.

    torchrun --nproc-per-node=2 -m gspo train experiment=micro_moe parallel.mode=replicate

torchrun tells each process its rank in the environment, and so does `join_scheduler` for the tasks
of one job of submitit. Rank 0 writes the run's directory and prints. The others compute, and are
silent. When a rank ends too early, the others notice in their next collective, and some rank
prints which rank it was.
"""

import hashlib
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import gspo
from gspo.config.checks import check_processes
from gspo.config.settings import Settings, first_difference
from gspo.distributed.ranks import DistributedRanks, RankLost, Ranks
from gspo.io.errors import SettingError
from gspo.run.entry_point import Ended, explain, stop_signal
from gspo.run.launched import process_count

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START = (
    "start the processes by torchrun, for example: torchrun --nproc-per-node=2 -m gspo train ..."
)
LOSS_TIMEOUT = 10.0  # seconds in which a failed rank can report why


class LostRank(NamedTuple):
    """A rank that has ended, and why."""

    rank: int  # -1: some rank does not answer, and none is known to have ended
    reason: str  # with the rank's name


class Peers:
    """The other ranks of a run: their processes, and which of them has ended.

    Beside its collectives, a rank can leave short notes for the others in a key-value store, which
    rank 0's process holds. "ended" is the reason why a rank failed, and "left" means that a rank
    ends because another was lost."""

    def __init__(self, ranks: Ranks, store: dist.Store | None = None):
        self.ranks = ranks
        self.store = store
        self.others_wait = True  # whether the other ranks wait for rank 0's `begin_attempt`
        self.processes = ranks.all_gather((platform.node(), os.getpid()))

    @contextmanager
    def watched(self) -> Generator[None]:
        """Let the other ranks know of an error of this rank within this context."""
        try:
            yield
        except (RankLost, Ended):  # another rank's error
            raise
        except BaseException as error:
            with suppress(RankLost):
                if self.ranks.rank == 0 and self.others_wait:
                    self.dismiss()
                else:
                    self.write_note("ended", explain(error) or type(error).__name__)
            raise

    def begin_attempt(self, lr: float, run: Path, checkpoint: Path | None) -> None:
        """As rank 0, let the others train along, at this learning rate from this checkpoint."""
        self.ranks.broadcast((lr, run, checkpoint))
        self.others_wait = False

    def dismiss(self) -> None:
        """As rank 0, let the others end."""
        self.ranks.broadcast(None)

    def agree_on_signal(self) -> None:
        """Let every rank know the signal that stopped the run, which decides the exit code.

        Perhaps only one rank has received it."""
        numbers = self.ranks.all_gather(int(stop_signal().number))
        # SIGUSR2 queues the job again
        agreed = signal.SIGUSR2 if signal.SIGUSR2 in numbers else max(numbers)
        stop_signal().number = agreed or stop_signal().number
        self.others_wait = True

    @cached_property
    def lost(self) -> LostRank:
        """The rank that has ended, or does not answer."""
        began = time.monotonic()
        self.write_note("left", "because another rank left")
        now = began
        while now < began + LOSS_TIMEOUT:
            for rank, (host, pid) in enumerate(self.processes):
                if rank == self.ranks.rank:
                    continue
                name = f"rank {rank} (process {pid} on {host})"
                reason = self.read_note("ended", rank)
                if reason:
                    return LostRank(rank, f"{name} has failed: {reason}")
                # a rank that failed gets a moment to report why
                if now <= began + 1 or host != platform.node():
                    continue
                if not is_alive(pid) and not self.read_note("left", rank):
                    perhaps = (
                        ", perhaps killed by the kernel because memory ran out" if rank else ""
                    )
                    return LostRank(rank, f"{name} has ended before its time{perhaps}")
            time.sleep(0.1)
            now = time.monotonic()
        all_ranks = ", ".join(f"{rank} on {host}" for rank, (host, _) in enumerate(self.processes))
        return LostRank(-1, f"a rank has ended or does not answer (the ranks are {all_ranks})")

    def write_note(self, key: str, text: str) -> None:
        """Leave a note for the other ranks, if the process that holds the store is still there."""
        try:
            if self.store:
                self.store.set(f"{key}/{self.ranks.rank}", text)
        except RuntimeError:  # the store has ended with its process
            self.store = None

    def read_note(self, key: str, rank: int) -> str:
        """Return a note of a rank, "" if it has left none."""
        name = f"{key}/{rank}"
        try:
            if self.store and self.store.check([name]):
                return self.store.get(name).decode()
        except RuntimeError:
            self.store = None
        return ""

    def report_loss(self) -> None:
        """Print that rank 0 was lost, as rank 1: rank 0 itself cannot."""
        rank, text = self.lost
        if rank == 0 and self.ranks.rank == 1 and not self.read_note("ended", 0):
            print(
                f"error: {text}; the same command goes on from the last checkpoint",
                file=sys.__stderr__,
                flush=True,
            )


def join(settings: Settings) -> Peers:
    """Join the other processes of the run, if there are any.

    Raises ValueError if the environment and parallel.mode do not fit each other, or if the ranks
    were started with different settings or different code."""
    count = process_count()
    check_launch(settings, count)
    if count == 1:
        return Peers(Ranks())
    check_processes(settings, count)
    timeout = timedelta(minutes=settings.parallel.timeout_minutes)
    stay_on_one_machine()
    backend = "gloo"
    if settings.policy.device != "cpu" and torch.cuda.is_available():
        local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count()
        if local_count > gpus:
            raise ValueError(
                f"{local_count} processes on a machine with {gpus} GPUs: "
                "start one for each, or policy.device=cpu"
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    peers = Peers(DistributedRanks(timeout), dist.PrefixStore("run", store))
    check_agreement(settings, peers.ranks)
    # a terminal sends a signal to all processes, and torchrun sends it once more
    stop_signal().repeats = 1
    return peers


def check_launch(settings: Settings, count: int) -> None:
    """Raise ValueError if the number of processes does not fit parallel.mode and parallel.ranks."""
    mode = settings.parallel.mode
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if count > 1 and missing:
        problem = f"{', '.join(missing)} is missing"
        raise SettingError("WORLD_SIZE", count, problem, remedy=START)
    if count > 1 and mode == "none":
        raise SettingError(
            "parallel.mode",
            mode,
            f"there are {count} processes",
            remedy="set parallel.mode=replicate or shard",
        )
    if mode != "none" and "WORLD_SIZE" not in os.environ:
        raise SettingError("parallel.mode", mode, "there is one process", remedy=START)
    expected = settings.parallel.ranks
    if expected not in (0, count):
        raise SettingError(
            "parallel.ranks",
            expected,
            f"there are {count} processes",
            remedy=f"start {expected}, or leave it out",
        )
    if count == 1 and mode == "shard":
        raise SettingError(
            "parallel.mode",
            "shard",
            "with one process, there is nothing to spread weights over",
            remedy="start several",
        )


def stay_on_one_machine() -> None:
    """Let gloo and NCCL listen at the loopback address alone if all ranks are on this machine.

    By themselves they would listen on the network too. The user's choice of an interface wins."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback:
            os.environ.setdefault(variable, loopback[0])


def check_agreement(settings: Settings, ranks: Ranks) -> None:
    """Raise ValueError on every rank if some rank has other settings or code than rank 0."""
    content = asdict(settings)
    del content["tracking"]
    del content["runs"]
    content = json.loads(json.dumps(content, default=str))
    (settings_of_rank_0, code_of_rank_0), *others = ranks.all_gather((content, code_hash()))
    for rank, (other_settings, code) in enumerate(others, start=1):
        difference = first_difference(other_settings, settings_of_rank_0)
        if difference:
            raise ValueError(
                f"rank {rank} was started with other settings than rank 0: {difference}"
            )
        if code != code_of_rank_0:
            raise ValueError(
                f"rank {rank} runs other code than rank 0: "
                f"{code} against {code_of_rank_0} (SHA-256)"
            )


def code_hash() -> str:
    """Return a hash of this package's source files, 16 hexadecimal digits."""
    root = Path(gspo.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine exists and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        with suppress(OSError):
            os.kill(pid, 0)
            return not Path("/proc").exists()
        return False
    # the state follows the name, which is in parentheses and may hold any characters
    state = stat.rpartition(")")[2].split()[0]
    return state not in "ZX"


def leave_group() -> None:
    """Close the connections to the other processes, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
