"""Writes and reads checkpoints.

A checkpoint is written to an unfinished folder that is renamed at the end, so it is never there in
part. The file `latest` is changed last.

checkpoints/latest         the name of the newest whole checkpoint
checkpoints/step_000100/   a checkpoint:
    weights, config, tokenizer   a model folder, or with LoRA peft's files of the adapter instead
                                 of the weights (gspo.model.adapter)
    optimizer.pt                 the optimizer's state, or the folder optimizer/ if the weights are
                                 sharded over ranks
    state.json                   the counters of the run
    value_head.pt                the critic, if there is one
    reference/                   the reference policy, if it was refreshed
    held.json, held.npz          responses that were sampled and not yet trained on, if any
    checksums.json               checksums of all other files, by which damage is noticed
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
from gspo.io.files import (
    errors_of_the_disk,
    removed_on_error,
    replace_text,
    step_folders,
    step_of,
    sync,
)
from gspo.model.loading import save
from gspo.model.policy import Policy
from gspo.model.value_head import FILE as VALUE_HEAD
from gspo.rollout.sources.base import PendingRollouts
from gspo.rollout.sources.pending import save_pending
from gspo.train.checkpoint_files import read_state, seal

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """The state of a run beside weights and optimizer state. All counts are of the whole run."""

    step: int = 0
    updates: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    skipped: int = 0  # updates in a row, up to the latest, whose gradient was not finite
    without_signal: int = 0  # steps in a row, up to the latest, whose advantages were all 0
    kl_coef: float | None = None  # the adaptive coefficient of the KL term
    # the coefficient of the entropy bonus, and the entropy of the latest update
    entropy_coef: list[float | None] | None = None
    rewards: RunningMoments = field(default_factory=RunningMoments)  # of all rewards so far
    # the state of the rollout source, see RolloutSource.state
    source: dict = field(default_factory=dict)
    # the learning rate of the settings, and the one that a callback has set; None: the same
    changed_lr: list[float] | None = None
    # the states of the user's callbacks, see Extensions.state
    callbacks: dict = field(default_factory=dict)

    @staticmethod
    def from_json(content: dict) -> TrainState:
        """Build the state from the content of state.json. Keys that are no fields are ignored."""
        names = {f.name for f in fields(TrainState)}
        values = {name: value for name, value in content.items() if name in names}
        values["rewards"] = RunningMoments(**content["rewards"])
        return TrainState(**values)


@dataclass
class Snapshot:
    """Copies of the contents of a checkpoint. Training continues while they are written."""

    model: dict[str, Tensor]  # with LoRA the adapter's tensors alone
    optimizer: dict
    state: str  # the content of state.json
    value_head: dict[str, Tensor] | None
    reference: dict[str, Tensor] | None
    kept_step: int  # the newest checkpoint up to this step is not deleted


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread while training continues, at most one at a time.

    The next `check`, `save` or `wait` raises an error of the thread.
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
        self.folder = run / "checkpoints"
        self.policy = policy
        self.optimizer = optimizer
        self.keep = keep
        self.settings = settings
        if cleans:
            # a run that was killed while it wrote them has left these
            for unfinished in self.folder.glob("*.unfinished"):
                if unfinished.is_dir():
                    shutil.rmtree(unfinished)
                else:
                    unfinished.unlink()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None

    def save(
        self,
        state: TrainState,
        reference: Policy | None = None,
        pending: PendingRollouts | None = None,
        kept_step: int = -1,
    ) -> None:
        """Copy weights, optimizer state, counters and the settings' hash, and begin to write them.

        `reference` is the reference policy if it has changed since the run's start, `pending` the
        responses that wait for later steps. Besides the `keep` newest checkpoints, the newest
        checkpoint up to step `kept_step` is kept.
        """
        self.wait()
        unfinished = self._unfinished(state.step)
        self._begin(unfinished, pending)
        head = self.policy.value_head
        adapter = self.policy.adapter
        model = self.policy.model
        tensors = adapter.tensors() if adapter else model.state_dict()
        snapshot = Snapshot(
            model=copies(tensors),
            optimizer=copies(self.optimizer.state_dict()),
            state=self._state_json(state),
            value_head=copies(head.state_dict()) if head else None,
            reference=copies(reference.model.state_dict()) if reference else None,
            kept_step=kept_step,
        )
        self.writing = self.thread.submit(self._write, snapshot, unfinished)

    def _unfinished(self, step: int) -> Path:
        """Return the unfinished folder of a checkpoint."""
        return self.folder / f"step_{step:06d}.unfinished"

    def _state_json(self, state: TrainState) -> str:
        """Return the content of state.json: the run's counters and the hash of its settings."""
        content = asdict(state)
        content["settings"] = self.settings
        return json.dumps(content)

    def _begin(self, unfinished: Path, pending: PendingRollouts | None) -> None:
        """Make the unfinished folder, and write the responses that wait into it."""
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if pending:
            with removed_on_error(unfinished):
                save_pending(pending, unfinished)

    def _write(self, snapshot: Snapshot, unfinished: Path) -> None:
        """Write the snapshot into the unfinished folder and rename it.

        If that fails, the folder is removed: on a full disk the run needs the room to record its
        end."""
        with removed_on_error(unfinished):
            self._write_snapshot(snapshot, unfinished)
        self._finish(unfinished, snapshot.kept_step)

    def _write_snapshot(self, snapshot: Snapshot, unfinished: Path) -> None:
        """Write the files of a checkpoint, with their checksums."""
        model = self.policy.model
        tokenizer = self.policy.tokenizer
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

    def _finish(self, unfinished: Path, kept_step: int) -> None:
        """Rename a whole folder, and delete old checkpoints.

        The `keep` newest are kept, and the newest up to step `kept_step`.
        """
        folder = unfinished.with_suffix("")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        sync(self.folder)
        replace_text(self.folder / "latest", folder.name)
        if self.keep:
            folders = step_folders(self.folder)
            folders = folders[: folders.index(folder) + 1]
            kept = folders[-self.keep :]
            up_to_kept_step = [f for f in folders if step_of(f.name) <= kept_step]
            kept += up_to_kept_step[-1:]
            for old in folders:
                if old not in kept:
                    shutil.rmtree(old)

    def check(self) -> None:
        """Raise the error of writing the last checkpoint, if it has already failed."""
        if self.writing and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is written, and raise the error of writing it, if any."""
        writing = self.writing
        self.writing = None
        if writing:
            writing.result()

    def close(self) -> None:
        """Wait until the last checkpoint is written, and end the thread.

        An error is logged, not raised, because another error may be the reason for closing."""
        self.thread.shutdown()
        if self.writing and self.writing.exception():
            log.error("the last checkpoint could not be written", exc_info=self.writing.exception())


def save_tensors(content: Any, path: Path) -> None:
    """Write nested dicts of tensors to a file. Raises OSError if the disk fails."""
    with open(path, "wb") as file, errors_of_the_disk(path):
        torch.save(content, file)


def copies(content: Any, copied: dict[tuple, Tensor] | None = None) -> Any:
    """Copy nested dicts and lists with their tensors to the CPU.

    A tensor that occurs twice (tied weights) is copied once. `copied` holds the copies so far.
    """
    copied = {} if copied is None else copied
    if isinstance(content, Tensor):
        memory = (content.data_ptr(), content.shape, content.stride())
        # empty tensors share the address 0, and may still differ in type
        if memory not in copied or not content.numel():
            copied[memory] = content.detach().to("cpu", copy=True)
        return copied[memory]
    if isinstance(content, dict):
        return {key: copies(value, copied) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [copies(value, copied) for value in content]
    return content


def load_optimizer(folder: Path, optimizer: Optimizer, policy: Policy) -> TrainState:
    """Load a checkpoint's optimizer state into the policy's `optimizer`, and return its counters.

    Another number of ranks may have written it, with sharded weights or not. The weights are not
    loaded here: gspo.model.loading opens the model folder, gspo.model.adapter an adapter's.
    """
    state = TrainState.from_json(read_state(folder))
    file = folder / "optimizer.pt"
    if file.exists():
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=bool(policy.shards))
        # its groups keep their order but may be cut (gspo.train.optimizer.parameter_groups)
        if policy.shards:
            stored["param_groups"] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(stored)
        if not policy.shards:
            return state
    from gspo.train import sharded_optimizer  # its imports take a second

    if file.exists():
        sharded_optimizer.shard_state(optimizer)
    else:
        sharded_optimizer.load_shards(folder, policy, optimizer)
    return state
