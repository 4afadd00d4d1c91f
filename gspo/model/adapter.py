"""The LoRA adapter of a run: peft defines it, initialises it, and can load its files elsewhere.

`policy.lora.rank=8` puts an adapter on the model's layers. Only the adapter is trained and saved.
The model's own weights do not change, so with the adapter off the model is the reference policy.
gspo.model.forward.low_rank computes the adapter's part of the forward pass.

LoRA: arXiv:2106.09685. peft's documentation: https://huggingface.co/docs/peft.
"""

import copy
import json
import math
import re
from collections.abc import Generator, Iterator
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
from gspo.io.errors import SettingError, first_line
from gspo.io.files import errors_of_the_disk
from gspo.model.forward.layers import Wrapper
from gspo.model.forward.low_rank import NAME, is_wrapped
from gspo.model.forward.padded_forward import (
    PROBE_LENGTHS,
    logits_of_row,
    probe_rows,
)
from gspo.model.settings import LoraSettings
from gspo.model.sharding.dtensors import architecture
from gspo.model.weights import parts_without_text

# peft's names of its files
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# linear layers whose weight the model reads itself, so that an adapter would do nothing: Mamba's
# and DeepSeek-V4's
READ_WITHOUT_FORWARD = ("dt_proj", "o_a_proj")
# transformers' names of the module that holds q, k, v and o
ATTENTION = ("self_attn", "attention", "attn")
# in peft's files, names of tensors begin with the names of peft's class around the model
PREFIX = "base_model.model."
# about so many weights of every parameter are summed in `base_sum`
SUMMED_WEIGHTS = 64


class Adapter:
    """A LoRA adapter on a model, which it changes in place.

    From now on the model's own weights need no gradient. At first the adapter changes nothing, and
    its random half depends on `seed` alone. `base` is the model's folder or hub name, for users who
    load the files elsewhere. Raises ValueError if the model has no layers to adapt, or if peft is
    not installed.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        settings: LoraSettings,
        seed: int,
        base: str = "",
    ):
        peft = import_peft()
        linear, experts = targets(model, settings.targets)
        module_names = {name.rpartition(".")[2] for name in linear}
        excluded = "|".join(map(re.escape, parts_without_text(model)))
        parameter_names = {".".join(name.split(".")[-2:]) for name in experts}
        self.model = model
        self.config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=sorted(module_names),
            exclude_modules=rf"({excluded}).*" if excluded else None,
            target_parameters=sorted(parameter_names) or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(seed, "lora"))
            try:
                peft.inject_adapter_in_model(self.config, model, NAME)
            except ValueError as error:
                raise SettingError(
                    "policy.lora.targets",
                    settings.targets,
                    f"peft refuses {type(model).__name__}: {error}",
                    remedy="try another of all, attention and experts, or policy.lora.rank=0",
                ) from None
        self.layers = [module for module in model.modules() if is_wrapped(module)]
        self._wrappers = _wrappers_by_weight(model)
        expected = {f"{name}.weight" for name in linear} | set(experts)
        different = sorted(self._wrappers.keys() ^ expected)
        if different:
            raise SettingError(
                "policy.lora.targets",
                settings.targets,
                f"peft adapts other layers of this model: it differs in {different[0]} and "
                f"{len(different) - 1} more",
                remedy="try another of all, attention and experts",
            )

    @cached_property
    def base_sum(self) -> float:
        """The sum of absolute values of some weights of every parameter of the model.

        The weights are evenly spaced. The sum distinguishes the model's own weights from others."""
        total = 0.0
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                flat = parameter.detach().flatten()
                spacing = max(1, len(flat) // SUMMED_WEIGHTS)
                total += float(flat[::spacing].double().abs().sum())
        return total

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters: A and B of all adapted layers."""
        return [parameter for name, parameter in self.model.named_parameters() if ".lora_" in name]

    @contextmanager
    def off(self) -> Generator[None]:
        """Switch the adapter off within this context."""
        enabled_layers = [layer for layer in self.layers if not layer.disable_adapters]
        for layer in enabled_layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in enabled_layers:
                layer.enable_adapters(True)

    @torch.no_grad()
    def merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors with the adapter merged in, by their names without adapter.

        Tensors that are not adapted are the model's tensors themselves, not copies."""
        for name, tensor in self._base_tensors():
            if name in self._wrappers:
                yield name, tensor + self._wrappers[name].get_delta_weight(NAME)
            else:
                yield name, tensor

    def adapted_bytes(self) -> int:
        """Return the number of bytes of the model's weights that are adapted."""
        adapted = [tensor for name, tensor in self._base_tensors() if name in self._wrappers]
        return sum(tensor.nbytes for tensor in adapted)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the merged tensors by name."""
        return {name: tensor.shape for name, tensor in self._base_tensors()}

    def _base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's own tensors by their names without adapter."""
        for name, tensor in self.model.state_dict().items():
            if ".lora_" not in name:
                yield name.replace(".base_layer", ""), tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of all adapted layers by their names in peft's files, without copying."""
        tensors = import_peft().get_peft_model_state_dict(
            self.model, adapter_name=NAME, save_embedding_layers=False
        )
        return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}

    def save(self, folder: Path, copied: dict[str, Tensor]) -> None:
        """Write the adapter in peft's format.

        `copied` holds copies of the tensors that the method `tensors` returns.

        Raises OSError if the disk fails."""
        config = copy.copy(self.config)
        # for users who load it elsewhere
        config.inference_mode = True
        metadata = {"format": "pt", "base_sum": repr(self.base_sum)}
        with errors_of_the_disk(folder):
            config.save_pretrained(folder)
            save_file(copied, folder / WEIGHTS, metadata=metadata)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the files that `save` wrote.

        Raises ValueError for an adapter of other layers, another rank or scale, or another
        model."""
        with safe_open(folder / WEIGHTS, "pt") as file:
            base_sum = float((file.metadata() or {}).get("base_sum", "nan"))
        # rounding on another kind of CPU changes the sum by less
        if not math.isclose(base_sum, self.base_sum, rel_tol=1e-6):
            base = self.config.base_model_name_or_path or "this model"
            raise ValueError(
                f"{folder} holds an adapter of other weights than {base} has now (their sums "
                "differ): restore the model, or the cold start, that the run began with"
            )
        stored = load_file(folder / WEIGHTS)
        tensors = self.tensors()
        stored_shapes = {name: tensor.shape for name, tensor in stored.items()}
        if stored_shapes != {name: tensor.shape for name, tensor in tensors.items()}:
            raise ValueError(
                f"{folder} holds an adapter of other layers or of another rank "
                "than policy.lora says"
            )
        alpha = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("lora_alpha")
        if alpha != self.config.lora_alpha:
            raise ValueError(
                f"{folder / CONFIG} says lora_alpha={alpha}, and policy.lora.alpha is "
                f"{self.config.lora_alpha}: give the file its old value back"
            )
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])


def check_adapted_forward(model: transformers.PreTrainedModel) -> None:
    """Raise ValueError if a model's own forward fails with its adapter."""
    (row,) = probe_rows(model, PROBE_LENGTHS[:1])
    try:
        logits_of_row(model, row)
    # foreign code may raise anything
    except Exception as error:
        raise SettingError(
            "policy.lora",
            problem=f"the forward of {architecture(model)} fails with an adapter "
            f"({type(error).__name__}: {first_line(error)[:200]})",
        ) from None


