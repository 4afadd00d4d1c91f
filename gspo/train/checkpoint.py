"""Writes and reads checkpoints. A checkpoint is written to an unfinished folder that is renamed at
the end, so that it is either whole or not there. The file `latest` is changed last.

checkpoints/step_000100/   model folder (weights, config, tokenizer), optimizer.pt, state.json; with
                           LoRA, in the place of the model, peft's files of the adapter
                           (gspo.model.adapter); where there is one, value_head.pt (the critic),
                           reference/ (a reference policy that was refreshed), held.json and
                           held.npz (responses that were sampled and not yet trained on) optimizer/
                           in the place of optimizer.pt where the weights were spread over ranks
                           checksums.json: of every other file, so that a damaged checkpoint is
                           noticed and skipped
checkpoints/latest         the name of the newest whole checkpoint
"""

from __future__ import annotations

import json
import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gspo.algorithm.reward_shaping import RunningMoments
from gspo.io.files import errors_of_the_disk, replace_text, sync
from gspo.model.loading import save
from gspo.model.policy import Policy
from gspo.model.value_head import FILE as VALUE_HEAD
from gspo.rollout.sources.base import PendingRollouts
from gspo.rollout.sources.pending import save_pending
from gspo.train.checkpoint_files import read_state, seal

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Holds what a resumed run needs beside weights and optimizer state. All counts are of the
    whole run.
    """

    step: int = 0
    updates: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    skipped: int = 0  # the number of latest updates in a row whose gradient was not finite
    kl_coef: float | None = None  # the adaptive coefficient of the KL term
    # the coefficient of the entropy bonus, and the entropy of the latest update
    entropy_coef: list[float | None] | None = None
    rewards: RunningMoments = field(default_factory=RunningMoments)  # of all rewards so far
    # the state of the rollout source, see RolloutSource.state
    source: dict = field(default_factory=dict)
    # the states of the user's callbacks, see Extensions.state
    callbacks: dict = field(default_factory=dict)

    @staticmethod
    def from_json(content: dict) -> TrainState:
        """Build the state from the content of state.json; keys that are no fields are ignored."""
        state = TrainState(
            **{f.name: content[f.name] for f in fields(TrainState) if f.name in content}
        )
        state.rewards = RunningMoments(**content["rewards"])
        return state


@dataclass
class Snapshot:
    """Holds copies of everything that goes into a checkpoint, so that training can continue while
    they are written.
    """

    step: int
    model: dict[str, Tensor]  # with LoRA the adapter's tensors alone
    optimizer: dict
    state: str  # the content of state.json
    value_head: dict[str, Tensor] | None
    reference: dict[str, Tensor] | None
    spared: int  # the newest checkpoint of this step or before is not deleted


class CheckpointWriter:
    """Writes the checkpoints of a run in a second thread while training continues, at most one at a
    time.

    An error while writing one is raised by the next `check`, `save` or `wait`.
    """

    def __init__(
        self,
        run: Path,
        policy: Policy,
        optimizer: Optimizer,
        keep: int,
        settings: str,
        cleans: bool = True,
    ):
        self.folder, self.policy, self.optimizer = run / "checkpoints", policy, optimizer
        self.keep, self.settings = keep, settings
        # left by a run that was killed while it wrote them
        for unfinished in self.folder.glob("*.unfinished") if cleans else ():
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None

    def save(
        self,
        state: TrainState,
        reference: Policy | None = None,
        pending: PendingRollouts | None = None,
        spared: int = -1,
    ) -> None:
        """Copy weights, optimizer state, counters and the hash of the settings, and begin to write
        them.

        `reference` is given if the reference policy is no longer the one that the run started from,
        `pending` if there are responses that wait for later steps. Beside the `keep` newest
        checkpoints, the newest one of step `spared` or before is kept.
        """
        self.wait()
        unfinished = self._begin(state.step, pending)
        head, adapter = self.policy.value_head, self.policy.adapter
        snapshot = Snapshot(
            step=state.step,
            model=copies(adapter.tensors() if adapter else self.policy.model.state_dict()),
            optimizer=copies(self.optimizer.state_dict()),
            state=json.dumps(asdict(state) | {"settings": self.settings}),
            value_head=copies(head.state_dict()) if head else None,
            reference=copies(reference.model.state_dict()) if reference else None,
            spared=spared,
        )
        self.writing = self.thread.submit(self._write, snapshot, unfinished)

    def _begin(self, step: int, pending: PendingRollouts | None) -> Path:
        """Make the unfinished folder of a checkpoint and write into it the responses that wait, if
        any.
        """
        unfinished = self.folder / f"step_{step:06d}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if pending:
            save_pending(pending, unfinished)
        return unfinished

    def _write(self, snapshot: Snapshot, unfinished: Path) -> None:
        """Write the snapshot into the unfinished folder and rename it."""
        model, tokenizer = self.policy.model, self.policy.tokenizer
        if self.policy.adapter:
            self.policy.adapter.save(unfinished, snapshot.model)
            tokenizer.save_pretrained(unfinished)
        else:
            save(model, tokenizer, unfinished, snapshot.model)
        if snapshot.value_head:
            save_tensors(snapshot.value_head, unfinished / VALUE_HEAD)
        if snapshot.reference:
            save(model, tokenizer, unfinished / "reference", snapshot.reference)
        save_tensors(snapshot.optimizer, unfinished / "optimizer.pt")
        (unfinished / "state.json").write_text(snapshot.state, encoding="utf-8")
        seal(unfinished)
        self._finish(unfinished, snapshot.spared)

    def _finish(self, unfinished: Path, spared: int) -> None:
        """Rename a folder that is whole; then delete all but the `keep` newest and the newest of
        step `spared`.
        """
        folder = unfinished.with_suffix("")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        sync(self.folder)
        replace_text(self.folder / "latest", folder.name)
        if self.keep:
            whole = sorted(p for p in self.folder.glob("step_??????") if p.name <= folder.name)
            kept = [p for p in whole if p.name <= f"step_{spared:06d}"][-1:]
            for old in whole[: -self.keep]:
                if old not in kept:
                    shutil.rmtree(old)

    def check(self) -> None:
        """Raise the error of writing the last checkpoint, if that has ended with one already."""
        if self.writing and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is whole. Raises the error of writing it,
        if any.
        """
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def close(self) -> None:
        """Wait until the last checkpoint is whole and end the thread. An error is logged, not
        raised, because another error may be the reason for closing."""
        self.thread.shutdown()
        if self.writing and self.writing.exception():
            log.error("the last checkpoint could not be written", exc_info=self.writing.exception())


