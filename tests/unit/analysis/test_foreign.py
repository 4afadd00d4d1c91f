"""Logs of other frameworks as files: found, read within bounds, and loaded like runs of ours."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from foreign_logs import (
    OTHER_ROWS,
    ROOT,
    SAMPLES,
    ms_swift_line,
    needs_samples,
    prime_rl_rows,
    slime_rows,
    trl_row,
    verl_row,
    write_lines,
    write_state,
)
from gspo.analysis import (
    event_frames,
    fig_curves,
    foreign_files,
    foreign_search,
    load,
    sources,
    wandb_files,
)
from gspo.analysis.foreign import ABOUT, read_foreign, read_foreign_runs
from gspo.cli import compare, report, view
from gspo.io import untrusted
from gspo.tracking.foreign_options import ForeignOptions
from recorded_runs import HEALTHY, write


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ------------------------------------------------------------------------------------------------
# the real samples
@needs_samples
def test_the_real_log_of_trl():
    run = read_foreign(SAMPLES / "trl_grpo_unsloth_trainer_state.json")
    assert run.framework == "trl" and len(run.rows) == 50 and run.batches_per_row == 5
    assert run.rows[0]["reward/mean"] == pytest.approx(0.62023756) and run.planned == 250
    assert not run.unknown() and not run.dropped
    data = load.load([SAMPLES / "trl_grpo_unsloth_trainer_state.json"])
    assert data.runs[0].collapsed == 130, "each row counts for its 5 steps"
    assert data.arms == ["not logged, foreign_logs/trl_grpo_unsloth_trainer_state (TRL)"]
    assert not load.lost_steps(data.runs[0])


@needs_samples
def test_the_real_log_of_verl():
    run = read_foreign(SAMPLES / "verl_gspo_file_logger.jsonl", objective="gspo")
    assert run.framework == "verl" and len(run.rows) == 3 and run.rows[0]["clip/token_active"] == 0
    assert "length/truncated" not in run.rows[0], "1/128 in every row is the padded width"
    assert all("seqratio" in name for name in run.unknown()), "the author's own"


@needs_samples
def test_the_real_log_of_a_trainer_of_the_authors_own_is_refused_with_its_names():
    with pytest.raises(ValueError, match=r"790 records: its names .*_runtime.* prove no framework"):
        read_foreign(SAMPLES / "gspo_custom_wandb_history.jsonl")
    with pytest.raises(load.RunsError, match="prove no framework"):
        load.load([SAMPLES / "gspo_custom_wandb_history.jsonl"])


# ------------------------------------------------------------------------------------------------
# every container
def test_checkpoints_hold_one_run(tmp_path):
    rows = [trl_row(step) for step in range(10, 60, 10)]
    write_state(tmp_path / "checkpoint-20" / "trainer_state.json", rows[:2])
    write_state(tmp_path / "checkpoint-50" / "trainer_state.json", rows)
    assert [row["step"] for row in read_foreign(tmp_path).rows] == [10, 20, 30, 40, 50]
    single = {"log_history": [trl_row(10)], "logging_steps": 10, "max_steps": 12}
    (tmp_path / "single").mkdir()
    file = tmp_path / "single" / "trainer_state.json"
    file.write_text(json.dumps(single))
    assert read_foreign(file).batches_per_row == 10, "12 steps, logging_steps 10: a single row"
    file.unlink()
    (record,) = sources.records(tmp_path)
    assert record.settings["steps"] == 100 and record.settings["framework"] == "TRL"


def test_the_state_with_the_most_steps_counts_and_not_the_outermost(tmp_path):
    """A run that ended at step 50, and was resumed with more steps and killed after its step 90."""

    def state(file: Path, steps: int) -> Path:
        write_state(file, [trl_row(step) for step in range(1, steps + 1)])
        content = {"global_step": steps} | json.loads(file.read_text())
        file.write_text(json.dumps(content, sort_keys=True, indent=2))
        return file

    state(tmp_path / "checkpoint-50" / "trainer_state.json", 50)
    state(tmp_path / "trainer_state.json", 50)
    newest = state(tmp_path / "checkpoint-90" / "trainer_state.json", 90)
    assert len(read_foreign(tmp_path).rows) == 90
    # the last state of a whole run stands beside its checkpoints
    state(tmp_path / "trainer_state.json", 90)
    assert read_foreign(tmp_path).path == tmp_path / "trainer_state.json"
    # what an earlier run left behind
    (tmp_path / "trainer_state.json").unlink()
    os.utime(newest, (1e9, 1e9))
    (note,) = [note for note in read_foreign(tmp_path).notes if "written later" in note]
    assert "checkpoint-90" in note and "checkpoint-50" in note and "name it alone" in note


def test_a_damaged_newest_state_does_not_hide_an_intact_older_one(tmp_path):
    rows = [trl_row(step) for step in range(1, 16)]
    write_state(tmp_path / "checkpoint-10" / "trainer_state.json", rows[:10])
    newest = tmp_path / "checkpoint-15" / "trainer_state.json"
    write_state(newest, rows)
    whole = newest.read_text()
    for cut, expected in ((0.3, 10), (whole.index("[") + 1, 10), (0.9, 13)):
        end = cut if isinstance(cut, int) else int(cut * len(whole))
        newest.write_text(whole[:end])
        run = read_foreign(tmp_path)
        assert len(run.rows) == expected, cut
        if expected == 10:
            assert run.planned == 100
            assert any("checkpoint-15" in note and "is damaged, so" in note for note in run.notes)


def test_training_that_begins_at_step_0_loses_no_row(tmp_path):
    """prime-rl's steps began at 0. An evaluation before the first update is no such step."""
    rows = [row for step in range(4) for row in prime_rl_rows(step)]
    run = read_foreign(write_lines(tmp_path / "zero.jsonl", rows))
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert any("begins at step 0, which counts as the first" in note for note in run.notes)
    run = read_foreign(write_lines(tmp_path / "one.jsonl", [{"step": 0, "eval/x": 1.0}, *rows[2:]]))
    assert [row["step"] for row in run.rows if "optim/grad_norm" in row] == [1, 2, 3]


