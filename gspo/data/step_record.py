"""The record of a training step: a file with all that the step's loss was computed from.

Another program can compute the loss again from it, under any objective, without the model
(gspo.train.replay). The file is `steps/step_000123.safetensors` in a run directory. It holds
arrays, and a header in JSON under the key "gspo" of the metadata that safetensors files have.
docs/replay.md describes the layout.

The field names of `StepRecord` are the names of the arrays. The arrays of update 2 are
`update_2.rows`, `update_2.logp`, ... Tokens stand row after row, without padding.

Dimensions: B responses, which are the rows, N response tokens, M all tokens (of each row its
prompt, then its response), L MoE layers, K experts per token, C kept tokens of all response tokens.
Of an update: b rows and n response tokens.

This module does not import torch, so pages, figures and tests can read records on any machine.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy import ndarray

VERSION = 1
# of a record with kept tokens, which version 1 does not know
VERSION_WITH_KEPT = 2
VERSIONS = (VERSION, VERSION_WITH_KEPT)
MAX_ROWS = 1_000_000

# bits of RecordedUpdate.clipped, see gspo.algorithm.objectives.base.LossOutputs
ACTIVE = 1
OUTSIDE = 2
BOUNDED = 4
DUAL = 8

# of Header.state, see gspo.train.trainer.Trainer.loss_state
STATE_TYPES: dict[str, Any] = {
    "lr": float,
    "kl_coef": float | str | None,  # a name such as "inf" if it is not finite
    "entropy_coef": list[float | None] | None,
    "rewards": dict[str, float],
    "starts_at_old_policy": bool,
    "skips_old_pass": bool,
    "experts": int,
}


def array(dtypes: str, dimensions: str, required: bool = True) -> Any:
    """Declare an array of a record: its permitted dtypes, and a letter for each dimension."""
    layout = {"dtypes": dtypes.split(), "dimensions": dimensions}
    if required:
        return field(metadata=layout)
    return field(default=None, metadata=layout)


@dataclass(kw_only=True)
class RecordedUpdate:
    """The arrays of an update, over the rows of its mini-batch."""

    rows: ndarray = array("int32", "b")  # the rows of the mini-batch
    # log-probs under the weights before this update, which are the weights after the updates before
    logp: ndarray = array("float32", "n")
    # LossOutputs.weight_BT: the factor of A grad log pi in the gradient, 0 if it is clipped
    weight: ndarray | None = array("float32", "n", required=False)
    # a sum of ACTIVE, OUTSIDE, BOUNDED and DUAL
    clipped: ndarray | None = array("uint8", "n", required=False)
    entropy: ndarray | None = array("float32", "n", required=False)  # nats
    values: ndarray | None = array("float32", "n", required=False)  # the critic's
    # the experts that the routers chose at the position that predicts the token
    experts: ndarray | None = array("int8 int16", "nLK", required=False)


@dataclass(kw_only=True)
class Header:
    """The header of a record."""

    step: int
    version: int = VERSION
    source: str = "gspo"  # the framework that trained the step
    label: str = ""  # the run in words
    # False: the step ended with an error, and the last updates may be missing
    complete: bool = True
    error: str = ""  # that error
    limit: int = 0  # the largest number of response tokens at this step
    # the groups of settings that the loss depends on: objective, advantage, kl, correction, reward,
    # trainer, policy
    settings: dict[str, Any] = field(default_factory=dict)
    # the coefficients and moments at the start of the step, see Trainer.loss_state
    state: dict[str, Any] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)  # [B]
    finish_reasons: list[str] = field(default_factory=list)  # [B]
    verdicts: list[str] = field(default_factory=list)  # [B]
    # [author, tokens, reward] of each turn of an episode, by row
    turns: dict[str, list[list[Any]]] = field(default_factory=dict)
    # the text of each token ID that occurs
    vocabulary: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)  # the step's metrics
    # the named rewards of the rows [B] if the task gives several. A record of a task with a single
    # reward does not have the key
    named_rewards: dict[str, list[float]] = field(default_factory=dict)
    # sentences on what another framework's dump did not hold, see gspo.data.foreign_records
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class StepRecord:
    """The record of a step."""

    header: Header
    updates: list[RecordedUpdate] = field(default_factory=list)
    prompt_lengths: ndarray = array("int32", "B")
    response_lengths: ndarray = array("int32", "B")
    groups: ndarray = array("int32", "B")  # the index of each row's group: 0, 0, ..., 1, 1, ...
    problems: ndarray = array("int64", "B")  # the index of each row's problem in the task
    samples: ndarray = array("int32", "B")  # the index of each row in its group as it was sampled
    policy_steps: ndarray = array("int32", "B")  # the step whose weights sampled the row
    rewards: ndarray = array("float64", "B")  # the verifier's
    token_ids: ndarray = array("int32", "M")
    trained: ndarray = array("bool", "N")  # the tokens in the loss
    sampled: ndarray = array("bool", "N")  # the policy's tokens; the environment wrote the others
    engine_logp: ndarray = array("float32", "N")  # log-probs as the engine reported them
    old_logp: ndarray = array("float32", "N")  # log-probs under the old policy
    advantages: ndarray = array("float32", "N")
    # the tokens over which the softmax of each token ran: their number, 0 for the whole vocabulary,
    # and their IDs (gspo.data.kept_tokens); without rollout.keep_mask there are none
    kept_counts: ndarray | None = array("int32", "N", required=False)
    kept_ids: ndarray | None = array("uint16 int32", "C", required=False)
    # log-probs under the weights after the last update
    after_logp: ndarray | None = array("float32", "N", required=False)
    # sum_v pi_v^2 under the old policy, if the advantages need it
    sum_pi_squared: ndarray | None = array("float32", "N", required=False)
    ref_logp: ndarray | None = array("float32", "N", required=False)  # of the reference policy
    correction: ndarray | None = array("float32", "N", required=False)  # of the engine's mismatch
    old_values: ndarray | None = array("float32", "N", required=False)  # the critic's at the start
    returns: ndarray | None = array("float32", "N", required=False)  # which the critic learns
    # experts at every position, -1 if none was recorded there
    engine_experts: ndarray | None = array("int8 int16", "MLK", required=False)
    old_experts: ndarray | None = array("int8 int16", "MLK", required=False)

    def __len__(self) -> int:
        return len(self.rewards)

    # these two are cached, because they are needed for each of many rows
    @cached_property
    def ends(self) -> ndarray:
        """The end of each row among the response tokens: int64 [B]."""
        return np.cumsum(self.response_lengths, dtype=np.int64)

    @cached_property
    def ends_with_prompts(self) -> ndarray:
        """The end of each row among all tokens: int64 [B]."""
        return self.ends + np.cumsum(self.prompt_lengths, dtype=np.int64)

    def tokens_of(self, row: int) -> slice:
        """Return the positions of a row's tokens among the N response tokens."""
        end = int(self.ends[row])
        return slice(end - int(self.response_lengths[row]), end)

    def prompt_and_response(self, row: int) -> tuple[ndarray, ndarray]:
        """Return the token IDs of a row's prompt, and those of its response."""
        end = int(self.ends_with_prompts[row])
        middle = end - int(self.response_lengths[row])
        begin = middle - int(self.prompt_lengths[row])
        return self.token_ids[begin:middle], self.token_ids[middle:end]


def smallest_experts(experts: ndarray) -> ndarray:
    """Return experts as int8 if all their numbers fit."""
    fits = experts.size == 0 or experts.max() <= np.iinfo(np.int8).max
    return experts.astype(np.int8) if fits else experts
