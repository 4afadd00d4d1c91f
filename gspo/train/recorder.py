"""Collects all that a training step's loss is computed from, and writes it as a record.

The trainer calls a recorder at the start of a step, before the updates, in each update, and at the
end of the step. Recording changes no number of the run. With several ranks each rank collects its
local rows, and rank 0 writes the rows of all.

gspo.data.step_record has the layout of the file. gspo.train.replay computes the loss from it.

Shape suffixes: B responses, T response tokens, S all tokens, N row indices, L MoE layers, K experts
per token.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from gspo.data.batch import TrainBatch, wait_for_copies
from gspo.data.samples import ScoredResponse
from gspo.data.step_record import Header, RecordedUpdate, StepRecord, smallest_experts
from gspo.data.step_record_files import record_file, write_record
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.sources.base import Rollout
from gspo.train.loss_terms import TermInputs, clip_bits
from gspo.train.routing import predicting

# the arrays of a row by the number of the update and the name of the array
RowArrays = dict[tuple[int, int], dict[str, ndarray]]


class Recorder:
    """The recorder of a run that records no steps. Its methods do nothing."""

    def start(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin the record of a step if it is due. `state` is Trainer.loss_state."""

    def add_batch(self, batch: TrainBatch, rollout: Rollout) -> None:
        """Add the batch of the step, before its updates."""

    def begin_update(self, number: int, rows_N: Tensor) -> None:
        """Begin an update, counted from 1. `rows_N` are this rank's rows in the step's batch."""

    def add_pass(self, indices_N: Tensor, inputs: TermInputs) -> None:
        """Add the forward pass of a micro-batch in the update, with the objective's outputs.

        `indices_N` are the micro-batch's rows among the rows of `begin_update`. Output and
        micro-batch are on the policy's device."""

    def end_updates(self, local_rows_N: Tensor, micro_batch_size: int) -> None:
        """Compute what a record holds of the policy after the last update."""

    def finish(self, metrics: Mapping[str, float], error: str = "") -> dict[str, float]:
        """Write the record, and return the metric of the time that recording took.

        `error` is the reason why the step ended before its last update."""
        return {}