def test_rows_that_are_means_over_parts_of_batches_lose_no_batch(tmp_path):
    rows = [trl_row(step) for step in range(5, 65, 5)]
    write_state(tmp_path / "trainer_state.json", rows)
    content = json.loads((tmp_path / "trainer_state.json").read_text()) | {"logging_steps": 5}
    (tmp_path / "trainer_state.json").write_text(json.dumps(content))
    run = read_foreign(tmp_path / "trainer_state.json", updates_per_batch=4)
    assert run.batches_per_row == 2
    assert not any(note.startswith("lost") for note in run.notes)


def test_an_export_with_nulls_has_the_rows_of_the_log_itself(tmp_path):
    """pandas writes null where a record lacks a column's name."""
    for name, records in (
        ("prime", [row for step in range(1, 5) for row in prime_rl_rows(step)]),
        ("slime", [row for rollout in range(4) for row in slime_rows(rollout)]),
        ("trl", [*map(trl_row, range(1, 5)), {"step": 4, "eval_reward": 0.7}]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        whole = read_foreign(write_lines(folder / "log.jsonl", records))
        exported = folder / "exported.jsonl"
        pd.DataFrame(records).to_json(exported, orient="records", lines=True)
        run = read_foreign(exported)
        assert len(run.rows) == len(whole.rows) and not run.dropped
        for row, expected in zip(run.rows, whole.rows, strict=True):
            assert row == pytest.approx(expected)
        assert any("nulls mean no number" in note for note in run.notes)
    # in any other log a null is a number that was not finite
    records = [trl_row(1), trl_row(2, kl=None), trl_row(3)]
    write_state(tmp_path / "trainer_state.json", records)
    assert math.isnan(read_foreign(tmp_path / "trainer_state.json").rows[1]["kl/ref_k3"])


def test_numbers_that_are_not_finite_may_be_spelled_as_text(tmp_path):
    rows = [
        {"step": step, "data": verl_row(step, **{"actor/grad_norm": spelled})}
        for step, spelled in enumerate((0.5, "NaN", "Infinity", "-Infinity"), start=1)
    ]
    run = read_foreign(write_lines(tmp_path / "log.jsonl", rows))
    norms = [row["optim/grad_norm"] for row in run.rows]
    assert norms[0] == 0.5 and all(map(math.isnan, norms[1:]))


def test_json_lines(tmp_path):
    rows = [row for step in (1, 2) for row in prime_rl_rows(step)]
    prime = read_foreign(write_lines(tmp_path / "metrics.jsonl", rows))
    assert prime.framework == "prime_rl" and len(prime.rows) == 2
    lines = [ms_swift_line(step) for step in (10, 20)]
    lines.append({"global_step": 20, "log_history": [{"step": 10}], "best_metric": 0.1})
    swift = read_foreign(write_lines(tmp_path / "logging.jsonl", lines))
    assert swift.framework == "ms_swift" and swift.planned == 160 and len(swift.rows) == 2
    logged = [{"step": step, "data": verl_row(step)} for step in (1, 2)]
    verl = read_foreign(write_lines(tmp_path / "experiment.jsonl", logged))
    assert verl.framework == "verl" and len(verl.rows) == 2
    with pytest.raises(ValueError, match="holds 3 logs: name one"):
        read_foreign(tmp_path)


def test_a_console(tmp_path):
    lines = ["(TaskRunner pid=12) some words - and: more", "step:x - nothing"]
    for step in (1, 2):
        pairs = " - ".join(f"{name}:{value}" for name, value in verl_row(step).items())
        lines.append(f"\x1b[36m(TaskRunner pid=12)\x1b[0m step:{step} - {pairs} - odd part")
    lines.append("step:3 - critic/score/mean:np.float64(0.25) - actor/pg_loss:nan")
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines))
    verl = read_foreign(file)
    assert [row["step"] for row in verl.rows] == [1, 2, 3] and verl.rows[2]["reward/mean"] == 0.25
    assert math.isnan(verl.rows[2]["verl/actor/pg_loss"])
    assert any("2 parts of lines" in note for note in verl.notes)


def event_folder(folder, rows, step_key):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for row in rows:
            for name, value in row.items():
                if isinstance(value, float):
                    writer.add_scalar(name, value, int(row[step_key]))
        writer.add_text("args", "not a number")
    return folder


