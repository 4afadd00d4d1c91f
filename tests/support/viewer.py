"""The viewer of runs as a process."""

import signal
import subprocess
import sys
from pathlib import Path

from commands import environment


class Viewer:
    """`gspo view` as a user starts it, until Ctrl-C."""

    def __init__(self, cwd: Path, *arguments: str, **variables: str):
        program = [sys.executable, "-P", "-m", "gspo", "view", *arguments, "open=false"]
        self.process = subprocess.Popen(
            program,
            cwd=cwd,
            env=environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # background jobs of a shell ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.said = []
        while not self.said or "Ctrl-C" not in self.said[-1]:
            line = self.process.stdout.readline()
            assert line, "".join(self.said)
            self.said.append(line)
        self.address = self.said[-1].split()[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.rest = self.process.communicate(timeout=30)[0]
