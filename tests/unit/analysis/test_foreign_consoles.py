"""Consoles of TRL, ms-swift, slime and ROLL: the lines that people keep and paste into issues."""

import json
import math

import pytest

from foreign_logs import trl_row, write_state
from gspo.analysis.foreign import read_foreign, read_foreign_runs

SLIME_BATCH = {"rollout/raw_reward": 0.25, "rollout/response_len/mean": 900.5}
SLIME_PERF = {"perf/rollout_time": 12.5}
SLIME_STEP = {"train/pg_clipfrac": 0.01, "train/lr-pg_0": 1e-6, "train/grad_norm": 0.5}
ROLL_ROW = {"critic/score/mean": 0.5, "critic/correct/mean": 0.25, "actor_train/grad_norm": 0.4}


def without_step(step: int, **changes: object) -> dict:
    row = trl_row(step, **changes)
    del row["step"]
    return row


def test_trl_prints_no_step_so_rows_are_numbered(tmp_path):
    lines = ["Loading model", "  5%|5         | 1/20 [00:10<03:10, 10.00s/it]"]
    lines += [str(without_step(step)) for step in range(1, 4)]
    lines.append(str({"eval_loss": 0.1, "eval_reward": 0.5, "epoch": 0.03}))
    lines.append("\r 20%|##        | 4/20 [00:40<02:40]" + str(without_step(4)))
    lines.append(str({"train_runtime": 44.0, "train_loss": 0.1, "epoch": 0.04}))
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines))
    run = read_foreign(file)
    assert run.framework == "trl"
    assert [row["step"] for row in run.rows if "reward/mean" in row] == [1, 2, 3, 4]
    assert run.rows[3]["reward/mean"] == pytest.approx(0.504)
    assert any("so they are numbered" in note for note in run.notes)


def test_a_resumed_run_of_trl_and_lines_that_stand_twice(tmp_path):
    def row(step: int, reward: float) -> str:
        return str(without_step(step, reward=reward, epoch=step / 10))

    lines = [row(step, 0.1) for step in range(1, 7)] + [row(step, 0.9) for step in range(4, 9)]
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines))
    run = read_foreign(file)
    assert [row["step"] for row in run.rows] == list(range(1, 9))
    assert [row["reward/mean"] for row in run.rows] == [0.1] * 3 + [0.9] * 5
    assert any("go back to 4, as those of a resumed run do" in note for note in run.notes)
    # two nodes of a cluster print each row
    file.write_text("\n".join(line for line in lines[:6] for _ in range(2)))
    doubled = read_foreign(file)
    assert [row["step"] for row in doubled.rows] == list(range(1, 7))
    assert "left out: 6 rows that are equal to the row above them" in doubled.notes


def test_numbers_that_are_not_finite_are_read_as_they_are_printed(tmp_path):
    norms = [math.inf, math.nan, -math.inf, 0.5]
    rows = [
        {"step": step, "metrics": ROLL_ROW | {"actor_train/grad_norm": norm}}
        for step, norm in enumerate(norms)
    ]
    file = tmp_path / "roll.log"
    file.write_text("\n".join(f"metrics_tag: {json.dumps(row)}" for row in rows))
    read = [row["optim/grad_norm"] for row in read_foreign(file).rows]
    assert all(map(math.isnan, read[:3])) and read[3] == 0.5


def test_a_first_row_behind_much_other_output_is_found(tmp_path):
    file = tmp_path / "slurm-1.out"
    rows = [str(without_step(step)) for step in (1, 2)]
    file.write_text("\n".join(["x" * 99] * 50_000 + rows))
    assert len(read_foreign(tmp_path).rows) == 2


def test_numbers_in_quotes_are_numbers(tmp_path):
    """transformers 5 prints its numbers as texts."""
    rows = [{name: str(value) for name, value in without_step(step).items()} for step in (1, 2)]
    file = tmp_path / "train.txt"
    file.write_text("\n".join(map(str, rows)))
    run = read_foreign(file)
    assert [row["reward/mean"] for row in run.rows] == pytest.approx([0.501, 0.502])