class StepRecorder(Recorder):
    """The recorder of a run that records steps.

    every    steps from a record to the next. 0: only `last` decides
    last     0: record the steps of `every` alone. Otherwise record every step. The run's loop then
             deletes the records that it does not keep (gspo.run.old_records)
    experts  record the experts of MoE models
    after    also record log-probs after the last update, which takes a pass over all responses
    """

    def __init__(
        self,
        run: Path,
        label: str,
        policy: Policy,
        settings: Mapping[str, Any],
        ranks: Ranks,
        *,
        every: int,
        last: int = 0,
        experts: bool = True,
        after: bool = False,
    ):
        self.run = run
        self.label = label
        self.policy = policy
        self.settings = dict(settings)  # the groups of settings that the loss depends on
        self.ranks = ranks
        self.every = every
        self.last = last
        self.experts = experts
        self.after = after
        self.vocabulary: dict[int, str] = {}  # the text of token IDs
        self.step = 0  # the step that is being recorded; 0: none
        self.seconds = 0.0  # that recording it has taken so far

    def start(self, step: int, state: Mapping[str, Any]) -> None:
        self.step = 0
        if not self.last and not (self.every and step % self.every == 0):
            return
        self.step = step
        self.seconds = 0.0
        self.state = dict(state)
        self.batch: TrainBatch | None = None
        self.rollout: Rollout | None = None
        self.after_logp_BT: Tensor | None = None
        self.update = 0
        self.update_rows_N = torch.zeros(0, dtype=torch.int64)
        self.passes: list[tuple[int, Tensor, dict[str, Tensor]]] = []

    def add_batch(self, batch: TrainBatch, rollout: Rollout) -> None:
        if self.step:
            self.batch = batch
            self.rollout = rollout

    def begin_update(self, number: int, rows_N: Tensor) -> None:
        self.update = number
        self.update_rows_N = rows_N

    @torch.no_grad()
    def add_pass(self, indices_N: Tensor, inputs: TermInputs) -> None:
        # An objective of the user's own may count its calls or draw random numbers. So its outputs
        # are taken from the loss, and it is not called again.
        if not self.step or inputs.outputs is None:
            return
        started = time.perf_counter()
        output = inputs.output
        clips = inputs.outputs
        shape = output.logp_BT.shape
        tensors = {
            "logp": output.logp_BT,
            "weight": clips.weight_BT.float().expand(shape),
            "clipped": clip_bits(clips).expand(shape),
        }
        if output.entropy_BT is not None:
            tensors["entropy"] = output.entropy_BT
        if output.values_BT is not None:
            tensors["values"] = output.values_BT
        if output.experts_BSLK is not None and self.experts:
            tensors["experts"] = predicting(output.experts_BSLK, inputs.batch)
        copies = {
            name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in tensors.items()
        }
        self.passes.append((self.update, self.update_rows_N[indices_N], copies))
        self.seconds += time.perf_counter() - started

    def end_updates(self, local_rows_N: Tensor, micro_batch_size: int) -> None:
        if self.step and self.after and self.batch is not None:
            started = time.perf_counter()
            scored = self.policy.score(self.batch, micro_batch_size, local_rows_N)
            self.after_logp_BT = scored.logp_BT
            self.seconds += time.perf_counter() - started

    def finish(self, metrics: Mapping[str, float], error: str = "") -> dict[str, float]:
        started = time.perf_counter()
        step = self.step
        self.step = 0
        if not step or self.batch is None or self.rollout is None:
            return {}
        wait_for_copies(self.policy.device)
        local = self._local_rows(self.batch)
        # the other ranks may have ended after an error
        of_ranks: list[RowArrays] | None = [local] if error else self.ranks.gather(local)
        if of_ranks is not None and self.ranks.rank == 0:
            rows: RowArrays = {}
            for part in of_ranks:
                rows |= part
            header = Header(
                step=step,
                label=self.label,
                complete=not error,
                error=error,
                limit=self.rollout.limit,
                settings=self.settings,
                state=self.state,
                metrics={name: finite(value) for name, value in metrics.items()},
            )
            record = to_record(header, self.batch, self.rollout.groups, rows, self.experts)
            header.vocabulary = self._texts(record.token_ids)
            write_record(record_file(self.run, step), record)
        # the tensors of a step are large
        self.batch = None
        self.rollout = None
        self.after_logp_BT = None
        self.passes = []
        self.seconds += time.perf_counter() - started
        return {"time/record_s": self.seconds}

    def _local_rows(self, batch: TrainBatch) -> RowArrays:
        """Return the arrays of this rank's rows, without padding.

        Update 0 stands for arrays of the whole step."""
        real_BT = batch.real_BT
        lengths = real_BT.sum(-1).tolist()
        rows: RowArrays = {}
        local_rows: set[int] = set()
        for update, rows_N, tensors in self.passes:
            for i, row in enumerate(rows_N.tolist()):
                local_rows.add(row)
                rows[update, row] = {
                    name: tensor[i, : lengths[row]].numpy() for name, tensor in tensors.items()
                }
        for row in local_rows:
            arrays = {}
            if batch.experts_BSLK is not None and self.experts:
                experts_SLK = batch.experts_BSLK[row][batch.attention_BS[row]]
                arrays["old_experts"] = experts_SLK.numpy()
            if self.after_logp_BT is not None:
                arrays["after_logp"] = self.after_logp_BT[row, : lengths[row]].numpy()
            rows[0, row] = arrays
        return rows

    def _texts(self, token_ids: ndarray) -> dict[str, str]:
        """Return the text of each token that occurs."""
        distinct_ids = np.unique(token_ids).tolist()
        for token in distinct_ids:
            if token not in self.vocabulary:
                self.vocabulary[token] = str(self.policy.tokenizer.decode([token]))
        return {str(token): self.vocabulary[token] for token in distinct_ids}


