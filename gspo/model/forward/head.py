"""Computes the output head of a transformers model in float32 where the layers below it are in
bfloat16.

It is for architectures that run through their own forward. Those that gspo.model.forward.network supports
have their own head.
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn


def use_float32_head(model: transformers.PreTrainedModel) -> None:
    """Let the model's output head multiply in float32, whatever the precision of its input, its
    weight or autocast.

    Names and values of the weights stay as they are. A head that is no plain linear layer is left
    as it is."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        head.forward = MethodType(_forward, head)


def _forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Stand in for the forward of a linear layer."""
    bias = None if head.bias is None else head.bias.float()
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), head.weight.float(), bias)
