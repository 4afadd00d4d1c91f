"""Pages in a real Chromium: the live page of running runs, reports opened from disk; and `wandb
leet` in a terminal.
"""

import json
import os
import pty
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from commands import ROOT, SMALL, command, environment, train
from foreign_logs import trl_row, write_state
from recorded_runs import write
from viewer import Viewer

pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CURVE = ".vega-embed canvas, .vega-embed svg"


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    # else playwright's own
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A tab that notes what it asks for outside this machine, and the errors of its scripts."""
    tab = chromium.new_page(viewport={"width": 1300, "height": 900})
    tab.outside, tab.errors = [], []
    here = ("http://127.0.0.1", "file:", "data:", "blob:")
    tab.on(
        "request",
        lambda request: None if request.url.startswith(here) else tab.outside.append(request.url),
    )
    tab.on("pageerror", lambda error: tab.errors.append(str(error)))
    yield tab
    tab.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A real run that has ended, and its folder."""
    folder = tmp_path_factory.mktemp("study")
    done = train(folder, *SMALL, "objective=gspo_tiny")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_page_shows_the_runs_and_their_curves(study, page):
    (run,) = (study / "runs" / "small").glob("gspo*-*")
    with Viewer(study, "runs") as viewer:
        assert "1 run of small" in viewer.said[0]
        page.goto(viewer.address)
        page.get_by_text(run.name).first.wait_for(timeout=60_000)
        page.locator(CURVE).first.wait_for(timeout=60_000)
        titles = page.locator(".vega-embed").count()
        assert titles >= 3 and page.get_by_text("reward (").first.is_visible()
        place = page.locator(CURVE).first.bounding_box()
        assert place["width"] > 150 and place["height"] > 100
        assert page.outside == [] and page.errors == []
    assert (
        viewer.process.returncode == 0
        and "closed" in viewer.rest
        and "Traceback" not in viewer.rest
    )


def test_a_running_run_refreshes(study, page):
    slow = [
        *SMALL,
        "objective=grpo",
        "study=live",
        "steps=100000",  # it is stopped before, however slowly the browser begins
        "tracking.wandb=disabled",
        "evaluation.every=100000",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen(command(*slow), cwd=study, env=environment(), **quiet)
    try:
        wait_for_rows(study / "runs" / "live", 3)
        with Viewer(study, "runs/live") as viewer:
            page.goto(viewer.address)
            page.locator(CURVE).first.wait_for(timeout=60_000)
            before = picture(page)
            rows = wait_for_rows(study / "runs" / "live", 3)
            wait_for_rows(study / "runs" / "live", rows + 20)
            end = time.monotonic() + 60
            while picture(page) == before:
                assert time.monotonic() < end, "the curve has not moved in a minute"
                page.wait_for_timeout(500)
            run.send_signal(signal.SIGTERM)
            run.wait(60)
            shots = [b""]
            while (now := picture(page)) != shots[-1]:  # and it stands still when the run does
                shots.append(now)
                assert len(shots) < 12
                page.wait_for_timeout(6000)
    finally:
        run.kill()


def picture(page) -> bytes:
    """The first curve's pixels; the page puts a new element in its place when it refreshes."""
    from playwright.sync_api import Error

    for _ in range(20):
        try:
            return page.locator(CURVE).first.screenshot(timeout=5000)
        except Error:
            page.wait_for_timeout(200)
    raise AssertionError("the curve never stood still for a picture")


def wait_for_rows(folder: Path, number: int) -> int:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = [len(path.read_text().splitlines()) for path in folder.glob("*/metrics.jsonl")]
        if found and found[0] >= number:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"{number} rows did not come")


def test_offline_files_alone_will_do(study, page, tmp_path):
    (run,) = (study / "runs" / "small").glob("gspo*-*")
    shutil.copytree(run / "wandb", tmp_path / "copied")
    with Viewer(tmp_path, "copied") as viewer:
        page.goto(viewer.address)
        page.get_by_text(run.name).first.wait_for(timeout=60_000)
        page.locator(CURVE).first.wait_for(timeout=60_000)
        assert page.locator(CURVE).count() > 0


