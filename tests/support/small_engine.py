"""A small object for a process of its own: what vLLM's would do to the trainer, without vLLM."""

import os
import signal
import subprocess
import sys
import time


class Small:
    def __init__(self, how: str = ""):
        if how == "refuses":
            raise ValueError("no room\nsecond line")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        self.below = None

    def echo(self, data: bytes) -> bytes:
        return data

    def fail(self) -> None:
        raise KeyError("a name")

    def where(self) -> tuple[int, int, str]:
        """Process, session, folder of temporary files."""
        return os.getpid(), os.getsid(0), os.environ["TMPDIR"]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> int:
        """A process below that holds all that this one holds, as a forked worker does."""
        self.below = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False
        )
        return self.below.pid

    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    def leave(self, code: int) -> None:
        os._exit(code)

    def close(self) -> None:
        if self.below:
            self.below.terminate()
