"""The policy that is trained: log-probs, entropy, values and routing of responses, cost in FLOPs.

Shape suffixes: B responses, T response tokens, S all tokens, V vocabulary, L MoE layers, K experts
per token, N tokens laid out, M response tokens, W hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from gspo.data.batch import NOT_RECORDED, TokenBatch, to_device, wait_for_copies
from gspo.io.errors import SettingError
from gspo.model.adapter import Adapter, check_adapted_forward
from gspo.model.chat.prompts import PromptFormat
from gspo.model.cost import active_parameters, forward_flops
from gspo.model.forward.head import use_float32_head
from gspo.model.forward.kept_softmax import all_columns
from gspo.model.forward.network import Network, autocast_to, is_supported
from gspo.model.forward.outputs import (
    PolicyOutput,
    entropy_of_logits,
    log_probs_of_logits,
    network_outputs,
)
from gspo.model.forward.packing import Sequences, lay_out
from gspo.model.forward.padded_forward import PaddedRows, Side, forward_arguments, padding_side
from gspo.model.forward.variable_lengths import uses_varlen
from gspo.model.loading import positions
from gspo.model.policy_text import PolicyText
from gspo.model.routing_replay import Routing
from gspo.model.settings import LoraSettings
from gspo.model.sharding.dtensors import architecture, full_tensor, reshard, run_unsharded
from gspo.model.value_head import ValueHead
from gspo.model.weights import empty_copy, load_tensors

if TYPE_CHECKING:
    from gspo.model.sharding.fsdp import Shards


class Policy(PolicyText):
    """A causal language model as a policy. With a `value_head` it has a critic on the same network.

    precision              of the matrix products in `forward`; engines have their own
    head_dtype             of the product that makes logits, also in engines on a copy of the policy
    checkpointing          keep only the layers' inputs for the backward pass
    shards                 the ranks that share the weights; None if this process has all weights
    initial_weights_digest a digest of the weights, if the run started from them
    """

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
        initial_weights_digest: str = "",
    ):
        super().__init__(model, tokenizer, prompts or PromptFormat())
        # no dropout: pi and pi_old must be the same function
        self.model = model.eval()
        self.value_head = value_head
        self.shards = shards
        self.temperature = temperature
        self.precision = precision
        self.head_dtype = head_dtype
        self.initial_weights_digest = initial_weights_digest
        self.routing = Routing(model)
        # None: the model's own forward is used
        self.network: Network | None = None
        if is_supported(model, precision):
            self.network = Network(model, checkpointing, head_dtype)
        else:
            # a model that cannot be padded is refused now
            _ = self.padding_side
            self.routing.leave_out_of_autocast()
            if head_dtype == torch.float32:
                use_float32_head(model)
        if checkpointing and not self.network:
            raise SettingError(
                "policy.checkpointing",
                True,
                f"{architecture(model)} runs in transformers' forward pass, which does not support it",
            )
        self._entropy_has_gradient = False
        # LoRA; None: all weights are trained
        self.adapter: Adapter | None = None
        self._adapter_is_off = False
        self._check_embeddings()

    # ----------------------------------------------------------------------------------- weights
    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.model.device

    @property
    def positions(self) -> int | None:
        """The maximum number of tokens of prompt and response together. None: there is no bound."""
        return positions(self.model.config)

    def adapt(
        self,
        lora: LoraSettings,
        seed: int,
        base: str = "",
        folder: Path | None = None,
    ) -> None:
        """Put a LoRA adapter on the model. From now on only the adapter is trained.

        It is a new adapter, or the adapter that `folder` holds. `base` is the folder or hub name of
        the model. Raises ValueError if the model cannot be adapted."""
        # counts the layers before they are wrapped
        _ = self.active_parameters
        self.adapter = Adapter(self.model, lora, seed, base)
        if not self.network:
            check_adapted_forward(self.model)
        if folder:
            self.adapter.load(folder)

    def without_adapter(self) -> Policy:
        """Return the policy as it was before its adapter: the same tensors, without critic.

        It serves as reference policy. It must not be used during an update of this policy."""
        base_policy = copy.copy(self)
        base_policy.value_head = None
        base_policy._adapter_is_off = True
        return base_policy

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return all trained parameters: the model's or its adapter's, and the critic's."""
        parameters = list((self.adapter or self.model).parameters())
        if self.value_head:
            parameters += self.value_head.parameters()
        return parameters

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of `named_tensors` by name."""
        if self.adapter:
            return self.adapter.shapes()
        return {name: tensor.shape for name, tensor in self.model.state_dict().items()}

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the model's weights by name, as an engine loads them.

        They are the weights themselves, not copies. With an adapter, each adapted weight is
        computed when it is its turn, with the adapter merged in. If the weights are sharded, all
        ranks must iterate over them, and each full tensor exists for a moment only."""
        if self.adapter:
            return self.adapter.merged_tensors()
        return ((name, full_tensor(tensor)) for name, tensor in self.model.state_dict().items())

    def load_tensors(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the model, rounded to its precision.

        Raises ValueError for other names or shapes."""
        load_tensors(self.model, named_tensors)

    def copy(self, dtype: torch.dtype | None = None) -> Policy:
        """Return a copy of the policy with its own tensors and without critic.

        Parameters are rounded to `dtype` if it is given. Buffers (rotary frequencies) stay in
        float32, as engines have them."""
        model = empty_copy(self.model, dtype or self.model.dtype, self.device)
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

    # ------------------------------------------------------------------------------ forward pass
    def enable_entropy_gradient(self) -> None:
        """Let `forward` return an entropy with a gradient, for an entropy term in the loss."""
        self._entropy_has_gradient = True

    def forward(
        self, batch: TokenBatch, entropy: bool = True, sum_pi_squared: bool = False
    ) -> PolicyOutput:
        """Compute log-probs of the response tokens, unspecified at padding.

        If the batch has `replay_BSLK`, the tokens go through these experts. `entropy` and
        `sum_pi_squared` say whether to compute these too."""
        self.routing.begin_forward()
        with self._adapter_switched():
            if self.network:
                output = self._network_forward(self.network, batch, entropy, sum_pi_squared)
            else:
                output = self._model_forward(batch, entropy, sum_pi_squared)
        if self.shards and not torch.is_grad_enabled():
            # FSDP keeps the outermost weights for a backward pass
            reshard(self.model)
        return output

    def lockstep(self, needs_gradient: list[bool]) -> Iterable[tuple[int | None, bool]]:
        """Yield (index, needs_gradient) of this rank's micro-batches in the order of computation.

        If weights are sharded, all ranks yield equally often and in a compatible order. An index of
        None means that this rank has no micro-batch left and must call `idle`."""
        return self.shards.lockstep(needs_gradient) if self.shards else enumerate(needs_gradient)

    def idle(self, batch: TokenBatch, needs_gradient: bool) -> None:
        """Pass one row through the model and discard the result.

        With sharded weights a pass of any rank needs all ranks, also ranks without rows."""
        with torch.set_grad_enabled(needs_gradient):
            logp_BT = self.forward(batch.rows(torch.tensor([0])), entropy=False).logp_BT
            if needs_gradient:
                logp_BT.backward(torch.zeros_like(logp_BT))

    @cached_property
    def padding_side(self) -> Side:
        """The side on which the model's own forward takes padding.

        Raises ValueError if the model cannot be padded on either side."""
        return padding_side(self.model)

    def cached_casts(self) -> AbstractContextManager:
        """Return a context in which several passes share weights that are rounded once.

        This makes the passes faster. No optimizer may step in this context."""
        return self.network.cached_casts() if self.network else nullcontext()

    def _adapter_switched(self) -> AbstractContextManager:
        """Return a context in which the adapter is off, if this is the policy without adapter."""
        if self.adapter and self._adapter_is_off:
            return self.adapter.off()
        return nullcontext()

    def _frozen(self) -> AbstractContextManager:
        """Return a context in which the weights must not change."""
        can_freeze = not self.shards and self.precision == torch.float32
        return self.network.frozen() if self.network and can_freeze else nullcontext()

    def _network_forward(
        self, network: Network, batch: TokenBatch, entropy: bool, sum_pi_squared: bool
    ) -> PolicyOutput:
        """Use our own forward (gspo.model.forward.network), with logits at response tokens only.

        The layout is computed on the CPU, where the batch is. Reading its sizes from a GPU would
        wait for all work of the GPU."""
        sequences = lay_out(batch)
        width = batch.mask_BT.shape[1]
        if self._uses_varlen():
            sequences.use_varlen()
        replay_NLK = None
        if batch.replay_BSLK is not None:
            replay_NLK = to_device(sequences.flat(batch.replay_BSLK), self.device)
        sequences = sequences.to(self.device)
        logp_M, entropy_M, experts_NLK, hidden_MW, squares_M, balance_N = run_unsharded(
            self.model,
            self._network_outputs,
            network,
            sequences,
            replay_NLK,
            entropy,
            sum_pi_squared,
        )
        output = PolicyOutput(sequences.responses(logp_M, width), None, None)
        if entropy_M is not None:
            if not self._entropy_has_gradient:
                entropy_M = entropy_M.detach()
            output.entropy_BT = sequences.responses(entropy_M, width)
        if experts_NLK is not None:
            output.experts_BSLK = sequences.experts(experts_NLK)
        if self.value_head:
            output.values_BT = sequences.responses(self.value_head(hidden_MW), width)
        if squares_M is not None:
            output.sum_pi_squared_BT = sequences.responses(squares_M, width)
        if balance_N is not None:
            balance_M = balance_N.index_select(0, sequences.predicting_M)
            output.balance_BT = sequences.responses(balance_M, width)
        return output

    def _uses_varlen(self) -> bool:
        """Return whether attention is computed by variable lengths rather than in rectangles."""
        if self.network is None:
            return False
        config = self.model.config
        key_heads = config.num_key_value_heads
        head_dim = self.network.head_dim
        dtype = self.model.dtype if self.precision == torch.float32 else self.precision
        return uses_varlen(self.device, dtype, config.num_attention_heads, key_heads, head_dim)

    def _network_outputs(
        self,
        network: Network,
        sequences: Sequences,
        replay_NLK: Tensor | None,
        entropy: bool,
        sum_pi_squared: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """Return `network_outputs` and the balance of the routers [N]."""
        outputs = network_outputs(
            network,
            sequences,
            replay_NLK,
            self.precision,
            self.temperature,
            entropy,
            sum_pi_squared,
        )
        return *outputs, self.routing.balance()

    def _model_forward(
        self, batch: TokenBatch, entropy: bool, sum_pi_squared: bool
    ) -> PolicyOutput:
        """Use the model's own forward on the padded batch, which every architecture has."""
        kept = all_columns(batch.kept).to(self.device) if batch.kept else None
        batch = batch.to(self.device)
        rows = PaddedRows(batch, self.padding_side)
        hidden_recorded = nullcontext()
        if self.value_head:
            hidden_recorded = self.value_head.recording(self.model)
        experts_BSLK = None
        with (
            self.routing.recording(rows.replay_BSLK),
            hidden_recorded,
            autocast_to(self.device, self.precision),
        ):
            logits_BCV = self.model(
                input_ids=rows.tokens_BS,
                use_cache=False,
                **forward_arguments(self.model, rows.attention_BS, rows.kept_columns),
            ).logits
            if self.routing.layers:
                experts_BSLK = rows.as_in_batch(self.routing.recorded(len(batch)))
        logits_BTV = rows.predicting(logits_BCV).float()
        if self.temperature != 1:
            logits_BTV = logits_BTV / self.temperature
        if kept:
            logits_BTV = kept.without_others(logits_BTV.flatten(0, 1)).view_as(logits_BTV)
        tokens_BT = batch.tokens_BS[:, batch.prompt_width :]
        output = PolicyOutput(log_probs_of_logits(logits_BTV, tokens_BT), None, experts_BSLK)
        if entropy:
            output.entropy_BT = entropy_of_logits(logits_BTV, self._entropy_has_gradient)
        if sum_pi_squared:
            output.sum_pi_squared_BT = logits_BTV.detach().softmax(-1).square().sum(-1)
        if self.value_head:
            hidden_BTW = rows.predicting(self.value_head.hidden_of_last_forward())
            output.values_BT = self.value_head(hidden_BTW)
        balance_N = self.routing.balance()
        if balance_N is not None:
            output.balance_BT = rows.predicting(balance_N.view(len(batch), -1))
        return output

    @torch.no_grad()
    def score(
        self,
        batch: TokenBatch,
        micro_batch_size: int,
        rows_N: Tensor | None = None,
        *,
        sum_pi_squared: bool = False,
    ) -> PolicyOutput:
        """Compute log-probs, experts and values of a batch under the current weights, on the CPU.

        The batch is computed in micro-batches, without gradient and entropy. With `rows_N` only
        these rows are computed. Log-probs and values of other rows are 0, and their experts are not
        recorded. With `sum_pi_squared` sum_v pi_v^2 is computed too."""
        logp_BT = torch.zeros(batch.mask_BT.shape)
        values_BT = torch.zeros(batch.mask_BT.shape) if self.value_head else None
        squares_BT = torch.zeros(batch.mask_BT.shape) if sum_pi_squared else None
        experts_BSLK = None
        if self.routing.layers:
            shape = (*batch.tokens_BS.shape, self.routing.layers, self.routing.top_k)
            experts_BSLK = torch.full(shape, NOT_RECORDED, dtype=torch.int16)
        order = batch.order()
        if rows_N is not None:
            order = order[torch.isin(order, rows_N)]
        chunks = order.split(micro_batch_size) if len(order) else ()

        def store(rows: Tensor, chunk: TokenBatch, output: PolicyOutput) -> None:
            width = chunk.mask_BT.shape[1]
            logp_BT[rows, :width] = output.logp_BT
            if values_BT is not None and output.values_BT is not None:
                values_BT[rows, :width] = output.values_BT
            if squares_BT is not None and output.sum_pi_squared_BT is not None:
                squares_BT[rows, :width] = output.sum_pi_squared_BT
            if experts_BSLK is not None and output.experts_BSLK is not None:
                first_column = batch.prompt_width - chunk.prompt_width
                is_token = chunk.attention_BS[:, :, None, None]
                recorded = torch.where(is_token, output.experts_BSLK, NOT_RECORDED)
                experts_BSLK[rows, first_column : first_column + recorded.shape[1]] = recorded

        # outputs whose copies from the GPU are still under way
        pending: list[tuple[Tensor, TokenBatch, PolicyOutput]] = []
        with self._adapter_switched(), self._frozen(), self.cached_casts():
            for i, _ in self.lockstep([False] * len(chunks)):
                if i is None:
                    self.idle(batch, needs_gradient=False)
                    continue
                chunk = batch.rows(chunks[i])
                output = self.forward(chunk, entropy=False, sum_pi_squared=sum_pi_squared).to_cpu()
                if self.device.type == "cpu":
                    store(chunks[i], chunk, output)
                else:
                    pending.append((chunks[i], chunk, output))
            wait_for_copies(self.device)
        for rows, chunk, output in pending:
            store(rows, chunk, output)
        return PolicyOutput(logp_BT, None, experts_BSLK, values_BT, sum_pi_squared_BT=squares_BT)

    # -------------------------------------------------------------------------------------- cost
    @cached_property
    def active_parameters(self) -> int | None:
        """The number of parameters that a token passes through. None if it is unknown."""
        return active_parameters(self.model)

    def forward_flops(self, lengths: Tensor) -> float:
        """Return the FLOPs of a forward pass over sequences of these lengths.

        A backward pass costs twice as much. `active_parameters` must not be None."""
        active = self.active_parameters
        if active is None:
            raise ValueError("the number of parameters that a token passes through is unknown")
        return forward_flops(self.model.config, active, lengths)
