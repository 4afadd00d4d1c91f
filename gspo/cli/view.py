"""Curves of runs, live and without an account: `gspo view runs/STUDY [runs/OTHER ...]`

  in=browser      trackio's page at http://127.0.0.1:PORT (the default; install it with pip install
                  '.[view]', or say `make view RUNS=runs/STUDY`). A study is a project of the page,
                  a run a run; group them by arm (Group by: Group) or by any setting, choose the x
                  axis. What running runs add appears within seconds. Ctrl-C ends it.
  in=terminal     W&B's `leet`: the offline files of each run, in this terminal (h: help, q: quit).
  port=7860       of the page; the next free one is taken
  open=no         do not open a browser: on a cluster, forward the port and open the address that is
                  printed

Run directories, offline W&B files and folders above them will do, also wandb:ENTITY/PROJECT.
Default: runs. Reads files only: safe while runs go on. What the page keeps lies in a temporary
folder and goes with it.
"""

from __future__ import annotations

import colorsys
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import webbrowser
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from gspo.analysis import sources
from gspo.analysis.sources import Record
from gspo.io.arguments import key_values
from gspo.io.escaping import escape_line
from gspo.io.files import read_events
from gspo.run.entry_point import command_line
from gspo.tracking.views import VIEWS

OPTIONS = {"in": "browser", "open": "yes", "port": "7860"}
CHOICES = {"in": ("browser", "terminal"), "open": ("yes", "no")}
HERE = "127.0.0.1"
# the variables that trackio reads from the environment, beside SYSTEM
THEIRS = ("TRACKIO_", "GRADIO_", "SPACE_", "OAUTH_")
FEWEST_COLOURS = 32  # more runs may begin while the page is open
LONGEST = 100  # most characters of a project's name
# least seconds between two looks at the files; nine times what a look takes, where that is longer
PAUSE = 2.0


def main() -> None:
    """Show the runs that the command line names, until Ctrl-C."""
    command_line(show)


def show() -> None:
    """Read the command line, and show the runs in the browser or in the terminal."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return
    options, paths = key_values(arguments, OPTIONS, paths=True)
    for key, choices in CHOICES.items():
        if options[key] not in choices:
            raise ValueError(f"{key}={options[key]}: choose one of {', '.join(choices)}")
    port = options["port"]
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"port={port} is not a port: give a number below 65536")
    paths = paths or ["runs"]
    for path in paths:
        if not path.startswith(sources.SERVER) and not Path(path).exists():
            raise ValueError(f"{path} does not exist")
    # handled like Ctrl-C, so that the folder below is removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="gspo-view-") as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        if options["in"] == "terminal":
            sys.exit(terminal(paths, Path(folder)))
        browser(paths, Path(folder), port, options["open"] != "no")
    print("closed")


# ---------------------------------------------------------------------------------------------------------
# in a browser
def browser(paths: list[str], folder: Path, port: str, opens: bool) -> None:
    """Fill trackio's store from the files, show its page, and go on filling until Ctrl-C."""
    order = [name for view in VIEWS for panel in view.panels() for name in panel.metrics]
    for name in [name for name in os.environ if name.startswith(THEIRS) or name == "SYSTEM"]:
        # these would say where to listen, what to upload and whose page to show, which is decided
        # here
        del os.environ[name]
    os.environ |= {"TRACKIO_DIR": str(folder), "TRACKIO_PLOT_ORDER": ",".join(order)}
    os.environ["GRADIO_SERVER_PORT"] = port  # trackio tries this port first
    try:
        from trackio import SQLiteStorage
    except ImportError:
        raise ValueError(
            "the page needs trackio: make view, or pip install '.[view]'; or say in=terminal"
        ) from None
    page = Page(SQLiteStorage)
    while not page.look(paths):
        if not any(sources.records(path) for path in paths):
            raise ValueError(
                f"no runs under {', '.join(paths)}: no folder with settings.yaml and metrics.jsonl"
            )
        page.say(f"no row yet under {', '.join(paths)}: waiting for the first")
        time.sleep(PAUSE)
    print(f"{len(page.sent)} runs of {', '.join(page.studies())}")
    os.environ["TRACKIO_COLOR_PALETTE"] = ",".join(palette(max(FEWEST_COLOURS, len(page.sent))))
    server, address = serve()
    address = f"{address.rstrip('/')}/?project={quote(page.studies()[0], safe='')}"
    print(f"{address}   (Ctrl-C ends it)", flush=True)
    if opens:
        webbrowser.open(address)
    try:
        while True:
            started = time.monotonic()
            try:
                page.look(paths)
            # a folder was moved or W&B cannot be reached; the next look may succeed
            except (OSError, ValueError) as error:
                page.say(str(error))
            time.sleep(max(PAUSE, 9 * (time.monotonic() - started)))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            # a second Ctrl-C must not leave the folder behind
            signal.signal(number, signal.SIG_IGN)
        server.should_exit = True


