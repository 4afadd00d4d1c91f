"""The engine that samples in the trainer's process with a key/value cache.

Prompts are padded on the left and masked, and each prompt is prefilled once for its group.

Shape suffixes: R live rows (responses still being sampled), V vocabulary, L MoE layers, K experts
per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.data.batch import runs_ahead, to_cpu, to_device
from gspo.data.seeding import uniform_rows
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.decode import CachedRows, Decoder, Step
from gspo.rollout.engines.plain_decode import CachedDecoder, UncachedDecoder, plain_decoder
from gspo.rollout.engines.quantization import quantize
from gspo.rollout.engines.requests import RandomKey, Row, SamplingRequest
from gspo.rollout.engines.static_decode import StaticDecoder
from gspo.rollout.engines.truncation import Truncation, kept_tokens

# After how many tokens the engine asks a GPU which rows have ended: it must finish all its work to
# answer. A CPU is asked after every token.
ASK_EVERY = 8
AnyDecoder = Decoder | CachedDecoder | UncachedDecoder


class LocalEngine(Engine):
    """Samples in the trainer's process.

    With `dtype` equal to the policy's it samples with the policy's own tensors, or with a copy
    where those are spread over ranks. With another `dtype` it samples with a copy that computes as
    an engine of that precision would: weights and activations are rounded, and the softmax of the
    logits is taken in float32. With a `quantization` the weights of that copy are rounded further.
    """

    def __init__(
        self,
        policy: Policy,
        batch_rows: int = 512,
        dtype: torch.dtype = torch.float32,
        quantization: str = "none",
        cuda_graphs: bool = True,
        ranks: Ranks | None = None,
    ):
        self.policy = policy
        self.batch_rows = batch_rows
        self.ranks = ranks or Ranks()
        self.quantization = quantization
        self.cuda_graphs = cuda_graphs
        self.shares_weights = (
            dtype == policy.model.dtype and quantization == "none" and not policy.shards
        )
        self.sampler = policy if self.shares_weights else policy.copy(dtype)
        self._quantize()
        if not self.sampler.network:
            _ = self.plain_decoder  # what it has to say is said before the first rollout

    @cached_property
    def plain_decoder(self) -> type[CachedDecoder] | type[UncachedDecoder]:
        """What decodes through the model's own forward."""
        return plain_decoder(self.sampler)

    def _quantize(self) -> None:
        if self.quantization != "none":
            quantize(self.sampler, self.quantization)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights into the engine's own tensors, if it has any."""
        if not self.shares_weights:
            self.sampler.load_tensors(named_tensors)
            self._quantize()

    def close(self) -> None:
        """Do nothing: the tensors are freed with the object."""

    @torch.no_grad()
    def _sample(
        self,
        rows: list[Row],
        rows_per_prefix: int,
        request: SamplingRequest,
        on_ended: Callable[[list[int]], None],
    ) -> None:
        """Prefill each prompt once, then decode all rows together, and drop the finished ones from
        time to time.
        """
        with (
            self.sampler.network.frozen(copy_experts=True)
            if self.sampler.network
            else nullcontext()
        ):
            decoder = self._decoder(rows)
            prefixes = [row.prefix_ids for row in rows[::rows_per_prefix]]
            first = decoder.prefill(prefixes, rows_per_prefix)
            sampled = self._sampled(rows, request.record_experts)
            for running_R in self._decode(decoder, first, sampled, request):
                on_ended(sampled.fill_ended_rows(running_R))

    def _decoder(self, rows: list[Row]) -> AnyDecoder:
        """Return what decodes these rows: on a GPU, unless `cuda_graphs` is false, with tensors of
        fixed shapes.
        """
        if not self.sampler.network:
            return self.plain_decoder(self.sampler)
        device = self.sampler.device
        if not self.cuda_graphs or not runs_ahead(device):
            return Decoder(self.sampler)
        return StaticDecoder(
            self.sampler, max(row.limit for row in rows), records=device.type == "cuda"
        )

    @torch.no_grad()
    def converse(
        self,
        rows: list[Row],
        rows_per_prefix: int,
        request: SamplingRequest,
        reply: Callable[[list[Row]], list[Row]],
    ) -> None:
        """Sample rows turn by turn, and keep their keys and values from turn to turn."""
        if not rows:
            return
        if not self.sampler.network:  # then every turn begins with a pass over all that was before
            super().converse(rows, rows_per_prefix, request, reply)
            return
        with self.sampler.network.frozen(copy_experts=True):
            decoder = Decoder(self.sampler)
            prefixes = [row.prefix_ids for row in rows[::rows_per_prefix]]
            first = decoder.prefill(prefixes, rows_per_prefix)
            while rows:
                sampled = self._sampled(rows, request.record_experts)
                taken = TakenRows(decoder, rows)
                for running_R in self._decode(decoder, first, sampled, request, taken):
                    sampled.fill_ended_rows(running_R)
                following = reply(rows)
                first = taken.go_on(following) if following else first
                rows = following

    def _sampled(self, rows: list[Row], record_experts: bool) -> SampledTokens:
        return SampledTokens(
            rows, record_experts and self.sampler.routing.layers > 0, self.sampler.device
        )

    def _decode(
        self,
        decoder: AnyDecoder,
        first: Step,
        sampled: SampledTokens,
        request: SamplingRequest,
        taken: TakenRows | None = None,
    ) -> Iterator[Tensor]:
        """Sample all rows, beginning with the logits of `first`. Yields, from time to time and at
        the end, the numbers of the rows that are unfinished, on the CPU. What the cache has of the
        others goes to `taken`."""
        rows, sampling = sampled.rows, request.sampling
        device, longest = self.sampler.device, max(row.limit for row in rows)
        stop_ids = to_device(torch.tensor(sorted(self.policy.stop_ids)), device)
        limits_R = to_device(torch.tensor([row.limit for row in rows]), device)
        uniforms_RT = to_device(
            torch.from_numpy(row_uniforms(rows, longest, request.random_key)), device
        )
        logits_RV, experts = first
        watches = [row.watch(self.policy, sampling) for row in rows] if sampling.stop else []
        # The numbers of the rows that the cache holds, some of which are finished, on the CPU and
        # on the device.
        numbers_R = torch.arange(len(rows))
        live_R = to_device(numbers_R, device)
        running_R = torch.ones_like(live_R, dtype=torch.bool)
        # stop strings are read on the CPU after each token
        asks_often = watches or not runs_ahead(device)
        every = 1 if asks_often else ASK_EVERY
        for t in range(longest):
            tokens_R, logp_R = draw(
                logits_RV, uniforms_RT[live_R, t], sampling.temperature, sampling
            )
            sampled.add(t, live_R, running_R, tokens_R, logp_R, experts)
            running_R &= ~torch.isin(tokens_R, stop_ids) & (t + 1 < limits_R[live_R])
            if (t + 1) % every and t + 1 < longest:
                logits_RV, experts = decoder.step(tokens_R)
                continue
            on_cpu, read_R = to_cpu(running_R, tokens_R)
            if watches:
                read = zip(numbers_R.tolist(), read_R.tolist(), strict=True)
                on_cpu = on_cpu & ~torch.tensor([watches[r].completes(token) for r, token in read])
                running_R = to_device(on_cpu, device)
            left = int(on_cpu.sum())
            if taken and left <= decoder.live_share * len(live_R):
                taken.take(numbers_R, ~on_cpu, sampled.lengths_R)
            if not left:
                break
            if left <= decoder.live_share * len(live_R):
                kept = on_cpu.nonzero().squeeze(-1)
                numbers_R = numbers_R[kept]
                keep = to_device(kept, device)
                decoder.keep(keep)
                live_R, running_R, tokens_R = live_R[keep], running_R[keep], tokens_R[keep]
                yield numbers_R
            logits_RV, experts = decoder.step(tokens_R)
        yield numbers_R[:0]


