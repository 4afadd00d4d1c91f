"""Curves of runs, live and without an account: `python experiments/view.py runs/STUDY [runs/OTHER ...]`

  in=browser      trackio's page at http://127.0.0.1:PORT (the default; install it with pip install '.[view]', or say
                  `make view RUNS=runs/STUDY`). A study is a project of the page, a run a run; group them by any
                  setting, choose the x axis. What running runs add appears within seconds. Ctrl-C ends it.
  in=terminal     W&B's `leet`: the offline files of each run, in this terminal (h: help, q: quit).
  port=7860       of the page; the next free one is taken
  open=no         do not open a browser: on a cluster, forward the port and open the address that is printed

Run directories, offline W&B files and folders above them will do, also wandb:ENTITY/PROJECT. Default: runs.
Reads files only: safe while runs go on. What the page keeps lies in a temporary folder and goes with it.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import webbrowser
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "analysis"))

import sources
from sources import Record

from gspo.process import command_line
from gspo.run_files import read_rows
from gspo.views import VIEWS

OPTIONS = {"in": ("browser", "terminal"), "open": ("yes", "no"), "port": ()}
PAUSE = 2.0  # seconds between two looks at the files, at least; nine times what a look takes, where that is longer


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return
    options = dict(argument.split("=", 1) for argument in arguments if argument.partition("=")[0] in OPTIONS)
    for key, value in options.items():
        if OPTIONS[key] and value not in OPTIONS[key]:
            raise ValueError(f"{key}={value}: choose one of {', '.join(OPTIONS[key])}")
    port = options.get("port", "7860")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"port={port} is not a port: give a number below 65536")
    paths = [argument for argument in arguments if argument.partition("=")[0] not in OPTIONS] or ["runs"]
    with tempfile.TemporaryDirectory(prefix="gspo-view-") as folder:
        if options.get("in") == "terminal":
            terminal(paths, Path(folder))
        else:
            browser(paths, Path(folder), int(port), options.get("open") != "no")


# --------------------------------------------------------------------------------------------------------- in a browser
def browser(paths: list[str], folder: Path, port: int, opens: bool) -> None:
    """Fill trackio's store from the files, show its page, go on filling until Ctrl-C."""
    order = [name for view in VIEWS for panel in view.panels() for name in panel.metrics]
    os.environ |= {"TRACKIO_DIR": str(folder), "TRACKIO_PLOT_ORDER": ",".join(order), "GRADIO_SHARE": "false"}
    try:
        import trackio
    except ImportError:
        raise ValueError("the page needs trackio: make view, or pip install '.[view]'; or say in=terminal") from None
    page = Page(trackio.SQLiteStorage)
    if not page.look(paths):
        raise ValueError(f"no runs under {', '.join(paths)}: no folder with settings.yaml and metrics.jsonl")
    print(f"{len(page.sent)} runs of {', '.join(page.studies())}")
    with contextlib.redirect_stdout(io.StringIO()):  # it advises on tokens for writing, which nobody needs here
        server, address, *_ = trackio.show(open_browser=False, block_thread=False, server_port=port)
    address = f"{address.rstrip('/')}/?project={page.studies()[0]}"
    print(f"{address}   (Ctrl-C ends it)", flush=True)
    if opens:
        webbrowser.open(address)
    try:
        while True:
            started = time.monotonic()
            try:
                page.look(paths)
            except (OSError, ValueError) as error:  # a run's folder was moved, a file is damaged: the rest goes on
                page.say(str(error))
            time.sleep(max(PAUSE, 9 * (time.monotonic() - started)))
    except KeyboardInterrupt:
        print("closed")
    finally:
        server.close()


class Page:
    """What trackio's store has been given of each run, so that a look adds what is new and nothing else.

    `store` is trackio.SQLiteStorage, which takes rows by the thousand; trackio.log would take them one by one. It is
    no documented part of trackio, so its version is pinned (tests/test_view.py).
    """

    def __init__(self, store: type):
        self.store = store
        self.sent: dict[tuple[str, str], list[dict[str, float]]] = {}  # by study and run
        self.notes: set[str] = set()

    def studies(self) -> list[str]:
        return sorted({study for study, _ in self.sent})

    def look(self, paths: list[str]) -> int:
        """Read the files again; returns how many rows were new."""
        return sum(self.add(record) for path in paths for record in sources.records(path))

    def add(self, record: Record) -> int:
        """Give the store the rows that it lacks; all of them again if a run went back and changed those it has."""
        for note in record.notes:
            self.say(note)
        study, name = str(record.settings.get("study", "runs")), record.path.name
        rows = [{k: v for k, v in row.items() if v == v and v is not None} for row in record.rows.to_dict("records")]
        before = self.sent.get((study, name), [])
        if rows[: len(before)] != before:
            self.store.delete_run(study, name, run_id=name)
            before = []
        new = rows[len(before) :]
        if new:
            metrics = [{k: v for k, v in row.items() if k != "step"} for row in new]
            steps = [int(row["step"]) for row in new]
            self.store.bulk_log(study, name, metrics, steps, times(record, new), record.settings, run_id=name)
            self.sent[study, name] = rows
            self.warn(study, name, read_rows(record.path / "monitor.jsonl"))
        return len(new)

    def warn(self, study: str, name: str, events: list[dict]) -> None:
        """The monitor's events as alerts of the page; those that it has are left alone."""
        levels = [{"warning": "warn", "fallen": "error"}.get(event["kind"], "info") for event in events]
        ids = [f"{study}/{name}/{number}" for number in range(len(events))]
        titles, texts = [event["kind"] for event in events], [event["text"] for event in events]
        steps = [event["step"] for event in events]
        self.store.bulk_alert(study, name, titles, texts, levels, steps, alert_ids=ids, run_id=name)

    def say(self, note: str) -> None:
        """Each note once; that a file has no end yet is what one expects here."""
        if note not in self.notes and "has no end" not in note:
            print(f"note: {note}", file=sys.stderr)
        self.notes.add(note)


def times(record: Record, rows: list[dict[str, float]]) -> list[str]:
    """When the rows were written: back from the file's last change by the seconds of training since."""
    file = record.path / "metrics.jsonl"
    end = file.stat().st_mtime if file.exists() else time.time()
    seconds = [row.get("compute/seconds", 0.0) for row in rows]
    return [datetime.fromtimestamp(end - max(seconds) + each, UTC).isoformat() for each in seconds]


# -------------------------------------------------------------------------------------------------------- in a terminal
def terminal(paths: list[str], folder: Path) -> None:
    """`wandb leet` over a folder of links to the newest offline files of each run."""
    newest: dict[Path, Path] = {}  # by the folder that holds a run's wandb files and by its id
    for path in paths:
        for file in sorted(Path(path).rglob("*.wandb"), key=lambda file: file.parent.name):
            newest[file.parent.parent / file.stem] = file.parent
    if not newest:
        raise ValueError(f"no offline W&B files under {', '.join(paths)} (with tracking.wandb=disabled there are none)")
    for found in newest.values():
        (folder / found.name).symlink_to(found.resolve())
    subprocess.run([Path(sys.executable).parent / "wandb", "leet", folder], check=False)


if __name__ == "__main__":
    command_line(main)
