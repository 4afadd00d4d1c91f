"""Batches: the tensors of responses, which are cut into mini-batches and micro-batches.

A batch has a row per response. Prompts are padded on the left and responses on the right, so all
responses start in the same column, `prompt_width`:

    . . 7 + 5 = ? | 7 + 5 = 1 2 ; # 1 2 $
    3 - 8 + 9 = ? | 3 - 8 = - 5 ; - 5 + 9 = ...

In an episode, tokens of the environment stand between the policy's tokens. Later tokens attend to
them, but they are no response tokens: neither the loss nor any statistic sees them.

Each step of training adds tensors to the batch, and each stage has a type:

    TokenBatch       tokens and masks: all that a forward pass needs
    RolloutBatch     + the engine's log-probs and experts                    gspo.data.pack
    OldPolicyBatch   + log-probs and experts under the old policy            gspo.train.old_policy
    TrainBatch       + advantages: all that an update needs                  gspo.train.credit

Shape suffixes: B responses, T response tokens, S = prompt_width + T all tokens, L MoE layers, K
experts per token, N selected tokens or rows.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from numpy import ndarray

# stands for experts at padding, and where no experts were recorded, such as at the last token
NOT_RECORDED = -1
Part = TypeVar("Part", bound="DataclassInstance")


class Positions:
    """The positions of a mask's tokens: int64, in the flattened mask [B, T], and their rows."""

    def __init__(self, mask_BT: Tensor):
        has_tokens_B = mask_BT.any(-1)
        self.tokens_N = mask_BT.flatten().nonzero().squeeze(-1)
        self.rows_N = has_tokens_B.nonzero().squeeze(-1)

    def to(self, device: torch.device) -> Positions:
        """Copy the positions to a device."""
        copied = copy(self)
        copied.tokens_N = to_device(self.tokens_N, device)
        copied.rows_N = to_device(self.rows_N, device)
        return copied


@dataclass
class KeptSets:
    """The tokens that could be drawn at each response token (gspo.data.kept_tokens).

    Parts of a batch share `ids`, so selecting rows copies no list.
    """

    ids: ndarray  # the token IDs of all positions of the whole batch, on the CPU
    starts_BT: Tensor  # int64, the index in `ids` at which a position's kept tokens begin
    counts_BT: Tensor  # int64, how many there are; 0: the whole vocabulary is kept


@dataclass(kw_only=True)
class TokenBatch:
    """The tokens of B responses and their prompts."""

    tokens_BS: Tensor  # int64
    attention_BS: Tensor  # bool, True on real tokens
    # bool, True on the response tokens that are trained on: tokens of the policy, the
    # end-of-sequence token included
    mask_BT: Tensor
    # bool, True on all tokens of the policy, also of responses that `mask_BT` leaves out
    sampled_BT: Tensor
    prompts_B: Tensor  # int64; rows with the same number have the same prompt
    # experts that forward passes must use; None: the routers choose
    replay_BSLK: Tensor | None = None
    # the tokens over which the softmax of each response token runs; None: the whole vocabulary
    kept: KeptSets | None = None
    # positions of `mask_BT` and of `sampled_BT`; only `to` sets them, on the copy
    _positions: Positions | None = field(default=None, init=False, repr=False)
    _sampled_positions: Positions | None = field(default=None, init=False, repr=False)

    @property
    def prompt_width(self) -> int:
        """The number of columns before the responses."""
        return self.tokens_BS.shape[1] - self.mask_BT.shape[1]

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    @property
    def real_BT(self) -> Tensor:
        """Which response columns hold a token, the environment's tokens included: bool."""
        return self.attention_BS[:, self.prompt_width :]

    @property
    def choice_BT(self) -> Tensor:
        """The response tokens at which more than one token could be drawn: bool.

        If a position has a single kept token, its log-prob is 0 under every policy."""
        if self.kept is None:
            return self.mask_BT
        return self.mask_BT & (self.kept.counts_BT != 1)

    def of_tokens(self, x_BT: Tensor) -> Tensor:
        """Select the entries of response tokens: [N, ...] of [B, T, ...]."""
        positions = self._response_positions()
        return x_BT.flatten(0, 1).index_select(0, positions.tokens_N)

    def of_rows(self, x_B: Tensor) -> Tensor:
        """Select the entries of rows that have response tokens."""
        positions = self._response_positions()
        return x_B.index_select(0, positions.rows_N)

    def _response_positions(self) -> Positions:
        """Return the positions of the response tokens.

        They are computed anew unless `to` has copied them, because `mask_BT` may have changed."""
        return self._positions or Positions(self.mask_BT)

    def to(self, device: torch.device) -> Self:
        """Copy all tensors to a device, and the positions of the response tokens with them.

        Computing the positions on a GPU would wait for all the work that it has."""
        copied = map_tensors(self, lambda _, tensor: to_device(tensor, device))
        positions = self._response_positions()
        copied._positions = positions.to(device)
        copied._sampled_positions = copied._positions
        if not torch.equal(self.mask_BT, self.sampled_BT):
            positions = Positions(self.sampled_BT)
            copied._sampled_positions = positions.to(device)
        return copied

    def with_all_sampled(self) -> Self:
        """Return the batch with all tokens of the policy in `mask_BT`."""
        batch = copy(self)
        batch.mask_BT = self.sampled_BT
        batch._positions = self._sampled_positions
        return batch

    def rows(self, rows_N: Tensor) -> Self:
        """Select rows in the given order, and cut off columns that are padding in all of them."""
        # from the attention mask, because the response mask may leave out whole responses
        attention_BS = self.attention_BS[rows_N]
        prompts, responses = attention_BS.tensor_split([self.prompt_width], dim=1)
        longest_prompt = int(prompts.sum(1).max())
        longest_response = int(responses.sum(1).max())
        start = self.prompt_width - longest_prompt
        end = self.prompt_width + longest_response

        def select(name: str, tensor: Tensor) -> Tensor:
            selected = tensor[rows_N]
            if name.endswith("_B"):
                return selected
            if "_BS" in name:
                return selected[:, start:end]
            return selected[:, :longest_response]

        return map_tensors(self, select)

    def split(self, size: int) -> list[Self]:
        """Cut the batch into micro-batches of at most `size` rows."""
        return [self.rows(rows_N) for rows_N in self.split_rows(size)]

    def split_rows(self, size: int) -> list[Tensor]:
        """Return the row indices of each micro-batch."""
        return list(self.order().split(size))

    def order(self, last_B: Tensor | None = None) -> Tensor:
        """Return the row indices [B] in an order that suits micro-batches.

        Micro-batches then hold similar lengths and few different prompts: rows of the same prompt
        stay together, and prompts are sorted by their longest row. Rows marked in `last_B` come
        after all others.
        """
        lengths_B = self.attention_BS.sum(1)
        distinct_G, group_B = self.prompts_B.unique(return_inverse=True)
        zeros_G = torch.zeros_like(distinct_G)
        longest_G = zeros_G.scatter_reduce(0, group_B, lengths_B, "amax")
        key_B = longest_G[group_B] * len(distinct_G) + group_B
        if last_B is not None:
            key_B = key_B + last_B * (1 + key_B.max())
        return key_B.argsort(stable=True)


