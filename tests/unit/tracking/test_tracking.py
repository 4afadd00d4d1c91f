"""Metrics file, offline W&B after a real SIGKILL, rollouts, registry, seeds."""

import doctest
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import forked
import gspo.data.seeding
import gspo.model.tokenizer
import gspo.train.diagnostics
from commands import environment, wandb_rows
from gspo.data.seeding import permutation, seed_for, uniform_rows
from gspo.io.errors import SettingError
from gspo.io.tables import clock
from gspo.tracking.metrics import METRICS, lookup
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.tracker import Progress, Tracker, read_rollouts, read_rows, supersede
from gspo.tracking.wandb_choice import check_variables, chosen_mode


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({"WANDB_MODE": "dryrun"}, "offline"),  # its name until W&B 0.10
        ({"WANDB_MODE": "run"}, "online"),
        ({"WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_DISABLED": "true"}, "disabled"),
        ({"WANDB_DISABLED": "false"}, "online"),
        ({}, "online"),
    ],
)
def test_the_mode_that_the_environment_chooses(monkeypatch, variables, mode):
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"WANDB_API_KEY": "0" * 40}).items():
        monkeypatch.setenv(name, value)
    assert chosen_mode("auto") == mode


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("WANDB_MODE", "Offline", "choose online, offline or disabled"),
        ("WANDB_MODE", "shared", "choose online, offline or disabled"),
        ("WANDB_PROJECT", "a/b", "W&B takes up to 128 characters"),
        ("WANDB_TAGS", "fine," + "x" * 80, "W&B takes tags of 1 to 64 characters"),
    ],
)
def test_a_variable_that_wandb_would_refuse_is_refused_before_a_run(
    monkeypatch, name, value, remedy
):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"^{name}=.*{remedy}"):
        check_variables(TrackingSettings())
    if name in ("WANDB_PROJECT", "WANDB_TAGS"):
        # the settings count in place of the environment
        check_variables(TrackingSettings(project="mine", tags=["mine"]))


DIES = """
import os, signal, sys, time
from pathlib import Path
from gspo.tracking.tracker import Tracker, read_rollouts
from gspo.tracking.settings import TrackingSettings
tracker = Tracker(Path(sys.argv[1]), TrackingSettings(wandb="offline"), {"seed": 1}, "group", ["tag"])
for step in range(6):
    tracker.log(step, {"reward/mean": step / 10}, None)
    time.sleep(0.1)
time.sleep(2.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_was_logged_seconds_before_a_kill_is_on_disk(tmp_path):
    done = forked.run([sys.executable, "-c", DIES, str(tmp_path)], env=environment())
    assert done.returncode == -9
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(6))
    assert [row["step"] for row in wandb_rows(tmp_path)] == list(range(6))


def test_a_metric_that_nobody_defined_is_refused_and_nan_becomes_null(tmp_path):
    tracker = Tracker(tmp_path, TrackingSettings(wandb="disabled"), {}, "g", [])
    with pytest.raises(KeyError, match="reward_mean"):
        tracker.log(1, {"reward_mean": 1.0}, None)
    tracker.log(1, {"reward/mean": math.nan, "optim/grad_norm": math.inf}, None)
    tracker.finish(0)
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": None, "optim/grad_norm": None}
    ]


def test_read_rows_leaves_out_a_line_that_was_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "rew')
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    assert read_rows(tmp_path / "nothing") == []


def test_supersede_splits_at_the_step(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"st'
    )
    for step in (2, 4):
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text("x")
    supersede(tmp_path, 3)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [row["step"] for row in read_rows(tmp_path / "superseded" / "1" / "metrics.jsonl")] == [
        4
    ]
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_000002.jsonl"]
    assert (tmp_path / "superseded" / "1" / "rollouts_step_000004.jsonl").exists()


def test_a_deleted_folder_of_superseded_entries_does_not_stop_the_next(tmp_path):
    (tmp_path / "superseded" / "2").mkdir(parents=True)  # the user has deleted superseded/1
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 4}\n')
    supersede(tmp_path, 3)
    assert (tmp_path / "superseded" / "3" / "metrics.jsonl").exists()


def test_supersede_takes_what_is_named_after_a_step_and_nothing_else(tmp_path):
    """An evaluation belongs to the step of its checkpoint; what users put beside stays where it is."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 4}\n')
    mine = [
        "notes/step_by_step.txt",
        "rollouts/step_5_by_hand.jsonl",
        "evaluations/step_x/result.json",
    ]
    earlier = [
        "evaluations/step_000004-28211d79a6/result.json",
        "checkpoints/step_000004/state.json",
    ]
    unfinished = ["checkpoints/step_000006.unfinished/state.json"]
    later = ["evaluations/step_000006-28211d79a6/result.json", "checkpoints/step_000006/state.json"]
    for name in mine + earlier + unfinished + later:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    supersede(tmp_path, 4)
    left = {
        str(p.relative_to(tmp_path))
        for p in tmp_path.rglob("*")
        if p.is_file() and "superseded" not in p.parts
    }
    assert left == {"metrics.jsonl", *mine, *earlier, *unfinished}
    assert (
        tmp_path / "superseded" / "1" / "evaluations_step_000006-28211d79a6" / "result.json"
    ).exists()
    assert (tmp_path / "superseded" / "1" / "checkpoints_step_000006" / "state.json").exists()


