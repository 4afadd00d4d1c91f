"""A run from the outside: its directory, its policy, how it is stopped, and how errors become one line."""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from gspo.checkpoint import latest_checkpoint, replace_text
from gspo.cold_start import cold_start
from gspo.config import Settings, read_settings, run_directory, same_result, write_settings
from gspo.policy.policy import Policy


def find(settings: Settings) -> tuple[Path, Path | None]:
    """The run's directory, and the checkpoint to go on from if there is one. Writes nothing.

    Raises ValueError if the directory holds results that may not be continued.
    """
    folder = Path(settings.resume) if settings.resume else run_directory(settings)
    if (folder / "metrics.jsonl").exists():
        if not settings.resume and settings.on_existing == "refuse":
            raise ValueError(
                f"{folder} exists already; continue it with resume={folder} (or on_existing=resume), or remove it"
            )
        difference = same_result(settings, read_settings(folder))
        if difference:
            raise ValueError(f"{folder} was made with other settings: {difference}")
    return folder, latest_checkpoint(folder)


def claim(settings: Settings, folder: Path) -> None:
    """Make the directory and say in it what runs there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(settings, folder)
    replace_text(folder / "code.json", json.dumps(code_state(), indent=1))


def open_policy(settings: Settings, checkpoint: Path | None, report: Callable[[int, int, float], None]) -> Policy:
    """The policy of a checkpoint; without one, the policy that reinforcement learning starts from."""
    if checkpoint:
        model, tokenizer = settings.model.open(checkpoint)
    elif settings.cold_start.steps:
        cache = Path(settings.runs) / "cold_starts"
        model, tokenizer = settings.model.open(
            cold_start(settings.model, settings.task, settings.cold_start, cache, report)
        )
    else:
        model, tokenizer = settings.model.make()
    device = settings.policy.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Policy(model.to(device), tokenizer, settings.rollout.temperature)


def recorded(run: str, step: int) -> tuple[Settings, Path]:
    """Settings and checkpoint of a run directory; step -1 is the newest checkpoint. Raises ValueError if not there."""
    settings = read_settings(Path(run))
    folder = latest_checkpoint(Path(run)) if step < 0 else Path(run) / "checkpoints" / f"step_{step:06d}"
    if folder is None or not (folder / "state.json").exists():
        there = sorted(p.name for p in (Path(run) / "checkpoints").glob("step_??????"))
        raise ValueError(f"step={step}: {run} has no such checkpoint; it has {', '.join(there) or 'none'}")
    return settings, folder


def finished(checkpoint: Path | None, steps: int) -> bool:
    """Whether the run has reached `steps` already."""
    return checkpoint is not None and json.loads((checkpoint / "state.json").read_text())["step"] >= steps


def code_state() -> dict:
    """Which code and which machine: commit, whether it was changed, versions."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    return {
        "commit": commit or None,
        "changed_files": [line[3:] for line in changed.splitlines()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "wandb", "hydra-core")},
        "machine": platform.machine(),
        "command": sys.argv,
    }


def log_to(folder: Path) -> logging.Handler:
    """Send the library's log to the run's train.log; close the handler at the end of the run."""
    handler = logging.FileHandler(folder / "train.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("gspo")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


class Stopped(Exception):
    """Raised where a run that was asked to stop has nothing to save yet."""


class StopSignal:
    """SIGINT and SIGTERM ask for a stop after the current step; a second one stops at once.

    One per process: a process that was asked to stop runs no further jobs of its sweep.
    """

    number: int = 0  # the signal that asked
    loud: bool = False  # whether this process tells the user; the workers of a sweep leave it to the process above

    def install(self, *numbers: int) -> None:
        for number in numbers:
            signal.signal(number, self._note)

    def requested(self) -> bool:
        return self.number != 0

    def raise_if_requested(self) -> None:
        if self.number:
            raise Stopped

    def _note(self, number: int, frame: object) -> None:
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
        if self.loud:
            print(
                "\nstopping after the current step (once more: stop now and lose what no checkpoint holds)", flush=True
            )


_STOP = StopSignal()


def stop_signal() -> StopSignal:
    """This process's. Entry points must ask here: a sweep's launcher copies their globals into its workers."""
    return _STOP


USER_ERRORS = (ValueError, HydraException, OmegaConfBaseException)


def one_line(job: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """A job whose wrong settings become one line and exit code 2, before Hydra can add its own lines to it."""

    @functools.wraps(job)
    def reported(config: DictConfig) -> None:
        try:
            job(config)
        except USER_ERRORS as error:
            sys.exit(report(error))
        except OSError as error:
            print(
                f"error: {error}; what was written before is kept: go on with resume=RUN when this is mended",
                file=sys.stderr,
            )
            sys.exit(1)

    return reported


def command_line(main: Callable[[], None]) -> None:
    """Run an entry point. Exit codes: 0 done, 2 wrong settings, 1 anything else, 128 + n stopped by signal n."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise composition errors instead of printing them over several lines
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        main()
    except USER_ERRORS as error:
        sys.exit(report(error))
    if _STOP.number:
        sys.exit(128 + _STOP.number)


def report(error: BaseException) -> int:
    print("error: " + explain(error), file=sys.stderr)
    return 2


def explain(error: BaseException) -> str:
    """The messages of an error and its causes in one line, without Hydra's advice to its own developers."""
    parts = []
    while error is not None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        parts += [line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))]
        error = error.__cause__
    return " ".join(dict.fromkeys(parts))
