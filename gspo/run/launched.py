"""What this process knows of the others that its run was started as, before they have found each
other.

torchrun tells each process its rank in the environment, and so does `join_scheduler` for the tasks
of one job of submitit. Rank 0 writes the run's directory and speaks to the user; the others
compute, and are silent.

An error may be known to one rank alone, and torchrun ends all ranks when the first has failed. So
the first rank of a machine that knows an error prints it before it exits (`say_error`), and hands
it to torchrun, which shows it last.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# torchrun names a file in which each rank may say why it failed
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SAID = "said"  # beside the folders of these files: made by the rank that has printed an error


def launched() -> int:
    """Return how many processes this run was started as."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() else 1


def is_follower() -> bool:
    """Return whether this process is one of the ranks that write nothing and are silent."""
    return launched() > 1 and os.environ.get("RANK", "0") != "0"


def join_scheduler() -> bool:
    """Let the tasks of a job of submitit, where it has several, be the processes of one run, and
    return whether they are: `hydra.launcher.tasks_per_node=8`. Call this before anything asks how
    many processes there are."""
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


def say_error(text: str, is_more: bool = False) -> None:
    """Print an error of a run on the standard error. Of several ranks one prints it: the first that
    knows it, and rank 0 also if it has more to say (`is_more`) than a rank before it."""
    if launched() == 1:
        print(text, file=sys.stderr)
        return
    is_first = speaks()
    if is_first or (is_more and not is_follower()):
        print(text, file=sys.__stderr__, flush=True)
    if ERROR_FILE in os.environ:
        last = text.splitlines()[-1]
        # torchrun shows what stands for the stack
        about = {"py_callstack": last, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            content = json.dumps({"message": {"message": last, "extraInfo": about}})
            Path(os.environ[ERROR_FILE]).write_text(content, encoding="utf-8")


def speaks() -> bool:
    """Return whether this rank is the one that prints an error: the first of its machine to know
    one, under torchrun. Other launchers have no folder for the ranks of a machine. There rank 0
    speaks, and of each other machine the rank that is its first."""
    if ERROR_FILE not in os.environ:
        return not is_follower() or os.environ.get("LOCAL_RANK") == "0"
    try:
        (Path(os.environ[ERROR_FILE]).parents[1] / SAID).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return not is_follower()
    return True


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
        said = traceback.format_exc().rstrip()
        last = said.splitlines()[-1]
        say_error(f"{said}\nerror: rank {os.environ.get('RANK')}: {last}")
        leave(1)
    leave(0)


def leave(code: int) -> None:
    """End a process of several. Their connections are not taken down in order, which at times
    aborts in the attempt.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