def row_uniforms(rows: list[Row], count: int, random_key: RandomKey) -> np.ndarray:
    """Draw the numbers in [0, 1) that choose the next `count` tokens of each row. Shape [R, count].

    A number depends on the random key, the problem, the sample and the token's position in the
    response alone."""
    positions = [(*random_key, row.problem.task, row.problem.index, row.sample) for row in rows]
    most_done = max(row.done for row in rows)
    drawn = uniform_rows(most_done + count, positions)
    if not most_done:
        return drawn
    return np.stack(
        [numbers[row.done : row.done + count] for row, numbers in zip(rows, drawn, strict=True)]
    )


class TakenRows:
    """What the cache holds of the rows that have ended their turn, so that their next turn can go
    on from there.
    """

    def __init__(self, decoder: Decoder, rows: list[Row]):
        self.decoder, self.rows = decoder, rows
        self.pieces: list[CachedRows] = []
        # by the row's episode index: its number in all pieces together
        self.places: dict[int, int] = {}

    def take(self, numbers_R: Tensor, ended_R: Tensor, lengths_R: Tensor) -> None:
        """Take the rows that have ended out of those that the cache holds. `numbers_R` are the
        numbers of the latter and `ended_R` says which have ended, both on the CPU; `lengths_R` are
        the lengths of all rows."""
        at = ended_R.nonzero().squeeze(-1)
        numbers = numbers_R[at].tolist()
        (lengths,) = to_cpu(lengths_R)
        # the last token that was sampled was not fed
        fed = [len(self.rows[i].prefix_ids) + int(lengths[i]) - 1 for i in numbers]
        self.pieces.append(self.decoder.take(to_device(at, lengths_R.device), fed))
        for i in numbers:
            self.places[self.rows[i].episode_index] = len(self.places)

    def go_on(self, following: list[Row]) -> Step:
        """Go on with these rows: feed what they have beyond the cache, and return the next step's
        logits and experts."""
        order = [self.places[row.episode_index] for row in following]
        lengths = [length for piece in self.pieces for length in piece.lengths]
        self.decoder.put(self.pieces, order)
        return self.decoder.feed(
            [row.prefix_ids[lengths[i] :] for row, i in zip(following, order, strict=True)]
        )


