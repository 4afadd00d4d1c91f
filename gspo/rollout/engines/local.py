"""The engine that samples in the trainer's process, with a KV cache.

Each prompt is prefilled once for its group. Then all rows are decoded together, token by token.
Rows that have ended are dropped from time to time.

Shape suffixes: R rows (responses that are being sampled), T response tokens, V vocabulary, L MoE
layers, K experts per token, B blocks of the vocabulary, S tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.data.batch import runs_ahead, to_cpu, to_device
from gspo.data.seeding import uniform_rows
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine, policy_logprobs
from gspo.rollout.engines.decode import CachedRows, DecodeOutput, Decoder, NetworkDecoder
from gspo.rollout.engines.kept_recorder import KeptRecorder
from gspo.rollout.engines.quantization import quantize
from gspo.rollout.engines.requests import RandomKey, Row, SamplingRequest
from gspo.rollout.engines.static_decode import StaticDecoder
from gspo.rollout.engines.transformers_decode import UncachedDecoder, transformers_decoder
from gspo.rollout.engines.truncation import Truncation, kept_tokens

# A GPU is asked which rows have ended after so many tokens, because it must finish all its work to
# answer. A CPU is asked after every token.
TOKENS_PER_CHECK = 8


class LocalEngine(Engine):
    """An engine that samples in the trainer's process.

    With the policy's own `dtype` it samples with the policy's tensors, or with a copy if they are
    sharded over ranks. With another `dtype` it samples with a copy that computes like an engine
    of that precision. Its weights and activations are rounded, and the softmax of the logits is
    computed in float32. With a `quantization` the weights of the copy are rounded further.
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
            _ = self.transformers_decoder  # prints its warning before the first rollout

    @cached_property
    def transformers_decoder(self) -> Callable[[Policy], Decoder]:
        """The class that decodes through the model's own forward."""
        return transformers_decoder(self.sampler)

    def _quantize(self) -> None:
        if self.quantization != "none":
            quantize(self.sampler, self.quantization)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights into the engine's own tensors, if it has any."""
        if not self.shares_weights:
            self.sampler.load_tensors(named_tensors)
            self._quantize()

    def logprobs_of(
        self, prompts: list[list[int]], responses: list[list[int]]
    ) -> list[list[float]]:
        """Return the log-probs of given response tokens at temperature 1, row by row."""
        return policy_logprobs(self.sampler, prompts, responses)

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
        """Prefill each prompt once, then decode all rows together until they have ended."""
        network = self.sampler.network
        with network.frozen(copy_experts=True) if network else nullcontext():
            decoder = self._decoder(rows)
            prompts = [row.prefix_ids for row in rows[::rows_per_prefix]]
            first = decoder.prefill(prompts, rows_per_prefix)
            sampled = SampledTokens(rows, request, self.sampler.device)
            for unfinished in self._decode(decoder, first, sampled, request):
                on_ended(sampled.fill_ended_rows(unfinished))

    def _decoder(self, rows: list[Row]) -> Decoder:
        """Return a decoder for these rows.

        On a GPU its tensors have fixed shapes, unless `cuda_graphs` is false."""
        network = self.sampler.network
        if not network:
            return self._decoder_through_transformers(rows)
        device = self.sampler.device
        if not self.cuda_graphs or not runs_ahead(device):
            return NetworkDecoder(network)
        max_tokens = max(row.limit for row in rows)
        return StaticDecoder(network, max_tokens, records=device.type == "cuda")

    def _decoder_through_transformers(self, rows: list[Row]) -> Decoder:
        """Return the decoder for rows of a model that runs through its own forward.

        A cache has columns for the longest prefix and the most new tokens. Models with a table of
        positions have no more columns than positions, and LongRoPE changes its factors there."""
        columns = max(len(row.prefix_ids) for row in rows) + max(row.limit for row in rows)
        if self.positions is not None and columns > self.positions:
            return UncachedDecoder(self.sampler)
        return self.transformers_decoder(self.sampler)

    @torch.no_grad()
    def converse(
        self,
        rows: list[Row],
        rows_per_prefix: int,
        request: SamplingRequest,
        reply: Callable[[list[Row]], list[Row]],
    ) -> None:
        """Sample rows turn by turn, and keep their KV cache from turn to turn."""
        if not rows:
            return
        network = self.sampler.network
        if not network:  # then every turn begins with a pass over the whole prefix
            super().converse(rows, rows_per_prefix, request, reply)
            return
        with network.frozen(copy_experts=True):
            decoder = NetworkDecoder(network)
            prompts = [row.prefix_ids for row in rows[::rows_per_prefix]]
            first = decoder.prefill(prompts, rows_per_prefix)
            while rows:
                sampled = SampledTokens(rows, request, self.sampler.device)
                caches = TurnCaches(decoder, rows)
                for unfinished in self._decode(decoder, first, sampled, request, caches):
                    sampled.fill_ended_rows(unfinished)
                rows = reply(rows)
                if rows:
                    first = caches.resume(rows)

    def _decode(
        self,
        decoder: Decoder,
        first: DecodeOutput,
        sampled: SampledTokens,
        request: SamplingRequest,
        caches: TurnCaches | None = None,
    ) -> Iterator[Tensor]:
        """Sample all rows, beginning with the logits of `first`.

        Yields the indices of the unfinished rows, on the CPU, from time to time and at the end.
        `caches` saves the keys and values of the other rows."""
        rows = sampled.rows
        sampling = request.sampling
        device = self.sampler.device
        max_tokens = max(row.limit for row in rows)
        stop_ids = to_device(torch.tensor(sorted(self.policy.stop_ids)), device)
        limits_R = to_device(torch.tensor([row.limit for row in rows]), device)
        uniforms = row_uniforms(rows, max_tokens, request.random_key)
        uniforms_RT = to_device(torch.from_numpy(uniforms), device)
        detectors = []
        if sampling.stop:
            detectors = [row.stop_detector(self.policy, sampling) for row in rows]
        # stop strings are read on the CPU after each token
        tokens_per_check = TOKENS_PER_CHECK if runs_ahead(device) and not detectors else 1
        # The indices of the rows in the decoder's cache, on the CPU and on the device. Some of
        # these rows may have ended.
        indices_R = torch.arange(len(rows))
        cached_rows_R = to_device(indices_R, device)
        unfinished_R = torch.ones_like(cached_rows_R, dtype=torch.bool)
        logits_RV, experts = first
        for t in range(max_tokens):
            uniform_R = uniforms_RT[cached_rows_R, t]
            tokens_R, logp_R, kept_RV = draw_kept(
                logits_RV, uniform_R, sampling.temperature, sampling, sampling.keeps_mask
            )
            sampled.add(t, cached_rows_R, unfinished_R, tokens_R, logp_R, experts)
            if kept_RV is not None and sampling.keeps_mask:
                sampled.kept.add(t, indices_R, kept_RV)
            is_below_limit_R = t + 1 < limits_R[cached_rows_R]
            unfinished_R &= ~torch.isin(tokens_R, stop_ids) & is_below_limit_R
            if (t + 1) % tokens_per_check and t + 1 < max_tokens:
                logits_RV, experts = decoder.step(tokens_R)
                continue
            unfinished, tokens = to_cpu(unfinished_R, tokens_R)
            if detectors:
                row_tokens = zip(indices_R.tolist(), tokens.tolist(), strict=True)
                stopped = [detectors[i].completes(token) for i, token in row_tokens]
                unfinished = unfinished & ~torch.tensor(stopped)
                unfinished_R = to_device(unfinished, device)
            num_unfinished = int(unfinished.sum())
            drops_rows = num_unfinished <= decoder.max_unfinished_share * len(cached_rows_R)
            if caches and drops_rows:
                caches.save(indices_R, ~unfinished, sampled.lengths_R)
            if num_unfinished == 0:
                break
            if drops_rows:
                positions = unfinished.nonzero().squeeze(-1)
                indices_R = indices_R[positions]
                positions = to_device(positions, device)
                decoder.keep(positions)
                cached_rows_R = cached_rows_R[positions]
                unfinished_R = unfinished_R[positions]
                tokens_R = tokens_R[positions]
                yield indices_R
            logits_RV, experts = decoder.step(tokens_R)
        yield indices_R[:0]


