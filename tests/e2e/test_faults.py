"""Faults, each for real: damaged checkpoints and rows, a full disk, W&B out of reach, a policy that
collapses.

What was computed before is kept, one line says what happened, and a run that goes on ends as one
that met no fault.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import forked
from commands import ROOT, SMALL, comparable, environment, evaluate, only_run, train, wandb_rows
from gspo.data.step_record_files import recorded_steps
from gspo.tracking.tracker import read_rows


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Twelve steps without a fault."""
    folder = tmp_path_factory.mktemp("straight")
    done = train(folder, *SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    return only_run(folder)


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory) -> Path:
    """The folder of a run that stands at step 8, with checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("eight")
    done = train(folder, *SMALL, "steps=8")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def at_eight(eight_steps, tmp_path) -> Path:
    shutil.copytree(eight_steps / "runs", tmp_path / "runs")
    return tmp_path


def resumed(folder: Path, steps: int = 12) -> subprocess.CompletedProcess:
    return train(folder, f"resume={only_run(folder).relative_to(folder)}", f"steps={steps}")


def same_end(run: Path, straight: Path) -> bool:
    ends = [
        load_file(folder / "checkpoints" / "step_000012" / "model.safetensors")
        for folder in (run, straight)
    ]
    assert ends[0].keys() == ends[1].keys()
    return all(torch.equal(ends[0][key], ends[1][key]) for key in ends[1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("model.safetensors", flip_a_bit, "model.safetensors is not as it was written"),
        ("optimizer.pt", cut_in_half, "optimizer.pt is not as it was written"),
        ("state.json", Path.unlink, "state.json is missing"),
        ("checksums.json", cut_in_half, "checksums.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    at_eight, straight, name, damage, said
):
    run = only_run(at_eight)
    damage(run / "checkpoints" / "step_000008" / name)
    done = resumed(at_eight)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        said in done.stderr
        and "step_000008 is damaged" in done.stderr
        and "going back to step_000006" in done.stderr
    )
    assert comparable(run) == comparable(straight) and same_end(run, straight)
    attic = run / "superseded" / "1"
    assert [row["step"] for row in read_rows(attic / "metrics.jsonl")] == [7, 8]
    assert (attic / "checkpoints_step_000008").is_dir()


@pytest.mark.slow
def test_without_a_whole_checkpoint_one_line_says_what_to_do(at_eight):
    run = only_run(at_eight)
    for step in (6, 8):
        flip_a_bit(run / "checkpoints" / f"step_{step:06d}" / "optimizer.pt")
    before = (run / "metrics.jsonl").read_bytes()
    done = resumed(at_eight)
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "no whole checkpoint is left: move" in done.stderr
    )
    assert (run / "metrics.jsonl").read_bytes() == before


def without_monitor(rows: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in row.items() if not name.startswith("monitor/")}
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tail", "lost"),
    [
        (b'{"step": 9, "reward/me', ""),
        (b"\x00\xff\x13\n", ""),
        (None, "the rows of steps 8 are lost"),
    ],
    ids=["cut short", "garbage", "a row"],
)
def test_a_damaged_end_of_the_rows_costs_those_rows_alone(at_eight, straight, tail, lost):
    run = only_run(at_eight)
    rows = run / "metrics.jsonl"
    data = rows.read_bytes()
    rows.write_bytes(data + tail if tail else data[: data.rindex(b'"', 0, -20)] + b"\x07\n")
    done = resumed(at_eight)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("metrics.jsonl was damaged" in done.stderr) == bool(lost) and lost in done.stderr
    expected = [row for row in comparable(straight) if not lost or row["step"] != 8]
    # it counts the rows that it has
    assert without_monitor(comparable(run)) == without_monitor(expected)
    assert same_end(run, straight)
    assert (run / "superseded" / "1" / "damaged_metrics.jsonl").exists()


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_computed(straight, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    try:
        done = train(disk, *SMALL, "tracking.wandb=disabled", "checkpoint.keep=0")
        assert done.returncode == 1 and "No space left on device" in done.stderr
        assert (
            "what was written is kept" in done.stderr.splitlines()[-1]
            and "Traceback" not in done.stderr
        )
        run = only_run(disk)
        kept = comparable(run)
        assert 0 < len(kept) < 13 and kept == comparable(straight)[: len(kept)]
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        done = train(disk, f"resume={run.relative_to(disk)}", "steps=12")
        assert done.returncode == 0, done.stderr[-3000:]
        assert comparable(run) == comparable(straight) and same_end(run, straight)
        assert not list(run.rglob("*.unfinished"))
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    done = train(tmp_path, *SMALL)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "runs" in done.stderr


@pytest.mark.slow
def test_wandb_out_of_reach_is_tracked_offline(tmp_path, straight):
    unreachable = {
        "WANDB_API_KEY": "0" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_INIT_TIMEOUT": "5",
    }
    done = train(tmp_path, *SMALL, "tracking.wandb=online", account=unreachable)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "W&B cannot be reached or refuses, tracking goes on offline" in done.stderr
        and "wandb sync" in done.stdout
    )
    run = only_run(tmp_path)
    assert comparable(run) == comparable(straight)
    assert [row["step"] for row in wandb_rows(run)] == list(range(13))


LR, FIRST_WRONG_STEP = 1e-3, 12
COLLAPSING = [*SMALL, "steps=45", f"optim.lr={LR}", "evaluation.every=1000"]
# after n wrong steps the smoothed reward is 0.5 w 0.9^n / (w 0.9^n + 1 + ... + 0.9^(n-1)), w = 1 +
# ... + 0.9^10 = 6.86: 0.87, 0.75 and 0.65 of its peak. From the third on it has fallen, and the
# monitor acts after 20 such steps.
FALL_STEP = FIRST_WRONG_STEP + 2
FALLEN_STEP = FALL_STEP + 19
FORCED = [str(FIRST_WRONG_STEP), str(LR)]


def train_falling(cwd: Path, *overrides: str) -> subprocess.CompletedProcess:
    """A run whose every response is wrong from FIRST_WRONG_STEP on, as long as its learning rate is
    LR.
    """
    script = [sys.executable, str(ROOT / "tests/support/falling.py"), *FORCED, *overrides]
    return forked.run(script, cwd=cwd, env=environment())


@pytest.mark.slow
def test_a_policy_that_collapses_is_noticed_reported_and_stopped(tmp_path):
    done = train_falling(tmp_path, *COLLAPSING, "monitor.action=stop")
    assert done.returncode == 4, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "Error executing" not in done.stderr
    run = only_run(tmp_path)
    events = [json.loads(line) for line in (run / "monitor.jsonl").read_text().splitlines()]
    last = read_rows(run / "metrics.jsonl")[-1]
    assert events[-1]["kind"] == "fallen" and events[-1]["step"] == last["step"] == FALLEN_STEP
    assert last["monitor/fallen"] == 1
    warned = [
        event["step"]
        for event in events
        if event["signal"] == "reward_fall" and event["kind"] == "warning"
    ]
    assert warned == [FALL_STEP], "warned before"
    assert (run / "checkpoints" / "latest").read_text() == f"step_{last['step']:06d}"
    assert json.loads((run / "status.json").read_text())["how"] == "collapsed"
    said = "the monitor ended the run 20 steps into a fall"
    assert said in (run / "report.txt").read_text() and said in done.stdout
    offline = next(run.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    assert b"has been below 0.7 x its peak" in offline, "wandb.alert"
    more = train_falling(
        tmp_path, f"resume={run.relative_to(tmp_path)}", f"steps={last['step'] + 3}"
    )
    assert more.returncode == 0, "who resumes it has been told"
    again = [json.loads(line) for line in (run / "monitor.jsonl").read_text().splitlines()]
    assert [event for event in again if event["kind"] == "fallen"] == events[-1:], (
        "and is not told again"
    )


@pytest.mark.slow
def test_a_rollback_goes_on_from_a_healthy_step_at_a_lower_rate_also_when_killed_in_between(
    tmp_path,
):
    rollback = [
        *COLLAPSING,
        "monitor.action=rollback",
        "monitor.rollbacks=1",
        "monitor.rollback_lr=0.5",
        "tracking.record_last=2",
    ]
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    done = train_falling(tmp_path / "straight", *rollback)
    assert done.returncode == 0, done.stderr[-3000:]
    run = only_run(tmp_path / "straight")
    (back,) = json.loads((run / "rollbacks.json").read_text())
    assert (back["from"], back["to"]) == (FALLEN_STEP, 10), (
        "from a healthy step, the newest that has a checkpoint"
    )
    assert (
        back["moved"]
        and f"rolled back from step {back['from']} to step {back['to']}" in done.stderr
    )
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(46))
    assert all(row["reward/mean"] == 0.5 for row in rows[1:]), (
        "it goes on earning, at the lower rate"
    )
    assert not rows[-1]["monitor/fallen"]
    # the lowered rate has another hash, but the records stay in the run's own directory
    assert recorded_steps(run)[-2:] == [44, 45]
    assert [rows[step]["optim/lr"] for step in (back["to"], back["to"] + 1)] == pytest.approx(
        [LR, LR / 2]
    )
    seen = wandb_rows(run)
    assert [row["optim/lr"] for row in seen[1:]] == [row["optim/lr"] for row in rows[1:]], (
        "a W&B run of its own, whole"
    )
    assert len({p.name.rsplit("-", 1)[1] for p in run.glob("wandb/offline-run-*")}) == 2
    attic = read_rows(run / "superseded" / "1" / "metrics.jsonl")
    assert [row["step"] for row in attic] == list(range(back["to"] + 1, back["from"] + 1))
    folder = tmp_path / "killed"
    assert train_falling(folder, *rollback, "steps=12").returncode == 0
    assert evaluate(only_run(folder)).returncode == 0, (
        "what an evaluation leaves in the run is in nobody's way"
    )
    go_on = [f"resume={only_run(folder).relative_to(folder)}", "steps=45"]
    killer = [
        sys.executable,
        str(ROOT / "tests/support/killer.py"),
        "rollback.decided",
        "13",
        "--falling",
        *FORCED,
        *go_on,
    ]
    killed = forked.run(killer, cwd=folder, env=environment())
    assert killed.returncode == -9 and (folder / "killed_in").exists(), killed.stderr[-3000:]
    assert not json.loads((only_run(folder) / "rollbacks.json").read_text())[0]["moved"]
    done = train_falling(folder, f"resume={only_run(folder).relative_to(folder)}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert comparable(only_run(folder)) == comparable(run)
    assert [p.name[:23] for p in (only_run(folder) / "superseded" / "1").glob("evaluations_*")] == [
        "evaluations_step_000012"
    ]
    last = [
        folder / "checkpoints" / "step_000045" / "model.safetensors"
        for folder in (run, only_run(folder))
    ]
    assert last[0].read_bytes() == last[1].read_bytes()


REWARDS = """
from pathlib import Path

