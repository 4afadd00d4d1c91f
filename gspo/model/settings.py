"""The choices of a model and their settings.

Every choice gives a transformers AutoModelForCausalLM and its tokenizer. Building a model imports
PyTorch and transformers, which takes seconds. The methods that build import them, because settings
must be read and refused at once.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gspo.io.errors import SettingError
from gspo.io.ranges import LARGEST_SEED, Ranged, choice, ranged
from gspo.model.public_models import PUBLIC_MODELS

if TYPE_CHECKING:
    from gspo.model.weights import Loaded


# maximum tokens of prompt and response together, for models that are built from their settings
POSITIONS = 2048


@dataclass
class ModelSettings(Ranged, key="model"):
    """The base class of the model choices. `name` is the choice's name."""

    name: str = ""
    # the model is built from its settings, with POSITIONS positions
    built_from_settings: ClassVar[bool] = False
    # the model has no routers, which is known before it is loaded
    is_dense: ClassVar[bool] = False
    # transformers' name of the attention in the model's own forward
    attention = "sdpa"

    def source(self) -> str:
        """Return the folder or hub name of the model, "" if it is built from its settings."""
        return ""

    def make(self) -> Loaded:
        """Return model and tokenizer as they are before any of our training."""
        raise TypeError("choose a concrete model: tiny_moe, tiny_dense, hf, stand_in")

    def without_name(self) -> dict[str, Any]:
        """Return all settings but the name, as arguments of the function that builds the model."""
        settings = asdict(self)
        del settings["name"]
        return settings

    def outline(self) -> Loaded:
        """Return the model and its tokenizer. Its weights may be without content."""
        return self.make()

    def open(self, folder: Path) -> Loaded:
        """Load a folder that `save` wrote for this choice of model."""
        from gspo.model.loading import load

        return load(str(folder))


def check_head_size(hidden: int, heads: int) -> None:
    """Raise ValueError if heads do not divide the hidden size into even widths."""
    if hidden % heads or (hidden // heads) % 2:
        raise SettingError(
            "model.hidden",
            hidden,
            f"divided by model.heads={heads} it must be an even whole number",
        )


@dataclass
class Tiny(ModelSettings):
    """The base class of models with random weights and one token per character."""

    hidden: int = ranged(64, least=1)
    layers: int = ranged(4, least=1)
    heads: int = ranged(4, least=1)
    built_from_settings: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_size(self.hidden, self.heads)


@dataclass
class TinyMoE(Tiny):
    """A Qwen3-MoE of 0.47 M parameters (0.13 M active), with random weights."""

    name: str = "tiny_moe"
    experts: int = ranged(16, least=1)
    experts_per_token: int = ranged(2, least=1)
    expert_width: int = ranged(32, least=1)
    init_seed: int = ranged(0, least=0, most=LARGEST_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.experts:
            raise SettingError(
                "model.experts_per_token",
                self.experts_per_token,
                f"must not exceed model.experts={self.experts}",
            )

    def make(self) -> Loaded:
        from gspo.model.tiny import random_qwen3_moe

        return random_qwen3_moe(**self.without_name(), positions=POSITIONS)


@dataclass
class TinyDense(Tiny):
    """A dense Qwen3 with random weights: the control without a router."""

    name: str = "tiny_dense"
    layers: int = 6
    width: int = ranged(128, least=1)
    init_seed: int = ranged(0, least=0, most=LARGEST_SEED)
    is_dense: ClassVar[bool] = True

    def make(self) -> Loaded:
        from gspo.model.tiny import random_qwen3

        return random_qwen3(**self.without_name(), positions=POSITIONS)


@dataclass
class HFModel(ModelSettings):
    """Any AutoModelForCausalLM, from a folder or by its name on the hub.

    The tokenizer must have an end-of-sequence token. Weights are float32, because an update of size
    1e-6 would be lost in bfloat16 weights of size 1e-2.
    """

    name: str = "hf"
    path: str = ""
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "/" in self.attention:
            raise SettingError(
                "model.attention",
                self.attention,
                "names code on the hub, which is never run",
                remedy="use sdpa, eager or flash_attention_2",
            )

    def source(self) -> str:
        if not self.path:
            raise SettingError(
                "model.path", "", "is empty", "set the folder or hub name to load, model.path=..."
            )
        return os.path.expanduser(self.path)

    def make(self) -> Loaded:
        from gspo.model.loading import load

        return load(self.source(), self.attention)

    def outline(self) -> Loaded:
        from gspo.model.loading import load_outline

        return load_outline(self.source(), self.attention)

    def open(self, folder: Path) -> Loaded:
        from gspo.model.loading import load

        return load(str(folder), self.attention)


@dataclass
class StandIn(ModelSettings):
    """A random model with the architecture and chat format of a public model.

    `path` is the public model's name on the hub."""

    name: str = "stand_in"
    path: str = "Qwen/Qwen3-0.6B"
    attention: str = "sdpa"
    hidden: int = ranged(32, least=8)
    layers: int = ranged(2, least=1)
    heads: int = ranged(4, least=1)
    # of an MoE model; each token goes through two of them
    experts: int = ranged(8, least=2)
    init_seed: int = ranged(0, least=0, most=LARGEST_SEED)
    built_from_settings: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path not in PUBLIC_MODELS:
            raise SettingError(
                "model.path",
                self.path,
                f"with model=stand_in, it can stand in for {', '.join(PUBLIC_MODELS)}",
            )
        is_dense = "num_experts" not in PUBLIC_MODELS[self.path][1]
        if is_dense and self.experts != StandIn.experts:
            raise SettingError("model.experts", self.experts, f"{self.path} has no experts")
        check_head_size(self.hidden, self.heads)

    def make(self) -> Loaded:
        from gspo.model.stand_in import random_stand_in

        return random_stand_in(**self.without_name(), positions=POSITIONS)


@dataclass
class LoraSettings(Ranged, key="policy.lora"):
    """The settings of a LoRA adapter: h = W x + (alpha / rank) B A x. Only A and B are trained."""

    # 0: there is no adapter, and all weights are trained
    rank: int = ranged(0, least=0)
    # attention: q, k, v and o | experts: those of MoE layers | all: both, and other linear layers
    # but router and head
    targets: str = choice("all", ("attention", "experts", "all"))
    alpha: int = ranged(32, least=1)
