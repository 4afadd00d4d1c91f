"""Shows the curves of runs, live and without an account.

    gspo view runs/STUDY
    gspo view runs/STUDY runs/OTHER in=terminal
    gspo view outputs objective=gspo updates_per_batch=4

The page is trackio's, at http://127.0.0.1:PORT. To install trackio, use pip install -e '.[view]' or
`make view RUNS=runs/STUDY`. A study is a project of the page. Runs can be grouped by arm (Group by:
Group) or by any setting, and the x axis can be chosen. New rows appear within seconds. Ctrl-C ends
it. in=terminal shows W&B's `leet` instead (h: help, q: quit).

Logs of other frameworks (docs/other_frameworks.md) have their own metrics after ours, under trl/,
verl/ and so on. The command only reads files, so it is safe during runs. The page's data is in a
temporary folder, which is removed at the end.
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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from gspo.analysis import sources
from gspo.analysis.foreign import FRAMEWORK
from gspo.analysis.foreign_joining import lasting_path, run_folder
from gspo.analysis.sources import Record
from gspo.io.arguments import command_options, option
from gspo.io.escaping import escape_line
from gspo.io.files import METRICS_FILE, read_events
from gspo.io.tables import counted
from gspo.run.entry_point import command_line
from gspo.tracking.foreign_options import NOTHING_SAID, ForeignOptions
from gspo.tracking.views import VIEWS

if TYPE_CHECKING:
    from trackio import SQLiteStorage
    from uvicorn import Server

LOOPBACK = "127.0.0.1"
# trackio reads the environment variables that begin like this, and SYSTEM
TRACKIO_VARIABLES = ("TRACKIO_", "GRADIO_", "SPACE_", "OAUTH_")
MIN_COLOURS = 32  # more runs may begin while the page is open
MAX_STUDY_CHARS = 100
# The page waits at least so long between two readings of the files, and at least nine times the
# duration of a reading.
PAUSE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Options(ForeignOptions):
    """The options of this command."""

    paths: tuple[str, ...] = option(
        ("runs",),
        "run directories, offline W&B files, logs of other frameworks, or folders above them "
        "(default: runs); wandb:ENTITY/PROJECT[/GROUP or /RUN_ID]",
    )
    in_: str = option("browser", "show a page, or W&B's leet", choices=("browser", "terminal"))
    port: int = option(7860, "port of the page, or the next free port", least=1, most=65535)
    open: bool = option(True, "open a browser; on a cluster, forward the port instead")


def main() -> None:
    """Show the runs that the command line names, until Ctrl-C."""
    command_line(show)


def show() -> None:
    """Read the command line, and show the runs in the browser or in the terminal."""
    options = command_options(Options, __doc__)
    for path in options.paths:
        if not path.startswith(sources.SERVER) and not Path(path).exists():
            raise ValueError(f"{path} does not exist")
    # SIGTERM acts like Ctrl-C, so that the folder below is removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="gspo-view-") as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        if options.in_ == "terminal":
            if options.given():
                raise ValueError(f"in=terminal shows files as they are: {options.without_effect()}")
            if options.port != Options.port or not options.open:
                raise ValueError("in=terminal shows no page: leave port= and open= out")
            sys.exit(terminal(options.paths, Path(folder)))
        browser(options.paths, Path(folder), options)
    print("closed")


# -------------------------------------------------------------------------------------------------
# in a browser
def browser(paths: Sequence[str], folder: Path, options: Options) -> None:
    """Fill trackio's store from the files, show its page, and add new rows until Ctrl-C."""
    # The user's variables could change the address, upload the data, or show another page.
    for name in list(os.environ):
        if name.startswith(TRACKIO_VARIABLES) or name == "SYSTEM":
            del os.environ[name]
    order = [name for view in VIEWS for panel in view.panels() for name in panel.metrics]
    os.environ["TRACKIO_DIR"] = str(folder)
    os.environ["TRACKIO_PLOT_ORDER"] = ",".join(order)
    os.environ["GRADIO_SERVER_PORT"] = str(options.port)  # trackio tries this port first
    try:
        from trackio import SQLiteStorage
    except ImportError:
        raise ValueError(
            "the page needs trackio: make view, or pip install -e '.[view]'; or set in=terminal"
        ) from None
    page = Page(SQLiteStorage)
    while not page.update(paths, options):
        records = [record for path in paths for record in sources.records(path, options)]
        if not any(record.settings for record in records):
            reasons = ["no folder with settings.yaml and metrics.jsonl"]
            reasons += [note for record in records for note in record.notes]
            raise ValueError(f"no runs under {', '.join(paths)}: {'; '.join(reasons[:5])}")
        page.say(f"no row yet under {', '.join(paths)}: waiting for the first")
        time.sleep(PAUSE_SECONDS)
    if options.given() and not page.has_foreign_runs:
        raise ValueError(options.without_effect())
    print(f"{counted(len(page.sent), 'run')} of {', '.join(page.studies())}")
    colours = palette(max(MIN_COLOURS, len(page.sent)))
    os.environ["TRACKIO_COLOR_PALETTE"] = ",".join(colours)
    server = serve()
    study = quote(page.studies()[0], safe="")
    address = f"http://{LOOPBACK}:{server.config.port}/?project={study}"
    print(f"{address}   (Ctrl-C ends it)", flush=True)
    if options.open:
        webbrowser.open(address)
    try:
        while True:
            started = time.monotonic()
            try:
                page.update(paths, options)
            except (OSError, ValueError) as error:
                # A folder was moved or W&B cannot be reached. The next reading may succeed.
                page.say(str(error))
            time.sleep(max(PAUSE_SECONDS, 9 * (time.monotonic() - started)))
    finally:
        # a second Ctrl-C must not leave the folder behind
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, signal.SIG_IGN)
        server.should_exit = True