def test_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    rows = [{f"train/{name}": v for name, v in trl_row(step).items()} for step in range(1, 4)]
    folder = event_folder(tmp_path / "runs" / "host", rows, "train/step")
    trl = read_foreign(folder)
    assert trl.framework == "trl" and [row["step"] for row in trl.rows] == [1, 2, 3]
    assert trl.rows[0]["reward/mean"] == pytest.approx(0.501)
    (file,) = folder.iterdir()
    assert read_foreign(file).rows == trl.rows
    file.write_bytes(file.read_bytes()[:-700])
    cut = read_foreign(folder)
    assert 0 < len(cut.rows) <= 3 and any("cut or damaged at byte" in note for note in cut.notes)
    whole = file.read_bytes()
    file.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    damaged = read_foreign(folder)
    assert any("events are read" in note for note in damaged.notes)
    rolled = event_folder(tmp_path / "roll", [OTHER_ROWS["roll"]], "step")
    assert read_foreign(rolled).rows[0]["step"] == 1


LOG_WANDB = """
import json, os, sys
import wandb
rows = json.loads(sys.stdin.read())
run = wandb.init(project="p", dir=sys.argv[1], mode="offline", config=json.loads(sys.argv[2]))
for row in rows:
    run.log(row)
run.finish()
"""


def wandb_file(folder: Path, rows: list[dict], config: dict) -> Path:
    folder.mkdir()
    command = [sys.executable, "-c", LOG_WANDB, str(folder), json.dumps(config)]
    subprocess.run(command, input=json.dumps(rows), text=True, check=True, capture_output=True)
    (file,) = folder.rglob("*.wandb")
    return file


@pytest.mark.slow
def test_wandb_files_that_the_real_client_wrote(tmp_path):
    rows = []
    for step in range(1, 4):
        rows.append({"profiling/Time taken: vllm": 1.0, "train/global_step": step})
        row = {f"train/{name}": value for name, value in trl_row(step).items() if name != "step"}
        rows.append(row | {"train/global_step": step})
    config = {"seed": 3, "learning_rate": 1e-6, "importance_sampling_level": "sequence"}
    file = wandb_file(tmp_path / "trl", rows, config)
    (record,) = sources.records(tmp_path / "trl")
    assert record.rows["step"].tolist() == [1, 2, 3]
    assert record.settings["seed"] == 3 and record.settings["objective.name"] == "gspo"
    assert any("3 records without a metric of training" in note for note in record.notes)
    assert read_foreign(file).rows[0]["clip/sequence_active"] == 0.01
    own = wandb_files.read(file)
    assert not own.rows and len(own.records) == 6
    # W&B cuts a mapping into its leaves
    nested = [{"train/global_step": 1, "mine": {"reward": 0.5, "deep": {"x": 1.0}}}]
    (record,) = wandb_files.read(wandb_file(tmp_path / "nested", nested, {})).records
    assert record["mine.reward"] == 0.5 and record["mine.deep.x"] == 1.0


def test_runs_of_wandbs_server(tmp_path):
    rows = [{"_step": step} | verl_row(step, **{"actor/kl_coef": "NaN"}) for step in (1, 2)]
    policy = {"actor": {"policy_loss": {"loss_mode": "gspo"}}}
    config = {"actor_rollout_ref": policy, "data": {"seed": 5}, "_wandb": {}}
    run = SimpleNamespace(
        config=config, name="cloud", id="abc", scan_history=lambda page_size: iter(rows)
    )
    record = sources.from_server(run)
    assert record.settings["seed"] == 5 and record.settings["objective.name"] == "gspo"
    assert record.rows["clip/token_active"].tolist() == [0.02, 0.02]
    assert record.rows["kl/coef"].isna().all()


