"""Writes checkpoints of a model that is spread over ranks. No rank holds all of it: each writes
some of the model's files, and its share of the optimizer's state. The folder is that of any
checkpoint (gspo.train.checkpoint), but that `optimizer/` takes the place of optimizer.pt
(gspo.train.sharded_optimizer).
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from gspo.distributed.ranks import Ranks
from gspo.io.files import errors_of_the_disk, sync
from gspo.model.policy import Policy
from gspo.model.sharding.sharded_files import Files, local_files, write_files, write_rest
from gspo.model.value_head import FILE as VALUE_HEAD
from gspo.rollout.sources.base import PendingRollouts
from gspo.train.checkpoint import CheckpointWriter, TrainState, copies, save_tensors
from gspo.train.checkpoint_files import checksum, seal
from gspo.train.sharded_optimizer import begin_writing


@dataclass
class Shard:
    """Holds what one rank is to write."""

    state: str  # the content of state.json
    files: Files
    index: dict
    value_head: dict[str, Tensor] | None
    reference: tuple[Files, dict] | None
    optimizer: Future
    spared: int


class ShardedCheckpointWriter(CheckpointWriter):
    """Writes the checkpoints of a run together with the writers of the other ranks: every rank has
    one, and all of them must save at the same steps.

    Rank 0 renames the folder once all have written their parts. An error of one is raised by all.
    """

    def __init__(
        self,
        run: Path,
        policy: Policy,
        optimizer: Optimizer,
        keep: int,
        settings: str,
        ranks: Ranks,
    ):
        super().__init__(run, policy, optimizer, keep, settings, cleans=ranks.rank == 0)
        self.ranks, self.exchange, self.of_dcp = ranks, ranks.new_group(), ranks.new_group()

    def save(
        self,
        state: TrainState,
        reference: Policy | None = None,
        pending: PendingRollouts | None = None,
        spared: int = -1,
    ) -> None:
        self.wait()
        unfinished = self._begin(state.step, pending) if self.ranks.rank == 0 else None
        unfinished = self.ranks.broadcast(unfinished)
        files, index = local_files(self.policy.model, self.ranks)
        head = self.policy.value_head
        shard = Shard(
            state=json.dumps(asdict(state) | {"settings": self.settings}),
            files=files,
            index=index,
            value_head=copies(head.state_dict()) if head else None,
            reference=local_files(reference.model, self.ranks) if reference else None,
            optimizer=begin_writing(self.policy, self.optimizer, unfinished, self.of_dcp),
            spared=spared,
        )
        self.writing = self.thread.submit(self._write_shard, shard, unfinished)

    def _write_shard(self, shard: Shard, unfinished: Path) -> None:
        """Write this rank's part; then, as rank 0, what there is one of, and rename the folder."""
        problem = ""
        try:
            self._write_files(shard, unfinished)
        except (OSError, CheckpointException) as error:
            problem = f"rank {self.ranks.rank}: {str(error).strip().splitlines()[-1]}"
        if problem := next((text for text in self.exchange.all_gather(problem) if text), ""):
            raise OSError(problem)
        files = self.exchange.shard(sorted(path for path in unfinished.rglob("*.safetensors")))
        sums = self.exchange.all_gather(
            {str(path.relative_to(unfinished)): checksum(path) for path in files}
        )
        if self.ranks.rank == 0:
            model, tokenizer = self.policy.model, self.policy.tokenizer
            write_rest(model, tokenizer, shard.index, unfinished)
            if shard.value_head:
                save_tensors(shard.value_head, unfinished / VALUE_HEAD)
            if shard.reference:
                write_rest(model, tokenizer, shard.reference[1], unfinished / "reference")
            (unfinished / "state.json").write_text(shard.state, encoding="utf-8")
            seal(unfinished, {name: found for some in sums for name, found in some.items()})
            self._finish(unfinished, shard.spared)
        self.exchange.all_gather(None)  # whole for all

    def _write_files(self, shard: Shard, unfinished: Path) -> None:
        written = write_files(shard.files, unfinished)
        if shard.reference:
            (unfinished / "reference").mkdir(exist_ok=True)
            written += write_files(shard.reference[0], unfinished / "reference")
        with errors_of_the_disk(unfinished):
            shard.optimizer.result()
        for path in written:
            sync(path)