def row_uniforms(rows: list[Row], count: int, random_key: RandomKey) -> np.ndarray:
    """Draw the numbers in [0, 1) that choose the next `count` tokens of each row. Shape [R, count].

    A number depends only on the random key, the problem, the sample, and the token's position in
    the response."""
    positions = [(*random_key, row.problem.task, row.problem.index, row.sample) for row in rows]
    max_done = max(row.done for row in rows)
    pairs = zip(rows, uniform_rows(max_done + count, positions), strict=True)
    return np.stack([uniforms_T[row.done : row.done + count] for row, uniforms_T in pairs])


class TurnCaches:
    """The keys and values of rows that have ended their turn, to continue from in the next turn."""

    def __init__(self, decoder: NetworkDecoder, rows: list[Row]):
        self.decoder = decoder
        self.rows = rows
        self.saved: list[CachedRows] = []
        # Row.episode_index -> index in all of `saved` together
        self.index_of_episode: dict[int, int] = {}

    def save(self, indices_R: Tensor, ended_R: Tensor, lengths_R: Tensor) -> None:
        """Save the cache of the rows that have ended.

        `indices_R` are the indices of the rows in the decoder's cache. `ended_R` says which of them
        have ended. Both are on the CPU. `lengths_R` are the response lengths of all rows."""
        positions = ended_R.nonzero().squeeze(-1)
        ended = indices_R[positions].tolist()
        (lengths,) = to_cpu(lengths_R)
        fed = []
        for i in ended:
            row = self.rows[i]
            # the last token that was sampled was not fed
            fed.append(len(row.prefix_ids) + int(lengths[i]) - 1)
            self.index_of_episode[row.episode_index] = len(self.index_of_episode)
        positions = to_device(positions, lengths_R.device)
        self.saved.append(self.decoder.extract(positions, fed))

    def resume(self, rows: list[Row]) -> DecodeOutput:
        """Restore the cache of these rows, feed the rest of their prefixes, and return the output.

        The first token of the next turn is drawn from its logits."""
        lengths = [length for cached in self.saved for length in cached.lengths]
        indices = [self.index_of_episode[row.episode_index] for row in rows]
        self.decoder.restore(self.saved, indices)
        pairs = zip(rows, indices, strict=True)
        return self.decoder.feed([row.prefix_ids[lengths[index] :] for row, index in pairs])