PEER = ROOT / ".venv-peer" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="TRL is not installed: make setup-peer")
def test_a_log_that_trl_wrote(tmp_path):
    """12 updates, 2 of each batch: TRL's own names, all in the table, and clipping in the second."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(PEER), str(ROOT / "tests" / "support" / "trl_run.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300)
    run = read_foreign(tmp_path, updates_per_batch=2, objective="gspo")
    assert run.framework == "trl" and [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    assert not run.unknown() and not run.dropped and run.planned == 6
    for name in ("reward/mean", "policy/entropy", "length/mean", "clip/sequence_active"):
        assert all(math.isfinite(row[name]) for row in run.rows), name
    assert any(row["clip/sequence_active"] > 0 for row in run.rows)


# ------------------------------------------------------------------------------------------------
# never silent
def test_a_path_without_runs_says_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    no_step = "rows.jsonl: none of its first 20 lines is a row with a step"
    with pytest.raises(load.RunsError, match=no_step):
        load.load([tmp_path])
    (tmp_path / "rows.jsonl").rename(tmp_path / "rows.csv")
    with pytest.raises(load.RunsError, match=r"holds 2 files \(1 \.\w+, 1 \.\w+\), none of them"):
        load.load([tmp_path])
    with pytest.raises(load.RunsError, match="the file is none of trainer_state"):
        load.load([tmp_path / "notes.md"])
    with pytest.raises(ValueError, match="the folder holds no file"):
        (tmp_path / "empty").mkdir()
        read_foreign(tmp_path / "empty")


def beside_a_good_log(folder: Path) -> Path:
    write_state(folder / "good" / "trainer_state.json", [trl_row(step) for step in range(1, 5)])
    (folder / "other").mkdir()
    return folder / "other"


def test_a_log_that_cannot_be_read_is_named_beside_a_good_one(tmp_path, monkeypatch, capsys):
    runs = tmp_path / "runs"
    other = beside_a_good_log(runs)
    logged = [{"step": step, "data": verl_row(step)} for step in (1, 2)]
    (other / "link.jsonl").symlink_to(write_lines(tmp_path / "target.jsonl", logged))
    (other / "trainer_state.json").write_text('{"best_metric": null, "log_his')
    (other / "gz.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (other / "empty.log").touch()
    note = (
        f"left out: 4 files without rows of a run ({other}/empty.log: the file is empty; "
        f"{other}/gz.jsonl.gz: the file is compressed by gzip: unpack it first; "
        f"{other}/link.jsonl: the file is a link, and links are not followed: name the file that "
        f"it points to; {other}/trainer_state.json: the file has no log_history, or was cut before "
        "it)"
    )
    assert note in load.load([runs]).notes and note in read_foreign(runs).notes
    monkeypatch.setattr("sys.argv", ["gspo report", str(runs), f"out={tmp_path / 'pages'}"])
    with pytest.raises(SystemExit) as ended:
        report.write_pages()
    assert not ended.value.code and f"note: {note}" in capsys.readouterr().err
    # many are counted
    for number in range(9):
        write_lines(other / f"{number}.jsonl", [{"reward": 0.5, "loss": 1.0}])
    (note,) = [note for note in load.load([runs]).notes if note.startswith("left out")]
    assert note.startswith("left out: 13 files") and note.endswith("; and 8 more)")


def test_files_that_are_no_logs_are_not_named(tmp_path):
    other = beside_a_good_log(tmp_path)
    for name in ("debug.log", "debug-internal.log", "core-debug-20261128_101511.log"):
        (other / name).write_text("W&B's own")
    (other / "settings.json").write_text("{}")
    (other / "run-1-ab" / "files").mkdir(parents=True)
    (other / "run-1-ab" / "run-ab.wandb").touch()
    (other / "run-1-ab" / "files" / "output.log").write_text("a console without rows")
    (other / "latest-run").symlink_to(other)
    _, _, notes = read_foreign_runs(tmp_path)
    assert not notes
    # a console that a user keeps beside runs of ours
    write(tmp_path / "study" / "gspo-seed0", "gspo", HEALTHY)
    (tmp_path / "study" / "nohup.log").write_text("no rows")
    assert not any("nohup" in note for note in load.load([tmp_path / "study"]).notes)


def test_an_unreadable_state_says_why(tmp_path):
    file = tmp_path / "trainer_state.json"
    for content, reason in (
        ("", "is empty"),
        ('{"log_his', "no log_history, or was cut before it"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=reason):
            read_foreign(tmp_path)
        with pytest.raises(load.RunsError, match=reason):
            load.load([file])


def test_two_histories_of_a_folder_are_two_runs(tmp_path):
    for name, reward in (("a_log_history.json", 0.1), ("b.json", 0.9)):
        rows = [trl_row(step, reward=reward) for step in range(1, 5)]
        (tmp_path / name).write_text(json.dumps(rows))
    (tmp_path / "points.json").write_text("[[1, 2]]")
    data = load.load([tmp_path])
    assert [run.path.name for run in data.runs] == ["a_log_history.json", "b.json"]
    assert [run.rows["reward/mean"][0] for run in data.runs] == [0.1, 0.9]


@pytest.mark.slow
def test_a_wandb_file_of_ours_is_answered_as_ours(tmp_path):
    config = {"seed": 1, "steps": 3, "objective": {"name": "gspo"}, "record": {"run": "mine"}}
    file = wandb_file(tmp_path / "ours", [{"step": 1, "reward/mean": 0.5}], config)
    for source in (file, tmp_path / "ours"):
        with pytest.raises(ValueError, match=r"a run of this repository \(mine\), with 1 row\. It"):
            read_foreign(source)


def test_our_own_files_are_not_passed_over_either(tmp_path):
    rows = [{"step": 1, "reward/mean": 0.5, "clip/token_active": 0.1}]
    file = write_lines(tmp_path / "metrics.jsonl", rows)
    with pytest.raises(load.RunsError, match="its names are ours: name the run directory"):
        load.load([file])
    file.unlink()
    (tmp_path / "settings.yaml").write_text("seed: 1\nsteps: 3\nobjective: {name: gspo}\n")
    with pytest.raises(load.RunsError, match=r"left out: .*no rollout batch yet"):
        load.load([tmp_path])


def test_many_damaged_places_of_a_wandb_file_are_one_note(tmp_path):
    segment = wandb_files.Segment(tmp_path, damage=[f"damaged at byte {i}" for i in range(500)])
    notes = foreign_files.wandb_log([segment]).notes
    assert len(notes) == 11 and notes[-1].endswith("490 more places are damaged")


def test_records_of_ours_without_a_step_are_counted(tmp_path):
    segment = wandb_files.Segment(tmp_path, config={"record": {"run": "r"}})
    for row in ({"step": 1, "reward/mean": 0.5}, {"reward/mean": 1.0}, {"step": 1, "a/b": 1.0}):
        segment.add(row)
    segment.add({"step": 1, "reward/mean": 0.7})
    assert segment.rows == {1: {"reward/mean": 0.7, "a/b": 1.0}}
    assert segment.without_step == 1 and segment.overwritten == 1 and not segment.records


# ------------------------------------------------------------------------------------------------
# hostile and damaged files
def test_damaged_files(tmp_path):
    rows = [trl_row(step) for step in range(1, 30)]
    file = write_state(tmp_path / "trainer_state.json", rows)
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    cut = read_foreign(file)
    assert 5 < len(cut.rows) < 29 and any("is damaged" in note for note in cut.notes)
    file.write_text(text.replace("0.501", "NaN").replace("0.502", "-Infinity"))
    odd = read_foreign(file)
    assert math.isnan(odd.rows[0]["reward/mean"]) and math.isnan(odd.rows[1]["reward/mean"])
    lines = write_lines(tmp_path / "metrics.jsonl", prime_rl_rows(1) + prime_rl_rows(2))
    lines.write_bytes(lines.read_bytes()[:-20] + b"\n\xff\xfe\n[1]\n")
    damaged = read_foreign(lines)
    assert any("3 lines that are no rows" in note for note in damaged.notes)


@pytest.mark.parametrize(
    "content",
    [
        b'{"log_history": 3}',
        b'{"log_history": {"step": 1}}',
        b'{"log_history": ' + b"[" * 3000,
        b'{"log_history": [[1], 2, null]}',
        b'{"log_history": [{"step": 1' + b"0" * 50 + b"}]}",
    ],
)
def test_a_hostile_state_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "trainer_state.json").write_bytes(content)
    with pytest.raises(ValueError, match="trainer_state") as error:
        read_foreign(tmp_path / "trainer_state.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < 900
    with pytest.raises(load.RunsError, match="no runs under"):
        load.load([tmp_path])


def test_bounds(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "metrics.jsonl", prime_rl_rows(1))
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    with pytest.raises(ValueError, match="the file is a link, and links are not followed"):
        read_foreign(link)
    monkeypatch.setattr(untrusted, "MAX_METRICS", 5)
    with pytest.raises(ValueError, match="5 metrics"):
        read_foreign(file)
    monkeypatch.setattr(untrusted, "MAX_ROWS_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="is larger than 10 bytes"):
        foreign_files.json_lines(file)


def console_line(step, **changes):
    row = verl_row(step, **changes)
    return f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in row.items())


def test_a_console_with_a_mark_long_lines_progress_bars_and_a_late_first_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(untrusted, "MAX_LINE_BYTES", 2000)
    monkeypatch.setattr(foreign_search, "FIRST_CONSOLE_BYTES", 100)
    file = tmp_path / "train.log"
    set_with_spaces = {"val-core/My Set/acc/mean@4": 0.5}
    lines = [console_line(1), "x" * 5000, console_line(2, **set_with_spaces) + "\rTraining: 10%"]
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    run = read_foreign(file)
    assert [row["step"] for row in run.rows] == [1, 2], "the byte order mark hides no row"
    assert run.rows[1]["eval/My Set/avg@4"] == 0.5
    assert run.notes[0] == "left out: 1 lines of more than 2,000 bytes"
    assert not any("parts of lines" in note for note in run.notes)
    file.write_text("INFO some words\n" * 20 + console_line(3))
    late = read_foreign(file)
    assert late.rows[0]["step"] == 3 and not any("rounded" in note for note in late.notes)
    pairs = " - ".join(f"{name}:{value:.3f}" for name, value in verl_row(1).items())
    file.write_text(f"step:1 - {pairs}")  # as verl 0.3 printed
    assert any("rounded to 3 decimals" in note for note in read_foreign(file).notes)


def test_the_whole_history_on_the_last_line_of_ms_swift_may_be_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MAX_LINE_BYTES", 4000)
    rows: list[dict] = [ms_swift_line(step) for step in range(1, 20)]
    rows.append({"global_step": 19, "log_history": [trl_row(step) for step in range(1, 20)]})
    run = read_foreign(write_lines(tmp_path / "logging.jsonl", rows))
    assert len(run.rows) == 19 and "left out: 1 lines of more than 4,000 bytes" in run.notes


def test_a_history_that_a_script_saved_as_a_list(tmp_path):
    file = tmp_path / "trainer_log_history.json"
    text = json.dumps([trl_row(step) for step in range(1, 9)], indent=1)
    file.write_text(text)
    assert len(read_foreign(tmp_path).rows) == 8
    file.write_text(text[:-200])
    cut = read_foreign(file)
    assert len(cut.rows) == 7 and any("is damaged" in note for note in cut.notes)


def test_rows_with_the_axes_of_slime_alone_are_found(tmp_path):
    rows = [row for rollout in range(2) for row in slime_rows(rollout)]
    slime = read_foreign(write_lines(tmp_path / "history.jsonl", rows))
    assert slime.rows[0]["reward/mean"] == 0.5
    assert any("others rollout batches" in note for note in slime.notes), "4 updates, 2 batches"
    (tmp_path / "history.jsonl").unlink()
    wide = verl_row(1) | {f"timing_s/a_long_name_of_a_part_{i}": 1.0 for i in range(3000)}
    write_lines(tmp_path / "wide.jsonl", [{"step": 1, "data": wide}])
    assert read_foreign(tmp_path).framework == "verl"


def test_files_that_are_no_text_say_so(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for content, reason in (
        (b"\x1f\x8b\x08\x00", "compressed by gzip: unpack it"),
        ("step".encode("utf-16"), "UTF-16 text: convert it"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read_foreign(file)
    os.mkfifo(tmp_path / "pipe.log")
    with pytest.raises(ValueError, match="a pipe or a device"):
        read_foreign(tmp_path / "pipe.log")


def test_event_files_of_zeros_and_with_a_damaged_event(tmp_path):
    pytest.importorskip("tensorboard")
    rows = [{f"train/{name}": v for name, v in trl_row(step).items()} for step in (1, 2)]
    folder = event_folder(tmp_path / "runs", rows, "train/step")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    notes: list[str] = []
    events = list(event_frames.events(file, notes))
    assert not notes and len(events) > 20
    position = whole.index(events[4]) + 3
    file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    assert list(event_frames.events(file, notes)) == [*events[:4], *events[5:]]
    assert f"{len(events) - 1} of {len(events)} events are read" in notes[0]
    file.write_bytes(bytes(1 << 20))
    assert not list(event_frames.events(file, notes)) and "damaged at byte 0" in notes[-1]


def test_names_that_are_no_text_or_too_long_are_left_out(tmp_path):
    rows = [trl_row(1, **{"\ud800": 1.0, "x" * 5000: 1.0})]
    run = read_foreign(write_state(tmp_path / "trainer_state.json", rows))
    assert not run.unknown() and run.dropped == {"names that are too long or no text": 2}


# ------------------------------------------------------------------------------------------------
# what a user says, arms, figures
def test_foreign_run_yaml_says_what_the_log_does_not(tmp_path):
    about = tmp_path / "outputs" / ABOUT
    write_state(
        tmp_path / "outputs" / "checkpoint-40" / "trainer_state.json",
        [trl_row(step) for step in range(1, 41)],
    )
    about.write_text("objective: gspo\nupdates_per_batch: 4\nseed: 2\nsteps: 20\nstudy: mine\n")
    (run,) = load.load([tmp_path]).runs
    assert run.seed == 2 and run.planned == 20 and run.last == 10 and run.study == "mine"
    assert run.arm == "GSPO (TRL)" and run.rows["clip/sequence_active"].notna().all()
    for line, problem in (
        ("seeds: 2", "seeds is unknown. It may have framework, objective"),
        ("1: 2", "1 is unknown. It may have framework, objective"),
        ("seed: two", "seed=two must be a whole number of 0 or more"),
        ("seed: true", "seed=True must be a whole number of 0 or more"),
        ("steps: -1", "steps=-1 must be a whole number of 0 or more"),
        ("a: [", "holds no settings"),
    ):
        about.write_text(line)
        with pytest.raises(load.RunsError, match="no runs under") as error:
            load.load([tmp_path])
        assert problem in str(error.value)


def two_runs(folder: Path) -> Path:
    for seed, name in enumerate(("a", "b")):
        rows = [{"step": step, "data": verl_row(step)} for step in range(1, 31)]
        (folder / name).mkdir(parents=True)
        write_lines(folder / name / "file.jsonl", rows)
        text = f"objective: {'gspo' if name == 'a' else 'grpo'}\nseed: {seed}\nstudy: s\n"
        (folder / name / ABOUT).write_text(text)
    return folder


def test_figures_and_comparisons_take_them(tmp_path, capsys, monkeypatch):
    folder = two_runs(tmp_path / "runs")
    monkeypatch.setattr("sys.argv", ["gspo compare", str(folder)])
    compare.compare()
    printed = capsys.readouterr().out
    assert "reward, last" in printed and "end not logged" in printed and "clipped tokens" in printed
    data = load.load([folder])
    assert data.arms == ["GRPO (verl)", "GSPO (verl)"]
    drawn = fig_curves.draw(data, tmp_path, metrics=["reward/mean", "verl/actor/pg_loss"])
    assert all(path.exists() for path in drawn)
    for run in data.runs:
        assert run.custom["verl/actor/pg_loss"].meaning.startswith("verl: ")


def test_slime_in_one_file(tmp_path):
    rows = [row for rollout in range(3) for row in slime_rows(rollout)]
    for number, row in enumerate(rows):
        row["_step"] = number
    slime = read_foreign(write_lines(tmp_path / "history.jsonl", rows), updates_per_batch=2)
    assert [row["step"] for row in slime.rows] == [1, 2, 3]
    assert slime.rows[0]["optim/grad_norm"] == 1.5


@pytest.mark.slow
def test_runs_of_ours_and_of_another_framework_side_by_side(tmp_path, capsys, monkeypatch):
    write(tmp_path / "ours" / "gspo-seed0", "gspo", HEALTHY)
    theirs = two_runs(tmp_path / "theirs") / "a"
    monkeypatch.setattr("sys.argv", ["gspo compare", str(tmp_path / "ours"), str(theirs)])
    compare.compare()
    printed = capsys.readouterr().out
    assert "framework" in printed and len(printed.splitlines()) < 40
    data = load.load([tmp_path / "ours", theirs])
    assert data.arms == ["GSPO", "GSPO (verl)"]
    assert fig_curves.draw(data, tmp_path / "figures", metrics=["reward/mean"])


def test_the_live_page_tells_logs_of_the_same_name_apart(tmp_path):
    sent = {}
    store = SimpleNamespace(
        validate_project_name=lambda name: None,
        bulk_log=lambda study, name, metrics, *rest, **options: sent.update({name: metrics}),
    )
    page = view.Page(store)
    assert page.update([str(two_runs(tmp_path / "runs"))]) == 60
    assert sent.keys() == {"a-file.jsonl", "b-file.jsonl"}
    assert sent["a-file.jsonl"][0]["reward/mean"] == 0.501


# ------------------------------------------------------------------------------------------------
# a trainer of one's own
def own_log(folder: Path, about: str) -> Path:
    rows = [{"it": n, "global_step": n, "loop/score": n / 10, "loop/x": 1.0} for n in range(1, 31)]
    write_lines(folder / "history.jsonl", rows)
    (folder / "foreign_run.yaml").write_text(about, encoding="utf-8")
    return folder / "history.jsonl"


def test_a_trainer_of_ones_own_is_read_by_the_names_that_the_user_gives(tmp_path):
    about = "names: {loop/score: reward/mean, loop/gone: optim/lr}\ncounts: updates\n"
    log = own_log(tmp_path, f"{about}updates_per_batch: 3\nobjective: mine\nseed: 2\n")
    own = read_foreign(log)
    assert own.framework == "own" and len(own.rows) == 10
    assert own.rows[0] == {
        "step": 1,
        "reward/mean": pytest.approx(0.2),
        "own/loop/x": 1,
        "own/it": 2,
    }
    assert any("not in the log: loop/gone" in note for note in own.notes)
    data = load.load([tmp_path])
    assert data.runs[0].settings["framework"] == "your trainer" and data.runs[0].seed == 2
    # a changed mapping is read anew, not from the cache
    own_log(tmp_path, "names: {loop/x: reward/mean}\nobjective: mine\n")
    assert set(load.load([tmp_path]).runs[0].rows["reward/mean"]) == {1.0}


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            "names: {loop/score: rewards/mean}",
            "loop/score: rewards/mean is none of our metrics",
        ),
        ("names: {a: reward/mean, b: reward/mean}", "b and a are both reward/mean"),
        ("names: {a: 1}", "a: 1 must be two names"),
        ("names: {a: eval/*}", r"eval/\* is none of our metrics"),
        ("names: {loop/*: reward/mean}", r"loop/\*: a star is no pattern here"),
        ("names: {it: step}", "it: step is none of our metrics"),
        ("names: {a: reward/mean}\ncounts: epochs", "epochs is none of batches, updates"),
        ("names: {a: reward/mean}\nframework: trl", "framework=trl is set"),
        ("step: it", "says step, but no names"),
        ("names: reward/mean", "names=reward/mean must be pairs of names"),
    ],
)
def test_a_wrong_mapping_is_refused_with_key_and_value(tmp_path, about, message):
    with pytest.raises(ValueError, match=message):
        read_foreign(own_log(tmp_path, about))


def test_a_step_of_any_name_and_names_that_begin_as_wandbs_own(tmp_path):
    (tmp_path / "foreign_run.yaml").write_text(
        "names: {_score: reward/mean, inner.norm: optim/grad_norm}\nstep: iteration_of_mine\n"
    )
    rows = [
        {"iteration_of_mine": step, "_score": step / 10, "inner": {"norm": 2.0}}
        for step in range(4)
    ]
    write_lines(tmp_path / "history.jsonl", rows)
    own = read_foreign(tmp_path)
    assert [row["step"] for row in own.rows] == [1, 2, 3, 4]
    assert own.rows[3]["reward/mean"] == 0.3 and own.rows[3]["optim/grad_norm"] == 2.0
    assert "its iteration_of_mine begins at 0, which counts as the first" in own.notes
    (tmp_path / "history.json").write_text(json.dumps(rows[1:]))
    (tmp_path / "history.jsonl").unlink()
    assert [row["step"] for row in read_foreign(tmp_path).rows] == [1, 2, 3]


def test_updates_that_are_counted_from_0_make_whole_batches(tmp_path):
    about = "names: {x: reward/mean}\nstep: it\ncounts: updates\nupdates_per_batch: 4\n"
    (tmp_path / "foreign_run.yaml").write_text(about)
    write_lines(tmp_path / "history.jsonl", [{"it": it, "x": float(it)} for it in range(12)])
    assert [row["reward/mean"] for row in read_foreign(tmp_path).rows] == [1.5, 5.5, 9.5]
    # an evaluation before the first update is no update
    evaluated = "names: {x: reward/mean, y: eval/held_out/avg@k}\nstep: it\n"
    (tmp_path / "foreign_run.yaml").write_text(evaluated)
    write_lines(tmp_path / "history.jsonl", [{"it": 0, "y": 0.1}, {"it": 1, "x": 0.5}])
    assert [row["step"] for row in read_foreign(tmp_path).rows] == [0, 1]


# ------------------------------------------------------------------------------------------------
# arms
def verl_experiments(folder: Path, *names: str) -> Path:
    """Experiments of one project, as verl's file logger lays them out: project/experiment.jsonl."""
    folder.mkdir(parents=True)
    for name in names:
        rows = [{"step": step, "data": verl_row(step)} for step in range(1, 31)]
        write_lines(folder / f"{name}.jsonl", rows)
    return folder


