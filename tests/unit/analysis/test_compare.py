"""`gspo compare` on runs whose numbers are known."""

import subprocess
import sys

import pytest

import forked
from recorded_runs import COLLAPSED, HEALTHY, write


def compare(*paths) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "gspo", "compare", *map(str, paths)]
    return forked.run(command)


def test_settings_that_differ_and_what_the_runs_did(tmp_path):
    healthy = write(tmp_path, "gspo", HEALTHY)
    collapsed = write(tmp_path, "grpo", COLLAPSED, optim__lr=0.5)
    (collapsed / "status.json").write_text('{"how": "stopped"}')
    done = compare(healthy, collapsed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [f"[1] {healthy}", f"[2] {collapsed}"], (
        "as they were given"
    )
    rows = {
        line.split("  ")[0]: line.split("  ", 1)[1]
        for line in done.stdout.splitlines()[4:]
        if "  " in line
    }
    cells = {
        name: [cell.strip() for cell in row.split("  ") if cell.strip()]
        for name, row in rows.items()
    }
    assert cells["optim.lr"] == ["0.0001", "0.5"] and cells["objective.name"] == ["gspo", "grpo"]
    assert not {"seed", "rollout.staleness", "trainer.minibatches"} & set(cells), (
        "what is equal is left out"
    )
    assert (
        cells["ended"][1].startswith("stopped; collapsed at step 3")
        and cells["ended"][0] == "finished"
    )
    assert cells["reward, last 10"] == ["0.500 [0.500, 0.500]", "0.100 [0.100, 0.100]"]
    assert cells["clipped tokens"] == ["0.2", "0.001"] and cells["tokens of a response"] == [
        "14.0",
        "14.0",
    ]
    assert "entropy" not in cells, "nobody reported it"


@pytest.mark.slow
def test_a_run_without_rewards_at_its_end_has_no_last_reward(tmp_path):
    """The log of a run that diverged holds rewards that are no number."""
    diverged = [0.4] * 50 + [None] * 40
    runs = [write(tmp_path, "gspo", HEALTHY), write(tmp_path, "grpo", diverged)]
    lines = compare(*runs).stdout.splitlines()
    (reward,) = [line for line in lines if line.startswith("reward, last 10")]
    assert reward.endswith("0.500 [0.500, 0.500]  none after batch 50")
    more = [write(tmp_path, "grpo", rewards, seed=2) for rewards in (HEALTHY,)]
    more += [write(tmp_path, "gspo", HEALTHY, seed=seed) for seed in (2, 3, 4, 5, 6, 7)]
    lines = compare(*runs, *more).stdout.splitlines()
    assert any("0.500 [no interval], 1 without" in line for line in lines), lines


def test_a_score_stands_with_its_95_percent_interval(tmp_path):
    runs = [write(tmp_path, name, HEALTHY) for name in ("gspo", "grpo")]
    for run in runs:
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 91, "eval/math/avg@2": 0.7, "eval/math/stderr": 0.05}\n')
    assert (
        "eval/math/avg@2, last ± 95 % (best)  0.700 ± 0.098 (0.700)  0.700 ± 0.098 (0.700)\n"
        in compare(*runs).stdout
    )


@pytest.mark.slow
def test_one_run_or_none_is_one_line(tmp_path):
    run = write(tmp_path, "gspo", HEALTHY)
    for paths in ([run], [tmp_path / "nowhere", run]):
        done = compare(*paths)
        assert (
            done.returncode == 2
            and done.stderr.startswith("error: ")
            and done.stderr.count("\n") == 1
        )
    assert compare("--help").returncode == 0 and compare().returncode == 2


def test_a_named_folder_without_runs_is_said(tmp_path):
    runs = [write(tmp_path, name, HEALTHY) for name in ("gspo", "grpo")]
    (tmp_path / "empty").mkdir()
    done = compare(*runs, tmp_path / "empty")
    assert done.returncode == 0, done.stderr
    assert f"note: left out: {tmp_path / 'empty'}, it holds no run" in done.stdout


@pytest.mark.slow
def test_many_runs_are_summarised_by_groups_of_seeds(tmp_path):
    runs = [write(tmp_path, "gspo", HEALTHY, seed=seed) for seed in range(7)]
    runs += [write(tmp_path, "grpo", COLLAPSED, seed=seed, optim__lr=0.5) for seed in range(6)]
    lines = compare(*runs).stdout.splitlines()
    assert lines[0] == "13 runs in 2 groups that differ in more than the seed (all=true: every run)"
    names, best, worst = (
        [cell.strip() for cell in row.split("  ") if cell.strip()] for row in lines[2:5]
    )
    score = "eval/math/avg@2, last"
    assert names == ["objective", "runs", "reward, last 10", score, "ended"], (
        "lr varies with the objective and tells no more"
    )
    last = "0.100 [0.100, 0.100]"
    assert best == ["gspo", "7", "0.500 [0.500, 0.500]", last, "7 finished"]
    assert worst == ["grpo", "6", "0.100 [0.100, 0.100]", last, "6 collapsed"]
    assert len(lines) == 5
    assert f"[1] {runs[0]}" in compare(*runs, "all=true").stdout.splitlines()


@pytest.mark.slow
def test_many_runs_without_groups_have_a_line_each(tmp_path):
    runs = [write(tmp_path, "gspo", HEALTHY, optim__lr=1e-4 * k) for k in range(1, 14)]
    lines = compare(*runs).stdout.splitlines()
    assert lines[0].startswith("13 runs (all=true") and len(lines) == 2 + 1 + 13


def test_options_of_runs_are_refused_with_evaluations(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "responses").mkdir(parents=True)
    done = compare(tmp_path / "a", tmp_path / "b", "where.optim.lr=1")
    assert done.returncode == 2 and "where.* and all= are about runs" in done.stderr


@pytest.mark.slow
def test_some_runs_have_a_line_each_and_can_be_chosen_by_a_setting(tmp_path):
    for seed in range(3):
        for lr in (1e-4, 0.5):
            write(tmp_path, "gspo", HEALTHY, seed=seed, optim__lr=lr)
    lines = compare(tmp_path).stdout.splitlines()
    assert lines[0] == "6 runs in 2 groups that differ in more than the seed (all=true: every run)"
    assert lines[6] == "6 runs (all=true: everything of every run)" and lines[8].split()[:2] == [
        "lr",
        "seed",
    ]
    assert len(lines) == 15
    assert max(map(len, lines)) <= 100
    chosen = compare(tmp_path, "where.optim.lr=.5").stdout.splitlines()
    assert len([line for line in chosen if line.startswith("[")]) == 3
    none = compare(tmp_path, "where.optim.lr=7")
    assert (
        none.returncode == 2
        and none.stderr == "error: where.optim.lr=7: no run has it; there are 0.0001, 0.5\n"
    )
    assert (
        compare(tmp_path, "--where", "optim.lr=7").stderr
        == "error: --where: options have no dashes; set where.optim.lr=7\n"
    )


def test_a_run_that_was_killed_is_not_running(tmp_path):
    runs = [write(tmp_path, "gspo", HEALTHY), write(tmp_path, "grpo", HEALTHY)]
    (runs[0] / "status.json").write_text('{"how": "running"}')
    (ended,) = (line for line in compare(*runs).stdout.splitlines() if line.startswith("ended"))
    assert ended.split() == ["ended", "died", "finished"]
