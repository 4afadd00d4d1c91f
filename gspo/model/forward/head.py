"""Computes the output head of a transformers model in float32 if its layers are in bfloat16.

It is for architectures that run through their own forward. gspo.model.forward.network has its own
head.
"""

from types import MethodType

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn


def use_float32_head(model: transformers.PreTrainedModel) -> None:
    """Make the model's output head multiply in float32, for any input, weight and autocast.

    Names and values of the weights do not change. A head that is no plain linear layer does not
    change."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        head.forward = MethodType(_forward, head)


def _forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Replace the forward of a linear layer."""
    bias = None if head.bias is None else head.bias.float()
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), head.weight.float(), bias)