def serve() -> tuple[object, str]:
    """Serve trackio's page to this machine alone and return the server and its address. It listens
    on the loopback address, without a tunnel to the outside, and answers only requests that name
    this host, so that no other web page reads it under a name of its own (DNS rebinding).
    `trackio.show` does not check the host, and takes the rest from the environment."""
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from trackio.launch import launch_trackio_dashboard
    from trackio.server import build_starlette_app_only

    app, _ = build_starlette_app_only(mcp_server=False)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HERE, "localhost"], www_redirect=False)
    address, _, _, server = launch_trackio_dashboard(app, server_name=HERE, share=False, quiet=True)
    return server, address


class Page:
    """What trackio's store has been given of each run, so that a look adds only what is new.

    `store` is trackio.SQLiteStorage, which takes rows by the thousand, whereas trackio.log would
    take them one by one. It is not a documented part of trackio, so trackio's version is pinned
    (tests/unit/analysis/test_view.py).
    """

    def __init__(self, store: type):
        self.store = store
        # from the page's study and run to the run that has this name
        self.names: dict[tuple[str, str], str] = {}
        self.sent: dict[tuple[str, str], list[dict[str, float]]] = {}  # by study and run
        self.warned: dict[tuple[str, str], int] = {}  # the number of alerts that the page has
        self.notes: set[str] = set()

    def studies(self) -> list[str]:
        return sorted({study for study, _ in self.sent})

    def look(self, paths: list[str]) -> int:
        """Read the files again and return how many rows were new."""
        return sum(self.add(record) for path in paths for record in sources.records(path))

    def add(self, record: Record) -> int:
        """Give the store the rows that it lacks, or all of them again if a run went back and
        changed earlier ones.
        """
        for note in record.notes:
            self.say(note)
        study, name = self.place(record)
        rows = [
            {k: v for k, v in row.items() if v == v and v is not None}
            for row in record.rows.to_dict("records")
        ]
        before = self.sent.get((study, name), [])
        if rows[: len(before)] != before:
            self.store.delete_run(study, name, run_id=name)
            self.warned.pop((study, name), None)
            before = []
        new = rows[len(before) :]
        if new:
            metrics = [{k: v for k, v in row.items() if k != "step"} for row in new]
            steps = [int(row["step"]) for row in new]
            settings = {
                escape_line(k): escape_line(v) if isinstance(v, str) else v
                for k, v in record.settings.items()
            }
            settings["_Group"] = arm_of(name)  # the first choice of the page's "Group by"
            self.store.bulk_log(
                study, name, metrics, steps, times(record, new), settings, run_id=name
            )
            self.sent[study, name] = rows
        if rows:
            try:
                self.warn(study, name, read_events(record.path / "monitor.jsonl"))
            except (OSError, ValueError) as error:
                self.say(str(error))
        return len(new)

    def place(self, record: Record) -> tuple[str, str]:
        """Return the project and the name under which the page has a run. trackio takes names for
        the same that differ only in punctuation, and runs of one name for one; where it would, a
        few digits keep them apart."""
        study, name = (
            escape_line(record.settings.get("study", "runs")),
            escape_line(record.path.name),
        )
        if not self.takes(study):
            study = f"study-{study[:LONGEST]}-{digits(study)}"
        whose = record.id or str(record.path.absolute())
        if self.names.setdefault((study, name), whose) != whose:
            name = f"{name}-{digits(whose)}"
        return study, name

    def takes(self, study: str) -> bool:
        """Return whether trackio keeps this name unchanged."""
        try:
            self.store.validate_project_name(study)
        except ValueError:  # raised for a reserved name
            return False
        return len(study) <= LONGEST and all(c.isalnum() or c in "-_" for c in study)

    def warn(self, study: str, name: str, events: list[dict]) -> None:
        """Show the monitor's events as alerts of the page, except those that it already has."""
        if len(events) == self.warned.get((study, name), 0):
            return
        self.warned[study, name] = len(events)
        levels = [
            {"warning": "warn", "fallen": "error"}.get(event["kind"], "info") for event in events
        ]
        ids = [f"{study}/{name}/{number}" for number in range(len(events))]
        kinds = [
            f"{event['kind']}: {event['signal']}" if event["signal"] else event["kind"]
            for event in events
        ]
        titles = [escape_line(f"{name}: {kind}") for kind in kinds]
        texts = [escape_line(event["text"]) for event in events]
        steps = [event["step"] for event in events]
        self.store.bulk_alert(study, name, titles, texts, levels, steps, alert_ids=ids, run_id=name)

    def say(self, note: str) -> None:
        """Print each note once, except that a file has no end yet, which is normal here."""
        if note not in self.notes and "has no end" not in note:
            print(f"note: {escape_line(note)}", file=sys.stderr)
        self.notes.add(note)


