"""Lineage: what W&B's real client records of cold start, run and checkpoints, offline and against a
stand-in server.
"""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record

import forked
from commands import environment
from gspo.analysis.wandb_files import payloads
from gspo.tracking import artifacts
from gspo.tracking.artifacts import HASHED, allowed_name, folder_artifact
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.wandb_choice import MODEL
from gspo.train.checkpoint_files import CHECKSUMS, seal
from recorded_wandb import pause
from refusals import refuses
from wandb_server import serving

RUN = """
import sys
from pathlib import Path
from gspo.tracking.tracker import Tracker
from gspo.tracking.settings import TrackingSettings
folder, upload = Path(sys.argv[1]), sys.argv[2] == "upload"
settings = TrackingSettings(upload_checkpoints=upload)
start = folder.parent / "cold_starts" / "tiny_moe-math-0123456789"
tracker = Tracker(folder, settings, {"seed": 1}, "study", ["tag"], start=start)
for step in (1, 2, 3):
    tracker.log(step, {"reward/mean": step / 10}, None)
    tracker.checkpoints()
print(tracker.finish(0))
"""


def sealed(folder: Path, weights: bytes) -> Path:
    """A folder as checkpoints and cold starts are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "state.json").write_text("{}")
    seal(folder)
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    sealed(tmp_path / "cold_starts" / "tiny_moe-math-0123456789", b"cold" * 1000)
    folder = tmp_path / "gspo-seed1-abc"
    for step in (2, 4):
        sealed(folder / "checkpoints" / f"step_{step:06d}", bytes([step]) * 5000)
    (folder / "checkpoints" / "latest").write_text("step_000004")
    (folder / "checkpoints" / "step_000006.unfinished").mkdir()
    return folder


def track(folder: Path, how: str = "", **account: str) -> subprocess.CompletedProcess:
    done = forked.run(
        [sys.executable, "-c", RUN, str(folder), how], folder, environment() | account
    )
    assert done.returncode == 0, done.stderr
    return done


def recorded(folder: Path) -> dict[str, list]:
    """The artifacts in the newest offline file, by name and aliases."""
    file = max(folder.glob("wandb/offline-run-*/run-*.wandb"))
    found: dict[str, list] = {}
    for payload in payloads(file.read_bytes(), []):
        record = Record()
        record.ParseFromString(payload)
        if record.WhichOneof("record_type") == "artifact":
            found.setdefault(record.artifact.name, []).append(record.artifact)
    return found


def test_the_checksums_are_what_is_hashed():
    assert CHECKSUMS in HASHED
    assert doctest.testmod(artifacts).failed == 0
    assert len(allowed_name("x" * 300)) == 128 and allowed_name("a:b c") == "a_b_c"


def test_weights_are_named_and_not_read_and_other_weights_are_another_version(tmp_path):
    folder = sealed(tmp_path / "step_000002", b"one")
    first = folder_artifact(folder, "run", MODEL, upload=False)
    entries = first.manifest.entries
    assert set(entries) == {"model.safetensors", "state.json", CHECKSUMS}
    assert entries["model.safetensors"].ref == (folder / "model.safetensors").as_uri()
    assert (
        entries["model.safetensors"].size == 3 and entries["model.safetensors"].local_path is None
    )
    (folder / "model.safetensors").write_bytes(b"two")  # its sum is still that of the first
    assert folder_artifact(folder, "run", MODEL, upload=False).digest == first.digest, (
        "the weights were read"
    )
    sealed(folder, b"two")
    assert folder_artifact(folder, "run", MODEL, upload=False).digest != first.digest


@pytest.mark.slow
def test_offline_the_file_holds_cold_start_and_checkpoints_as_references(run):
    track(run)
    found = recorded(run)
    assert set(found) == {"tiny_moe-math-0123456789", "gspo-seed1-abc"}
    (start,) = found["tiny_moe-math-0123456789"]
    assert start.use_after_commit and start.type == "model"
    versions = found["gspo-seed1-abc"]
    assert [sorted(each.aliases) for each in versions] == [
        ["latest", f"step_00000{n}"] for n in (2, 4)
    ]
    for each in versions:
        assert not each.use_after_commit and each.type == "model"
        refs = {entry.path: entry.ref for entry in each.manifest.contents}
        step = json.loads(each.metadata)["folder"]
        assert (
            refs["model.safetensors"] == (Path(step) / "model.safetensors").as_uri()
            and "step_00000" in step
        )
        assert not any(entry.local_path for entry in each.manifest.contents), (
            "nothing was copied to be uploaded"
        )


@pytest.mark.slow
def test_uploaded_checkpoints_wait_in_the_offline_segment_and_the_cold_start_does_not(run):
    track(run, "upload")
    found = recorded(run)
    for each in found["gspo-seed1-abc"]:
        files = {entry.path: entry.local_path for entry in each.manifest.contents}
        assert Path(files["model.safetensors"]).read_bytes() in (b"\2" * 5000, b"\4" * 5000)
        assert run / "wandb" in Path(files["model.safetensors"]).parents
    (start,) = found["tiny_moe-math-0123456789"]
    assert all(entry.ref and not entry.local_path for entry in start.manifest.contents)


def lineage(server) -> tuple[list, list]:
    made = [
        (each["artifactCollectionName"], sorted(a["alias"] for a in each["aliases"]))
        for each in server.made
    ]
    return sorted(made), server.used


WHOLE = [
    ("gspo-seed1-abc", ["latest", "step_000002"]),
    ("gspo-seed1-abc", ["latest", "step_000004"]),
    ("tiny_moe-math-0123456789", ["latest"]),
]


@pytest.mark.slow
def test_the_server_gets_the_graph_online_and_from_an_offline_run(run):
    with serving() as server:
        track(run, **server.environment)
        (name,) = server.runs
        assert lineage(server) == (WHOLE, [(name, "tiny_moe-math-0123456789")]), server.unknown
    pause()
    other = run.with_name("gspo-seed1-def")
    run.rename(other)
    for note in (*other.glob("wandb_*"), other / "signed.json"):
        note.unlink()
    track(other)
    with serving() as server:
        newest = max((other / "wandb").glob("offline-run-*"))
        sync = [str(Path(sys.executable).parent / "wandb"), "sync", str(newest)]
        subprocess.run(
            sync, cwd=other, env=environment() | server.environment, check=True, capture_output=True
        )
        (name,) = server.runs
        made, used = lineage(server)
        assert used == [(name, "tiny_moe-math-0123456789")], server.unknown
        assert [(each, aliases) for each, aliases in made if "def" in each] == [
            (each.replace("abc", "def"), aliases) for each, aliases in WHOLE[:2]
        ]


@pytest.mark.slow
def test_a_server_that_refuses_artifacts_costs_one_line(run):
    with serving() as server:
        server.refuses = True
        done = track(run, **server.environment)
        (found,) = server.runs.values()
        assert (
            [row["step"] for row in found.rows.values()] == [1, 2, 3]
            and found.ended
            and server.made == []
        )
    assert done.stderr.count("warning: W&B does not take the artifact") == 1, done.stderr


def test_what_cannot_be_uploaded_is_refused():
    with refuses("tracking.upload_checkpoints", True, "with tracking.wandb=disabled"):
        TrackingSettings(wandb="disabled", upload_checkpoints=True)