def serve() -> Server:
    """Serve trackio's page to this machine only, and return the server.

    The server listens on the loopback address, without a tunnel to the outside. It only answers
    requests whose Host is this machine. Otherwise a web page could read it under another name (DNS
    rebinding). `trackio.show` does not check the host and reads the rest from the environment."""
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from trackio.launch import launch_trackio_dashboard
    from trackio.server import build_starlette_app_only

    app, _ = build_starlette_app_only(mcp_server=False)
    app.add_middleware(
        TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"], www_redirect=False
    )
    *_, server = launch_trackio_dashboard(app, server_name=LOOPBACK, share=False, quiet=True)
    return server


class Page:
    """The rows of each run that trackio's store has, so that only new rows are added.

    `store` is trackio.SQLiteStorage. It accepts thousands of rows at once, and trackio.log a single
    row. It is not a documented part of trackio, so trackio's version is pinned
    (tests/unit/analysis/test_view.py).
    """

    def __init__(self, store: type[SQLiteStorage]):
        self.store = store
        # from the page's study and run name to the id of the run that has this name
        self.run_ids: dict[tuple[str, str], str] = {}
        # the rows and the number of alerts that the page has, by study and run name
        self.sent: dict[tuple[str, str], list[dict[str, float]]] = {}
        self.alert_counts: dict[tuple[str, str], int] = {}
        self.notes: set[str] = set()
        self.has_foreign_runs = False

    def studies(self) -> list[str]:
        return sorted({study for study, _ in self.sent})

    def update(self, paths: Sequence[str], options: ForeignOptions = NOTHING_SAID) -> int:
        """Read the files again and return the number of new rows."""
        records = [record for path in paths for record in sources.records(path, options)]
        return sum(self.add(record) for record in records)

    def add(self, record: Record) -> int:
        """Give the store a run's new rows, or all rows again if earlier rows have changed.

        Earlier rows change if a run resumes from an earlier step. Returns the number of rows."""
        for note in record.notes:
            # counts in the notes on a run of another framework grow with every reading
            self.say(note, re.sub(r"\d+", "", note) if FRAMEWORK in record.settings else "")
        self.has_foreign_runs |= FRAMEWORK in record.settings
        study, name = self.study_and_name(record)
        rows = [
            {k: v for k, v in row.items() if v == v and v is not None}
            for row in record.rows.to_dict("records")
        ]
        old_rows = self.sent.get((study, name), [])
        if rows[: len(old_rows)] != old_rows:
            self.store.delete_run(study, name, run_id=name)
            self.alert_counts.pop((study, name), None)
            old_rows = []
        new_rows = rows[len(old_rows) :]
        if new_rows:
            metrics = [{k: v for k, v in row.items() if k != "step"} for row in new_rows]
            steps = [int(row["step"]) for row in new_rows]
            settings = {
                escape_line(k): escape_line(v) if isinstance(v, str) else v
                for k, v in record.settings.items()
            }
            settings["_Group"] = arm_of(name)  # the first choice of the page's "Group by"
            self.store.bulk_log(
                study, name, metrics, steps, times(record, new_rows), settings, run_id=name
            )
            self.sent[study, name] = rows
        if rows and record.path.is_dir():
            try:
                self.send_alerts(study, name, read_events(record.path / "monitor.jsonl"))
            except (OSError, ValueError) as error:
                self.say(str(error))
        return len(new_rows)

    def study_and_name(self, record: Record) -> tuple[str, str]:
        """Return the names of a run's study and of the run on the page.

        trackio merges studies whose names differ only in punctuation, and runs with the same name.
        In these cases a few digits are added to a name."""
        study = escape_line(record.settings.get("study", "runs"))
        name = escape_line(record.path.name)
        run_id = record.id or str(record.path.absolute())
        if FRAMEWORK in record.settings:
            log = lasting_path(record.path)
            run_id = record.id or str(log)
            # many logs have the same name, and many runs the same name of a folder
            names = dict.fromkeys((run_folder(record.path).name, log.name))
            name = escape_line("-".join(filter(None, names)))
        if not self.is_unchanged(study):
            study = f"study-{study[:MAX_STUDY_CHARS]}-{digits(study)}"
        if self.run_ids.setdefault((study, name), run_id) != run_id:
            name = f"{name}-{digits(run_id)}"
        return study, name

    def is_unchanged(self, study: str) -> bool:
        """Return whether trackio keeps this name of a study unchanged."""
        try:
            self.store.validate_project_name(study)
        except ValueError:  # a reserved name
            return False
        return len(study) <= MAX_STUDY_CHARS and all(c.isalnum() or c in "-_" for c in study)

    def send_alerts(self, study: str, name: str, events: list[dict]) -> None:
        """Show the monitor's events as alerts of the page, unless it already has all of them."""
        if len(events) == self.alert_counts.get((study, name), 0):
            return
        self.alert_counts[study, name] = len(events)
        level_by_kind = {"warning": "warn", "fallen": "error"}
        levels = [level_by_kind.get(event["kind"], "info") for event in events]
        ids = [f"{study}/{name}/{number}" for number in range(len(events))]
        kinds = [
            f"{event['kind']}: {event['signal']}" if event["signal"] else event["kind"]
            for event in events
        ]
        titles = [escape_line(f"{name}: {kind}") for kind in kinds]
        texts: list[str | None] = [escape_line(event["text"]) for event in events]
        steps = [event["step"] for event in events]
        self.store.bulk_alert(study, name, titles, texts, levels, steps, alert_ids=ids, run_id=name)

    def say(self, note: str, key: str = "") -> None:
        """Print each note once. A file without an end is normal here and is not printed.

        Of notes with the same key, only the first is printed."""
        key = key or note
        if key not in self.notes and "has no end" not in note:
            print(f"note: {escape_line(note)}", file=sys.stderr)
        self.notes.add(key)