def test_the_report_of_a_run_opens_from_disk_without_a_network(study, page):
    (run,) = (study / "runs" / "small").glob("gspo*-*")
    page.context.set_offline(True)
    page.goto(f"file://{run / 'report.html'}")
    assert run.name in page.title() and page.outside == [] and page.errors == []
    for words in (
        "What happened",
        "Is it stable?",
        "Warnings",
        "Responses",
        "Time and cost",
        "Settings",
    ):
        assert page.get_by_role("heading", name=words).is_visible(), words
    curves = page.locator("svg")
    assert curves.count() >= 6
    for i in range(curves.count()):
        drawn = curves.nth(i).locator("polyline").first.bounding_box()
        assert drawn["width"] > 100, curves.nth(i).inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_report_of_a_study_opens_from_disk_without_a_network(study, page):
    made = [sys.executable, str(ROOT / "analysis" / "study_report.py"), "runs/small"]
    done = subprocess.run(made, cwd=study, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page.context.set_offline(True)
    page.goto(f"file://{study / done.stdout.split()[0]}")
    assert page.title() == "Study small" and page.outside == [] and page.errors == []
    pictures = page.locator("img")
    assert pictures.count() >= 1
    for i in range(pictures.count()):
        assert pictures.nth(i).evaluate("image => image.complete && image.naturalWidth > 500")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.get_by_role("link", name="gspo").first.click()
    assert "gspo" in page.title() and page.get_by_role("heading", name="Is it stable?").is_visible()


def test_what_the_page_is_given_when_a_run_goes_back(tmp_path, monkeypatch):
    """A rollback rewrites rows: the page's store ends up with the run as it is, each step once."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    script = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests/support")!r})
from pathlib import Path
from gspo.cli import view
from recorded_runs import write
from trackio import SQLiteStorage
folder = write(Path("runs") / "s", "gspo", [0.4, 0.5, 0.6])
(folder / "monitor.jsonl").write_text('{{"step": 2, "kind": "warning", "text": "odd"}}\\n')
page = view.Page(SQLiteStorage)
news = [page.update(["runs"]), page.update(["runs"])]
with open(folder / "monitor.jsonl", "a") as file:  # after its row was seen
    file.write('{{"step": 3, "kind": "fallen", "signal": "reward_fall", "text": "low"}}\\n')
page.update(["runs"])
titles = [alert["title"] for alert in SQLiteStorage.get_alerts("known")]
assert titles == [f"{{folder.name}}: fallen: reward_fall", f"{{folder.name}}: warning"], titles
lines = (folder / "metrics.jsonl").read_text().splitlines()
back = [json.loads(line) for line in lines]
back[-1]["reward/mean"] = 0.1
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in back + [back[-1] | {{"step": 99}}]))
news.append(page.update(["runs"]))
(study,) = page.studies()
logs = SQLiteStorage.get_logs(study, folder.name)
print(json.dumps([news, [(row["step"], row["reward/mean"]) for row in logs if "reward/mean" in row]]))
print(len(SQLiteStorage.get_alerts(study)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, alerts = done.stdout.splitlines()
    (first, none, again), rows = json.loads(said)
    assert none == 0 and again == first + 1 and alerts == "2"
    assert rows[-2:] == [[rows[-2][0], 0.1], [99, 0.1]] and len({step for step, _ in rows}) == len(
        rows
    )


def test_a_run_of_another_framework(page, tmp_path):
    """Metrics under our names, then the framework's own; in trackio's real store."""
    rows = [trl_row(step) for step in range(1, 9)]
    write_state(tmp_path / "outputs" / "checkpoint-8" / "trainer_state.json", rows)
    (tmp_path / "store").mkdir()
    words = ("outputs", "objective=gspo", "updates_per_batch=2")
    with Viewer(tmp_path, *words, TMPDIR=str(tmp_path / "store")) as viewer:
        assert any("1 run of trl" in line for line in viewer.said)
        page.goto(viewer.address)
        page.locator(CURVE).first.wait_for(timeout=60_000)
        shown = page.inner_text("body")
        # the mean reward and, by name, the reward of TRL's one function
        sections = ("reward (2)", "correct (1)", "sequence_active", "trl (", "loss")
        order = [shown.index(text) for text in sections]
        assert order == sorted(order) and page.errors == []
        (database,) = (path for path in (tmp_path / "store").rglob("*.db") if "trl" in path.name)
        assert [row["step"] for row in logs(database, "outputs")] == [1, 2, 3, 4]


def test_a_taken_port_a_damaged_run_and_a_terminated_viewer(tmp_path):
    whole, bad = (write(tmp_path / "runs", "gspo", [0.4, 0.5], seed) for seed in (1, 2))
    (bad / "metrics.jsonl").write_text("garbage\n" + (bad / "metrics.jsonl").read_text())
    store = tmp_path / "store"
    store.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Viewer(tmp_path, "runs", f"port={port}", TMPDIR=str(store)) as viewer:
            assert f":{port}/" not in viewer.address
            assert any("lines left out that are no rows: 1" in line for line in viewer.said)
            with open(whole / "metrics.jsonl", "a") as file:
                file.write('{"step": 3, "reward/mean": 0.6}\n')
            (database,) = (path for path in store.rglob("*.db") if "known" in path.name)
            end = time.monotonic() + 30
            while [row["step"] for row in logs(database, whole.name)] != [0, 1, 2, 3]:
                assert time.monotonic() < end
                time.sleep(0.5)
            viewer.process.terminate()
    assert viewer.process.returncode == 0 and list(store.iterdir()) == []


def logs(database: Path, run: str) -> list[sqlite3.Row]:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute(
            "SELECT step FROM metrics WHERE run_name = ? ORDER BY step", (run,)
        ).fetchall()


def test_it_waits_for_the_first_row(tmp_path):
    folder = write(tmp_path / "runs", "gspo", [0.4])
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("")
    timer = threading.Timer(5, (folder / "metrics.jsonl").write_text, [rows])
    timer.start()
    with Viewer(tmp_path, "runs") as viewer:
        assert "no row yet under runs: waiting" in viewer.said[0]


def test_in_the_terminal(study):
    (run,) = (study / "runs" / "small").glob("gspo*-*")
    program = [sys.executable, "-P", "-m", "gspo", "view", "runs/small", "in=terminal"]
    pid, screen = pty.fork()
    if pid == 0:
        os.chdir(study)
        os.execvpe(
            program[0],
            program,
            environment() | {"TERM": "xterm-256color", "LINES": "50", "COLUMNS": "180"},
        )
    shown, end = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end and not (
            run.name.encode() in shown and b"advantage/abs_max" in shown
        ):
            if select.select([screen], [], [], 1)[0]:
                shown += os.read(screen, 65536)
        assert run.name.encode() in shown and b"advantage/abs_max" in shown, shown[-2000:].decode(
            errors="replace"
        )
        os.write(screen, b"q")
    finally:
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["empty"], "no runs under empty"),
        (["empty", "in=terminal"], "no offline W&B files under empty"),
        (["nowhere", "in=terminal"], "nowhere does not exist"),
        (["wandb:team/gspo", "in=terminal"], "in=terminal shows files"),
        (["empty", "in=terminal", "port=8000"], "in=terminal shows no page"),
        (["in=window"], "in=window: choose one of browser, terminal"),
        (["port=x"], "port=x: must be a whole number"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, said, tmp_path):
    (tmp_path / "empty").mkdir()
    program = [sys.executable, "-P", "-m", "gspo", "view", *arguments]
    if "in=terminal" not in arguments:
        program.append("open=false")
    done = subprocess.run(
        program, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
