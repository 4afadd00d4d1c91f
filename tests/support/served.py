"""Starts a vLLM server by `gspo serve`, as a user does, and ends it."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

from commands import environment

SECONDS = 400  # until it answers, on a busy machine


def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def served(folder: Path, url: str, *words: str) -> Iterator[subprocess.Popen]:
    """Within: a server at this address, which answers. `words` are those of the run."""
    command = [sys.executable, "-P", "-m", "gspo", "serve", *words]
    command += ["rollout=vllm_server", f"rollout.url={url}", "threads=1"]
    with open(folder / "server.log", "w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        server = subprocess.Popen(
            command, cwd=folder, env=environment(), start_new_session=True, **streams
        )
    try:
        deadline = time.monotonic() + SECONDS
        while not answers(url):
            assert server.poll() is None and time.monotonic() < deadline, (
                folder / "server.log"
            ).read_text()[-3000:]
            time.sleep(0.5)
        yield server
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