def test_experiments_of_one_folder_are_arms_of_their_own(tmp_path):
    project = verl_experiments(tmp_path / "myproject", "lr1e-6", "lr2e-6")
    data = load.load([project])
    assert data.arms == [
        "not logged, myproject/lr1e-6 (verl)",
        "not logged, myproject/lr2e-6 (verl)",
    ]
    same = load.load([project], foreign_options=ForeignOptions(objective="gspo"))
    assert same.arms == ["GSPO (verl) [log=lr1e-6.jsonl]", "GSPO (verl) [log=lr2e-6.jsonl]"]
    assert any("2 runs are GSPO (verl) with seed 0" in note for note in same.notes)
    where = load.load([project], {"log": "lr2e-6.jsonl"}, ForeignOptions(objective="gspo"))
    assert where.arms == ["GSPO (verl)"] and where.runs[0].path.name == "lr2e-6.jsonl"


def test_checkpoints_of_the_same_name_are_named_after_the_folders_of_their_runs(tmp_path):
    for folder in ("one/outputs", "two/outputs", "other"):
        state = tmp_path / folder / "checkpoint-30" / "trainer_state.json"
        write_state(state, [trl_row(step) for step in range(1, 31)])
    logs = ["one/outputs/checkpoint-30/trainer_state.json"]
    logs.append(logs[0].replace("one", "two"))
    assert load.load([tmp_path]).arms == [
        "not logged, other (TRL)",
        *(f"not logged, outputs (TRL) [log={log}]" for log in logs),
    ]


