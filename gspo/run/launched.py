"""What this process knows of the others that its run was started as, before they have found each other.

torchrun tells each process its rank in the environment, and so does `join_scheduler` for the tasks of one job of
submitit. Rank 0 writes the run's directory and speaks to the user; the others compute, and are silent.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress


def launched() -> int:
    """Return how many processes this run was started as."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() else 1


def is_follower() -> bool:
    """Return whether this process is one of the ranks that write nothing and are silent."""
    return launched() > 1 and os.environ.get("RANK", "0") != "0"


def join_scheduler() -> bool:
    """Let the tasks of a job of submitit, where it has several, be the processes of one run, and return whether they
    are: `hydra.launcher.tasks_per_node=8`. Call this before anything asks how many processes there are."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return False
    from submitit import JobEnvironment
    from submitit.helpers import TorchDistributedEnvironment

    if JobEnvironment().num_tasks == 1:
        return False
    TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    if is_follower():
        silence()
    return True


def silence() -> None:
    """Let this process print nothing from now on; what `Peers` has to say still appears."""
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def as_rank(main: Callable[[], None]) -> None:
    """Call an entry point, which ends this process itself where it is one of several."""
    if launched() == 1:
        main()
        return
    try:
        main()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else bool(end.code))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def leave(code: int) -> None:
    """End a process of several. Their connections are not taken down in order, which at times aborts in the attempt."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