def test_progress_says_step_reward_and_time_left(capsys):
    progress = Progress("gspo seed 1", 10, 0, alone=False, seconds_between_lines=0.0)
    time.sleep(0.05)
    progress(5, reward=0.25)
    line = capsys.readouterr().out
    assert "step 5/10" in line and "reward 0.250" in line and "left" in line


@pytest.mark.parametrize(("seconds", "text"), [(59, "0:59"), (3599, "59:59"), (7200, "2:00:00")])
def test_a_duration_of_hours_has_hours(seconds, text):
    assert clock(seconds) == text


def test_the_registry_is_unambiguous_and_explained():
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    assert all(
        (m.unit or m.name == "custom/*") and m.meaning and m.summary in ("last", "max", "recent")
        for m in METRICS
    )
    assert lookup("eval/math_hard/avg@2").name == "eval/*/avg@*"
    assert lookup("clip/token_active_minibatch_3").name == "clip/token_active_minibatch_*"


def test_randomness_is_a_function_of_position():
    assert seed_for(1, "a", 2) != seed_for(1, "a", 3) != seed_for(2, "a", 3)
    assert seed_for("1") != seed_for(1)
    longer = uniform_rows(9, [(1, "x")])
    assert (uniform_rows(5, [(1, "x")]) == longer[:, :5]).all()
    positions = [(1, "x"), (1, "y"), ("1", "x", 2**70)]
    rows = uniform_rows(6, positions)
    for row, position in zip(rows, positions, strict=True):
        fresh = np.random.Generator(np.random.Philox(key=seed_for(*position)))
        assert (row == fresh.random(6)).all(), (
            "one generator that is started anew, or one for each position"
        )
    assert (
        sorted(permutation(7, 3)) == list(range(7))
        and (permutation(7, 3) == permutation(7, 3)).all()
    )


@pytest.mark.parametrize(
    "module", [gspo.data.seeding, gspo.train.diagnostics, gspo.model.tokenizer]
)
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_no_machine_paths_in_the_repository():
    root = Path(__file__).parents[3]
    files = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    home = str(Path.home())
    for name in files:
        if (root / name).suffix in (".py", ".yaml", ".yml", ".md", ".toml", ".txt", ""):
            assert home + "/" not in (root / name).read_text(), name


def test_what_a_summary_keeps_of_noisy_batches_is_the_last_and_the_mean_of_ten():
    kept = {
        name: lookup(name).summary
        for name in ("reward/mean", "reward/math", "clip/token_active", "eval/x/avg@2")
    }
    assert kept == {
        "reward/mean": "recent",
        "reward/math": "recent",
        "clip/token_active": "recent",
        "eval/x/avg@2": "max",
    }
    assert {
        lookup(name).summary
        for name in ("step", "compute/tokens", "eval/x/stderr", "optim/updates")
    } == {"last"}


SUMMARISED = """
import json, sys
from pathlib import Path
from gspo.tracking.tracker import Tracker, read_rollouts
from gspo.tracking.settings import TrackingSettings
for last in (12, 14):  # and resumed
    tracker = Tracker(Path(sys.argv[1]), TrackingSettings(wandb="offline"), {"seed": 1}, "group", ["tag"])
    for step in range(last - 1 if last == 14 else 1, last + 1):
        score = {"eval/x/avg@2": 0.9 if step == 4 else 0.1} if step % 4 == 0 else {}
        tracker.log(step, {"reward/mean": step / 10, "compute/tokens": step} | score, None)
    summary = tracker.wandb.run.summary
    print(json.dumps({"recent": dict(summary["mean_of_last_10"]), "best": dict(summary["eval/x/avg@2"])}))
    tracker.finish(0)
"""


@pytest.mark.slow
def test_a_summary_by_hand(tmp_path):
    done = forked.run([sys.executable, "-c", SUMMARISED, str(tmp_path)], env=environment())
    first, resumed = (json.loads(line) for line in done.stdout.splitlines())
    # .3 to 1.2
    assert first == {
        "recent": {"reward/mean": pytest.approx(0.75)},
        "best": {"last": 0.1, "max": 0.9},
    }
    assert resumed == {
        "recent": {"reward/mean": pytest.approx(0.95)},
        "best": {"last": 0.1, "max": 0.9},
    }


def test_damaged_lines_of_saved_responses_are_left_out(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    assert read_rollouts(path) == []
    path.write_text('{"reward": 1.0}\n[1]\nno JSON\n{"reward": 0.5}\n{"rewa')
    assert read_rollouts(path) == [{"reward": 1.0}, {"reward": 0.5}]
