"""A check of every hand-over of weights to an engine, on recorded tokens.

Responses of a run's first rollout are recorded. After every load of weights engine and trainer
compute the log-probs of the recorded tokens again. For each token

    x = the trainer's log-prob now - its log-prob after the previous load
    y = the same difference of the engine's log-probs

If all weights arrived, y = x except for rounding. If no weight arrived, y = 0. If a tensor is
stale, y lacks the tensor's contribution. A difference between engine and trainer that stays the
same, such as another kernel's rounding, cancels. So the check sees a stale tensor that the
log-probs themselves do not show, because an update changes them by less than the tolerance
(gspo.rollout.sources.behaviour_logprobs.check_engine).

For an engine in bfloat16 the trainer's weights are rounded while it computes its log-probs. Else
x would have changes that rounding removes: a weight of 0.02 has neighbours in bfloat16 at a
distance of 1.2e-4, so a change of 1e-6 often leaves the engine's weight as it was.

The check needs an engine that can compute the log-probs of given tokens (`Engine.logprobs_of`).

Shape suffixes: Q recorded sequences, N recorded response tokens of all sequences.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo.data.samples import Response
from gspo.model.sharding.dtensors import local_tensor
from gspo.model.weights import input_embedding
from gspo.rollout.engines.base import Engine, policy_logprobs

# The recorded sequences are short. An engine computes all logits of a sequence at once, and must
# have the memory for it.
MAX_SEQUENCES = 32
MAX_PROMPT_TOKENS = 128  # the last ones
MAX_RESPONSE_TOKENS = 64  # the first ones
# In float32 the check fails if |y - x| exceeds so many times |engine - trainer| at the previous
# load, plus MIN_ROUNDING nats. A stale tensor changes all sequences. Rounding alone changes a few
# of them much more than the others, because a token's router chooses another expert. So |y - x| of
# a quiet sequence is compared with the rounding of a noisy one: these are quantiles over sequences.
ROUNDING_FACTOR = 4.0
MIN_ROUNDING = 2e-6
QUIET = 0.5
NOISY = 0.9
# In bfloat16 the check fails if the slope of y on x is below MAX_SLOPE and STANDARD_ERRORS standard
# errors below 1. After complete loads slopes lay up to 4 standard errors from 1, because sequences
# are not quite independent (experiments/LOG.md, 2026-11-27).
MAX_SLOPE = 0.8
STANDARD_ERRORS = 8.0
# With fewer sequences the standard error is not known well.
MIN_SEQUENCES = 8
# With |x| below this share of |engine - trainer| rounding could remove all of y.
MIN_CHANGE = 0.1


@dataclass
class LogprobChange:
    """How the log-probs of engine and trainer changed on the recorded tokens."""

    slope: float  # sum(x y) / sum(x^2): 1 if all weights arrived, 0 if none did
    slope_stderr: float  # its standard error; the tokens of a sequence are not independent
    trainer_change: float  # mean |x|
    residual: float  # mean |y - x|


def logprob_change(trainer_N: Tensor, engine_N: Tensor, sequence_N: Tensor) -> LogprobChange:
    """Compare the changes x (`trainer_N`) and y (`engine_N`) of the recorded tokens.

    `sequence_N` is the index of each token's sequence. The slope is NaN if all x are 0. All numbers
    but `trainer_change` are NaN if a y is NaN."""
    num_sequences = int(sequence_N.max()) + 1
    residual_N = engine_N - trainer_N

    def sums_Q(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)

    squares_Q = sums_Q(trainer_N * trainer_N)
    products_Q = sums_Q(trainer_N * residual_N)
    # the slope of y - x on x, which is more exact than the slope of y on x
    offset = products_Q.sum() / squares_Q.sum()
    # the variance between sequences, not between tokens (Liang and Zeger 1986)
    errors_Q = products_Q - offset * squares_Q
    correction = num_sequences / max(num_sequences - 1, 1)
    stderr = (correction * errors_Q.square().sum()).sqrt() / squares_Q.sum()
    return LogprobChange(
        slope=float(1 + offset),
        slope_stderr=float(stderr),
        trainer_change=float(trainer_N.abs().mean()),
        residual=float(residual_N.abs().mean()),
    )


def is_token_lists(value: object, vocabulary: int) -> bool:
    """Return whether a value of JSON is a short list of token sequences, none of them empty."""
    if not isinstance(value, list) or len(value) > MAX_SEQUENCES:
        return False
    for tokens in value:
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= MAX_PROMPT_TOKENS:
            return False
        if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            return False
    return True


def sequence_gap(trainer_N: Tensor, engine_N: Tensor, sequence_N: Tensor, quantile: float) -> float:
    """Return a quantile over the sequences of their mean |engine - trainer|.

    The result is NaN if a difference is NaN or infinite."""
    difference_N = (engine_N - trainer_N).abs()
    if not difference_N.isfinite().all():
        return math.nan
    num_sequences = int(sequence_N.max()) + 1
    sums_Q = difference_N.new_zeros(num_sequences).index_add(0, sequence_N, difference_N)
    counts_Q = sequence_N.bincount(minlength=num_sequences)
    return float((sums_Q / counts_Q).quantile(quantile))


@contextmanager
def rounded_to_bfloat16(model: nn.Module) -> Generator[None]:
    """Round the float32 weights to bfloat16 inside the block, and restore every bit afterwards.

    bfloat16 has the upper 16 bits of float32. The bits that rounding changes are kept as a number
    of 16 bits. This number always fits, because numbers halfway between two neighbours are rounded
    away from 0, and not to the even neighbour."""
    parameters = [p for p in model.parameters() if p.dtype == torch.float32]
    bits_of_weights = [local_tensor(p.detach()).view(torch.int32) for p in parameters]
    lost_bits = []
    try:
        for bits in bits_of_weights:
            lost_bits.append((bits - rounded_bits(bits)).to(torch.int16))
            bits.copy_(rounded_bits(bits))
        yield
    finally:
        # right also for a weight that an exception left unrounded
        for bits, lost in zip(bits_of_weights, lost_bits, strict=False):
            bits.copy_(rounded_bits(bits) + lost)


def rounded_bits(bits: Tensor) -> Tensor:
    """Return the bits of float32 numbers after rounding them to bfloat16."""
    return (bits + 0x8000) & -0x10000


class HandoverCheck:
    """The check of hand-overs to one engine.

    `record` stores tokens and their log-probs, once. `check` follows every load of weights.

    `engine_rounding` says what rounds in the engine and not in the trainer. "nothing": both compute
    in float32, and a single stale tensor is an error. "bfloat16": the engine's weights and
    activations are rounded to bfloat16, and an engine that lacks a large part of an update is an
    error. "otherwise": the numbers are measured, and only a log-prob that is not finite is an error.
    """

    def __init__(self, engine: Engine, engine_rounding: str):
        self.engine = engine
        self.engine_rounding = engine_rounding
        self.prompts: list[list[int]] = []
        self.responses: list[list[int]] = []
        self.noisy_gap = 0.0  # |engine - trainer| of a noisy sequence after the last load
        self.trainer_N = torch.empty(0)
        self.engine_N = torch.empty(0)
        self.sequence_N = torch.empty(0)
        self.is_recorded = False  # whether `record` was called, or a checkpoint had tokens
        # the metrics of the last load, which a resumed run logs again
        self.metrics: dict[str, float] = {}
        # the tokens are those of a checkpoint, and their log-probs have to be computed
        self.is_restored = False

    def record(self, groups: Sequence[Sequence[Response]]) -> None:
        """Record up to MAX_SEQUENCES responses and their log-probs under the present weights.

        The first response of each group comes first. All ranks record the same responses. Later
        calls do nothing, and neither does a call for an engine that shares the policy's tensors."""
        if self.is_recorded or self.engine.shares_weights:
            return
        self.is_recorded = True
        by_sample = sorted((i, n) for n, group in enumerate(groups) for i in range(len(group)))
        responses = [groups[n][i] for i, n in by_sample[:MAX_SEQUENCES]]
        prompts = [r.prompt_ids[-MAX_PROMPT_TOKENS:] for r in responses]
        # an engine samples one further token, for which it must have room
        limits = [MAX_RESPONSE_TOKENS] * len(prompts)
        if self.engine.positions is not None:
            limits = [
                min(limit, self.engine.positions - len(prompt) - 1)
                for limit, prompt in zip(limits, prompts, strict=True)
            ]
        for r, prompt, limit in zip(responses, prompts, limits, strict=True):
            if limit > 0:
                self.prompts.append(prompt)
                self.responses.append(r.token_ids[:limit])
        if not self.prompts:
            return
        if not self._measure_present():
            self.prompts = []

    def _measure_present(self) -> bool:
        """Compute the log-probs from which the next load is measured.

        Returns False if the engine cannot compute log-probs of given tokens."""
        logprobs = self._logprobs()
        if logprobs is None:
            return False
        self.trainer_N, self.engine_N = logprobs
        lengths_Q = torch.tensor([len(response) for response in self.responses])
        self.sequence_N = torch.arange(len(lengths_Q)).repeat_interleave(lengths_Q)
        self.noisy_gap = sequence_gap(*logprobs, self.sequence_N, NOISY)
        return True

    def state(self) -> dict[str, Any]:
        """Return the recorded tokens and the metrics of the last load, ready for JSON."""
        if not self.prompts:
            return {}
        return {"prompts": self.prompts, "responses": self.responses, "metrics": self.metrics}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`. The next `check` then has nothing to compare with.

        A run without state records the first rollout after its resume. Raises ValueError if the
        state holds no tokens of this model."""
        if state:
            vocabulary = len(input_embedding(self.engine.policy.model))
            for name in ("prompts", "responses"):
                if not is_token_lists(state.get(name), vocabulary):
                    raise ValueError(f"the state of the hand-over check has no valid {name}")
            if len(state["prompts"]) != len(state["responses"]):
                raise ValueError("the state of the hand-over check has prompts without responses")
            if not isinstance(state.get("metrics"), dict):
                raise ValueError("the state of the hand-over check has no metrics")
            self.prompts = state["prompts"]
            self.responses = state["responses"]
            self.metrics = state["metrics"]
            self.is_recorded = True
            self.is_restored = True

    def check(self, step: int) -> dict[str, float]:
        """Return the metrics of the load after this step, none before the recording.

        Each rank checks its own engine. The metrics are those of the rank with the largest
        residual. Raises RuntimeError on all ranks if an engine has not got all weights."""
        if not self.prompts:
            return {}
        if self.is_restored:
            self.is_restored = False
            self._measure_present()
            return self.metrics
        self.metrics = self._compare(step)
        return self.metrics

    def _compare(self, step: int) -> dict[str, float]:
        """Compare the changes of engine and trainer since the previous load."""
        logprobs = self._logprobs()
        if logprobs is None:
            raise RuntimeError("the engine computed log-probs of given tokens before, but not now")
        trainer_N, engine_N = logprobs
        trainer_change_N = trainer_N - self.trainer_N
        engine_change_N = engine_N - self.engine_N
        change = logprob_change(trainer_change_N, engine_change_N, self.sequence_N)
        residual = sequence_gap(trainer_change_N, engine_change_N, self.sequence_N, QUIET)
        fault = self.fault(change, residual)
        self.trainer_N = trainer_N
        self.engine_N = engine_N
        self.noisy_gap = sequence_gap(trainer_N, engine_N, self.sequence_N, NOISY)
        numbers = (change.slope, change.slope_stderr, change.trainer_change, change.residual)
        ranks = self.engine.ranks
        changes = [LogprobChange(*values) for values in ranks.all_gather(numbers)]
        faults = [message for message in ranks.all_gather(fault) if message]
        if faults:
            raise RuntimeError(
                f"after step {step} the engine has not got all of the trainer's weights: "
                f"on {len(self.sequence_N)} recorded tokens {faults[0]}"
            )
        worst = max(changes, key=lambda other: other.residual)
        if worst.trainer_change == 0:  # an update that was left out, or a learning rate of 0
            return {}
        return {
            "mismatch/sync_slope": worst.slope,
            "mismatch/sync_slope_stderr": worst.slope_stderr,
            "mismatch/sync_residual": worst.residual / worst.trainer_change,
        }

    def fault(self, change: LogprobChange, residual: float) -> str:
        """Return in words why this change shows missing weights, "" if it does not.

        `residual` is |y - x| of a quiet sequence."""
        if math.isnan(residual):
            return "a log-prob is not finite"
        if self.engine_rounding == "nothing":
            limit = ROUNDING_FACTOR * self.noisy_gap + MIN_ROUNDING
            if residual > limit:
                return (
                    f"the changes of its log-probs differ from the trainer's by {residual:.2g} "
                    f"nats, of which at most {limit:.2g} is rounding"
                )
        is_measurable = (
            len(self.prompts) >= MIN_SEQUENCES
            and change.trainer_change > MIN_CHANGE * self.noisy_gap
        )
        if self.engine_rounding == "bfloat16" and is_measurable:
            highest = change.slope + STANDARD_ERRORS * change.slope_stderr
            if change.slope < MAX_SLOPE and highest < 1:
                return (
                    f"its log-probs changed by {change.slope:.2f} +- {change.slope_stderr:.2f} of "
                    "the trainer's change (rollout.dtype=bfloat16)"
                )
        return ""

    def _logprobs(self) -> tuple[Tensor, Tensor] | None:
        """Return the log-probs of the recorded tokens: the trainer's and the engine's, float64.

        Returns None if the engine cannot compute them."""
        engine_logprobs = self.engine.logprobs_of(self.prompts, self.responses)
        if engine_logprobs is None:
            return None
        policy = self.engine.policy
        rounding: AbstractContextManager[None] = nullcontext()
        if self.engine_rounding == "bfloat16":
            rounding = rounded_to_bfloat16(policy.model)
        with rounding:
            trainer_logprobs = policy_logprobs(policy, self.prompts, self.responses)
        return (
            torch.tensor([value for row in trainer_logprobs for value in row]).double(),
            torch.tensor([value for row in engine_logprobs for value in row]).double(),
        )
