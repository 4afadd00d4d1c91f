"""The ranks of the tests (tests/support/ranked.py): where they come from, what they know, how their
ends are told.
"""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ranked import ranked

HERE = "as it was imported"


def whose(ranks) -> tuple[int, str]:
    return ranks.rank, HERE


def ancestors(count: int) -> list[int]:
    """The processes above this one, from its parent on."""
    found = [os.getpid()]
    for _ in range(count):
        found.append(int(Path(f"/proc/{found[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
    return found[1:]


def others(pid: int) -> list[str]:
    """The names of a process's threads beside its first."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [(task / "comm").read_text().strip() for task in tasks if task.name != str(pid)]


def test_no_process_that_ranks_are_forked_from_has_computed():
    """OpenMP keeps its threads once it has used two or more. The last one is the server of the
    forked scripts.
    """
    lineage = ranked(
        1, lambda ranks: [(Path(f"/proc/{p}/cmdline").read_text(), others(p)) for p in ancestors(3)]
    )[0]
    assert all("forked.py" in command for command, _ in lineage), "none is this process"
    assert {name for _, names in lineage for name in names} <= {"jemalloc_bg_thd"}, "pyarrow's"


def test_ranks_have_the_environment_and_what_the_function_names(monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    told = {"closure": object(), "more": [1, 2]}

    def found(ranks):
        assert sorted(told) == ["closure", "more"]
        return os.environ["OF_THE_TEST"], os.getcwd(), whose(ranks), ranks.all_gather(ranks.rank)

    assert ranked(2, found) == [("seen", str(tmp_path), (i, HERE), [0, 1]) for i in (0, 1)]


def test_a_rank_that_fails_or_is_killed_is_named():
    def end(ranks):
        if ranks.rank == 0:
            raise KeyError("missing")
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if ranks.rank == 2:
            os._exit(7)

    with pytest.raises(AssertionError) as caught:
        ranked(4, end)
    text = str(caught.value)
    assert "rank 0 fails:\nTraceback" in text and "KeyError: 'missing'" in text
    assert (
        "rank 1 was ended by SIGKILL" in text
        and "rank 2 ended with exit code 7" in text
        and "rank 3" not in text
    )


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_what_its_threads_do():
    def hang(ranks):
        if ranks.rank == 1:
            thread = threading.Thread(target=lambda: time.sleep(600))
            thread.start()
            thread.join()

    with pytest.raises(AssertionError) as caught:
        ranked(2, hang, seconds=10)
    text = str(caught.value)
    assert "rank 1 hangs after 10 s:\n" in text and "rank 0" not in text
    assert f'File "{__file__}", line' in text and " in hang" in text and " in <lambda>" in text
