"""Writes checkpoints of a model that is sharded over ranks.

No rank holds all of the model. Each rank writes some of the model's files, and its share of the
optimizer's state. The folder has the files of any checkpoint (gspo.train.checkpoint), but
`optimizer/` replaces optimizer.pt (gspo.train.sharded_optimizer).
"""

import shutil
from concurrent.futures import Future
from dataclasses import dataclass
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
    """The part of a checkpoint that a rank writes."""

    state: str  # the content of state.json
    files: Files
    index: dict
    value_head: dict[str, Tensor] | None
    reference: tuple[Files, dict] | None
    optimizer: Future
    kept_step: int


class ShardedCheckpointWriter(CheckpointWriter):
    """Writes the checkpoints of a run together with the writers of the other ranks.

    Every rank has a writer, and all of them must save at the same steps. Rank 0 renames the folder
    once all have written their parts. All of them raise an error of any of them.
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
        self.ranks = ranks
        self.thread_ranks = ranks.new_group()  # of the thread that writes
        self.dcp_ranks = ranks.new_group()  # of PyTorch's distributed checkpoint

    def save(
        self,
        state: TrainState,
        reference: Policy | None = None,
        pending: PendingRollouts | None = None,
        kept_step: int = -1,
    ) -> None:
        self.wait()
        unfinished = self._unfinished(state.step)
        failure: Exception | None = None
        if self.ranks.rank == 0:
            try:
                self._begin(unfinished, pending)
            except Exception as error:  # the other ranks would wait for ever
                failure = error
        # the other ranks wait here until the folder exists
        unfinished, failure = self.ranks.broadcast((unfinished, failure))
        if failure:
            raise failure
        files, index = local_files(self.policy.model, self.ranks)
        head = self.policy.value_head
        shard = Shard(
            state=self._state_json(state),
            files=files,
            index=index,
            value_head=copies(head.state_dict()) if head else None,
            reference=local_files(reference.model, self.ranks) if reference else None,
            optimizer=begin_writing(self.policy, self.optimizer, unfinished, self.dcp_ranks),
            kept_step=kept_step,
        )
        self.writing = self.thread.submit(self._write_shard, shard, unfinished)

    def _write_shard(self, shard: Shard, unfinished: Path) -> None:
        """Write this rank's part. Rank 0 then writes the undivided files and renames the folder."""
        ranks = self.thread_ranks
        problem = ""
        try:
            self._write_files(shard, unfinished)
        except (OSError, CheckpointException) as error:
            problem = f"rank {ranks.rank}: {str(error).strip().splitlines()[-1]}"
        problems = [text for text in ranks.all_gather(problem) if text]
        if problems:
            if ranks.rank == 0:  # all ranks have stopped writing
                shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(problems[0])
        files = ranks.shard(sorted(unfinished.rglob("*.safetensors")))
        checksums = {}
        for path in files:
            name = str(path.relative_to(unfinished))
            checksums[name] = checksum(path)
        checksums_of_ranks = ranks.all_gather(checksums)
        if ranks.rank == 0:
            model = self.policy.model
            tokenizer = self.policy.tokenizer
            write_rest(model, tokenizer, shard.index, unfinished)
            if shard.value_head:
                save_tensors(shard.value_head, unfinished / VALUE_HEAD)
            if shard.reference:
                write_rest(model, tokenizer, shard.reference[1], unfinished / "reference")
            (unfinished / "state.json").write_text(shard.state, encoding="utf-8")
            for other in checksums_of_ranks:
                checksums |= other
            seal(unfinished, checksums)
            self._finish(unfinished, shard.kept_step)
        ranks.all_gather(None)  # the checkpoint is whole for all

    def _write_files(self, shard: Shard, unfinished: Path) -> None:
        """Write this rank's files, and wait until they are on the disk."""
        written = write_files(shard.files, unfinished)
        if shard.reference:
            (unfinished / "reference").mkdir(exist_ok=True)
            written += write_files(shard.reference[0], unfinished / "reference")
        with errors_of_the_disk(unfinished):
            shard.optimizer.result()
        for path in written:
            sync(path)
