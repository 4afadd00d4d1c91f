"""Online: the real client against a stand-in for W&B's server. What is tracked is what is read
back, and no more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from commands import environment
from gspo.analysis import fig_curves, load, notebooks, sources
from gspo.run.sweep_state import upload
from gspo.tracking.tracker import supersede
from recorded_wandb import TABLES, log, pause, rows, same, steps, with_rollouts
from wandb_server import serving


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


@pytest.fixture(autouse=True)
def account(server, monkeypatch, tmp_path):
    """This process reads from the stand-in, with a cache of its own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def online(server, tmp_path_factory):
    """A run in two segments; the server lacks the rows from 20 on of the first, as when a kill
    comes before upload.
    """
    folder = tmp_path_factory.mktemp("online") / "gspo-seed1-abc"
    log(folder, rows(0, 25), **server.environment)
    (run,) = server.runs.values()
    assert [row["step"] for row in run.rows.values()] == list(range(26)) and run.ended
    run.rows = {number: row for number, row in run.rows.items() if row["step"] < 20}
    run.summary["_step"] = 19
    log(folder, rows(26, 40), **server.environment)
    return folder


@pytest.mark.slow
def test_a_resumed_run_is_one_run_with_every_row_once(server, online):
    (run,) = server.runs.values()
    steps = [run.rows[number]["step"] for number in sorted(run.rows)]
    assert steps == list(range(41)) and [row["_step"] for row in run.rows.values()] == steps
    about = {
        key: run.about[key] for key in ("displayName", "groupName", "jobType", "tags", "project")
    }
    names = {
        "displayName": "gspo-seed1-abc",
        "groupName": "study",
        "jobType": "train",
        "tags": ["tag"],
        "project": "gspo",
    }
    assert about == names and run.config["objective"]["value"]["clip_low"] == 3e-4


@pytest.mark.slow
def test_the_servers_rows_are_the_directorys(server, online, tmp_path):
    (directory,), (answered,) = sources.records(online), sources.records("wandb:team/gspo")
    same(directory.rows, answered.rows)
    assert directory.settings == answered.settings and answered.path.name == online.name
    asked = len(server.scanned)
    same(sources.records("wandb:team/gspo")[0].rows, directory.rows)
    assert asked > 0 and len(server.scanned) == asked, "the second time from the cache"
    (run,) = server.runs.values()
    run.rows[41] = run.rows[40] | {"_step": 41, "step": 41}
    try:
        assert sources.records("wandb:team/gspo")[0].rows["step"].max() == 41, (
            "a run that goes on is read again"
        )
    finally:
        del run.rows[41]
    run.config["record"]["value"]["run"] = "renamed"
    try:
        assert sources.records("wandb:team/gspo")[0].path.name == "renamed"
    finally:
        run.config["record"]["value"]["run"] = online.name
    tables = [
        notebooks.load_runs(source).metric("reward/mean") for source in (online, "wandb:team/gspo")
    ]
    assert tables[0].equals(tables[1]) and len(tables[0]) == 40
    assert (
        len(sources.records("wandb:team/gspo/study")) == 1
        and sources.records("wandb:team/gspo/other") == []
    )
    drawn = [fig_curves.draw(load.load([source]), tmp_path / str(i))[1].read_bytes() for i, source in
             enumerate([online, "wandb:team/gspo"])]  # fmt: skip
    assert drawn[0] == drawn[1]


