"""Evaluations as W&B runs of the job type "eval", and runs with TensorBoard's files, by the
commands themselves.
"""

import json
import sys
from pathlib import Path

import pytest

import forked
from commands import SMALL, environment, evaluate, only_run, train
from gspo.analysis import sources, wandb_files
from recorded_wandb import pause
from wandb_server import serving

# `make setup` installs it; the environment of vLLM has it not
reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def run(server, tmp_path_factory) -> Path:
    """A run that was tracked online, with TensorBoard's files."""
    folder = tmp_path_factory.mktemp("tracked")
    short = [o for o in SMALL if not o.startswith("steps=")]
    done = train(
        folder,
        *short,
        "steps=4",
        "tracking.tensorboard=true",
        "tracking.project=mine",
        account=server.environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return only_run(folder)


@pytest.mark.slow
def test_the_graph_goes_from_the_cold_start_to_the_evaluation(server, run):
    (trained,) = server.runs
    call = [
        "-P",
        "-m",
        "gspo",
        "evaluate",
        f"run={run}",
        "problems=2",
        "k=2",
        "step=4",
        "wandb=auto",
    ]

    def evaluated() -> None:
        done = forked.run(
            [sys.executable, *call], cwd=run.parents[2], env=environment() | server.environment
        )
        assert done.returncode == 0 and "wandb sync" not in done.stdout, done.stderr[-3000:]

    evaluated()
    (name,) = set(server.runs) - {trained}
    pause()
    evaluated()  # the same command again: the same run
    assert set(server.runs) == {trained, name} and name.startswith("eval-")
    found, result = server.runs[name], next(run.glob("evaluations/*/result.json"))
    about = {key: found.about[key] for key in ("jobType", "groupName", "project")}
    assert about == {"jobType": "eval", "groupName": "small", "project": "mine"}
    (row,) = found.rows.values()
    assert row["step"] == 4
    for each, numbers in json.loads(result.read_text())["sets"].items():
        assert row[f"eval/{each}/avg@2"] == numbers["avg"]["value"]
        assert row[f"eval/{each}/pass@2"] == numbers["pass"]["2"]["value"]
    told = found.config["evaluated"]["value"]
    assert (
        told["run"] == run.name and told["step"] == 4 and told["checkpoint"].endswith("step_000004")
    )
    (start,) = (run.parents[1] / "cold_starts").glob("*[0-9a-f]")
    assert set(server.used) == {(trained, start.name), (name, run.name)}
    versions = {
        each["digest"] for each in server.made if each["artifactCollectionName"] == run.name
    }
    assert len(versions) == 2, "the evaluation uses a version that the run has written"
    assert "evaluation" in {each["artifactTypeName"] for each in server.made}


@pytest.mark.slow
def test_an_evaluation_is_no_run_to_the_figures(run):
    done = evaluate(run, "wandb=offline", "seed=3")
    assert done.returncode == 0 and "to upload them: wandb sync" in done.stdout, done.stderr[-3000:]
    (file,) = run.glob("evaluations/*/wandb/offline-run-*/run-eval-*.wandb")
    assert wandb_files.read(file).job == "eval"
    (nothing,) = sources.records(file.parent)
    assert nothing.rows.empty and "evaluations, which train nothing: 1" in nothing.notes[0]
    assert [record.path for record in sources.records(run.parents[1])] == [run]


@pytest.mark.slow
def test_an_untracked_evaluation_leaves_no_trace_of_wandb(run):
    assert evaluate(run, "seed=5").returncode == 0
    newest = max(run.glob("evaluations/*"), key=lambda folder: folder.stat().st_mtime)
    assert not (newest / "wandb").exists() and not (newest / "wandb_id").exists()


@pytest.mark.slow
def test_the_event_files_hold_the_rows(run):
    events = reader.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(events.Tags()["scalars"]) == {name for row in rows for name in row} - {"step"}
    for name in ("reward/mean", "optim/grad_norm", "compute/flops"):
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == {
            row["step"]: pytest.approx(row[name], rel=1e-6) for row in rows if name in row
        }


@pytest.mark.slow
def test_the_score_is_in_wandbs_rows_and_not_in_ours(server, run):
    found = next(each for each in server.runs.values() if each.about["jobType"] == "train")
    assert all("score" in row for row in found.rows.values())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any("score" in row for row in rows)
    last = rows[-1]
    held_out = [value for name, value in last.items() if "/avg@" in name]
    assert (
        found.rows[4]["score"]
        == pytest.approx(sum(held_out) / len(held_out))
        == found.summary["score"]
    )
