"""Checkpoints: written beside, then renamed, so that one is either whole or not there; `latest` moves last.

checkpoints/step_000100/   model folder (weights, config, tokenizer), optimizer.pt, state.json; where there is one,
                           value_head.pt (the critic), reference/ (a reference policy that was refreshed),
                           held.json and held.npz (responses that were sampled and not yet trained on)
checkpoints/latest         the name of the newest whole one
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch.optim import Optimizer

from gspo.policy.models import save
from gspo.policy.policy import Policy
from gspo.reward_shaping import RunningMoments
from gspo.rollout.held import save_held
from gspo.rollout.source import Held


@dataclass
class CheckpointSettings:
    """When to write one, and how many to keep. A checkpoint is always written at the end and when a run is stopped."""

    every: int = 10  # steps
    keep: int = 2  # newest ones; 0 keeps all

    def __post_init__(self):
        if self.every < 1 or self.keep < 0:
            raise ValueError(
                f"checkpoint.every={self.every} must be at least 1 and checkpoint.keep={self.keep} at least 0"
            )


@dataclass
class TrainState:
    """What a resumed run must know beside weights and optimizer; all counts are of the whole run."""

    step: int = 0
    updates: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    kl_coef: float | None = None  # the adaptive coefficient
    rewards: RunningMoments = field(default_factory=RunningMoments)  # of all rewards so far
    source: dict = field(default_factory=dict)  # what the rollout source must know, see OnPolicySource.state

    @staticmethod
    def from_json(content: dict) -> TrainState:
        state = TrainState(**{f.name: content[f.name] for f in fields(TrainState)})
        state.rewards = RunningMoments(**content["rewards"])
        return state


def save_checkpoint(
    run: Path,
    policy: Policy,
    optimizer: Optimizer,
    state: TrainState,
    keep: int,
    settings: str,
    reference: Policy | None = None,
    held: Held | None = None,
) -> Path:
    """Write weights, optimizer, counters and the hash of the settings; then drop all but the `keep` newest.

    `reference` is given where the reference policy is not the one that the run started from, `held` where responses
    wait for later steps.
    """
    folder = run / "checkpoints" / f"step_{state.step:06d}"
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save(policy.model, policy.tokenizer, unfinished)
    if policy.value_head:
        policy.value_head.save(unfinished)
    if reference:
        save(reference.model, reference.tokenizer, unfinished / "reference")
    if held:
        save_held(held, unfinished)
    torch.save(optimizer.state_dict(), unfinished / "optimizer.pt")
    (unfinished / "state.json").write_text(json.dumps(asdict(state) | {"settings": settings}))
    for path in [*unfinished.rglob("*")]:
        _sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    _sync(folder.parent)
    replace_text(folder.parent / "latest", folder.name)
    if keep:
        for old in sorted(p for p in folder.parent.glob("step_??????") if p.name <= folder.name)[:-keep]:
            shutil.rmtree(old)
    return folder


def latest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run directory, if any."""
    pointer = run / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    folder = pointer.parent / pointer.read_text().strip()
    if not (folder / "state.json").exists():
        raise ValueError(f"{pointer} names {folder.name}, which is not a whole checkpoint of this run")
    return folder


def check_belongs(folder: Path, settings: str) -> None:
    """Raises ValueError if a checkpoint was written under other settings, whatever directory it lies in now."""
    written = json.loads((folder / "state.json").read_text())["settings"]
    if written != settings:
        raise ValueError(f"{folder} belongs to a run with other settings ({written}, here {settings})")


def load_optimizer(folder: Path, optimizer: Optimizer) -> TrainState:
    """Put a checkpoint's optimizer state back; returns its counters. The weights are a model folder by themselves."""
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
    return TrainState.from_json(json.loads((folder / "state.json").read_text()))


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it holds either the old or the new text, never half of one."""
    beside = path.with_name(path.name + ".unfinished")
    beside.write_text(text)
    _sync(beside)
    os.replace(beside, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