def save_tensors(content: Any, path: Path) -> None:
    """Write nested dicts of tensors to a file. Raises OSError if the disk fails."""
    with open(path, "wb") as file, errors_of_the_disk(path):
        torch.save(content, file)


def copies(content: Any, made: dict[tuple, Tensor] | None = None) -> Any:
    """Copy nested dicts and lists with their tensors to the CPU; one that occurs twice (tied
    weights) only once.
    """
    made = {} if made is None else made
    if isinstance(content, Tensor):
        place = (content.data_ptr(), content.shape, content.stride())
        if place not in made or not content.numel():
            made[place] = content.detach().to("cpu", copy=True)
        return made[place]
    if isinstance(content, dict):
        return {key: copies(value, made) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [copies(value, made) for value in content]
    return content


def load_optimizer(folder: Path, optimizer: Optimizer, policy: Policy) -> TrainState:
    """Load a checkpoint's optimizer state into the policy's `optimizer` and return its counters.
    Another number of ranks may have written it, with weights spread over them or not.

    The weights are not loaded here: a checkpoint is a model folder, which gspo.model.loading opens,
    or an adapter's.
    """
    state = TrainState.from_json(read_state(folder))
    whole = folder / "optimizer.pt"
    if whole.exists():
        stored = torch.load(whole, map_location="cpu", weights_only=True, mmap=bool(policy.shards))
        # its groups keep their order but may be cut (gspo.train.optimizer.parameter_groups)
        if policy.shards:
            stored["param_groups"] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(stored)
    if whole.exists() and not policy.shards:
        return state
    from gspo.train import sharded_optimizer  # its imports take a second

    if whole.exists():
        sharded_optimizer.spread_state(optimizer)
    else:
        sharded_optimizer.load_shards(folder, policy, optimizer)
    return state