def arm_of(run: str) -> str:
    """Return the name of a run's folder without seed and hash, which runs of one arm share.

    >>> arm_of("grpo-lr0.0002-seed3-18fa44493a")
    'grpo-lr0.0002'
    """
    return re.sub(r"-seed\d+-[0-9a-f]{10}(?=$|-)", "", run)


def palette(count: int) -> list[str]:
    """Return so many different colours: hues by the golden angle, in three lightnesses."""
    colours = []
    for number in range(count):
        hue = number * 0.618034 % 1
        red, green, blue = colorsys.hls_to_rgb(hue, (0.45, 0.6, 0.35)[number % 3], 0.65)
        colours.append(f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}")
    return colours


def digits(name: str) -> str:
    """Return six hexadecimal digits of a name's hash."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:6]


def times(record: Record, rows: list[dict[str, float]]) -> list[str]:
    """Return when the rows were written, counted back from the file's last change by the seconds of
    training since.
    """
    file = record.path / "metrics.jsonl"
    end = file.stat().st_mtime if file.exists() else time.time()
    seconds = [min(max(row.get("compute/seconds", 0.0), 0.0), 1e9) for row in rows]
    return [datetime.fromtimestamp(end - max(seconds) + each, UTC).isoformat() for each in seconds]


# --------------------------------------------------------------------------------------------------------
# in a terminal
def terminal(paths: list[str], folder: Path) -> int:
    """Run `wandb leet` over a folder of links to the newest offline files of each run, and return
    its exit code.
    """
    if away := [path for path in paths if path.startswith(sources.SERVER)]:
        raise ValueError(
            f"{away[0]}: in=terminal shows files; for runs of the server say `wandb leet RUN-URL`"
        )
    newest: dict[Path, Path] = {}  # by the folder that holds a run's wandb files, and the run's id
    for path in map(Path, paths):
        files = (
            [file for file in path.rglob("*.wandb") if file.is_file()] if path.is_dir() else [path]
        )
        for file in sorted((file.resolve() for file in files), key=lambda file: file.parent.name):
            newest[file.parent.parent / file.stem] = file.parent
    if not newest:
        raise ValueError(
            f"no offline W&B files under {', '.join(paths)} (with tracking.wandb=disabled there are none)"
        )
    for found in set(newest.values()):
        with contextlib.suppress(FileExistsError):  # the same run is there as a copy
            (folder / found.name).symlink_to(found)
    return subprocess.run(
        [Path(sys.executable).parent / "wandb", "leet", folder], check=False
    ).returncode