def arm_of(run: str) -> str:
    """Return the name of a run's folder without seed and hash. All runs of an arm share it.

    >>> arm_of("grpo-lr0.0002-seed3-18fa44493a")
    'grpo-lr0.0002'
    """
    return re.sub(r"-seed\d+-[0-9a-f]{10}(?=$|-)", "", run)


def palette(count: int) -> list[str]:
    """Return `count` different colours: hues by the golden angle, in three lightnesses."""
    colours = []
    for index in range(count):
        hue = index * 0.618034 % 1
        lightness = (0.45, 0.6, 0.35)[index % 3]
        rgb = colorsys.hls_to_rgb(hue, lightness, 0.65)
        colours.append("#" + "".join(f"{round(255 * value):02x}" for value in rgb))
    return colours


def digits(name: str) -> str:
    """Return six hexadecimal digits of a name's hash."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:6]


def times(record: Record, rows: list[dict[str, float]]) -> list[str]:
    """Return the times at which the rows were written, estimated from their seconds of training.

    The last row has the time of the file's last change."""
    file = record.path / METRICS_FILE
    end = file.stat().st_mtime if file.exists() else time.time()
    seconds = [min(max(row.get("compute/seconds", 0.0), 0.0), 1e9) for row in rows]
    start = end - max(seconds)
    return [datetime.fromtimestamp(start + elapsed, UTC).isoformat() for elapsed in seconds]


# -------------------------------------------------------------------------------------------------
# in a terminal
def terminal(paths: Sequence[str], folder: Path) -> int:
    """Run `wandb leet` on links to the newest offline files of each run, and return its exit code.

    `folder` gets the links."""
    for path in paths:
        if path.startswith(sources.SERVER):
            raise ValueError(
                f"{path}: in=terminal shows files; for runs of the server type `wandb leet RUN-URL`"
            )
    newest_folders: dict[Path, Path] = {}  # by the parent of a run's W&B folders, and the run's id
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            files = [file for file in path.rglob("*.wandb") if file.is_file()]
        for file in sorted((file.resolve() for file in files), key=lambda file: file.parent.name):
            newest_folders[file.parent.parent / file.stem] = file.parent
    if not newest_folders:
        raise ValueError(
            f"no offline W&B files under {', '.join(paths)} "
            "(with tracking.wandb=disabled there are none)"
        )
    for wandb_folder in set(newest_folders.values()):
        with contextlib.suppress(FileExistsError):  # a copy of the run has the same name
            (folder / wandb_folder.name).symlink_to(wandb_folder)
    wandb = Path(sys.executable).parent / "wandb"
    return subprocess.run([wandb, "leet", folder], check=False).returncode
