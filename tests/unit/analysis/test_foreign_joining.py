"""Logs of one run in one folder are one run; logs that disagree stay two, with a note."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from foreign_logs import trl_row, verl_row, write_lines, write_state
from gspo.analysis import foreign_joining, load, sources
from gspo.analysis.foreign import ABOUT, read_foreign, read_foreign_runs, translated
from gspo.analysis.foreign_search import EVENTS, LINES, TRAINER_STATE, WANDB
from gspo.tracking.frameworks.columns import NOT_FINITE
from gspo.tracking.frameworks.translate import Log


def rewarded(step: int, start: int = 1) -> dict:
    """A row whose numbers tell the start that has written it."""
    return trl_row(step, reward=step / 7, entropy=0.4 / start)


def as_events(rows: list[dict]) -> list[dict]:
    """Records as TensorBoard's: float32, names with train/, and the step beside them."""
    records = []
    for row in rows:
        numbers = {f"train/{k}": float(np.float32(v)) for k, v in row.items() if k != "step"}
        records += [{"step": row["step"], name: value} for name, value in numbers.items()]
    return records


def state(folder: Path, rows: list[dict]) -> Log:
    file = write_state(folder / f"checkpoint-{rows[-1]['step']}" / "trainer_state.json", rows)
    return Log(file, TRAINER_STATE, rows, planned=100)


def start(folder: Path, time: int, rows: list[dict]) -> Log:
    (folder / "runs" / f"start_{9 - time}").mkdir(parents=True)
    (folder / "runs" / f"start_{9 - time}" / f"events.out.tfevents.{time}.host").touch()
    return Log(folder / "runs" / f"start_{9 - time}", EVENTS, as_events(rows))


def wandb(folder: Path, rows: list[dict], **config: object) -> Log:
    file = folder / "wandb" / "run-1-abc" / "run-abc.wandb"
    records = []
    for row in rows:
        numbers = {f"train/{name}": value for name, value in row.items() if name != "step"}
        records.append(numbers | {"train/global_step": row["step"], "train/extra": 1.5})
    return Log(file, WANDB, records, config=config)


def runs_of(*logs: Log):
    runs, unreadable = translated(list(logs))
    assert not unreadable
    return [run for run, _ in runs]


def rows_of(first: int, last: int, start: int = 1) -> list[dict]:
    return [rewarded(step, start) for step in range(first, last + 1)]


# ------------------------------------------------------------------------------------------------
# the same run
def test_three_trackers_and_two_starts_are_one_run(tmp_path):
    whole = rows_of(1, 8) + rows_of(9, 12, start=2)
    (run,) = runs_of(
        # the names of the folders sort otherwise than their starts
        start(tmp_path, 2, rows_of(9, 12, start=2)),
        start(tmp_path, 1, rows_of(1, 10)),
        wandb(tmp_path, whole, seed=7, importance_sampling_level="sequence"),
        state(tmp_path, whole),
    )
    assert [row["step"] for row in run.rows] == list(range(1, 13))
    alone = runs_of(state(tmp_path / "alone", whole))[0]
    for row, expected in zip(run.rows, alone.rows, strict=True):
        assert row["reward/mean"] == expected["reward/mean"], "the numbers that were not rounded"
        assert row["policy/entropy"] == expected["policy/entropy"] and row["trl/extra"] == 1.5
    assert run.settings["seed"] == 7 and run.objective == "gspo" and run.planned == 100
    assert run.kind == f"{TRAINER_STATE} and {WANDB} and {EVENTS}" and run.path.suffix == ".json"
    assert not run.dropped
    text = "\n".join(run.notes)
    numbers = len(trl_row(1)) - 1  # without the step
    agreeing = f"is of the same run: {12 * numbers} numbers agree, 12 were added"
    assert f"run-abc.wandb (a W&B file) {agreeing}" in text
    agreeing = f"is of the same run: {8 * numbers} numbers agree, 0 were added"
    assert f"start_8 (TensorBoard's event files) {agreeing}" in text
    assert "Its 2 steps from 9 on are left out: a later start wrote them again" in text


