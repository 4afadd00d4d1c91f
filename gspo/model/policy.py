"""The policy that is trained: gives log-probs, entropy, values and routing of responses, and its cost in FLOPs.

Shape suffixes: B responses, T response tokens, S all tokens, V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from gspo.core.batch import NOT_RECORDED, TrainBatch
from gspo.model.adapter import Adapter, LoraSettings
from gspo.model.cost import active_parameters, forward_flops
from gspo.model.gathered import architecture, run_in, whole
from gspo.model.kernels import TokenLogProbs
from gspo.model.loading import positions
from gspo.model.network import Network, is_supported, rounding
from gspo.model.packing import Sequences, lay_out
from gspo.model.prompts import PromptFormat
from gspo.model.routing_replay import Routing
from gspo.model.value_head import ValueHead

if TYPE_CHECKING:
    from gspo.model.sharding import Shards


@dataclass
class PolicyOutput:
    """The results of one forward pass over a batch."""

    logp_BT: Tensor  # float32, log pi(y_t | x, y_<t) at the sampling temperature
    # float32, -sum_v pi log pi at the sampling temperature, over the whole vocabulary; None if not asked for. It has a
    # gradient if `Policy.learns_entropy` is true
    entropy_BT: Tensor | None
    experts_BSLK: Tensor | None  # int16, the routers' own choice at every position; None if dense
    values_BT: Tensor | None = None  # float32, the critic's V(x, y_<t); None without a critic
    balance_BT: Tensor | None = (
        None  # float32, E sum_e load_e p_e, mean over MoE layers; None outside Routing.balancing
    )


class Policy:
    """A causal language model as a policy. With a `value_head` it has a critic on the same network."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        temperature: float = 1.0,
        *,
        value_head: ValueHead | None = None,
        prompts: PromptFormat | None = None,
        precision: torch.dtype = torch.float32,
        checkpointing: bool = False,
        shards: Shards | None = None,
    ):
        self.model = model.eval()  # no dropout: pi and pi_old must be the same function
        self.value_head = value_head
        self.shards = shards  # the ranks over which the model's weights are spread; None if they are all here
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.prompts = prompts or PromptFormat()
        self.prompts.check(tokenizer)
        self.routing = Routing(model)
        own = is_supported(model, precision)
        self.network = Network(model, checkpointing) if own else None  # None: the model's own forward is used
        if checkpointing and not self.network:
            raise ValueError(f"policy.checkpointing=true: it is not there for {architecture(model)}")
        self.learns_entropy = False  # whether `forward` gives the entropy a gradient
        self.precision = precision  # of the matrix products in `forward`; engines have their own
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = ends if isinstance(ends, list) else [ends]  # chat models end a turn and a text with different tokens
        self.stop_ids = {tokenizer.eos_token_id, *(i for i in ends if i is not None)}
        self.adapter: Adapter | None = None  # LoRA; None: all weights are trained
        self._adapter_is_off = False

    @property
    def positions(self) -> int | None:
        """How many tokens of prompt and response together the model can take; None for no bound."""
        return positions(self.model)

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.model.device

    def adapt(self, lora: LoraSettings, seed: int, base: str = "", folder: Path | None = None) -> None:
        """Put a LoRA adapter on the model, as it begins or as `folder` holds it; from now on it is all that is trained.
        `base` says where the model came from. Raises ValueError if that cannot be done."""
        _ = self.active_parameters  # of the layers as they are, before they are wrapped
        self.adapter = Adapter(self.model, lora, seed, base)
        if folder:
            self.adapter.load(folder)

    def without_adapter(self) -> Policy:
        """Return the policy as it was before its adapter: the same tensors, without critic. It is there to be scored
        with, between the updates of this one."""
        before = copy.copy(self)
        before.value_head, before._adapter_is_off = None, True
        return before

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return all trained parameters: the model's or its adapter's, and the critic's."""
        own = self.adapter.parameters() if self.adapter else self.model.parameters()
        return [*own, *(self.value_head.parameters() if self.value_head else ())]

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of `named_tensors` by name."""
        if self.adapter:
            return self.adapter.shapes()
        return {name: tensor.shape for name, tensor in self.model.state_dict().items()}

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the model's weights by name, as an engine loads them. They are the weights themselves, not copies;
        but with an adapter those that it acts on are made, one after the other, with the adapter merged in. Where
        weights are spread over ranks, all ranks must go through them, and each is whole for a moment."""
        if self.adapter:
            return self.adapter.merged_tensors()
        return ((name, whole(tensor)) for name, tensor in self.model.state_dict().items())

    @torch.no_grad()
    def load_tensors(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the model, rounded to its precision. Raises ValueError for other names or shapes."""
        own = dict(self.model.state_dict())
        for name, tensor in named_tensors:
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"weight {name} {tuple(tensor.shape)} does not belong to this model")
            own.pop(name).copy_(tensor)
        if own:
            raise ValueError(f"weights are missing: {', '.join(own)}")

    def copy(self, dtype: torch.dtype | None = None) -> Policy:
        """Return the same policy on tensors of its own, without critic, in the precision `dtype` if it is given.

        Only parameters are rounded: the buffers (rotary frequencies) stay in float32, as engines have them.
        """
        config = self.model.config
        attention = config._attn_implementation
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, trust_remote_code=False
        )
        model.to(self.device, torch.float32)  # like ours its parameters require a gradient: kernels depend on that
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype or self.model.dtype)
        model.generation_config = self.model.generation_config
        twin = Policy(model, self.tokenizer, self.temperature, prompts=self.prompts, precision=self.precision)
        twin.load_tensors(self.named_tensors())
        return twin

    @property
    def prompt_format_used(self) -> str:
        """The format that prompts are encoded in: "chat" or "plain"."""
        return self.prompts.used(self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt in the policy's format."""
        return self.prompts.encode(self.tokenizer, text)

    def rendered(self, prompt_ids: list[int]) -> str:
        """Return a prompt's token ids as text, special tokens included: what the policy sees."""
        return self.tokenizer.decode(prompt_ids, clean_up_tokenization_spaces=False)

    def forward(self, batch: TrainBatch, entropy: bool = True) -> PolicyOutput:
        """Compute log-probs of the response tokens, 0 at padding. If the batch has `replay_BSLK`, the tokens go through
        those experts. `entropy` says whether to compute the entropy too."""
        self.routing.begin_forward()
        through = self._through_network if self.network else self._through_model
        with self._adapter_switched():
            output = through(batch, entropy)
        if self.shards and not torch.is_grad_enabled():
            self.model.reshard()  # FSDP keeps the outermost weights for a backward pass
        return output

    def lockstep(self, learns: list[bool]) -> Iterable[tuple[int | None, bool]]:
        """Yield the numbers of this rank's micro-batches in the order in which they are to be passed through the model,
        with what `learns` says of each. Where weights are spread over ranks it is an order that suits all of them, and
        None stands for `idle`."""
        return self.shards.lockstep(learns) if self.shards else enumerate(learns)

    def idle(self, batch: TrainBatch, learns: bool) -> None:
        """Pass a row through the model to no effect, so that other ranks can gather weights for a pass of theirs."""
        with torch.set_grad_enabled(learns):
            logp_BT = self.forward(batch.rows(torch.tensor([0])), entropy=False).logp_BT
            if learns:
                logp_BT.backward(torch.zeros_like(logp_BT))

    def _through_network(self, batch: TrainBatch, entropy: bool) -> PolicyOutput:
        """Use our own forward (gspo.model.network), and compute logits at response tokens only. The layout is found
        where the batch lies, on the CPU: reading its sizes from a GPU would wait for all the work that this has."""
        sequences, width = lay_out(batch), batch.mask_BT.shape[1]
        replay_NLK = None
        if batch.replay_BSLK is not None:
            replay_NLK = sequences.flat(batch.replay_BSLK).to(self.device, non_blocking=True)
        sequences = sequences.to(self.device)
        found = run_in(self.model, self._pass, sequences, replay_NLK, entropy)
        logp_M, entropy_M, own_NLK, hidden_MW, balance_N = found
        if entropy and not self.learns_entropy:
            entropy_M = entropy_M.detach()
        return PolicyOutput(
            sequences.responses(logp_M, width),
            sequences.responses(entropy_M, width) if entropy else None,
            sequences.experts(own_NLK) if own_NLK is not None else None,
            sequences.responses(self.value_head(hidden_MW), width) if self.value_head else None,
            None
            if balance_N is None
            else sequences.responses(balance_N.index_select(0, sequences.predicting_M), width),
        )

    def _pass(self, sequences: Sequences, replay_NLK: Tensor | None, entropy: bool) -> tuple[Tensor | None, ...]:
        """Return log-probs and entropy of the response tokens, the experts of all tokens, and the hidden states that
        predict the response tokens."""
        found = through_network(self.network, sequences, replay_NLK, self.precision, self.temperature, entropy)
        return *found, self.routing.balance()

    def _adapter_switched(self) -> AbstractContextManager:
        """Within this context the adapter is off if this policy is the one without it."""
        return self.adapter.off() if self._adapter_is_off else nullcontext()

    def _frozen(self) -> AbstractContextManager:
        """Within this context the weights must not change."""
        here = self.network and not self.shards
        return self.network.frozen() if here and self.precision == torch.float32 else nullcontext()

    def _through_model(self, batch: TrainBatch, entropy: bool) -> PolicyOutput:
        """Use the model's own forward on the padded batch, which every architecture has."""
        batch = batch.to(self.device)
        width = batch.mask_BT.shape[1]
        hidden = self.value_head.recording(self.model) if self.value_head else nullcontext()
        with self.routing.recording(batch.replay_BSLK), hidden, rounding(self.device, self.precision):
            logits_BTV = self.model(
                input_ids=batch.tokens_BS,
                attention_mask=batch.attention_BS.long(),
                position_ids=(batch.attention_BS.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=width + 1,  # the last prompt token predicts the first response token
            ).logits[:, :-1]
            experts_BSLK = self.routing.recorded(len(batch)) if self.routing.layers else None
        logits_BTV = logits_BTV.float() if self.temperature == 1 else logits_BTV.float() / self.temperature
        target_BT = logits_BTV.gather(-1, batch.tokens_BS[:, -width:, None]).squeeze(-1)
        logp_BT = target_BT - logits_BTV.logsumexp(-1)
        entropy_BT = None
        if entropy and self.learns_entropy:  # entr has an infinite slope where a probability is too small for float32
            p_BTV = logits_BTV.softmax(-1)
            entropy_BT = logits_BTV.logsumexp(-1) - (p_BTV * logits_BTV.masked_fill(p_BTV == 0, 0.0)).sum(-1)
        elif entropy:
            entropy_BT = torch.special.entr(logits_BTV.detach().softmax(-1)).sum(-1)
        values_BT = self.value_head.values_of_last_forward() if self.value_head else None
        balance_N = self.routing.balance()
        balance_BT = None if balance_N is None else balance_N.view(len(batch), -1)[:, -width - 1 : -1]
        return PolicyOutput(logp_BT, entropy_BT, experts_BSLK, values_BT, balance_BT)

    @torch.no_grad()
    def score(self, batch: TrainBatch, micro_batch_size: int, rows_N: Tensor | None = None) -> PolicyOutput:
        """Compute log-probs, experts and values of a whole batch under the current weights, in micro-batches.

        There is no gradient and no entropy; the results are on the CPU. With `rows_N` these rows alone are computed:
        log-probs and values of the others are 0, and their experts not recorded."""
        logp_BT, values_BT = torch.zeros_like(batch.engine_logp_BT), torch.zeros_like(batch.engine_logp_BT)
        experts_BSLK = None
        if self.routing.layers:
            shape = (*batch.tokens_BS.shape, self.routing.layers, self.routing.top_k)
            experts_BSLK = torch.full(shape, NOT_RECORDED, dtype=torch.int16)
        with self._adapter_switched(), self._frozen():
            order = batch.order()
            if rows_N is not None:
                order = order[torch.isin(order, rows_N)]
            chunks = order.split(micro_batch_size) if len(order) else ()
            for i, _ in self.lockstep([False] * len(chunks)):
                if i is None:
                    self.idle(batch, learns=False)
                    continue
                rows = chunks[i]
                chunk = batch.rows(rows)
                output = self.forward(chunk, entropy=False)
                logp_BT[rows, : chunk.mask_BT.shape[1]] = output.logp_BT.cpu()
                if self.value_head:
                    values_BT[rows, : chunk.mask_BT.shape[1]] = output.values_BT.cpu()
                if experts_BSLK is not None:
                    start = batch.prompt_width - chunk.prompt_width
                    kept = torch.where(chunk.attention_BS[:, :, None, None], output.experts_BSLK.cpu(), NOT_RECORDED)
                    experts_BSLK[rows, start : start + kept.shape[1]] = kept
        return PolicyOutput(logp_BT, None, experts_BSLK, values_BT if self.value_head else None)

    @cached_property
    def active_parameters(self) -> int | None:
        """How many parameters one token passes through; None if that cannot be determined."""
        return active_parameters(self.model)

    def forward_flops(self, lengths: Tensor) -> float:
        """Return the FLOPs of one forward over sequences of these lengths; a backward costs twice as much. Call this
        only where `active_parameters` is not None."""
        return forward_flops(self.model.config, self.active_parameters, lengths)


def through_network(
    network: Network,
    sequences: Sequences,
    replay_NLK: Tensor | None,
    precision: torch.dtype,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return log-probs and entropy of the response tokens [M], the experts of all tokens [N, L, K], and the hidden
    states that predict the response tokens [M, W]."""
    with rounding(sequences.tokens_N.device, precision):
        hidden_NW, own_NLK = network(
            sequences.tokens_N, sequences.positions_N, sequences.longest, sequences.attend, replay_NLK
        )
    hidden_MW = hidden_NW.index_select(0, sequences.predicting_M)
    rounded_MW = hidden_MW if precision == torch.float32 else hidden_MW.to(precision)
    logp_M, entropy_M = TokenLogProbs.apply(rounded_MW, network.head, sequences.target_M, temperature, entropy)
    return logp_M, entropy_M, own_NLK, hidden_MW