def score(prompt, response, row):
    asked = Path("asked")
    count = int(asked.read_text()) if asked.exists() else 0
    asked.write_text(str(count + 1))
    if Path("down").exists() and count >= 80:
        raise OSError("the server is down")
    return float("1" in response)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [[], ["rollout.staleness=1", "rollout.overlap=true"]])
def test_a_server_that_grades_nothing_costs_no_step(ahead, tmp_path):
    """Between two checkpoints the rewards' server goes down, and comes back."""
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "down").touch()
    options = [
        o for o in SMALL if not o.startswith(("task=", "evaluation.", "checkpoint.", "cold"))
    ]
    options += ["task=rows", "task.train_path=rows.jsonl", "task.reward=rewards:score", *ahead]
    options += ["reward.truncated=null", "evaluation.every=0", "checkpoint.every=100"]
    options += ["cold_start.steps=0"]
    broken = train(tmp_path, *options)
    assert broken.returncode == 1 and "OSError: the server is down" in broken.stderr
    rows_before = read_rows(only_run(tmp_path) / "metrics.jsonl")
    last_step = rows_before[-1]["step"]
    assert 2 <= last_step <= 5
    latest = (only_run(tmp_path) / "checkpoints" / "latest").read_text()
    assert latest == f"step_{last_step:06d}"
    (tmp_path / "down").unlink()
    again = train(tmp_path, *options)
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"begins after step {last_step} of 12" in again.stdout
    rows_after = read_rows(only_run(tmp_path) / "metrics.jsonl")
    assert rows_after[: len(rows_before)] == rows_before and rows_after[-1]["step"] == 12