def test_ms_swift_prints_its_step_as_a_text(tmp_path):
    rows = []
    for step in (5, 10):
        text = {"global_step/max_steps": f"{step}/160", "elapsed_time": "1m 29s"}
        rows.append(without_step(step) | text | {"memory(GiB)": 56.74})
    file = tmp_path / "train.log"
    file.write_text("\n".join(map(str, rows)))
    run = read_foreign(file, updates_per_batch=1)
    assert run.framework == "ms_swift" and [row["step"] for row in run.rows] == [5, 10]
    assert run.planned == 160 and not any("numbered" in note for note in run.notes)


def test_slime_has_an_axis_per_kind_of_line(tmp_path):
    lines = []
    for batch in (0, 1):
        head = f"(RolloutManager pid=1805485) [2026-04-15 07:57:53] rollout.py:1193 - perf {batch}:"
        lines.append(f"\x1b[36m{head}\x1b[0m {SLIME_PERF}")
        lines.append(f"data.py:101 - rollout {batch}: {SLIME_BATCH}")
        for update in (2 * batch, 2 * batch + 1):
            lines.append(f"model.py:5 - step {update}: {SLIME_STEP}")
    file = tmp_path / "job.out"
    file.write_text("\n".join(lines))
    run = read_foreign(file, updates_per_batch=2)
    assert run.framework == "slime" and [row["step"] for row in run.rows] == [1, 2]
    for row in run.rows:
        assert row["reward/mean"] == 0.25 and row["time/rollout_s"] == 12.5
        assert row["optim/grad_norm"] == 0.5


def test_roll_prints_json_after_a_tag(tmp_path):
    lines = []
    for step in (0, 1, 2):
        text = json.dumps({"step": step, "metrics": ROLL_ROW})
        lines.append(f"[2026-04-15] [tracking.py (97)] [INFO] metrics_tag: {text}")
    file = tmp_path / "roll.log"
    file.write_text("\n".join(lines))
    run = read_foreign(file)
    assert run.framework == "roll" and [row["step"] for row in run.rows] == [1, 2, 3]
    assert run.rows[0]["reward/mean"] == 0.5


def test_other_mappings_are_no_rows(tmp_path):
    file = tmp_path / "train.log"
    lines = ["config: {'lr': 1e-5, 'epochs': 3}", '{"loss": 0.5}', "{'epoch'", "x" * 5000]
    file.write_text("\n".join(lines))
    runs, problems, _ = read_foreign_runs(tmp_path)
    why = "no line of its first 64 MB is a row as verl, TRL, ms-swift, slime or ROLL print it"
    assert runs == [] and why in problems[0]


def test_a_console_without_steps_stands_back_behind_other_logs(tmp_path):
    rows = [trl_row(step) for step in range(1, 5)]
    write_state(tmp_path / "checkpoint-4" / "trainer_state.json", rows)
    lines = [str(without_step(step)) for step in range(1, 5)]
    (tmp_path / "train.log").write_text("\n".join(lines))
    [run], problems, notes = read_foreign_runs(tmp_path)
    assert run.path.name != "train.log" and len(run.rows) == 4
    assert not problems and any("whose rows have no step" in note for note in notes)


@pytest.mark.parametrize("part", ["{'", "'a' ", "'a':", "{'a': {'", "'a': '1', "])
def test_hostile_lines_end(tmp_path, part):
    """A search that tries every start for every end would take hours."""
    row = without_step(1, entropy=math.nan)
    file = tmp_path / "train.log"
    file.write_text("{'" + part * 200_000 + "\n" + str(row) + "\n")
    run = read_foreign(file)
    assert [row["step"] for row in run.rows] == [1]
