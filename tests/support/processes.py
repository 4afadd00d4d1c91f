"""Whether processes are there, which files they hold open and where they listen."""

import os
import time
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process has ended after at most so many seconds."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def open_files(pid: int) -> list[str]:
    """What each open file descriptor of a process points to: a path, or `socket:[inode]`.

    A descriptor that the process closes while they are read is left out.
    """
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.append(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    return targets


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """The addresses on which these processes accept connections, in hexadecimal as the kernel
    writes them.

    All processes are in the network namespace of the first.
    """
    pids = list(pids)
    sockets = {target for pid in pids for target in open_files(pid)}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            listens = columns[3] == "0A"
            if listens and f"socket:[{columns[9]}]" in sockets:
                addresses.add(columns[1].split(":")[0])
    return addresses
