"""Few file descriptors, a very long temporary folder, names that are not UTF-8: the machine is what it is."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from test_runs import ROOT, SMALL, environment

CHECK = """
from gspo.rewards.code_runner import CodeRunner, Limits
from gspo.rewards.sandbox_check import self_test
with CodeRunner(Limits(cpu_seconds=5, wall_seconds=20), slots=2) as runner:
    states = self_test(runner)
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


def test_programs_run_and_are_confined_where_few_descriptors_and_long_folders_are_all_there_is(tmp_path):
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
    there = environment() | {"TMPDIR": str(folder)}
    runs = []
    for script, *arguments in (
        ("experiments/train.py", *SMALL, "steps=2", "task=code"),
        ("experiments/report.py", "RUN"),
        ("experiments/sample.py", "run=."),
        ("experiments/sweep_status.py", "STUDY"),
        ("analysis/reproduce.py", "STUDY", "--out", "FOLDER/figures"),
    ):
        names = (
            {"RUN": f"run={runs[0]}", "STUDY": f"{runs[0].parent}", "FOLDER/figures": str(folder / "figures")}
            if runs
            else {}
        )
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *(names.get(argument, argument) for argument in arguments)],
            cwd=runs[0] if script.endswith("sample.py") else folder,
            env=there,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (script, done.stderr.decode(errors="replace")[-3000:])
        runs = runs or sorted((folder / "runs" / "small").glob("*-seed*"))
