"""A run from the outside: its directory, what it says of itself there, its policy."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from gspo.config.load import read_settings, write_settings
from gspo.config.settings import Settings, folder_of, same_result, settings_hash
from gspo.core.escaping import Lines
from gspo.core.files import (
    LOCK,
    STATUS,
    CreatedFiles,
    append_to,
    read_rows,
    read_status,
    refuse_links,
    remove_unfinished,
    replace_text,
)
from gspo.core.ownership import doubt, own
from gspo.core.untrusted import read_json
from gspo.model.loading import POSITIONS, Loaded, TinyDense, TinyMoE, positions
from gspo.model.policy import Policy
from gspo.model.value_head import ValueHead
from gspo.run.cli import Stopped
from gspo.train.checkpoint import check_belongs, damage, latest_checkpoint, read_state
from gspo.train.cold_start import CHECKED_PROBLEMS, cold_start, recorded_reward

LOG = "train.log"
PLACES = ("path", "train_path", "hub")  # settings of a task or a model: what is read from there
ENDED = ("finished", "collapsed")  # how a run ended that has nothing left to do


def find(settings: Settings, in_sweep: bool) -> Path:
    """The run's directory. Writes nothing. Raises ValueError if it holds results that may not be continued.

    With on_existing=auto the same command continues a run that was interrupted or failed; one that has ended is refused
    (in a sweep it is passed over, by `attempt` of experiments/train.py).
    """
    folder = folder_of(settings)
    if (folder / "metrics.jsonl").exists():
        how = read_status(folder).get("how", "interrupted")
        goes_on = settings.on_existing == "auto" and (in_sweep or how not in ENDED)
        if not (settings.resume or settings.on_existing == "resume" or goes_on):
            raise ValueError(f"{folder} exists already ({how}); continue it with resume={folder}, or remove it")
        difference = same_result(settings, read_settings(folder))
        if difference:
            raise ValueError(f"{folder} was made with other settings: {difference}")
        if not (settings.resume or in_sweep):
            print(f"{folder} is there already ({how}): this command goes on with it")
    return folder


@contextmanager
def exclusive(folder: Path, names: Collection[str] = ()) -> Iterator[CreatedFiles]:
    """One process at a time in a run directory. Raises ValueError if another one is there, and if something in it lies
    elsewhere; of a folder that holds other things too, `names` says which of its entries are written."""
    refuse_links(folder, names)
    made = CreatedFiles(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with append_to(folder / LOCK) as lock:
        for patience in (0.1, 0.3, 0.6, 0.0):  # who only looks whether somebody is there holds it for a moment
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(patience)
        else:
            raise ValueError(f"{folder} is being written by another process; wait for it, or stop it first")
        remove_unfinished(folder)
        yield made


def to_go_on_from(settings: Settings, folder: Path) -> Path | None:
    """The run's newest checkpoint; None to start from the beginning, which a run does that was killed before its first.

    Raises ValueError if the checkpoint is another run's, or if none is there although the rows go beyond two of them.
    """
    checkpoint = latest_checkpoint(folder)
    if checkpoint:
        check_belongs(checkpoint, settings_hash(settings))
        return checkpoint
    last = max((row["step"] for row in read_rows(folder / "metrics.jsonl")), default=-1)
    if last >= 0 and last >= 2 * (every := read_settings(folder).checkpoint.every):  # the first was whole by then
        raise ValueError(
            f"{folder} has no checkpoint, although it has rows up to step {last} and checkpoint.every={every}: "
            "put its checkpoints back, or move it away to start it from the beginning"
        )
    if settings.resume or last >= 0:
        print(f"{folder} was interrupted before its first checkpoint: it starts from the beginning")
    return None


def claim(settings: Settings, folder: Path, prompt_used: str) -> None:
    """Say in the directory what runs there; the settings take up what prompt.format became."""
    settings.prompt_used = prompt_used
    write_settings(settings, folder)
    replace_text(folder / "code.json", json.dumps(code_state(), indent=1))


def open_policy(settings: Settings, checkpoint: Path | None, report: Callable[[int, int, float], None]) -> Policy:
    """The policy of a checkpoint, or the one that reinforcement learning starts from; with its critic if it has one."""
    if isinstance(settings.model, TinyMoE | TinyDense):
        check_room(settings, POSITIONS)  # before a cold start that would be in vain
    folder = checkpoint or starting_folder(settings, report)
    model, tokenizer = opened(settings, folder)
    check_room(settings, positions(model))
    if folder and not checkpoint:
        reward = recorded_reward(folder)
        print(f"{settings.label()}: starts from {folder}, reward {reward:.3f} on {CHECKED_PROBLEMS} problems")
    head = ValueHead.open(model, checkpoint) if settings.advantage.needs_values else None
    return Policy(
        model,
        tokenizer,
        settings.rollout.temperature,
        head,
        settings.prompt,
        precision(settings),
        settings.policy.checkpointing,
    )


def check_room(settings: Settings, available: int | None) -> None:
    """Raises ValueError if responses leave no room for any prompt in the model's positions."""
    limit = settings.rollout.longest_limit
    if available and limit >= available:
        raise ValueError(f"rollout.max_new_tokens={limit} leaves no room for a prompt in {available} positions")


