"""The launch of this process: its rank and the number of ranks, before they have met.

torchrun tells each process its rank in the environment, and so does `join_scheduler` for the tasks
of one job of submitit. Rank 0 writes the run's directory and prints. The others compute, and are
silent.

Perhaps only one rank knows of an error, and torchrun ends all ranks when the first has failed. So
the first rank of a machine that knows an error prints it before it exits (`say_error`). It also
gives the error to torchrun, which prints it last.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# torchrun names a file in which each rank may write why it failed
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# beside the folders of these files: the rank that prints an error makes this file
ERROR_PRINTED_FILE = "said"


def process_count() -> int:
    """Return how many processes this run was started as."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() else 1


def is_follower() -> bool:
    """Return whether this process is a rank other than 0, which writes nothing and is silent."""
    return process_count() > 1 and os.environ.get("RANK", "0") != "0"


def join_scheduler() -> bool:
    """Make the tasks of a job of submitit the ranks of one run, and return whether they are.

    A job has several tasks with `hydra.launcher.tasks_per_node=8`. Call this before
    `process_count`."""
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
    """Let this process print nothing from now on, except the messages of `Peers`."""
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def say_error(text: str, is_more: bool = False) -> None:
    """Print an error of a run on the standard error, for all ranks of a run.

    The first rank that knows the error prints it. Rank 0 prints it too if it knows more (`is_more`)
    than a rank before it."""
    if process_count() == 1:
        print(text, file=sys.stderr)
        return
    is_first = claims_first_error()
    if is_first or (is_more and not is_follower()):
        print(text, file=sys.__stderr__, flush=True)
    if ERROR_FILE in os.environ:
        last = text.splitlines()[-1]
        # torchrun prints the text in the place of the stack
        extra = {"py_callstack": last, "timestamp": str(int(time.time()))}
        content = json.dumps({"message": {"message": last, "extraInfo": extra}})
        with suppress(OSError):
            Path(os.environ[ERROR_FILE]).write_text(content, encoding="utf-8")


def claims_first_error() -> bool:
    """Return whether this rank is the first of its machine to know an error, under torchrun.

    Other launchers have no folder for the ranks of a machine. Then it is rank 0, and on each other
    machine its first rank."""
    if ERROR_FILE not in os.environ:
        return not is_follower() or os.environ.get("LOCAL_RANK") == "0"
    try:
        (Path(os.environ[ERROR_FILE]).parents[1] / ERROR_PRINTED_FILE).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return not is_follower()
    return True


def as_rank(main: Callable[[], None]) -> None:
    """Call an entry point, and end this process afterwards if there are several ranks."""
    if process_count() == 1:
        main()
        return
    try:
        main()
    except SystemExit as error:
        end_process(error.code if isinstance(error.code, int) else bool(error.code))
    except BaseException:
        text = traceback.format_exc().rstrip()
        last = text.splitlines()[-1]
        say_error(f"{text}\nerror: rank {os.environ.get('RANK')}: {last}")
        end_process(1)
    end_process(0)


def end_process(code: int) -> None:
    """End a rank at once, since closing the connections in order sometimes aborts."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