def sync(folder: Path, server, *which: Path) -> str:
    command = [str(Path(sys.executable).parent / "wandb"), "sync", *map(str, which)]
    account = os.environ | server.environment
    done = subprocess.run(
        command, cwd=folder, env=account, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_newest_offline_segment_alone_brings_the_whole_run_to_the_server(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    log(folder, rows(0, 25))
    pause()
    log(folder, rows(26, 40))
    older, newest = sorted((folder / "wandb").glob("offline-run-*"))
    with serving() as server:
        sync(tmp_path, server, newest)
        (run,) = server.runs.values()
        assert steps(run) == list(range(41)) and run.about["groupName"] == "study"
        assert "Skipped 1 synced" in sync(tmp_path, server, older) and len(run.rows) == 41


@pytest.mark.slow
def test_a_run_that_was_online_and_goes_on_offline_is_uploaded_as_a_new_one(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    with serving() as server:
        log(folder, rows(0, 25), **server.environment)
        first = (folder / "wandb_id").read_text()
        pause()
        log(folder, rows(26, 40))
        second = (folder / "wandb_id").read_text()
        sync(tmp_path, server, *sorted((folder / "wandb").glob("offline-run-*")))
        assert second != first and steps(server.runs[first]) == list(range(26))
        assert steps(server.runs[second]) == list(range(41))
        pause()
        log(folder, rows(41, 45), **server.environment)  # and online again: the same one
        assert (folder / "wandb_id").read_text() == second and steps(server.runs[second]) == list(
            range(46)
        )


@pytest.mark.slow
def test_a_server_that_was_never_reached_changes_nothing(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    log(folder, rows(0, 25))
    identity = (folder / "wandb_id").read_text()
    # what the client leaves of a start that failed
    (folder / "wandb" / f"run-20260101_000000-{identity}").mkdir()
    pause()
    log(folder, rows(26, 40))
    assert (folder / "wandb_id").read_text() == identity


@pytest.mark.slow
def test_a_run_that_was_offline_and_goes_on_online_is_not_uploaded_twice(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    log(folder, rows(0, 25))
    pause()
    with serving() as server:
        log(folder, rows(26, 40), **server.environment)
        (run,) = server.runs.values()
        assert steps(run) == list(range(41))
        assert "Skipped 1 synced" in sync(
            tmp_path, server, *(folder / "wandb").glob("offline-run-*")
        )
        assert len(run.rows) == 41


@pytest.mark.slow
def test_rows_that_a_killed_process_had_sent_stay_as_it_sent_them(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    with serving() as server:
        log(folder, rows(0, 25), **server.environment)
        supersede(folder, 20)
        pause()
        log(folder, [row | {"reward/mean": 0.1} for row in rows(21, 40)], **server.environment)
        (run,) = server.runs.values()
        assert steps(run) == list(range(41))
        rewards = {row["step"]: row.get("reward/mean") for row in run.rows.values()}
        assert rewards[25] == 0.525 and rewards[26] == 0.1


def shown(run) -> dict[int, tuple[list[str], int, int]]:
    """By step: the responses that the table gained, which increment of the table it was, how many
    it knows before.
    """
    found = {}
    for row in run.rows.values():
        if table := row.get("rollouts"):
            new = json.loads(run.files[table["path"]])
            place = [new["columns"].index(name) for name in ("step", "response")]
            assert {line[place[0]] for line in new["data"]} == {row["step"]}
            texts = [line[place[1]] for line in new["data"]]
            found[row["step"]] = (
                texts,
                table["increment_num"],
                len(table["previous_increments_paths"]),
            )
    return found


EVERY_STEP = {
    step: ([f"answer {n} of step {step}" for n in (0, 2)], place, place)
    for place, step in enumerate((1, 3, 5, 7))
}


@pytest.mark.slow
def test_the_rollouts_of_every_saved_step_are_in_one_table_also_of_a_resumed_run(tmp_path):
    with serving() as server:
        with_rollouts(tmp_path / "online", 0, 3, **server.environment)
        pause()
        with_rollouts(tmp_path / "online", 4, 7, **server.environment)
        (run,) = server.runs.values()
        assert shown(run) == EVERY_STEP and set(server.artifacts) == {
            f"run-{run.name}-incr-rollouts"
        }
    with_rollouts(tmp_path / "offline", 0, 3)
    pause()
    with_rollouts(tmp_path / "offline", 4, 7)
    newest = max((tmp_path / "offline" / "wandb").glob("offline-run-*"))
    with serving() as server:
        sync(tmp_path, server, newest)
        (run,) = server.runs.values()
        assert shown(run) == EVERY_STEP


@pytest.mark.slow
def test_a_table_survives_the_cleaning_of_temporary_files(tmp_path):
    """As systemd-tmpfiles does in long runs, among others with W&B's folder for tables."""
    (tmp_path / "temporary").mkdir()
    cleaning = "    for folder in Path(os.environ['TMPDIR']).glob('*wandb-media'): folder.rmdir()\n"
    script = "import os\n" + TABLES.replace("    tracker.log(", f"{cleaning}    tracker.log(")
    with serving() as server:
        command = [sys.executable, "-c", script, str(tmp_path / "run"), "0", "7"]
        variables = environment() | server.environment | {"TMPDIR": str(tmp_path / "temporary")}
        (tmp_path / "run").mkdir()
        forked.run(command, tmp_path, variables).check_returncode()
        (run,) = server.runs.values()
        assert shown(run) == EVERY_STEP


@pytest.mark.slow
def test_wandbs_own_variables_count_where_no_setting_is_given(tmp_path):
    folder = tmp_path / "study" / "gspo-seed1-abc"
    folder.mkdir(parents=True)
    (folder / "code.json").write_text('{"commit": "c0ffee", "changed_files": ["a.py"]}')
    theirs = {
        "PROJECT": "theirs",
        "ENTITY": "team",
        "TAGS": "x,y",
        "RUN_GROUP": "mine",
        "NAME": "named",
        "NOTES": "why",
    }
    theirs = {f"WANDB_{name}": value for name, value in theirs.items()}
    with serving() as server:
        log(folder, rows(0, 3), **server.environment, **theirs)
        (run,) = server.runs.values()
        keys = ("project", "entity", "tags", "groupName", "displayName", "notes")
        assert [run.about[key] for key in keys] == [
            "theirs",
            "team",
            ["tag", "x", "y"],
            "mine",
            "named",
            "why",
        ]
        record = {"run": "gspo-seed1-abc", "commit": "c0ffee", "changed_files": ["a.py"]}
        assert run.config["record"]["value"] == record
        (read,) = (
            sources.records("wandb:team/theirs")
            if os.environ["WANDB_BASE_URL"] == server.address
            else [None]
        )
        assert read is None or read.path.name == "gspo-seed1-abc"
    script = TABLES.replace("table_rows=2", "project='own', tags=['z']").replace(
        "if step % 2", "if False"
    )
    with serving() as server:
        (tmp_path / "other").mkdir()
        command = [sys.executable, "-c", script, str(tmp_path / "other"), "0", "2"]
        forked.run(command, env=environment() | server.environment | theirs).check_returncode()
        (run,) = server.runs.values()
        assert run.about["project"] == "own" and run.about["tags"] == ["own", "z"]


SHARED = """
import sys, wandb
about = {"silent": True, "console": "off", "x_label": "machine", "x_primary": sys.argv[2] == "first"}
settings = wandb.Settings(**about, x_update_finish_state=sys.argv[2] == "first")
run = wandb.init(project="gspo", id=sys.argv[1], dir=sys.argv[3], mode="shared", settings=settings)
if sys.argv[2] == "first":
    run.log({"reward/mean": 0.5}, step=7)
run.finish()
"""


@pytest.mark.slow
def test_why_other_machines_write_no_system_metrics_into_the_run(tmp_path):
    """What docs/monitoring.md says of W&B's shared mode. If this fails with a newer client, look at
    it again.
    """

    def shared(identity: str, which: str) -> None:
        command = [sys.executable, "-c", SHARED, identity, which, str(tmp_path)]
        forked.run(command, env=environment() | server.environment).check_returncode()

    with serving() as server:
        log(tmp_path / "gspo-seed1-abc", rows(0, 5), **server.environment)
        (run,) = server.runs.values()
        assert run.summary["reward/mean"] == {"last": 0.505}
        shared(run.name, "second")
        assert steps(run) == list(range(6)) and run.ended
        assert "reward/mean" not in run.summary, (
            "the second writer's summary takes the place of the first's"
        )
        shared("first", "first")
        assert [row["_step"] for row in server.runs["first"].rows.values()] == [0], (
            "it was logged as step 7"
        )


@pytest.mark.slow
def test_one_command_uploads_the_runs_of_a_study_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "runs" / "a study"
    for seed in (1, 2):
        log(study / f"gspo-seed{seed}-abc", rows(0, 25))
    pause()
    log(study / "gspo-seed1-abc", rows(26, 40))
    command = upload(study)
    assert command == "wandb sync 'runs/a study'/*/wandb"
    with serving() as server:
        where = (
            environment()
            | server.environment
            | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        )
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=where, capture_output=True, text=True, check=True
        )
        found = {run.about["displayName"]: steps(run) for run in server.runs.values()}
        assert found == {"gspo-seed1-abc": list(range(41)), "gspo-seed2-abc": list(range(26))}, (
            done.stderr
        )
        assert upload(study) is None
        subprocess.run(command, shell=True, cwd=tmp_path, env=where, check=True)
        assert {run.about["displayName"]: steps(run) for run in server.runs.values()} == found
        pause()
        log(study / "gspo-seed2-abc", rows(26, 40))  # goes on offline after its upload
        assert upload(study) == command
        subprocess.run(command, shell=True, cwd=tmp_path, env=where, check=True)
        print({name: (run.about["displayName"], steps(run)) for name, run in server.runs.items()})
        assert all(steps(run) in (list(range(26)), list(range(41))) for run in server.runs.values())


@pytest.mark.slow
def test_refusals_are_one_line(server, capsys):
    with pytest.raises(ValueError, match="write wandb:ENTITY/PROJECT"):
        sources.records("wandb:team")
    # the server breaks: an error of its own in every answer
    before, server.runs = server.runs, None
    try:
        with pytest.raises(load.RunsError, match=r"^wandb:team/gspo: "):
            load.load(["wandb:team/gspo"])
    finally:
        server.runs = before
