"""The live page is for this machine alone, whatever the environment says; no two studies or runs
become one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from processes import listening_addresses
from recorded_runs import write
from spoiled_runs import ESCAPE, MARKUP, ROOT, pipe, row
from viewer import Viewer

pytestmark = pytest.mark.browser  # where trackio is installed; no browser is opened


def named(folder: Path, study: str, seed: int = 1) -> Path:
    run = write(folder, "gspo", [0.4, 0.5], seed)
    settings = yaml.safe_load((run / "settings.yaml").read_text()) | {"study": study}
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_it_listens_on_the_loopback_address_and_opens_no_tunnel(tmp_path):
    named(tmp_path / "runs", "known")
    hosted = {
        "GRADIO_SERVER_NAME": "0.0.0.0",
        "GRADIO_SHARE": "true",
        "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    }
    hosted |= {
        "SYSTEM": "spaces",
        "TRACKIO_SERVER_URL": "http://192.0.2.1",
        "GRADIO_MCP_SERVER": "True",
    }
    with Viewer(tmp_path, "runs", **hosted) as viewer:
        assert viewer.address.startswith("http://127.0.0.1:")
        assert listening_addresses([viewer.process.pid]) == {"0100007F"}
        assert not any("gradio.live" in line or "public" in line for line in viewer.said)


def status(address: str, host: str) -> int:
    request = urllib.request.Request(address, headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_page_under_another_name_is_refused(tmp_path):
    """DNS rebinding: evil.example answers with 127.0.0.1, so that its own script may ask this page."""
    named(tmp_path / "runs", "known")
    with Viewer(tmp_path, "runs") as viewer:
        port = viewer.address.split(":")[2].split("/")[0]
        page = f"http://127.0.0.1:{port}/"
        assert [status(page, host) for host in (f"127.0.0.1:{port}", f"localhost:{port}")] == [
            200,
            200,
        ]
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            f"{socket.gethostname()}x",
        ):
            assert status(page, host) == 400, host
            assert status(f"{page}version", host) == 400, host


STORE = """
import sys
from pathlib import Path
sys.path[:0] = {paths}
from gspo.cli import view
from trackio import SQLiteStorage
page = view.Page(SQLiteStorage)
page.update(sys.argv[1:])
page.update(sys.argv[1:])
import json
found = {{study: {{run: len(SQLiteStorage.get_logs(study, run)) for run in SQLiteStorage.get_runs(study)}}
         for study in page.studies()}}
print(json.dumps(found))
"""


def stored(cwd: Path, *paths: str) -> dict[str, dict[str, int]]:
    script = STORE.format(paths=[str(ROOT / "experiments"), str(ROOT / "analysis"), str(ROOT)])
    there = os.environ | {"TRACKIO_DIR": str(cwd / "store"), "XDG_CACHE_HOME": str(cwd / "cache")}
    program = [sys.executable, "-c", script, *paths]
    done = subprocess.run(
        program, cwd=cwd, env=there, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_studies_and_runs_of_like_names_stay_apart(tmp_path):
    for folder, study in (
        ("a", "x1.0"),
        ("b", "x10"),
        ("c", "x1 0"),
        ("d", "known_traces"),
        ("e", "."),
        ("f", ".."),
    ):
        named(tmp_path / folder, study)
    found = stored(tmp_path, *"abcdef")
    assert len(found) == 6 and all(list(runs.values()) == [3] for runs in found.values()), found
    assert "x10" in found


def test_runs_of_one_name_are_two_curves(tmp_path):
    run = named(tmp_path / "mine" / "s", "known")
    shutil.copytree(run, tmp_path / "theirs" / "s" / run.name)
    with open(tmp_path / "theirs" / "s" / run.name / "metrics.jsonl", "a") as file:
        file.write(row(step=3, **{"reward/mean": 0.1}))
    # a run that is named twice is one
    for paths in (("mine", "theirs"), ("mine", "theirs", "mine/s")):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        (runs,) = stored(tmp_path, *paths).values()
        assert sorted(runs.values()) == [3, 4] and run.name in runs


def test_a_bad_run_leaves_the_page_to_the_others(tmp_path):
    whole = named(tmp_path / "runs", "known")
    bad = [
        named(tmp_path / "runs", study, seed)
        for seed, study in enumerate((ESCAPE + MARKUP, "n" * 500, "a", "b"), 2)
    ]
    (bad[1] / "settings.yaml").write_text("x: &a [1]\ny: [*a, *a]\n")
    pipe("monitor.jsonl")(bad[2])
    pipe("metrics.jsonl")(bad[3])
    with Viewer(tmp_path, "runs") as viewer:
        said = "".join(viewer.said)
        assert (
            "has an alias" in said
            and f"{bad[3] / 'metrics.jsonl'}".removeprefix(str(tmp_path) + "/") in said
        )
        assert "\x1b" not in said and "\u202e" not in said
        assert "of " in viewer.said[-2] and "known" in viewer.said[-2]
        viewer.process.send_signal(signal.SIGINT)
        end = time.monotonic() + 30
        while viewer.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
    assert viewer.process.returncode == 0 and "Traceback" not in viewer.rest
    assert whole.exists()