def open_reference(
    settings: Settings, checkpoint: Path | None, report: Callable[[int, int, float], None]
) -> Policy | None:
    """The reference policy, if there is a KL term: where the run started, or what it was refreshed to since."""
    if settings.kl.name == "none":
        return None
    refreshed = checkpoint / "reference" if checkpoint else None
    folder = refreshed if refreshed and refreshed.exists() else starting_folder(settings, report)
    model, tokenizer = opened(settings, folder)
    return Policy(model.requires_grad_(False), tokenizer, settings.rollout.temperature, precision=precision(settings))


def precision(settings: Settings) -> torch.dtype:
    """Of the trainer's matrix products."""
    return getattr(torch, settings.policy.precision)


def starting_folder(settings: Settings, report: Callable[[int, int, float], None]) -> Path | None:
    """The cold-started model's folder, made if it is not there yet; None where a run starts without cold start."""
    if not settings.cold_start.steps:
        return None
    cache = Path(settings.runs) / "cold_starts"
    parts = (settings.model, settings.task, settings.cold_start)
    return cold_start(*parts, cache, report, device(settings), settings.prompt)


def opened(settings: Settings, folder: Path | None) -> Loaded:
    """A model folder, or the model as its settings make it; on the run's device."""
    model, tokenizer = settings.model.open(folder) if folder else settings.model.make()
    return model.to(device(settings)), tokenizer


def say_layers(layers: dict[str, str]) -> None:
    """One line on what confines the programs that a task runs; nothing for a task that runs none."""
    if layers:
        print("sandbox: " + "; ".join(f"{name}: {state}" for name, state in layers.items()))


def device(settings: Settings) -> str:
    """Where the model runs. Raises ValueError for a device that is not there."""
    return usable_device(settings.policy.device, "policy.device")


def usable_device(wanted: str, key: str) -> str:
    """A device, or for "auto" the best one. Raises ValueError, naming the setting, for one that is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=wanted).item()
    except (RuntimeError, AssertionError) as error:  # unknown to torch; no such hardware; a build without it; no memory
        raise ValueError(f"{key}={wanted} cannot be used here: {str(error).splitlines()[0]}") from None
    return wanted


def recorded(run: str, step: int, consent: bool) -> tuple[Settings, Path]:
    """Settings and checkpoint of a run directory; step -1 is the newest checkpoint. Raises ValueError if not there.
    `consent`: to running programs in a weak sandbox."""
    settings = read_settings(Path(run), consent)
    if not own(Path(run) / "settings.yaml") and (reads := named_elsewhere(settings)):
        print(f"warning: {run}/settings.yaml {doubt()}; it reads {reads}", file=sys.stderr)
    folder = latest_checkpoint(Path(run)) if step < 0 else Path(run) / "checkpoints" / f"step_{step:06d}"
    if folder is None or not folder.exists():
        there = sorted(p.name for p in (Path(run) / "checkpoints").glob("step_??????"))
        raise ValueError(f"step={step}: {run} has no such checkpoint; it has {', '.join(there) or 'none'}")
    if step >= 0 and (problem := damage(folder)):
        raise ValueError(f"step={step}: {folder} is damaged: {problem}")
    read_json(folder / "config.json")  # which transformers would read without bounds
    return settings, folder


def about_its_maker(settings: Settings, folder: Path) -> list[str]:
    """What to say before a run is resumed that this user did not make."""
    if not settings.resume or own(folder / "settings.yaml"):
        return []
    place = "tracking.wandb, tracking.entity and tracking.project count as this command gives them"
    reads = f"; it reads {named}" if (named := named_elsewhere(settings)) else ""
    return [f"{folder / 'settings.yaml'} {doubt()}; {place}, so wandb={settings.tracking.wandb}{reads}"]


def named_elsewhere(settings: Settings) -> str:
    """What a run's settings name outside of its directory to be read, as key=value; "" for nothing."""
    groups = {"task": settings.task, "model": settings.model}
    named = {f"{group}.{key}": getattr(part, key, "") for group, part in groups.items() for key in PLACES}
    return ", ".join(f"{key}={value}" for key, value in named.items() if value)


def finished(checkpoint: Path | None, steps: int) -> bool:
    """Whether the run has reached `steps` already."""
    return checkpoint is not None and read_state(checkpoint)["step"] >= steps


def say(folder: Path, how: str, step: int, reason: str = "") -> None:
    """Write status.json: running, finished, stopped, collapsed or failed; the step; the reason of a failure."""
    entry = {
        "how": how,
        "step": step,
        "reason": reason,
        "time": time.time(),
        "pid": os.getpid(),
        "host": platform.node(),
    }
    replace_text(folder / STATUS, json.dumps(entry))


def git(*words: str) -> str:
    """What git says of this code; "" where there is no git, or no repository."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        return done.stdout
    except OSError:
        return ""


def code_state() -> dict:
    """Which code and which machine: commit, whether it was changed, versions."""
    return {
        "commit": git("rev-parse", "HEAD").strip() or None,
        "changed_files": [line[3:] for line in git("status", "--porcelain").splitlines()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "wandb", "hydra-core")},
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "command": sys.argv,
    }


@contextmanager
def log_to(folder: Path) -> Iterator[None]:
    """Within: the library's log goes to the run's train.log, with the traceback of whatever ends the run."""
    file = append_to(folder / LOG)
    handler = logging.StreamHandler(file)
    handler.setFormatter(Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("gspo")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    except Stopped:
        raise
    except Exception:
        if folder.exists():  # a run that could not begin has taken its folder away
            logger.exception("the run failed")
        raise
    finally:
        logger.removeHandler(handler)
        file.close()
