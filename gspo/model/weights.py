"""Copies a model without its weights, and copies weights into a model."""

from collections.abc import Iterable
from typing import TypeAlias

import torch
import transformers
from torch import Tensor

# In quotes: transformers imports a class and its dependencies when the class's name is first read.
Loaded: TypeAlias = "tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]"


def input_embedding(model: transformers.PreTrainedModel) -> Tensor:
    """Return the weight of a model's input embedding, which has a row for each token."""
    return model.get_input_embeddings().get_parameter("weight")


def parts_without_text(model: transformers.PreTrainedModel) -> tuple[str, ...]:
    """Return the names of a multimodal model's modules that texts do not pass through.

    They stand beside the text model in one parent: a vision tower and its projector. The result is
    empty for a model of texts alone."""
    text_model = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is text_model), "")
    parent, _, text_name = path.rpartition(".")
    if not parent:
        return ()
    children = model.get_submodule(parent).named_children()
    return tuple(f"{parent}.{name}." for name, _ in children if name != text_name)


def empty_copy(
    model: transformers.PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> transformers.PreTrainedModel:
    """Return a model of the same architecture and buffers, with uninitialised parameters.

    It is built on the meta device first. Drawing random weights only to overwrite them would take a
    CPU 40 s for 1e9 of them."""
    config = model.config
    with torch.device("meta"):
        copied = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=config._attn_implementation, trust_remote_code=False
        )
    copied.to(dtype).to_empty(device=device)
    # `to_empty` has made two tensors of tied weights
    copied.tie_weights()
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        setattr(copied.get_submodule(owner), attribute, buffer.clone())
    # The choice of kernels depends on whether parameters require a gradient, as the model's do.
    return copied.requires_grad_()


@torch.no_grad()
def load_tensors(
    model: transformers.PreTrainedModel, named_tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy weights into a model, rounded to its precision.

    Raises ValueError for other names or shapes."""
    targets = dict(model.state_dict())
    for name, tensor in named_tensors:
        if name not in targets or targets[name].shape != tensor.shape:
            raise ValueError(f"weight {name} {tuple(tensor.shape)} does not belong to this model")
        targets.pop(name).copy_(tensor)
    if targets:
        raise ValueError(f"weights are missing: {', '.join(targets)}")
