"""Sweeps that would lose their failures: jobs in several studies, globs, launchers of single jobs,
errors of our own callback."""

import subprocess
import sys

import pytest

import forked
from commands import SMALL, environment
from gspo.run.sweep_state import jobs
from gspo.tracking.tracker import read_rows

TRAIN = [sys.executable, "-P", "-m", "gspo", "train"]
OWN = [
    o for o in SMALL if not o.startswith(("study=", "steps=", "checkpoint.", "evaluation.every="))
]
TYPED = [*TRAIN, "-m", *OWN, "evaluation.every=0", "tracking.wandb=disabled"]


def swept(folder, *words: str):
    return forked.run([*TYPED, *words], cwd=folder, env=environment())


@pytest.mark.slow
def test_every_study_of_a_sweep_has_its_plan_and_its_failures_end_in_exit_code_1(tmp_path):
    done = swept(tmp_path, "study=one,two", "advantage=glob([gae,rloo])", "steps=1,2")
    assert done.returncode == 1 and "4 of the jobs did not finish" in done.stderr, done.stderr[
        -3000:
    ]
    assert done.stderr.count("objective=gspo: has one advantage per response, advantage=gae") == 4
    assert "one, two: 2 of 2 runs, 4 of 4 steps" in done.stdout, "the longer of steps=1,2 is made"
    for name in ("one", "two"):
        found = jobs(tmp_path / "runs" / name)
        assert sorted(job.state for job in found) == ["failed"] * 4 + ["finished"], (
            "the failures have no study"
        )
        (finished,) = [job for job in found if job.state == "finished"]
        assert finished.steps == 2
        assert read_rows(tmp_path / "runs" / name / finished.run / "metrics.jsonl")[-1]["step"] == 2


@pytest.mark.slow
def test_a_launcher_that_a_jobs_file_chooses_is_refused_before_any_job(tmp_path):
    file = tmp_path / "own" / "experiment" / "with_joblib.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: joblib\nseed: 1\n"
    )
    done = forked.run(
        [*TRAIN, "-cd", "own", "-m", *OWN, "experiment=with_joblib,tiny_moe"],
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    last = done.stderr.splitlines()[-1]
    assert (
        last.startswith("error: the files of the job ")
        and "experiment=with_joblib choose JoblibLauncher" in last
    )
    assert last.endswith("here BasicLauncher: set hydra/launcher=... on the command line")


@pytest.mark.slow
def test_what_goes_wrong_in_our_callback_ends_the_sweep_with_the_reason(tmp_path):
    """Hydra alone would make a warning of it, and exit with 0."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "small").write_text("a file in the place of the study's folder")
    done = swept(tmp_path, "study=small", "steps=1", "seed=1,2")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert (
        done.stderr.splitlines()[-1].startswith("error: ")
        and "runs/small" in done.stderr.splitlines()[-1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "figure --help", "train --help"])
def test_a_reader_that_has_read_enough_is_no_error(tmp_path, words):
    line = f"{sys.executable} -m gspo.cli.main {words} | head -1"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