class SampledExperts(NamedTuple):
    """The experts of the rows, int16."""

    prompt: Tensor  # [R, tokens, L, K]: of the prompt, or of the tokens fed before this turn
    response_RTLK: Tensor  # at t: of the pass that was fed the t-th token


class SampledTokens:
    """The sampled tokens, log-probs and experts of the rows, as tensors until rows end."""

    def __init__(self, rows: list[Row], request: SamplingRequest, device: torch.device):
        self.rows = rows
        self.record_experts = request.record_experts
        self.keeps_mask = request.sampling.keeps_mask
        num_rows = len(rows)
        max_tokens = max(row.limit for row in rows)
        # whether the tokens of a row were copied into its object in `rows`
        self.filled_R = torch.zeros(num_rows, dtype=torch.bool)
        self.tokens_RT = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)
        self.logp_RT = torch.zeros(num_rows, max_tokens, device=device)
        self.lengths_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.experts: SampledExperts | None = None  # from the first token on, if they are recorded
        self.kept = KeptRecorder(num_rows, max_tokens)

    def add(
        self,
        t: int,
        cached_rows_R: Tensor,
        unfinished_R: Tensor,
        tokens_R: Tensor,
        logp_R: Tensor,
        experts: Tensor | None,
    ) -> None:
        """Store the t-th token of the cached rows. Only unfinished rows become longer.

        `cached_rows_R` are the indices of the rows in the decoder's cache. `experts` are the
        experts of the pass that predicted the token, None without MoE layers."""
        self.tokens_RT[cached_rows_R, t] = tokens_R
        self.logp_RT[cached_rows_R, t] = logp_R
        self.lengths_R[cached_rows_R] += unfinished_R
        if not self.record_experts or experts is None:
            return
        experts = experts.to(torch.int16)
        if self.experts is None:
            shape = (*self.tokens_RT.shape, *experts.shape[2:])
            self.experts = SampledExperts(experts, experts.new_empty(shape))
        else:
            self.experts.response_RTLK[cached_rows_R, t - 1] = experts[:, 0]

    def fill_ended_rows(self, unfinished: Tensor) -> list[int]:
        """Fill the rows that have ended and were not filled before, and return their indices.

        `unfinished` holds the indices of the rows that have not ended, on the CPU."""
        ended_R = ~self.filled_R
        ended_R[unfinished] = False
        self.filled_R |= ended_R
        indices = ended_R.nonzero().squeeze(-1)
        on_device = to_device(indices, self.tokens_RT.device)
        tensors = [self.tokens_RT, self.logp_RT, self.lengths_R]
        if self.experts:
            tensors += self.experts
        on_cpu = to_cpu(*(tensor.index_select(0, on_device) for tensor in tensors))
        tokens, logprobs, lengths = (tensor.tolist() for tensor in on_cpu[:3])
        indices = indices.tolist()
        for i, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            row = self.rows[index]
            row.token_ids = tokens[i][:length]
            row.logprobs = logprobs[i][:length]
            if self.experts:
                prompt_experts, response_experts = (tensor[i].numpy() for tensor in on_cpu[3:])
                fed_before = sum(len(experts) for experts in row.experts)  # in earlier turns
                fed_now = len(row.prefix_ids) - fed_before
                new_experts = [prompt_experts[:fed_now], response_experts[: length - 1]]
                row.experts = row.experts + new_experts
        if self.keeps_mask:
            for index, kept in zip(indices, self.kept.take(indices, lengths), strict=True):
                self.rows[index].kept = kept
        return indices


