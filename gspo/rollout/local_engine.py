"""The engine that samples in the trainer's process with a key/value cache.

Prompts are padded on the left and masked, and each prompt is prefilled once for its group.

Shape suffixes: R live rows (responses still being sampled), V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from gspo.core.seeding import uniforms
from gspo.model.policy import Policy
from gspo.rollout.decode import CachedRows, Decoder, PlainDecoder, Step
from gspo.rollout.engine import Engine
from gspo.rollout.quantization import quantize
from gspo.rollout.requests import Row, Sampling
from gspo.rollout.truncation import Truncation, kept_tokens

LIVE_SHARE = 0.9  # finished rows are dropped from the cache once at most this share of its rows is unfinished


class LocalEngine(Engine):
    """Samples in the trainer's process.

    With `dtype` equal to the policy's it samples with the policy's own tensors, or with a copy where those are spread
    over ranks. With another `dtype` it samples with a copy that computes as an engine of that precision would: weights
    and activations are rounded, and the softmax of the logits is taken in float32. With a `quantization` the weights of
    that copy are rounded further.
    """

    def __init__(
        self,
        policy: Policy,
        batch_rows: int = 512,
        dtype: torch.dtype = torch.float32,
        quantization: str = "none",
    ):
        self.policy = policy
        self.batch_rows = batch_rows
        self.quantization = quantization
        self.shares_weights = dtype == policy.model.dtype and quantization == "none" and not policy.shards
        self.sampler = policy if self.shares_weights else policy.copy(dtype)
        self._quantize()

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
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        record_experts: bool,
        ended: Callable[[list[int]], None],
    ) -> None:
        """Prefill each prompt once, then decode all rows together, and drop the finished ones from time to time."""
        with self.sampler.network.frozen(copy_experts=True) if self.sampler.network else nullcontext():
            decoder = Decoder(self.sampler) if self.sampler.network else PlainDecoder(self.sampler)
            first = decoder.prefill([row.prefix_ids for row in rows[::group_size]], group_size)
            sampled = self._sampled(rows, record_experts)
            for running_R in self._decode(decoder, first, sampled, sampling, seed):
                ended(sampled.fill_ended_rows(running_R))

    @torch.no_grad()
    def converse(
        self,
        rows: list[Row],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        record_experts: bool,
        reply: Callable[[list[Row]], list[Row]],
    ) -> None:
        """Sample rows turn by turn, and keep their keys and values from turn to turn."""
        if not rows:
            return
        if not self.sampler.network:  # then every turn begins with a pass over all that was before
            super().converse(rows, group_size, sampling, seed, record_experts, reply)
            return
        with self.sampler.network.frozen(copy_experts=True):
            decoder = Decoder(self.sampler)
            first = decoder.prefill([row.prefix_ids for row in rows[::group_size]], group_size)
            while rows:
                sampled, taken = self._sampled(rows, record_experts), TakenRows(decoder, rows)
                for running_R in self._decode(decoder, first, sampled, sampling, seed, taken):
                    sampled.fill_ended_rows(running_R)
                following = reply(rows)
                first = taken.go_on(following) if following else first
                rows = following

    def _sampled(self, rows: list[Row], record_experts: bool) -> SampledTokens:
        return SampledTokens(rows, record_experts and self.sampler.routing.layers > 0, self.sampler.device)

    def _decode(
        self,
        decoder: Decoder | PlainDecoder,
        first: Step,
        sampled: SampledTokens,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        taken: TakenRows | None = None,
    ) -> Iterator[Tensor]:
        """Sample all rows, beginning with the logits of `first`. Yields, from time to time and at the end, the numbers
        of the rows that are unfinished. What the cache has of the others goes to `taken`."""
        rows = sampled.rows
        device, longest = self.sampler.device, max(row.limit for row in rows)
        stop_ids = torch.tensor(sorted(self.policy.stop_ids), device=device)
        limits_R = torch.tensor([row.limit for row in rows], device=device)
        noise = [uniforms(r.done + longest, *seed, r.problem.task, r.problem.index, r.sample)[r.done :] for r in rows]
        uniforms_RT = torch.from_numpy(np.stack(noise)).to(device)
        logits_RV, experts = first
        watches = [row.watch(self.policy, sampling) for row in rows] if sampling.stop else []
        live_R = torch.arange(len(rows), device=device)  # the rows that the cache holds; some of them are finished
        running_R = torch.ones_like(live_R, dtype=torch.bool)
        for t in range(longest):
            tokens_R, logp_R = draw(logits_RV, uniforms_RT[live_R, t], sampling.temperature, sampling)
            sampled.add(t, live_R, running_R, tokens_R, logp_R, experts)
            running_R &= ~torch.isin(tokens_R, stop_ids) & (t + 1 < limits_R[live_R])
            if watches:
                read = zip(live_R.tolist(), tokens_R.tolist(), strict=True)
                running_R &= ~torch.tensor([watches[r].completes(token) for r, token in read], device=device)
            left = int(running_R.sum())
            if taken and left <= LIVE_SHARE * len(live_R):
                taken.take(live_R, ~running_R, sampled.lengths_R)
            if not left:
                break
            if left <= LIVE_SHARE * len(live_R):
                keep = running_R.nonzero().squeeze(-1)
                decoder.keep(keep)
                live_R, running_R, tokens_R = live_R[keep], running_R[keep], tokens_R[keep]
                yield live_R
            logits_RV, experts = decoder.step(tokens_R)
        yield live_R[:0]


class TakenRows:
    """What the cache holds of the rows that have ended their turn, so that their next turn can go on from there."""

    def __init__(self, decoder: Decoder, rows: list[Row]):
        self.decoder, self.rows = decoder, rows
        self.pieces: list[CachedRows] = []
        self.places: dict[int, int] = {}  # by the row's place: its number in all pieces together

    def take(self, live_R: Tensor, ended_R: Tensor, lengths_R: Tensor) -> None:
        """Take the rows that have ended out of those that the cache holds, whose numbers are `live_R`."""
        at = ended_R.nonzero().squeeze(-1)
        numbers = live_R[at]
        # the last token that was sampled was not fed
        sampled = zip(numbers.tolist(), lengths_R[numbers].tolist(), strict=True)
        self.pieces.append(self.decoder.take(at, [len(self.rows[i].prefix_ids) + n - 1 for i, n in sampled]))
        for i in numbers.tolist():
            self.places[self.rows[i].place] = len(self.places)

    def go_on(self, following: list[Row]) -> Step:
        """Go on with these rows: feed what they have beyond the cache, and return the next step's logits and
        experts."""
        order = [self.places[row.place] for row in following]
        lengths = [length for piece in self.pieces for length in piece.lengths]
        self.decoder.put(self.pieces, order)
        return self.decoder.feed([row.prefix_ids[lengths[i] :] for row, i in zip(following, order, strict=True)])


class SampledTokens:
    """The tokens, log-probs and experts that were sampled for the rows of one call, kept as tensors until rows end."""

    def __init__(self, rows: list[Row], keep_experts: bool, device: torch.device):
        self.rows, self.keep_experts = rows, keep_experts
        longest = max(row.limit for row in rows)
        self.filled_R = torch.zeros(len(rows), dtype=torch.bool)  # rows that have got their tokens as lists
        self.tokens_RT = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        self.logp_RT = torch.zeros(len(rows), longest, device=device)
        self.lengths_R = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.prompt_experts: Tensor | None = None  # [R, prompt, L, K], or of what was fed before this turn
        self.experts_RTLK: Tensor | None = None  # at t: the experts of the pass that was fed the t-th token

    def add(
        self, t: int, live_R: Tensor, running_R: Tensor, tokens_R: Tensor, logp_R: Tensor, experts: Tensor | None
    ) -> None:
        """Store the t-th token of the live rows; only unfinished rows become longer. `experts` are those of the pass
        that predicted the token."""
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
        """Fill the rows that have ended and were not filled before, and return their numbers. `running_R` holds the
        numbers of those that have not ended."""
        ended_R = ~self.filled_R
        ended_R[running_R.cpu()] = False
        self.filled_R |= ended_R
        which = ended_R.nonzero().squeeze(-1)
        here = which.to(self.tokens_RT.device)
        tokens, logp = self.tokens_RT[here].tolist(), self.logp_RT[here].tolist()
        lengths, which = self.lengths_R[here].tolist(), which.tolist()
        if self.keep_experts:
            prompts, fed = self.prompt_experts[here].cpu().numpy(), self.experts_RTLK[here].cpu().numpy()
        for i, (r, length) in enumerate(zip(which, lengths, strict=True)):
            row = self.rows[r]
            row.token_ids, row.logprobs = tokens[i][:length], logp[i][:length]
            if self.keep_experts:
                before = sum(map(len, row.experts))  # positions that earlier turns have fed
                row.experts = [*row.experts, prompts[i, : len(row.prefix_ids) - before], fed[i, : length - 1]]
        return which


def draw(
    logits_RV: Tensor, uniform_R: Tensor, temperature: float, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: the likeliest at temperature 0, else by inverting the cumulative distribution.

    Returns the tokens [R] and their log-probs [R]. A drawn token is the first whose cumulative probability exceeds the
    row's uniform number in [0, 1). The sum runs in float64, so that rounding does not change the chances where the
    vocabulary is large. With `truncation` it runs over the tokens that this keeps, and the uniform number is a share of
    their sum; the log-probs are those of the whole distribution all the same.
    """
    logprobs_RV = (logits_RV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        tokens_R = logprobs_RV.argmax(-1)
    else:
        p_RV = logprobs_RV.double().exp()
        if truncation and truncation.rules:
            p_RV = p_RV * kept_tokens(logprobs_RV, truncation)
        cumulative_RV = p_RV.cumsum(-1)
        threshold_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(-1)
        tokens_R = torch.searchsorted(cumulative_RV, threshold_R1, right=True).squeeze(-1)
        tokens_R = tokens_R.clamp(max=logits_RV.shape[-1] - 1)
    return tokens_R, logprobs_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)
