"""How much memory a process takes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def anonymous_bytes() -> int:
    """What this process holds in memory beside files that are mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))
    )


@contextmanager
def peak() -> Iterator[list[int]]:
    """Measures by how many bytes this process grows at most, from 2 to 2 milliseconds."""
    start, ended, found = anonymous_bytes(), threading.Event(), [0]

    def watch():
        while not ended.wait(0.002):
            found[0] = max(found[0], anonymous_bytes() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        found[0] = max(found[0], anonymous_bytes() - start)
        ended.set()
        thread.join()