class SampledTokens:
    """The tokens, log-probs and experts that were sampled for the rows of one call, kept as tensors
    until rows end.
    """

    def __init__(self, rows: list[Row], keep_experts: bool, device: torch.device):
        self.rows, self.keep_experts = rows, keep_experts
        longest = max(row.limit for row in rows)
        # rows that have got their tokens as lists
        self.filled_R = torch.zeros(len(rows), dtype=torch.bool)
        self.tokens_RT = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        self.logp_RT = torch.zeros(len(rows), longest, device=device)
        self.lengths_R = torch.zeros(len(rows), dtype=torch.int64, device=device)
        # [R, prompt, L, K], or of what was fed before this turn
        self.prompt_experts: Tensor | None = None
        # at t: the experts of the pass that was fed the t-th token
        self.experts_RTLK: Tensor | None = None

    def add(
        self,
        t: int,
        live_R: Tensor,
        running_R: Tensor,
        tokens_R: Tensor,
        logp_R: Tensor,
        experts: Tensor | None,
    ) -> None:
        """Store the t-th token of the live rows; only unfinished rows become longer. `experts` are
        those of the pass that predicted the token."""
        self.tokens_RT[live_R, t], self.logp_RT[live_R, t] = tokens_R, logp_R
        self.lengths_R[live_R] += running_R
        if self.keep_experts:
            experts = experts.to(torch.int16)
            if t == 0:
                self.prompt_experts = experts
                self.experts_RTLK = experts.new_empty(*self.tokens_RT.shape, *experts.shape[2:])
            else:
                self.experts_RTLK[live_R, t - 1] = experts[:, 0]

    def fill_ended_rows(self, running_R: Tensor) -> list[int]:
        """Fill the rows that have ended and were not filled before, and return their numbers.
        `running_R` holds the numbers of those that have not ended, on the CPU."""
        ended_R = ~self.filled_R
        ended_R[running_R] = False
        self.filled_R |= ended_R
        which = ended_R.nonzero().squeeze(-1)
        at = to_device(which, self.tokens_RT.device)
        kept = [self.tokens_RT, self.logp_RT, self.lengths_R]
        if self.keep_experts:
            kept += [self.prompt_experts, self.experts_RTLK]
        on_cpu = to_cpu(*(x.index_select(0, at) for x in kept))
        tokens, logp, lengths = (x.tolist() for x in on_cpu[:3])
        if self.keep_experts:
            prompts, fed = (x.numpy() for x in on_cpu[3:])
        which = which.tolist()
        for i, (r, length) in enumerate(zip(which, lengths, strict=True)):
            row = self.rows[r]
            row.token_ids, row.logprobs = tokens[i][:length], logp[i][:length]
            if self.keep_experts:
                before = sum(map(len, row.experts))  # positions that earlier turns have fed
                row.experts = [
                    *row.experts,
                    prompts[i, : len(row.prefix_ids) - before],
                    fed[i, : length - 1],
                ]
        return which


