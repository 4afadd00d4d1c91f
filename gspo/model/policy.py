"""The policy that is trained: gives log-probs, entropy, values and routing of responses, and its
cost in FLOPs.

Shape suffixes: B responses, T response tokens, S all tokens, V vocabulary, L MoE layers, K experts
per token.
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

from gspo.data.batch import NOT_RECORDED, TokenBatch, to_device, wait_for_copies
from gspo.model.adapter import Adapter
from gspo.model.chat.control_tokens import check_readable
from gspo.model.chat.prompts import PromptFormat
from gspo.model.cost import active_parameters, forward_flops
from gspo.model.forward.head import use_float32_head
from gspo.model.forward.kernels import SPLITS, TokenLogProbs
from gspo.model.forward.network import Network, is_supported, rounding
from gspo.model.forward.packing import Sequences, lay_out
from gspo.model.forward.padded_forward import PaddedRows, Side, forward_arguments, padding_side
from gspo.model.forward.variable_lengths import is_used
from gspo.model.loading import positions
from gspo.model.routing_replay import Routing
from gspo.model.settings import LoraSettings
from gspo.model.sharding.dtensors import architecture, full_tensor, run_unsharded
from gspo.model.value_head import ValueHead

if TYPE_CHECKING:
    from gspo.model.sharding.fsdp import Shards


@dataclass
class PolicyOutput:
    """The results of one forward pass over a batch."""

    logp_BT: Tensor  # float32, log pi(y_t | x, y_<t) at the sampling temperature
    # float32, -sum_v pi log pi at the sampling temperature, over the whole vocabulary; None if not
    # asked for. It has a gradient if `Policy.learns_entropy` is true
    entropy_BT: Tensor | None
    experts_BSLK: Tensor | None  # int16, the routers' own choice at every position; None if dense
    values_BT: Tensor | None = None  # float32, the critic's V(x, y_<t); None without a critic
    balance_BT: Tensor | None = (
        None  # float32, E sum_e load_e p_e, mean over MoE layers; None outside Routing.balancing
    )

    def to_cpu(self) -> PolicyOutput:
        """Return log-probs, experts and values on the CPU. The copies from a GPU are complete once
        it is synchronized.

        PyTorch makes these copies in pinned memory."""
        cpu = torch.device("cpu")
        experts_BSLK, values_BT = self.experts_BSLK, self.values_BT
        return PolicyOutput(
            self.logp_BT.to(cpu, non_blocking=True),
            None,
            None if experts_BSLK is None else experts_BSLK.to(cpu, non_blocking=True),
            None if values_BT is None else values_BT.to(cpu, non_blocking=True),
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
        head_dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
        shards: Shards | None = None,
    ):
        self.model = model.eval()  # no dropout: pi and pi_old must be the same function
        self.value_head = value_head
        # the ranks over which the model's weights are spread; None if they are all here
        self.shards = shards
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.prompts = prompts or PromptFormat()
        self.prompts.check(tokenizer)
        self.routing = Routing(model)
        own = is_supported(model, precision)
        # None: the model's own forward is used
        self.network = Network(model, checkpointing, head_dtype) if own else None
        # of the product that makes logits, also in engines on a copy of this policy
        self.head_dtype = head_dtype
        if not own:
            _ = self.padding_side  # a model that cannot be padded is refused now
            if head_dtype == torch.float32:
                use_float32_head(model)
        if checkpointing and not self.network:
            raise ValueError(
                f"policy.checkpointing=true: it is not there for {architecture(model)}"
            )
        self.learns_entropy = False  # whether `forward` gives the entropy a gradient
        self.precision = precision  # of the matrix products in `forward`; engines have their own
        ends = model.generation_config.eos_token_id if model.generation_config else None
        # chat models end a turn and a text with different tokens
        ends = ends if isinstance(ends, list) else [ends]
        # The tokens that end a response.
        self.stop_ids = {tokenizer.eos_token_id, *(i for i in ends if i is not None)}
        # The token that ends a turn by the chat template alone: neither tokenizer nor
        # generation_config.json names it.
        turn_end = self.prompts.end_of_turn(tokenizer)
        self.found_turn_end = None if turn_end in self.stop_ids else turn_end
        if turn_end is not None:
            self.stop_ids.add(turn_end)
        self.end_ids = frozenset(self.stop_ids)  # those of them that are no stops of the user's
        self._check_embedding()
        # a digest of the weights, if they are those that the run started from
        self.loaded_weights = ""
        self.adapter: Adapter | None = None  # LoRA; None: all weights are trained
        self._adapter_is_off = False

    def stop_at(self, strings: Iterable[str], key: str) -> None:
        """Let those of the stop strings that are one token of the tokenizer end a response by their
        id.

        Raises ValueError for one that holds a special token without text beside other text."""
        by_text = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items()}
        self.stop_ids |= {by_text[string] for string in strings if string in by_text}
        check_readable(
            [string for string in strings if string not in by_text],
            self.tokenizer,
            self.textless_ids,
            key,
        )

    @property
    def textless_ids(self) -> set[int]:
        """The tokens that are left out of a response's text: those that begin, end and pad a text
        or a turn, and all special tokens if `prompt.special_tokens` is false."""
        tokenizer = self.tokenizer
        ids = {
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            *self.end_ids,
        }
        if not self.prompts.special_tokens:
            ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
            ids |= set(tokenizer.all_special_ids)
        return ids - {None}

    def text(self, token_ids: list[int]) -> str:
        """Return the text of a response, or of a turn, as verifiers, rewards and environments read
        it.
        """
        textless = self.textless_ids
        kept = [token for token in token_ids if token not in textless]
        return self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)

    def _check_embedding(self) -> None:
        """Raise ValueError if tokens that can occur have no embedding. Padding, which is masked,
        needs none.
        """
        rows = self.model.get_input_embeddings().weight.shape[0]
        added = self.tokenizer.added_tokens_decoder
        template = str(self.tokenizer.chat_template)
        beyond = sorted(
            (i, token)
            for token, i in self.tokenizer.get_vocab().items()
            if i >= rows
            and (i in self.stop_ids or i not in added or not added[i].special or token in template)
            and (i != self.tokenizer.pad_token_id or i == self.tokenizer.eos_token_id)
        )
        if beyond:
            named = ", ".join(f"{token!r} ({i})" for i, token in beyond[:3])
            more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
            raise ValueError(
                f"the tokenizer has tokens that the model has no embedding for, which has {rows} rows: {named}{more}; "
                "use the tokenizer that the model was trained with, or resize the model's embedding"
            )

    @cached_property
    def padding_side(self) -> Side:
        """The side on which the model's own forward takes padding. Raises ValueError if neither
        side will do.
        """
        return padding_side(self.model)

    @property
    def positions(self) -> int | None:
        """How many tokens of prompt and response together the model can take; None for no bound."""
        return positions(self.model)

    @property
    def pad_id(self) -> int:
        """A token id for padding, which is masked: the tokenizer's own where the model has an
        embedding for it.
        """
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        own = self.tokenizer.pad_token_id
        return own if own is not None and own < vocabulary else 0

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.model.device

    def adapt(
        self, lora: LoraSettings, seed: int, base: str = "", folder: Path | None = None
    ) -> None:
        """Put a LoRA adapter on the model, as it begins or as `folder` holds it; from now on it is
        all that is trained. `base` says where the model came from. Raises ValueError if that cannot
        be done."""
        _ = self.active_parameters  # of the layers as they are, before they are wrapped
        self.adapter = Adapter(self.model, lora, seed, base)
        if folder:
            self.adapter.load(folder)

    def without_adapter(self) -> Policy:
        """Return the policy as it was before its adapter: the same tensors, without critic. It is
        there to be scored with, between the updates of this one."""
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
        """Return the model's weights by name, as an engine loads them. They are the weights
        themselves, not copies; but with an adapter those that it acts on are made, one after the
        other, with the adapter merged in. Where weights are spread over ranks, all ranks must go
        through them, and each is whole for a moment."""
        if self.adapter:
            return self.adapter.merged_tensors()
        return ((name, full_tensor(tensor)) for name, tensor in self.model.state_dict().items())

    def load_tensors(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the model, rounded to its precision. Raises ValueError for other names
        or shapes.
        """
        load_tensors(self.model, named_tensors)

    def copy(self, dtype: torch.dtype | None = None) -> Policy:
        """Return the same policy on tensors of its own, without critic, in the precision `dtype` if
        it is given.

        Only parameters are rounded: the buffers (rotary frequencies) stay in float32, as engines
        have them.
        """
        model = without_weights(self.model, dtype or self.model.dtype, self.device)
        load_tensors(model, self.named_tensors())
        model.generation_config = self.model.generation_config
        copied = Policy(
            model,
            self.tokenizer,
            self.temperature,
            prompts=self.prompts,
            precision=self.precision,
            head_dtype=self.head_dtype,
        )
        copied.stop_ids = set(self.stop_ids)
        return copied

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

    def forward(self, batch: TokenBatch, entropy: bool = True) -> PolicyOutput:
        """Compute log-probs of the response tokens, 0 at padding. If the batch has `replay_BSLK`,
        the tokens go through those experts. `entropy` says whether to compute the entropy too."""
        self.routing.begin_forward()
        through = self._through_network if self.network else self._through_model
        with self._adapter_switched():
            output = through(batch, entropy)
        if self.shards and not torch.is_grad_enabled():
            self.model.reshard()  # FSDP keeps the outermost weights for a backward pass
        return output

    def lockstep(self, learns: list[bool]) -> Iterable[tuple[int | None, bool]]:
        """Yield the numbers of this rank's micro-batches in the order in which they are to be
        passed through the model, with what `learns` says of each. Where weights are spread over
        ranks it is an order that suits all of them, and None stands for `idle`."""
        return self.shards.lockstep(learns) if self.shards else enumerate(learns)

    def idle(self, batch: TokenBatch, learns: bool) -> None:
        """Pass a row through the model to no effect, so that other ranks can gather weights for a
        pass of theirs.
        """
        with torch.set_grad_enabled(learns):
            logp_BT = self.forward(batch.rows(torch.tensor([0])), entropy=False).logp_BT
            if learns:
                logp_BT.backward(torch.zeros_like(logp_BT))

    def _through_network(self, batch: TokenBatch, entropy: bool) -> PolicyOutput:
        """Use our own forward (gspo.model.forward.network), and compute logits at response tokens only. The
        layout is found where the batch lies, on the CPU: reading its sizes from a GPU would wait
        for all the work that this has."""
        sequences, width = lay_out(batch), batch.mask_BT.shape[1]
        if self._attends_by_lengths():
            sequences.by_lengths()
        replay_NLK = None
        if batch.replay_BSLK is not None:
            replay_NLK = to_device(sequences.flat(batch.replay_BSLK), self.device)
        sequences = sequences.to(self.device)
        found = run_unsharded(self.model, self._pass, sequences, replay_NLK, entropy)
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

    def _attends_by_lengths(self) -> bool:
        """Return whether attention is computed by variable lengths rather than in rectangles."""
        config = self.model.config
        key_heads = config.num_key_value_heads
        head_dim = self.network.body.layers[0].self_attn.head_dim
        dtype = self.model.dtype if self.precision == torch.float32 else self.precision
        return is_used(self.device, dtype, config.num_attention_heads, key_heads, head_dim)

    def _pass(
        self, sequences: Sequences, replay_NLK: Tensor | None, entropy: bool
    ) -> tuple[Tensor | None, ...]:
        """Return log-probs and entropy of the response tokens, the experts of all tokens, and the
        hidden states that predict the response tokens."""
        found = through_network(
            self.network, sequences, replay_NLK, self.precision, self.temperature, entropy
        )
        return *found, self.routing.balance()

    def _adapter_switched(self) -> AbstractContextManager:
        """Within this context the adapter is off if this policy is the one without it."""
        return self.adapter.off() if self._adapter_is_off else nullcontext()

    def casts_kept(self) -> AbstractContextManager:
        """Within this context, in which no optimizer may step, several passes share the weights
        that are rounded for them, which makes them faster."""
        return self.network.casts_kept() if self.network else nullcontext()

    def _frozen(self) -> AbstractContextManager:
        """Within this context the weights must not change."""
        here = self.network and not self.shards
        return self.network.frozen() if here and self.precision == torch.float32 else nullcontext()

    def _through_model(self, batch: TokenBatch, entropy: bool) -> PolicyOutput:
        """Use the model's own forward on the padded batch, which every architecture has."""
        batch = batch.to(self.device)
        rows = PaddedRows(batch, self.padding_side)
        hidden = self.value_head.recording(self.model) if self.value_head else nullcontext()
        with (
            self.routing.recording(rows.replay_BSLK),
            hidden,
            rounding(self.device, self.precision),
        ):
            logits_BCV = self.model(
                input_ids=rows.tokens_BS,
                use_cache=False,
                **forward_arguments(self.model, rows.attention_BS, rows.kept_columns),
            ).logits
            experts_BSLK = None
            if self.routing.layers:
                experts_BSLK = rows.as_in_batch(self.routing.recorded(len(batch)))
        logits_BTV = rows.predicting(logits_BCV)
        logits_BTV = (
            logits_BTV.float() if self.temperature == 1 else logits_BTV.float() / self.temperature
        )
        target_BT = logits_BTV.gather(-1, batch.tokens_BS[:, batch.prompt_width :, None]).squeeze(
            -1
        )
        logp_BT = target_BT - logits_BTV.logsumexp(-1)
        entropy_BT = None
        # entr has an infinite slope where a probability is too small for float32
        if entropy and self.learns_entropy:
            p_BTV = logits_BTV.softmax(-1)
            entropy_BT = logits_BTV.logsumexp(-1) - (
                p_BTV * logits_BTV.masked_fill(p_BTV == 0, 0.0)
            ).sum(-1)
        elif entropy:
            entropy_BT = torch.special.entr(logits_BTV.detach().softmax(-1)).sum(-1)
        values_BT = None
        if self.value_head:
            values_BT = self.value_head(rows.predicting(self.value_head.hidden_of_last_forward()))
        balance_N = self.routing.balance()
        balance_BT = None if balance_N is None else rows.predicting(balance_N.view(len(batch), -1))
        return PolicyOutput(logp_BT, entropy_BT, experts_BSLK, values_BT, balance_BT)

    @torch.no_grad()
    def score(
        self, batch: TokenBatch, micro_batch_size: int, rows_N: Tensor | None = None
    ) -> PolicyOutput:
        """Compute log-probs, experts and values of a whole batch under the current weights, in
        micro-batches.

        There is no gradient and no entropy; the results are on the CPU. With `rows_N` these rows
        alone are computed: log-probs and values of the others are 0, and their experts not
        recorded."""
        logp_BT, values_BT = (
            torch.zeros(batch.mask_BT.shape),
            torch.zeros(batch.mask_BT.shape),
        )
        experts_BSLK = None
        if self.routing.layers:
            shape = (*batch.tokens_BS.shape, self.routing.layers, self.routing.top_k)
            experts_BSLK = torch.full(shape, NOT_RECORDED, dtype=torch.int16)
        with self._adapter_switched(), self._frozen(), self.casts_kept():
            order = batch.order()
            if rows_N is not None:
                order = order[torch.isin(order, rows_N)]
            chunks = order.split(micro_batch_size) if len(order) else ()
            copied: list[tuple[Tensor, TokenBatch, PolicyOutput]] = []

            def store(rows: Tensor, chunk: TokenBatch, output: PolicyOutput) -> None:
                logp_BT[rows, : chunk.mask_BT.shape[1]] = output.logp_BT
                if self.value_head:
                    values_BT[rows, : chunk.mask_BT.shape[1]] = output.values_BT
                if experts_BSLK is not None:
                    start = batch.prompt_width - chunk.prompt_width
                    kept = torch.where(
                        chunk.attention_BS[:, :, None, None], output.experts_BSLK, NOT_RECORDED
                    )
                    experts_BSLK[rows, start : start + kept.shape[1]] = kept

            for i, _ in self.lockstep([False] * len(chunks)):
                if i is None:
                    self.idle(batch, learns=False)
                    continue
                chunk = batch.rows(chunks[i])
                output = self.forward(chunk, entropy=False).to_cpu()
                if self.device.type == "cpu":
                    store(chunks[i], chunk, output)
                else:
                    copied.append((chunks[i], chunk, output))
            wait_for_copies(self.device)
            for rows, chunk, output in copied:
                store(rows, chunk, output)
        return PolicyOutput(logp_BT, None, experts_BSLK, values_BT if self.value_head else None)

    @cached_property
    def active_parameters(self) -> int | None:
        """How many parameters one token passes through; None if that cannot be determined."""
        return active_parameters(self.model)

    def forward_flops(self, lengths: Tensor) -> float:
        """Return the FLOPs of one forward over sequences of these lengths; a backward costs twice
        as much. Call this only where `active_parameters` is not None."""
        return forward_flops(self.model.config, self.active_parameters, lengths)


