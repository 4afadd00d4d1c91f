"""The rows of another framework's dump, and the step record that is made of them.

This module does not import torch.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy import ndarray

from gspo.data.foreign_dumps import PRIME_RL, PRIME_RL_FOLDER, RANK_FILES, Dump
from gspo.data.step_record import Header, RecordedUpdate, StepRecord

UNKNOWN = "unknown"  # the finish reason and the verdict of a response


@dataclass
class Row:
    """A row of a dump. Its arrays are over the tokens of the response."""

    prompt_ids: ndarray
    token_ids: ndarray
    trained: ndarray
    engine_logp: ndarray
    trainer_logp: ndarray
    advantages: ndarray
    entropy: ndarray | None
    reward: float  # NaN: unknown
    task: str
    in_loss: bool  # False: the row's reward counts for the baseline of its group alone
    named_rewards: dict[str, float] = field(default_factory=dict)  # the parts of `reward`


@dataclass
class Rows:
    """The rows of a dump, and how many lines were left out by reason."""

    rows: list[Row] = field(default_factory=list)
    omitted: Counter[str] = field(default_factory=Counter)
    steps: set[int] = field(default_factory=set)  # the steps that the rows state


def to_record(dump: Dump, result: Rows, notes: list[str]) -> StepRecord:
    """Return the record of a step with a single update over all rows that are in the loss."""
    group_of_prompt: dict[bytes, int] = {}
    groups = []
    for row in result.rows:
        key = row.prompt_ids.tobytes()
        groups.append(group_of_prompt.setdefault(key, len(group_of_prompt)))
    order = sorted(range(len(groups)), key=groups.__getitem__)
    rows = [result.rows[i] for i in order]
    sorted_groups = np.array(groups, np.int32)[order]
    group_sizes = np.bincount(sorted_groups)
    first_rows = np.cumsum(group_sizes) - group_sizes

    in_update = [row for row in rows if row.in_loss]
    entropy = None
    if all(row.entropy is not None for row in in_update):
        entropy = np.concatenate([row.entropy for row in in_update])
    update_rows = np.flatnonzero([row.in_loss for row in rows]).astype(np.int32)
    logp = np.concatenate([row.trainer_logp for row in in_update])
    update = RecordedUpdate(rows=update_rows, logp=logp, entropy=entropy)

    header = _header(dump, result)
    header.notes = notes + _notes(dump, result, group_sizes)
    header.tasks = [row.task for row in rows]
    header.finish_reasons = [UNKNOWN for _ in rows]
    header.verdicts = [UNKNOWN for _ in rows]
    for name in rows[0].named_rewards:
        header.named_rewards[name] = [row.named_rewards[name] for row in rows]
    header.turns = {str(i): _turns(row) for i, row in enumerate(rows) if not row.trained.all()}
    engine_logp = np.concatenate([row.engine_logp for row in rows])
    token_ids = []
    for row in rows:
        token_ids += [row.prompt_ids, row.token_ids]
    # no dump says which weights sampled a row
    policy_step = max(header.step - 1, 0)
    return StepRecord(
        header=header,
        updates=[update],
        prompt_lengths=np.array([len(row.prompt_ids) for row in rows], np.int32),
        response_lengths=np.array([len(row.token_ids) for row in rows], np.int32),
        groups=sorted_groups,
        problems=sorted_groups.astype(np.int64),
        samples=(np.arange(len(rows)) - first_rows[sorted_groups]).astype(np.int32),
        policy_steps=np.full(len(rows), policy_step, np.int32),
        rewards=np.array([row.reward for row in rows], np.float64),
        token_ids=np.concatenate(token_ids),
        trained=np.concatenate([row.trained & row.in_loss for row in rows]),
        sampled=np.concatenate([row.trained for row in rows]),
        engine_logp=engine_logp,
        old_logp=engine_logp.copy(),
        advantages=np.concatenate([row.advantages for row in rows]),
    )


def _header(dump: Dump, result: Rows) -> Header:
    """Return the header of a dump's record."""
    step = dump.step
    if step is None:
        step = min(result.steps, default=0)
    header = Header(step=step, source=dump.framework, label=f"{dump.framework}, step {step}")
    # The old policy is the engine. So the comparison of trainer and engine, which a replay makes
    # of the old policy, takes the first update's log-probs instead: skips_old_pass says this.
    header.state = {"starts_at_old_policy": False, "skips_old_pass": True}
    folder = dump.files[0].parent
    if PRIME_RL_FOLDER.fullmatch(folder.name) and not (folder / "STABLE").exists():
        header.complete = False
        header.error = "there is no file STABLE, which prime-rl writes when all ranks are done"
    return header


def _notes(dump: Dump, result: Rows, group_sizes: ndarray) -> list[str]:
    """Return sentences on what the dump lacks."""
    notes = []
    for reason, count in sorted(result.omitted.items()):
        notes.append(f"{count} of the dump's lines have {reason} and are left out.")
    not_in_loss = sum(not row.in_loss for row in result.rows)
    if not_in_loss:
        notes.append(
            f"{not_in_loss} of {len(result.rows)} rows are outside the loss "
            "and count for the baselines of their groups alone."
        )
    if any(math.isnan(row.reward) for row in result.rows):
        notes.append("Rows have no reward, so only the recorded advantages can be used.")
    single = int((group_sizes == 1).sum())
    if single:
        notes.append(
            f"{single} of {len(group_sizes)} groups have a single row, because no other row has "
            "the same prompt. Only the recorded advantages are right for them."
        )
    other_ranks = set(dump.files[0].parent.glob(RANK_FILES)) - set(dump.files)
    if dump.framework == PRIME_RL and other_ranks:
        notes.append(
            f"{len(other_ranks)} files of other ranks were not read: name the folder to read all."
        )
    return notes


def _turns(row: Row) -> list[list[Any]]:
    """Return the turns of a row: [author, tokens, reward]. The last one has the row's reward."""
    changes = np.flatnonzero(np.diff(row.trained)) + 1
    bounds = [0, *changes.tolist(), len(row.trained)]
    turns: list[list[Any]] = []
    for begin, end in pairwise(bounds):
        author = "policy" if row.trained[begin] else "environment"
        turns.append([author, end - begin, 0.0])
    turns[-1][2] = row.reward if math.isfinite(row.reward) else 0.0
    return turns
