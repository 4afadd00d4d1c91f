"""Runs the program as several ranks, each a real process forked from one that has imported
everything.

    done = launch(tmp_path, 2, "parallel.mode=replicate", *SMALL)
    launch(tmp_path, 2, ..., scripts={1: ["tests/support/killer.py", "update.backward", "3"]})     another
                                                                                                   for
                                                                                                   rank
                                                                                                   1

As a script it is the parent of the ranks. It tells each its rank, as torchrun does, and lets them
end by themselves.
"""

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ != "__main__":
    import forked
    from commands import environment

SECONDS = 120


@dataclass
class Rank:
    """How a rank ended."""

    code: int  # negative: the signal that killed it
    out: str
    err: str
    seconds: float  # from the start of all to its end


def launch(
    cwd: Path,
    count: int,
    *overrides: str,
    scripts: dict[int, list[str]] | None = None,
    extra: dict[int, list[str]] | None = None,
    env: dict[int, dict[str, str]] | None = None,
    seconds: int = SECONDS,
) -> list[Rank]:
    """Run `count` ranks in a folder to their ends, which must come within so many seconds. Of
    single ranks `scripts` names another script than `gspo train` with its first arguments, `extra`
    further settings, and `env` further variables ("" removes one)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(count):
        script = (scripts or {}).get(rank, ["-P", "-m", "gspo", "train"])
        told = {
            "RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        told = {key: str(value) for key, value in told.items()} | (env or {}).get(rank, {})
        files = [f"rank{rank}.out", f"rank{rank}.err"]
        ranks.append(
            {
                "argv": [*script, *overrides, *(extra or {}).get(rank, [])],
                "told": told,
                "files": files,
            }
        )
    command = [sys.executable, __file__, json.dumps(ranks), str(seconds - 20)]
    done = forked.run(command, cwd=cwd, env=environment(), seconds=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = json.loads(done.stdout.splitlines()[-1])
    texts = [[(cwd / name).read_text() for name in rank["files"]] for rank in ranks]
    return [Rank(code, *text, seconds) for (code, seconds), text in zip(ends, texts, strict=True)]


def main() -> None:
    from forked import _become

    started, numbers, ends = time.monotonic(), {}, {}
    for number, rank in enumerate(json.loads(sys.argv[1])):
        for name in rank["files"]:
            Path(name).write_text("")
        if pid := os.fork():
            numbers[pid] = number
            continue
        env = {key: value for key, value in {**os.environ, **rank["told"]}.items() if value != ""}
        files = ["/dev/null", *rank["files"]]
        os._exit(_become(rank["argv"], os.getcwd(), env, files, int(sys.argv[2])))
    while len(ends) < len(numbers):
        pid, status = os.wait()
        ends[numbers[pid]] = (os.waitstatus_to_exitcode(status), time.monotonic() - started)
    print(json.dumps([ends[number] for number in range(len(ends))]))


if __name__ == "__main__":
    main()