@dataclass(kw_only=True)
class RolloutBatch(TokenBatch):
    """The tokens of B responses, with the engine's results."""

    engine_logp_BT: Tensor  # log-probs as the engine reported them
    # experts that the engine chose; None if it did not return them
    engine_experts_BSLK: Tensor | None = None

    def with_old_policy(
        self,
        logp_BT: Tensor,
        experts_BSLK: Tensor | None = None,
        ref_logp_BT: Tensor | None = None,
        correction_BT: Tensor | None = None,
        sum_pi_squared_BT: Tensor | None = None,
    ) -> OldPolicyBatch:
        """Return the batch with the results of the passes before the updates."""
        return OldPolicyBatch(
            **contents_of(self),
            old_logp_BT=logp_BT,
            experts_BSLK=experts_BSLK,
            ref_logp_BT=ref_logp_BT,
            correction_BT=correction_BT,
            sum_pi_squared_BT=sum_pi_squared_BT,
        )


@dataclass(kw_only=True)
class OldPolicyBatch(RolloutBatch):
    """A rollout batch, with the results of the passes before the updates."""

    old_logp_BT: Tensor  # log-probs under the old policy
    # experts that the trainer chose under the old policy; None for dense models
    experts_BSLK: Tensor | None = None
    ref_logp_BT: Tensor | None = None  # log-probs under the reference policy
    # weights for the mismatch of engine and trainer; None: no correction
    correction_BT: Tensor | None = None
    # sum_v pi_v^2 of every token; None: the advantages do not need it
    sum_pi_squared_BT: Tensor | None = None

    def with_advantages(self, adv_BT: Tensor, critic: Critic | None = None) -> TrainBatch:
        """Return the batch with advantages."""
        return TrainBatch(**contents_of(self), adv_BT=adv_BT, critic=critic)

    def with_old_results(self, logp_BT: Tensor, experts_BSLK: Tensor | None) -> Self:
        """Return the batch with another pass's log-probs and experts as the old policy's."""
        batch = copy(self)
        batch.old_logp_BT = logp_BT
        batch.experts_BSLK = experts_BSLK
        return batch


@dataclass
class Critic:
    """The tensors that the critic is trained on."""

    old_values_BT: Tensor  # the critic's values at the start of the step
    returns_BT: Tensor  # the returns, which the critic is trained to predict


@dataclass(kw_only=True)
class TrainBatch(OldPolicyBatch):
    """All that an update needs of B responses."""

    adv_BT: Tensor  # advantages
    critic: Critic | None = None  # None for advantages without a critic

    def split_rows(self, size: int) -> list[Tensor]:
        """Return the row indices of each micro-batch.

        Rows whose advantages are all 0 come last. Micro-batches of such rows alone need no backward
        pass.
        """
        without_gradient_B = ~self.adv_BT.any(1)
        return list(self.order(without_gradient_B).split(size))


def contents_of(batch: TokenBatch) -> dict[str, Any]:
    """Return the fields of a batch by name."""
    return {f.name: getattr(batch, f.name) for f in fields(batch) if f.init}


def map_tensors(part: Part, change: Callable[[str, Tensor], Tensor]) -> Part:
    """Return a copy of a dataclass, and of the dataclasses in it, with changed tensors.

    `change` gets the name of a field and its tensor.
    """
    changed: dict[str, Any] = {}
    for f in fields(part):
        value = getattr(part, f.name)
        if isinstance(value, Tensor):
            changed[f.name] = change(f.name, value)
        elif is_dataclass(value):
            changed[f.name] = map_tensors(value, change)
    return replace(part, **changed)


def runs_ahead(device: torch.device) -> bool:
    """Return whether the CPU hands work to a device without waiting for it, as to a GPU."""
    return device.type not in ("cpu", "mps")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device.

    The CPU does not wait for a copy to a GPU, because it is made from pinned memory."""
    if runs_ahead(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_cpu(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of a device on the CPU, with a single wait."""
    copied = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    wait_for_copies(tensors[0].device)
    return copied


def wait_for_copies(device: torch.device) -> None:
    """Wait until the copies from a device that were begun before are complete."""
    if runs_ahead(device):
        torch.get_device_module(device).current_stream().synchronize()