def draw(
    logits_RV: Tensor, uniform_R: Tensor, temperature: float, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: the likeliest at temperature 0, else by inverting the cumulative
    distribution.

    Returns the tokens [R] and their log-probs [R]. A drawn token is the first whose cumulative
    probability exceeds the row's uniform number in [0, 1). The sum runs in float64, so that
    rounding does not change the chances where the vocabulary is large, on a GPU in two steps
    (`drawn_by_blocks`).

    With `truncation` it runs over the tokens that this keeps, and the uniform number is a share of
    their sum; the log-probs are those of the whole distribution all the same.
    """
    logprobs_RV = (logits_RV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        tokens_R = logprobs_RV.argmax(-1)
    elif runs_ahead(logits_RV.device):
        p_RV = logprobs_RV.exp()
        if truncation and truncation.rules:
            p_RV = p_RV * kept_tokens(logprobs_RV, truncation)
        tokens_R = drawn_by_blocks(p_RV, uniform_R)
    else:
        p_RV = logprobs_RV.double().exp()
        if truncation and truncation.rules:
            p_RV = p_RV * kept_tokens(logprobs_RV, truncation)
        cumulative_RV = p_RV.cumsum(-1)
        threshold_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(-1)
        tokens_R = torch.searchsorted(cumulative_RV, threshold_R1, right=True).squeeze(-1)
        tokens_R = tokens_R.clamp(max=logits_RV.shape[-1] - 1)
    return tokens_R, logprobs_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)


def drawn_by_blocks(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Draw one token per row from float32 probabilities, which need not sum to 1.

    It is the first token whose cumulative sum exceeds the uniform number's share of the whole sum.

    Sums run in float64, but only those of blocks of tokens and those within one block are kept: all
    of them would be 2.5 GB for 1,024 rows and a vocabulary of 152,000."""
    rows, vocabulary = p_RV.shape
    size = block_size(vocabulary)
    p_RBS = F.pad(p_RV, (0, -vocabulary % size)).unflatten(-1, (-1, size))
    ends_RB = p_RBS.sum(-1, dtype=torch.float64).cumsum(-1)
    threshold_R1 = (uniform_R * ends_RB[:, -1]).unsqueeze(-1)
    block_R1 = torch.searchsorted(ends_RB, threshold_R1, right=True).clamp(max=ends_RB.shape[1] - 1)
    before_R1 = torch.where(block_R1 > 0, ends_RB.gather(-1, (block_R1 - 1).clamp(min=0)), 0.0)
    within_RS = (
        p_RBS[torch.arange(rows, device=p_RV.device), block_R1.squeeze(-1)].double().cumsum(-1)
    )
    # The two sums over a block round differently. A token with a probability of 0 must not be drawn
    # for that.
    most_R1 = within_RS[:, -1:] * (1 - 2.0**-52)
    inside_R1 = torch.searchsorted(
        within_RS, torch.minimum(threshold_R1 - before_R1, most_R1), right=True
    )
    return (block_R1 * size + inside_R1.clamp(max=size - 1)).squeeze(-1)


def block_size(vocabulary: int) -> int:
    """Return how many tokens a block has: the largest power of two up to 1,024 that divides the
    vocabulary, so that no copy with padding is made, but at least 64."""
    return max(64, math.gcd(vocabulary, 1024))
