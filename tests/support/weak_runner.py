"""A runner that confines nothing, behind the interface of CodeRunner: the attack suite must see the
attacks succeed.
"""

import os
import signal
import subprocess
import sys
import tempfile

from gspo.rewards.sandbox.session import Limits, ProgramEnd


class WeakRunner:
    """Runs a program as `python -c` with everything that the harness has. It is its own and only
    slot.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def each(self, work, items):
        return [work(self, item) for item in items]

    def close(self) -> None:
        pass

    def run_program(
        self, code: str, stdin: str, limits: Limits | None = None
    ) -> tuple[bytes, ProgramEnd]:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as written:
            given.write(stdin.encode())
            given.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=given,
                stdout=written,
                stderr=subprocess.DEVNULL,
                close_fds=False,
                start_new_session=True,
            )
            try:
                # the programs of the suite end by themselves before that
                status = process.wait(timeout=12)
                why = "exit"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status, why = process.wait(), "timeout"
            return os.pread(written.fileno(), 1 << 24, 0), ProgramEnd(why, status)