def to_record(
    header: Header,
    batch: TrainBatch,
    groups: Sequence[list[ScoredResponse]],
    rows: RowArrays,
    with_experts: bool,
) -> StepRecord:
    """Return the record of a step, with the passes of the rows of all ranks."""
    responses = [r for group in groups for r in group]
    group_sizes = [len(group) for group in groups]
    describe_responses(header, responses)
    real_BT = batch.real_BT

    def of_tokens(x_BT: Tensor | None) -> ndarray | None:
        return None if x_BT is None else x_BT[real_BT].numpy()

    def of_rows(name: str) -> ndarray | None:
        arrays_of_rows = [rows.get((0, row), {}).get(name) for row in range(len(responses))]
        recorded_arrays = [array for array in arrays_of_rows if array is not None]
        is_complete = len(recorded_arrays) == len(responses)
        return np.concatenate(recorded_arrays) if is_complete else None

    engine_experts = None
    if batch.engine_experts_BSLK is not None and with_experts:
        engine_experts = smallest_experts(batch.engine_experts_BSLK[batch.attention_BS].numpy())
    old_experts = of_rows("old_experts")
    if old_experts is not None:
        old_experts = smallest_experts(old_experts)
    critic = batch.critic
    kept_counts = None
    kept_ids = None
    if batch.kept is not None:
        kept_counts = batch.kept.counts_BT[real_BT].numpy().astype(np.int32)
        # row after row, as `pack` has concatenated them
        kept_ids = batch.kept.ids
    return StepRecord(
        header=header,
        updates=updates_of(rows),
        prompt_lengths=np.array([len(r.prompt_ids) for r in responses], np.int32),
        response_lengths=np.array([len(r.token_ids) for r in responses], np.int32),
        groups=np.repeat(np.arange(len(groups), dtype=np.int32), group_sizes),
        problems=np.array([r.problem.index for r in responses], np.int64),
        samples=np.array([r.sample for r in responses], np.int32),
        policy_steps=np.array([r.policy_step for r in responses], np.int32),
        rewards=np.array([r.reward for r in responses], np.float64),
        token_ids=batch.tokens_BS[batch.attention_BS].numpy().astype(np.int32),
        trained=batch.mask_BT[real_BT].numpy(),
        sampled=batch.sampled_BT[real_BT].numpy(),
        engine_logp=batch.engine_logp_BT[real_BT].numpy(),
        old_logp=batch.old_logp_BT[real_BT].numpy(),
        advantages=batch.adv_BT[real_BT].numpy(),
        ref_logp=of_tokens(batch.ref_logp_BT),
        correction=of_tokens(batch.correction_BT),
        old_values=of_tokens(critic.old_values_BT if critic else None),
        returns=of_tokens(critic.returns_BT if critic else None),
        engine_experts=engine_experts,
        old_experts=old_experts,
        after_logp=of_rows("after_logp"),
        sum_pi_squared=of_tokens(batch.sum_pi_squared_BT),
        kept_counts=kept_counts,
        kept_ids=kept_ids,
    )


def describe_responses(header: Header, responses: Sequence[ScoredResponse]) -> None:
    """Fill the fields of a header that describe the responses, row by row."""
    header.tasks = [r.problem.task for r in responses]
    header.finish_reasons = [r.finish_reason for r in responses]
    header.verdicts = [r.score.verdict for r in responses]
    for row, r in enumerate(responses):
        if r.turns:
            header.turns[str(row)] = [[turn.author, turn.tokens, turn.reward] for turn in r.turns]
    for name in responses[0].score.rewards:
        header.named_rewards[name] = [r.score.rewards[name] for r in responses]


def updates_of(rows: RowArrays) -> list[RecordedUpdate]:
    """Return the updates of a step, with their rows in ascending order."""
    rows_by_update: dict[int, list[int]] = {}
    for number, row in sorted(rows):
        if number > 0:
            rows_by_update.setdefault(number, []).append(row)
    updates = []
    for number, numbers_of_rows in rows_by_update.items():
        parts = [rows[number, row] for row in numbers_of_rows]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if "experts" in arrays:
            arrays["experts"] = smallest_experts(arrays["experts"])
        updates.append(RecordedUpdate(rows=np.array(numbers_of_rows, np.int32), **arrays))
    return updates


def finite(value: float) -> float | None:
    """Return a metric as JSON holds it: None stands for a number that is not finite."""
    return float(value) if math.isfinite(value) else None