def test_what_comes_after_the_last_checkpoint_is_added(tmp_path):
    """A run that was killed at step 10, went on from checkpoint 8, and has no newer one."""
    logs = [start(tmp_path, 1, rows_of(1, 10)), start(tmp_path, 2, rows_of(9, 11, start=2))]
    (run,) = runs_of(*logs, state(tmp_path, rows_of(1, 8)))
    assert [row["step"] for row in run.rows] == list(range(1, 12))
    assert [row["policy/entropy"] for row in run.rows[8:]] == pytest.approx([0.2] * 3)
    assert any("begins after the last step, and continues the run" in note for note in run.notes)


def test_numbers_agree_up_to_rounding(tmp_path):
    numbers = {"reward": 1 / 3, "num_tokens": 123456789.0, "learning_rate": 1e-7, "kl": math.nan}
    rows = [trl_row(step, **numbers) for step in (1, 2)]
    (run,) = runs_of(state(tmp_path, rows), start(tmp_path, 1, rows))
    agreeing = f"{2 * (len(rows[0]) - 1)} numbers agree, 0 were added"
    assert any(agreeing in note for note in run.notes)
    assert run.dropped == {NOT_FINITE: 2} and sum("not finite" in note for note in run.notes) == 1


def test_event_files_without_a_number_are_noted(tmp_path):
    """transformers writes its hyperparameters into a folder below that of the start."""
    parameters = Log(tmp_path / "runs" / "start" / "1795827624.4", EVENTS)
    parameters.path.mkdir(parents=True)
    (run,) = runs_of(state(tmp_path, rows_of(1, 4)), parameters)
    assert any("event files without a record" in note for note in run.notes)


# ------------------------------------------------------------------------------------------------
# other runs
def test_logs_that_disagree_are_two_runs(tmp_path):
    other = rows_of(1, 4)
    other[2]["entropy"] = 0.7
    kept, odd = runs_of(state(tmp_path, rows_of(1, 4)), start(tmp_path, 1, other))
    assert len(kept.rows) == len(odd.rows) == 4 and odd.kind == EVENTS
    expected = "disagrees with it at step 3 (entropy is 0.4 there and 0.7 here), so they count as"
    assert any(expected in note for note in odd.notes)


def test_a_run_that_was_started_anew_is_another_run(tmp_path):
    whole = rows_of(1, 6, start=2)
    logs = [start(tmp_path, 1, rows_of(1, 3)), start(tmp_path, 2, whole), state(tmp_path, whole)]
    joined, first = runs_of(*logs)
    assert len(joined.rows) == 6 and len(first.rows) == 3
    assert any("a later start wrote all its steps again" in note for note in first.notes)


def test_only_logs_of_other_kinds_in_the_same_folder_are_joined(tmp_path):
    rows = rows_of(1, 4)
    starts = [start(tmp_path, time, rows) for time in (1, 2)]
    assert len(runs_of(*starts)) == 2, "event files alone"
    assert len(runs_of(state(tmp_path / "a", rows), start(tmp_path / "b", 1, rows))) == 2
    names = [dict(row) for row in rows]
    for row in names:
        row["step"] += 100
    (run,) = runs_of(state(tmp_path / "c", rows), start(tmp_path / "c", 1, names))
    assert len(run.rows) == 8, "it begins later"


def test_logs_of_two_frameworks_are_two_runs(tmp_path):
    verl = Log(tmp_path / "file.jsonl", "rows of JSON", [{"step": 1} | verl_row(1)])
    trl = Log(tmp_path / "trainer_state.json", TRAINER_STATE, rows_of(1, 2))
    assert [run.framework for run in runs_of(verl, trl)] == ["trl", "verl"]
    nothing = dataclasses.replace(verl, records=[{"step": 1, "mine": 1.0}])
    runs, unreadable = translated([nothing, trl])
    assert len(runs) == 1 and "prove no framework" in unreadable[0].notes[-1]


def test_disjoint_names_prove_nothing(tmp_path):
    rows = [{"step": step, "loss": 0.1} for step in (1, 2)]
    logs = [state(tmp_path, rows_of(1, 2)), start(tmp_path, 1, rows)]
    for record in logs[1].records:
        record["train/other"] = record.pop("train/loss")
    runs = foreign_joining.joined(logs, ["trl", "trl"])
    assert len(runs) == 2 and "no number in common" in runs[1][0].notes[-1]