def draw(
    logits_RV: Tensor, uniform_R: Tensor, temperature: float, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token per row, and return the tokens [R] and their log-probs [R].

    At temperature 0 it is the most likely token. Else it is the first token whose cumulative
    probability exceeds the row's uniform number in [0, 1). The sum runs in float64, so rounding
    does not change the chances in a large vocabulary. On a GPU it runs in two steps
    (`draw_by_blocks`).

    With `truncation` the sum runs over the kept tokens, and the uniform number is a share of their
    sum. The log-probs are still computed over the whole distribution.
    """
    tokens_R, logp_R, _ = draw_kept(logits_RV, uniform_R, temperature, truncation, False)
    return tokens_R, logp_R


def draw_kept(
    logits_RV: Tensor,
    uniform_R: Tensor,
    temperature: float,
    truncation: Truncation | None,
    keeps_mask: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw a token per row as `draw` does. Return tokens [R], log-probs [R] and kept tokens.

    The kept tokens, bool [R, V], are the tokens that could be drawn, None without rules of
    truncation. With `keeps_mask` the log-probs are of the softmax over the kept tokens. The drawn
    tokens do not depend on it."""
    logprobs_RV = (logits_RV.float() / (temperature or 1.0)).log_softmax(-1)
    kept_RV = None
    if temperature == 0:
        tokens_R = logprobs_RV.argmax(-1)
    else:
        by_blocks = runs_ahead(logits_RV.device)
        p_RV = logprobs_RV.exp() if by_blocks else logprobs_RV.double().exp()
        if truncation and truncation.rules:
            kept_RV = kept_tokens(logprobs_RV, truncation)
            p_RV = p_RV * kept_RV
        if by_blocks:
            tokens_R = draw_by_blocks(p_RV, uniform_R)
        else:
            cumulative_RV = p_RV.cumsum(-1)
            threshold_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(-1)
            tokens_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True)
            last_token = logits_RV.shape[-1] - 1
            tokens_R = tokens_R1.squeeze(-1).clamp(max=last_token)
    if kept_RV is not None and keeps_mask:
        # from the logits, as the trainer does: if all tokens are kept, these are the same bits
        scaled_RV = logits_RV.float() / temperature
        logprobs_RV = scaled_RV.masked_fill(~kept_RV, -torch.inf).log_softmax(-1)
    logp_R1 = logprobs_RV.gather(-1, tokens_R.unsqueeze(-1))
    return tokens_R, logp_R1.squeeze(-1), kept_RV


def draw_by_blocks(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Draw a token per row from float32 probabilities, which need not sum to 1.

    It is the first token whose cumulative sum exceeds the uniform number's share of the whole sum.

    Sums run in float64. Only the sums of blocks and the sums within a single block are kept. All
    sums would be 2.5 GB for 1,024 rows and a vocabulary of 152,000."""
    rows, vocabulary = p_RV.shape
    size = block_size(vocabulary)
    p_RBS = F.pad(p_RV, (0, -vocabulary % size)).unflatten(-1, (-1, size))
    ends_RB = p_RBS.sum(-1, dtype=torch.float64).cumsum(-1)
    threshold_R1 = (uniform_R * ends_RB[:, -1]).unsqueeze(-1)
    last_block = ends_RB.shape[1] - 1
    block_R1 = torch.searchsorted(ends_RB, threshold_R1, right=True).clamp(max=last_block)
    previous_R1 = (block_R1 - 1).clamp(min=0)
    before_R1 = torch.where(block_R1 > 0, ends_RB.gather(-1, previous_R1), 0.0)
    rows_R = torch.arange(rows, device=p_RV.device)
    p_RS = p_RBS[rows_R, block_R1.squeeze(-1)]
    within_RS = p_RS.double().cumsum(-1)
    # The two sums over a block round differently. Without this bound a token with a probability of
    # 0 could be drawn.
    bound_R1 = within_RS[:, -1:] * (1 - 2.0**-52)
    remaining_R1 = torch.minimum(threshold_R1 - before_R1, bound_R1)
    inside_R1 = torch.searchsorted(within_RS, remaining_R1, right=True).clamp(max=size - 1)
    return (block_R1 * size + inside_R1).squeeze(-1)


def block_size(vocabulary: int) -> int:
    """Return how many tokens a block of the vocabulary has.

    It is the largest power of two up to 1,024 that divides the vocabulary, because then no padded
    copy is made. It is at least 64."""
    return max(64, math.gcd(vocabulary, 1024))
