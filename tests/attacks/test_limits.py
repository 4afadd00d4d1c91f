"""Few file descriptors, a very long temporary folder, names that are not UTF-8: the machine is what
it is.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from commands import ROOT, SMALL, environment

CHECK = """
from gspo.rewards.sandbox.runner import CodeRunner, Limits
from gspo.rewards.sandbox.self_test import run_probes
with CodeRunner(Limits(cpu_seconds=5, wall_seconds=20), slots=2) as runner:
    states = runner.each(lambda slot, _: {**slot.layers(), **run_probes(slot)}, [None])[0]
    states["a program"] = str(runner.each(lambda slot, code: slot.run_program(code, ""), ["print(6 * 7)"])[0][0])
print(*(f"{name}: {state}" for name, state in states.items()), sep="\\n")
"""


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def check(folder: Path, limit: bool, **environment: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        preexec_fn=few_descriptors if limit else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_programs_run_and_are_confined_where_few_descriptors_and_long_folders_are_all_there_is(
    tmp_path,
):
    usual = check(tmp_path, limit=False)
    assert "42" in usual["a program"]
    long = tmp_path / ("d" * 200)
    long.mkdir()
    few = check(tmp_path, limit=True, TMPDIR=str(long))
    for states in (usual, few):
        states.pop("user", None)  # a number of its own
    assert few == usual and not list(long.iterdir())


@pytest.mark.slow
def test_a_run_in_a_folder_whose_name_is_not_utf_8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()

    def called(cwd: Path, command: str, *arguments: str) -> subprocess.CompletedProcess:
        return forked.run(
            [sys.executable, "-P", "-m", "gspo", command, *arguments], cwd=cwd, env=environment()
        )

    done = called(folder, "train", *SMALL, "steps=2", "task=code")
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (folder / "runs" / "small").glob("*-seed*")
    for script, *arguments in (
        ("report", str(run)),
        ("sweep-status", str(run.parent)),
        ("figures", str(run.parent), f"out={folder / 'figures'}"),
        ("study-report", str(run.parent), f"out={folder / 'figures'}"),
    ):
        done = called(tmp_path, script, *arguments)
        assert done.returncode == 0, (script, done.stderr[-3000:])
    # Hydra's grammar knows characters alone
    done = called(tmp_path, "sample", f"run={run}")
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "is not UTF-8, and a setting" in done.stderr
    )
    assert called(run, "sample", "run=.").returncode == 0


@pytest.mark.slow
def test_a_temporary_folder_whose_name_is_not_utf_8_is_refused(tmp_path):
    code = "from gspo.run.entry_point import command_line; command_line(lambda: print('it runs'))"
    there = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and not done.stdout
    assert done.stderr.startswith(b"error: TMPDIR=") and b"caf\\udce9 is not UTF-8" in done.stderr