def without_weights(
    like: transformers.PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> transformers.PreTrainedModel:
    """Return a model of the same architecture and with the same buffers, whose parameters hold
    nothing yet.

    It is built without memory first. Drawing weights only to overwrite them would take a CPU 40 s
    for 1e9 of them."""
    config = like.config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=config._attn_implementation, trust_remote_code=False
        )
    model.to(dtype).to_empty(device=device)
    model.tie_weights()  # tied weights are two tensors now
    for name, buffer in like.named_buffers():
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, buffer.clone())
    # Like ours the parameters require a gradient: which kernels are used depends on that.
    return model.requires_grad_()


@torch.no_grad()
def load_tensors(
    model: transformers.PreTrainedModel, named_tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy weights into a model, rounded to its precision. Raises ValueError for other names or
    shapes.
    """
    own = dict(model.state_dict())
    for name, tensor in named_tensors:
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(f"weight {name} {tuple(tensor.shape)} does not belong to this model")
        own.pop(name).copy_(tensor)
    if own:
        raise ValueError(f"weights are missing: {', '.join(own)}")


def through_network(
    network: Network,
    sequences: Sequences,
    replay_NLK: Tensor | None,
    precision: torch.dtype,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return log-probs and entropy of the response tokens [M], the experts of all tokens [N, L, K],
    and the hidden states that predict the response tokens [M, W]."""
    device = sequences.tokens_N.device
    with rounding(device, precision):
        hidden_NW, own_NLK = network(
            sequences.tokens_N,
            sequences.positions_N,
            sequences.longest,
            sequences.attend,
            replay_NLK,
        )
    hidden_MW = hidden_NW.index_select(0, sequences.predicting_M)
    rounded_MW = hidden_MW.to(torch.float32 if network.head_dtype == torch.float32 else precision)
    # Where the layers are in float32 too, a float32 product is what the user has chosen to pay for.
    split = network.head_dtype == torch.float32 != precision and SPLITS.get(device.type, False)
    logp_M, entropy_M = TokenLogProbs.apply(
        rounded_MW, network.head, sequences.target_M, temperature, entropy, split
    )
    return logp_M, entropy_M, own_NLK, hidden_MW