# ------------------------------------------------------------------------------------------------
# as files
def write_events(folder: Path, time: int, rows: list[dict]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"events.out.tfevents.{time}.host.1.0", "wb") as file:
        writer = RecordWriter(file)
        for record in as_events(rows):
            step = record.pop("step")
            ((name, value),) = record.items()
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            writer.write(Event(step=step, summary=summary).SerializeToString())
        writer.flush()


def test_a_folder_of_trl(tmp_path):
    pytest.importorskip("tensorboard")
    whole = rows_of(1, 4) + rows_of(5, 6, start=2)
    write_state(tmp_path / "out" / "checkpoint-4" / "trainer_state.json", whole[:4])
    write_state(tmp_path / "out" / "checkpoint-6" / "trainer_state.json", whole)
    write_events(tmp_path / "out" / "runs" / "Nov30", 100, rows_of(1, 5))
    write_events(tmp_path / "out" / "runs" / "Dec01", 200, whole[4:])
    write_events(tmp_path / "out" / "runs" / "Dec01", 300, [])
    (tmp_path / "out" / ABOUT).write_text("seed: 3\nobjective: gspo\n")
    run = read_foreign(tmp_path / "out")
    assert [row["reward/mean"] for row in run.rows] == [step / 7 for step in range(1, 7)]
    (record,) = sources.records(tmp_path)
    assert record.settings["seed"] == 3 and len(record.rows) == 6
    assert [run.arm for run in load.load([tmp_path]).runs] == ["GSPO (TRL)"]
    # event files alone take foreign_run.yaml of the run's folder too
    (alone,) = load.load([tmp_path / "out" / "runs" / "Nov30"]).runs
    assert alone.seed == 3 and alone.arm == "GSPO (TRL)"


def test_two_logs_of_ms_swift(tmp_path):
    rows = [trl_row(step) | {"global_step/max_steps": f"{step}/160"} for step in (1, 2, 3)]
    write_state(tmp_path / "v0" / "checkpoint-3" / "trainer_state.json", rows)
    lines = [{k: v for k, v in row.items() if k != "step"} for row in rows]
    for line in lines:
        line["reward"] = round(line["reward"] + 4e-9, 8)
        line["memory(GiB)"] = 16.0
    write_lines(tmp_path / "v0" / "logging.jsonl", lines)
    runs, problems, _ = read_foreign_runs(tmp_path)
    assert not problems and len(runs) == 1 and runs[0].framework == "ms_swift"
    assert runs[0].planned == 100 and len(runs[0].rows) == 3


def test_the_folder_of_a_run(tmp_path):
    """runs/ holds the starts of a run, or runs."""
    files = {
        "out/checkpoint-6/trainer_state.json": "out",
        "out/runs/Nov30/events.out.tfevents.1": "out",
        "out/wandb/run-1-abc/run-abc.wandb": "out",
        "runs/a/file.jsonl": "runs/a",
        "wandb/a/trainer_state.json": "wandb/a",
    }
    for file, folder in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert foreign_joining.run_folder(path) == tmp_path / folder, file
    (tmp_path / "out" / "runs" / "Nov30" / "1795827624.4").mkdir()
    parameters = tmp_path / "out" / "runs" / "Nov30" / "1795827624.4"
    assert foreign_joining.run_folder(parameters) == tmp_path / "out"


def test_event_files_beside_another_log_belong_to_it(tmp_path):
    logs = []
    for number, name in enumerate(("a", "b")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        rows = [trl_row(step, reward=step / 7 + number) for step in (1, 2)]
        logs.append(Log(write_lines(folder / "file.jsonl", rows), LINES, rows))
        logs.append(Log(folder, EVENTS, as_events(rows)))
    first, second = runs_of(*logs)
    assert (first.path.parent.name, second.path.parent.name) == ("a", "b")
    assert not any("disagrees" in note for note in first.notes + second.notes)
