"""The critic: a linear value head on the policy's network, as in PPO with a shared trunk.

V(x, y_<t) is computed from the hidden state that predicts token t, so a value needs no forward pass
of its own. The value loss trains the trunk too. The head starts at 0. So every value is 0 before
the first update, with any seed.

Shape suffixes: B responses, T response tokens, C tokens of which logits are computed, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import Tensor

FILE = "value_head.pt"


class ValueHead(torch.nn.Module):
    """Computes V = w . h + b in float32 from the input h of the language-model head."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear = torch.nn.Linear(hidden, 1, dtype=torch.float32)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self._hidden_BCH: Tensor | None = None

    @contextmanager
    def recording(self, model: transformers.PreTrainedModel) -> Generator[None]:
        """Record the last hidden states of the model's forward passes in this context."""

        def record(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
            self._hidden_BCH = inputs[0]

        handle = model.get_output_embeddings().register_forward_pre_hook(record)
        try:
            yield
        finally:
            handle.remove()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return V [...] of hidden states [..., H] that predict a response token."""
        return self.linear(hidden.float()).squeeze(-1)

    def hidden_of_last_forward(self) -> Tensor:
        """Return the hidden states [B, C, H] of the last forward pass within `recording`.

        The head keeps no reference to them."""
        hidden_BCH = self._hidden_BCH
        if hidden_BCH is None:
            raise RuntimeError("no forward pass has run within `recording`")
        self._hidden_BCH = None
        return hidden_BCH

    @staticmethod
    def open(model: transformers.PreTrainedModel, folder: Path | None) -> ValueHead:
        """Return the head of a checkpoint's `folder`, or a new head if `folder` is None."""
        # OPT-350M's head is narrower than its layers
        head = ValueHead(model.get_output_embeddings().weight.shape[1])
        if folder:
            head.load_state_dict(torch.load(folder / FILE, map_location="cpu", weights_only=True))
        return head.to(model.device)
