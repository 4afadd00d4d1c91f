"""What a sweep plans: a dry run shows it and writes nothing; jobs that are the same run are run
once.
"""

import json
import sys

import pytest

import forked
from commands import SMALL, environment
from gspo.run.sweep_state import forecast, jobs, own_overrides

TRAIN = [sys.executable, "-P", "-m", "gspo", "train"]


def planned(*overrides: str, folder: str, **more) -> dict:
    return {
        "overrides": ["steps=2", *overrides],
        "run": folder.split("/")[-1],
        "folder": folder,
        "steps": 2,
        **more,
    }


def test_a_forecast_says_of_every_job_what_it_would_do(tmp_path):
    done = tmp_path / "s" / "gspo-seed1-a"
    done.mkdir(parents=True)
    (done / "settings.yaml").write_text("steps: 2")
    (done / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    plan = [
        planned("seed=1", folder=str(done)),
        planned("seed=2", folder=str(tmp_path / "s" / "gspo-seed2-b")),
        {
            "overrides": ["steps=2", "seed=3"],
            "run": "steps=2 seed=3",
            "reason": "optim.lr=inf: must be a finite number",
        },
        planned("seed=1", "preset=trl", folder=str(done), same_as=0),
    ]
    lines = forecast(plan).splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["0", "finished"],
        ["1", "missing"],
        ["2", "wrong"],
        ["3", "repeated"],
    ]
    assert (
        "optim.lr=inf: must be a finite number" in lines[2]
        and lines[1].endswith("seed=2")
        and "2/2" in lines[0]
    )
    assert lines[3].endswith("seed=1 preset=trl: the same run as job 0")
    assert lines[4].startswith("4 jobs: 1 finished, 1 missing, 1 wrong, 1 repeated")
    assert own_overrides(plan, 3) == ["seed=1", "preset=trl"]
    assert own_overrides(plan[:1], 0) == ["steps=2", "seed=1"]


@pytest.mark.slow
def test_a_dry_run_without_m_prints_its_run_and_no_warning(tmp_path):
    dry_run = ["experiment=micro_moe", "dry_run=true"]
    done = forked.run([*TRAIN, *dry_run], cwd=tmp_path, env=environment())
    assert done.returncode == 0 and done.stdout.startswith("0  missing  0/100"), done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_a_dry_run_of_a_sweep_prints_its_jobs_and_writes_nothing(tmp_path):
    sweep = [
        "-m",
        "experiment=micro_moe",
        "preset=trl,ms_swift",
        "optim.lr=1e-4,-1",
        "dry_run=true",
        "study=s",
    ]
    done = forked.run([*TRAIN, *sweep], cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    states = [line.split()[1] for line in done.stdout.splitlines()[:4]]
    assert states == ["missing", "wrong", "repeated", "wrong"], done.stdout
    assert "optim.lr=-1.0: must be a finite number of at least 0" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ("optim.lr=1e-4,abc", "optim.lr=abc: must be a number"),
        ("objective=grpo,gspoo", "objective=gspoo: there is no such option; the nearest is gspo"),
    ],
)
def test_a_value_that_hydra_refuses_is_a_line_before_anything_is_written(tmp_path, values, refusal):
    """Hydra composes all jobs before the first. A dry run must promise nothing else."""
    sweep = [*TRAIN, "-m", "experiment=micro_moe", "study=s", values]
    done = forked.run([*sweep, "dry_run=true"], cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "2 jobs: 1 missing, 1 wrong; without dry_run=true none is started"
    )
    done = forked.run(sweep, cwd=tmp_path, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {refusal}") and done.stderr.count("\n") == 1
    assert "(job 1 of 2); no job was started" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["two_jobs", "basic"])
def test_two_presets_that_are_one_run_are_run_once_and_it_is_said(tmp_path, launcher):
    small = [o for o in SMALL if not o.startswith(("study=", "steps="))]
    command = [
        *TRAIN,
        "-m",
        *small,
        "study=s",
        "steps=2",
        "preset=trl,ms_swift",
        f"hydra/launcher={launcher}",
    ]
    done = forked.run(command, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "job 1 (preset=ms_swift) is the same run as job 0 (preset=trl), runs/s/gspo_trl-preset_trl-seed1-"
        in done.stdout
    )
    assert (
        "job 1 is the same run as job 0 (preset=trl)" in done.stdout
        and "nothing is left to do" in done.stdout
    )
    (run,) = (tmp_path / "runs" / "s").glob("gspo_trl-*")
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()][
        -1
    ] == 2
    (job,) = jobs(tmp_path / "runs" / "s")
    assert job.state == "finished" and "preset=trl" in job.overrides
