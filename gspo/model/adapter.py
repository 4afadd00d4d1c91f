"""The LoRA adapter of a run: peft defines it, initialises it, and can load its files anywhere else.

`policy.lora.rank=8` puts one on the model's layers. It alone is trained and saved; the model's own
weights stay as they are, so that with the adapter off they are the reference policy. How it takes
part in the forward pass is in gspo.model.forward.low_rank.

LoRA: arXiv:2106.09685. peft's documentation: https://huggingface.co/docs/peft.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gspo.data.seeding import seed_for
from gspo.io.files import errors_of_the_disk
from gspo.model.forward.low_rank import NAME, is_wrapped
from gspo.model.settings import LoraSettings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names of its files
# what transformers calls the module that holds q, k, v and o
ATTENTION = ("self_attn", "attention", "attn")
# peft's files have the names that its own class around the model gives them
PREFIX = "base_model.model."
SAMPLED = 64  # about how many weights of every parameter `base_sum` looks at


class Adapter:
    """A LoRA adapter on a model, which it changes in place: from now on the model's own weights
    need no gradient.

    It begins as one that changes nothing, and its random half depends on `seed` alone. `base` names
    the model's folder or its place on the hub, for those who load the files elsewhere. Raises
    ValueError if the model has no such layers, or if peft is not installed.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, settings: LoraSettings, seed: int, base: str = ""
    ):
        peft = installed()
        linear, experts = targets(model, settings.targets)
        self.model = model
        self.config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=sorted({name.rpartition(".")[2] for name in linear}),
            target_parameters=sorted({".".join(name.split(".")[-2:]) for name in experts}) or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(seed, "lora"))
            peft.inject_adapter_in_model(self.config, model, NAME)
        self.layers = [module for module in model.modules() if is_wrapped(module)]
        self._weights = {name: wrapper for wrapper, name in _adapted_weights(model)}
        if self._weights.keys() != {f"{name}.weight" for name in linear} | set(experts):
            raise ValueError(
                f"policy.lora.targets={settings.targets}: peft would adapt other layers of this model than those, "
                f"{', '.join(sorted(self._weights))}"
            )

    @cached_property
    def base_sum(self) -> float:
        """A number by which the model's own weights can be told from others: the sum of the
        absolute values of some evenly spaced ones of every parameter."""
        total = 0.0
        for name, parameter in self.model.named_parameters():
            flat = parameter.detach().flatten()
            if ".lora_" not in name:
                total += float(flat[:: max(1, len(flat) // SAMPLED)].double().abs().sum())
        return total

    def parameters(self) -> list[nn.Parameter]:
        """Return A and B of all adapted layers: what is trained."""
        return [parameter for name, parameter in self.model.named_parameters() if ".lora_" in name]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within this context the model computes as if there were no adapter."""
        on = [layer for layer in self.layers if not layer.disable_adapters]
        for layer in on:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in on:
                layer.enable_adapters(True)

    @torch.no_grad()
    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors by the names that they have without an adapter, with the
        adapter merged in. Of what it does not touch these are the tensors themselves."""
        for name, tensor in self._base_tensors():
            wrapper = self._weights.get(name)
            yield name, tensor if wrapper is None else tensor + wrapper.get_delta_weight(NAME)

    def adapted_bytes(self) -> int:
        """Return how many bytes the model's weights take that the adapter acts on."""
        return sum(tensor.nbytes for name, tensor in self._base_tensors() if name in self._weights)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the merged tensors by name."""
        return {name: tensor.shape for name, tensor in self._base_tensors()}

    def _base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's own tensors by the names that they have without an adapter."""
        for name, tensor in self.model.state_dict().items():
            if ".lora_" not in name:
                yield name.replace(".base_layer", ""), tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of all adapted layers by the names of peft's files. They are the weights
        themselves.
        """
        found = installed().get_peft_model_state_dict(
            self.model, adapter_name=NAME, save_embedding_layers=False
        )
        return {f"{PREFIX}{name}": tensor for name, tensor in found.items()}

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write the adapter as peft does; `tensors` are copies of what the function of that name
        returns. Raises OSError if the disk fails."""
        config = copy.copy(self.config)
        config.inference_mode = True  # for those who load it; we train it whatever stands here
        with errors_of_the_disk(folder):
            config.save_pretrained(folder)
            save_file(
                tensors,
                folder / WEIGHTS,
                metadata={"format": "pt", "base_sum": repr(self.base_sum)},
            )

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load what `save` wrote. Raises ValueError for an adapter of other layers, another rank,
        or another model.
        """
        with safe_open(folder / WEIGHTS, "pt") as file:
            base_sum = float((file.metadata() or {}).get("base_sum", "nan"))
        # rounding on another kind of CPU stays below that
        if not math.isclose(base_sum, self.base_sum, rel_tol=1e-6):
            raise ValueError(
                f"{folder} holds an adapter of other weights than {self.config.base_model_name_or_path or 'this model'}"
                " has now (their sums differ): give back the model, or the cold start, that the run began with"
            )
        stored, own = load_file(folder / WEIGHTS), self.tensors()
        if {name: x.shape for name, x in stored.items()} != {
            name: x.shape for name, x in own.items()
        }:
            raise ValueError(
                f"{folder} holds an adapter of other layers or of another rank than policy.lora says"
            )
        for name, tensor in own.items():
            tensor.copy_(stored[name])


def installed() -> ModuleType:
    """Return peft. Raises ValueError, in one line, if it is not installed."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ValueError(
            f"policy.lora needs {error.name}, which is not installed: pip install 'gspo[lora]'"
        ) from None
    return peft


def targets(model: transformers.PreTrainedModel, which: str) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers that are to be adapted, and those of the experts'
    stacked tensors. Raises ValueError if there is none."""
    attention, experts, others, stacked = [], [], [], []
    for name, module in model.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            holder = parts[-2] if len(parts) > 1 else ""
            (
                attention if holder in ATTENTION else experts if "experts" in parts else others
            ).append(name)
        elif parts[-1] == "experts":
            stacked += [
                f"{name}.{key}"
                for key, one in module.named_parameters(recurse=False)
                if one.ndim == 3
            ]
    linear = {"attention": attention, "experts": experts, "all": attention + experts + others}[
        which
    ]
    stacked = [] if which == "attention" else stacked
    if not linear and not stacked:
        raise ValueError(
            f"policy.lora.targets={which}: {type(model).__name__} has no such layers that are known here"
        )
    return linear, stacked


def _adapted_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield peft's wrappers, each with the name that the tensor which it adapts has without an
    adapter.
    """
    for name, module in model.named_modules():
        if is_wrapped(module):
            own = getattr(module, "parameter_name", "weight")
            yield module, f"{name}.{own}".replace(".base_layer", "")