def import_peft() -> ModuleType:
    """Return peft. Raises ValueError with a single-line message if it is not installed."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise SettingError(
            "policy.lora",
            problem=f"needs {error.name}, which is not installed",
            remedy="pip install -e '.[lora]'",
        ) from None
    return peft


def targets(model: transformers.PreTrainedModel, which: str) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers to adapt, and of the experts' stacked tensors.

    `which` is policy.lora.targets. Raises ValueError if there is nothing to adapt."""
    attention = []
    experts = []
    other_layers = []
    stacked_experts = []
    without_text = parts_without_text(model)
    for name, module in model.named_modules():
        parts = name.split(".")
        is_router = any("router" in part.lower() for part in parts)
        if name.startswith(without_text) or is_router or parts[-1] in READ_WITHOUT_FORWARD:
            continue
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            if len(parts) > 1 and parts[-2] in ATTENTION:
                attention.append(name)
            elif "experts" in parts:
                experts.append(name)
            else:
                other_layers.append(name)
        elif parts[-1] == "experts":
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    stacked_experts.append(f"{name}.{parameter_name}")
    if which == "attention":
        linear = attention
        stacked_experts = []
    else:
        linear = experts if which == "experts" else attention + experts + other_layers
    if not linear and not stacked_experts:
        raise SettingError(
            "policy.lora.targets",
            which,
            f"{type(model).__name__} has no layers of this kind",
        )
    return linear, stacked_experts


def _wrappers_by_weight(model: nn.Module) -> dict[str, Wrapper]:
    """Return peft's wrappers, by the name without adapter of the tensor that each adapts."""
    wrappers: dict[str, Wrapper] = {}
    for name, module in model.named_modules():
        if is_wrapped(module):
            parameter_name = getattr(module, "parameter_name", "weight")
            wrappers[f"{name}.{parameter_name}".replace(".base_layer", "")] = module
    return wrappers