def test_a_log_may_have_a_name_as_long_as_names_can_be(tmp_path):
    rows = [{"step": step, "data": verl_row(step)} for step in (1, 2)]
    log = write_lines(tmp_path / ("x" * 249 + ".jsonl"), rows)
    assert read_foreign(log).rows[1]["step"] == 2


def test_lost_batches_are_told_once(tmp_path):
    rows = [{"step": step, "data": verl_row(step)} for step in range(4, 9)]
    data = load.load([write_lines(tmp_path / "resumed.jsonl", rows)])
    (lost,) = [note for note in data.notes if "no row of" in note]
    assert lost.endswith("resumed.jsonl: lost: it has no row of batches 1, 2, 3")


def test_a_log_of_a_folder_with_others_has_a_file_of_its_own(tmp_path):
    project = verl_experiments(tmp_path / "project", "a", "b")
    (project / ABOUT).write_text("objective: grpo\nseed: 3\n")
    (project / f"b.{ABOUT}").write_text("objective: gspo\nseed: 4\n")
    data = load.load([project])
    assert {(run.arm, run.seed) for run in data.runs} == {("GRPO (verl)", 3), ("GSPO (verl)", 4)}


def test_seeds_in_several_logs_stay_a_group_of_the_comparison(tmp_path):
    project = verl_experiments(tmp_path / "project", "a1", "a2", "b1", "b2", "b3")
    for log in project.glob("*.jsonl"):
        about = f"objective: {'gspo' if log.stem[0] == 'a' else 'grpo'}\nseed: {log.stem[1]}\n"
        log.with_name(f"{log.stem}.{ABOUT}").write_text(about)
    runs = load.load([project]).runs
    assert compare.distinguishing_settings(runs) == {"objective.name": "objective"}
    assert "5 runs in 2 groups" in compare.summary(runs)[0]


def loaded_of_server(monkeypatch, *configs: dict) -> load.Data:
    """Runs of TRL on W&B's server with these settings, beside TRL's defaults."""
    records = []
    for number, config in enumerate(configs):
        rows = []
        for step in range(1, 31):
            row = {f"train/{name}": value for name, value in trl_row(step).items()}
            rows.append(row | {"train/global_step": step})
        defaults = {"seed": 42, "importance_sampling_level": "sequence", "loss_type": "grpo"}
        run = SimpleNamespace(
            config=defaults | config,
            name=f"run{number}",
            id=f"id{number}",
            scan_history=lambda page_size, rows=rows: iter(rows),
        )
        records.append(sources.from_server(run))
    monkeypatch.setattr(sources, "records", lambda path, options: records)
    return load.load(["wandb:me/project"])


def test_arms_have_the_settings_of_the_framework_in_which_runs_differ(monkeypatch):
    data = loaded_of_server(
        monkeypatch, {"max_completion_length": 512}, {"max_completion_length": 4096}
    )
    assert data.arms == [
        "GSPO (TRL) [trl.max_completion_length=512]",
        "GSPO (TRL) [trl.max_completion_length=4096]",
    ]
    # names and folders of runs are no such settings
    data = loaded_of_server(monkeypatch, {"run_name": "x"}, {"run_name": "y", "seed": 1})
    assert data.arms == ["GSPO (TRL)"] and not any("differ" in note for note in data.notes)


def test_seeds_that_differ_in_settings_of_the_framework_are_told(monkeypatch):
    first = {"seed": 1, "weight_decay": 0.0, "delta": None, "num_iterations": 1}
    second = {"seed": 2, "weight_decay": 0.1, "delta": 4.0, "num_iterations": 4}
    data = loaded_of_server(monkeypatch, first, second)
    (note,) = [note for note in data.notes if note.startswith("seeds of")]
    assert note.endswith("differ also in trl.delta, trl.num_iterations, trl.weight_decay")
    # a log without the setting does not say that it differs
    data = loaded_of_server(monkeypatch, {"seed": 1, "weight_decay": 0.1}, {"seed": 2})
    assert not any(note.startswith("seeds of") for note in data.notes)
