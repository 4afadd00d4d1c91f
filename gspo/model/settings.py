"""The choices of a model and their settings. Building one imports PyTorch and transformers, which
takes seconds. Those imports are inside the methods that build, so that settings can be read and
refused at once.

Every choice gives a transformers AutoModelForCausalLM and its tokenizer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gspo.io.ranges import LARGEST_SEED, Ranged, choice, ranged
from gspo.model.public_models import KNOWN

if TYPE_CHECKING:
    import transformers

    Loaded = tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]

POSITIONS = 2048  # how many tokens of prompt and response the models that are made here can take


@dataclass
class ModelSettings(Ranged, key="model"):
    """The base class of the model choices. `name` is the choice's name."""

    name: str = ""
    # it is made from its settings, with a known number of positions
    made_here: ClassVar[bool] = False
    is_dense: ClassVar[bool] = False  # it is known, before it is loaded, to have no routers
    # transformers' name of the attention that its own forward uses
    attention: ClassVar[str] = "sdpa"

    def source(self) -> str:
        """Return the folder or hub name that it is loaded from, "" for a model that is made here."""
        return ""

    def make(self) -> Loaded:
        """Return model and tokenizer as they are before any of our training."""
        raise TypeError("choose a concrete model: tiny_moe, tiny_dense, hf")

    def outline(self) -> Loaded:
        """Return the model with no regard to its weights, which may have no content, and its
        tokenizer.
        """
        return self.make()

    def open(self, folder: Path) -> Loaded:
        """Load a folder that `save` wrote for this choice of model."""
        from gspo.model.loading import load

        return load(str(folder))


@dataclass
class Tiny(ModelSettings):
    """The base class of the models that are made here, with random weights and one token per
    character.
    """

    hidden: int = ranged(64, least=1)
    layers: int = ranged(4, least=1)
    heads: int = ranged(4, least=1)
    made_here: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"model.hidden={self.hidden} divided by model.heads={self.heads} must be an even whole number"
            )


@dataclass
class TinyMoE(Tiny):
    """A Qwen3-MoE of 0.47 M parameters (0.13 M active) with random weights and one token per
    character.
    """

    name: str = "tiny_moe"
    experts: int = ranged(16, least=1)
    experts_per_token: int = ranged(2, least=1)
    expert_width: int = ranged(32, least=1)
    init_seed: int = ranged(0, least=0, most=LARGEST_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model.experts_per_token={self.experts_per_token} must not exceed model.experts={self.experts}"
            )

    def make(self) -> Loaded:
        from gspo.model.tiny import random_qwen3_moe

        return random_qwen3_moe(
            self.hidden,
            self.layers,
            self.heads,
            POSITIONS,
            self.experts,
            self.experts_per_token,
            self.expert_width,
            seed=self.init_seed,
        )


@dataclass
class TinyDense(Tiny):
    """A dense Qwen3 with random weights and one token per character: the control without a router."""

    name: str = "tiny_dense"
    layers: int = 6
    width: int = ranged(128, least=1)
    init_seed: int = ranged(0, least=0, most=LARGEST_SEED)
    is_dense: ClassVar[bool] = True

    def make(self) -> Loaded:
        from gspo.model.tiny import random_qwen3

        return random_qwen3(
            self.hidden, self.layers, self.heads, POSITIONS, self.width, seed=self.init_seed
        )


@dataclass
class HFModel(ModelSettings):
    """Any AutoModelForCausalLM, from a folder or by its name on the hub.

    The tokenizer must have an end-of-sequence token. Weights are float32: an update of size 1e-6
    would be lost in bfloat16 weights of size 1e-2.
    """

    name: str = "hf"
    path: str = ""
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "/" in self.attention:
            raise ValueError(
                f"model.attention={self.attention!r} names code on the hub, which is never run; use sdpa, eager or "
                "flash_attention_2"
            )

    def source(self) -> str:
        if not self.path:
            raise ValueError(
                "model.path='' is empty; say which folder or hub name to load, model.path=..."
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
    """A random model of the architecture of `path`, a public model's name on the hub, with its chat
    format.
    """

    name: str = "stand_in"
    path: str = "Qwen/Qwen3-0.6B"
    attention: str = "sdpa"
    hidden: int = ranged(32, least=8)
    layers: int = ranged(2, least=1)
    heads: int = ranged(4, least=1)
    experts: int = ranged(8, least=2)  # of an MoE model, each token goes through two of them
    init_seed: int = ranged(0, least=0, most=LARGEST_SEED)
    made_here: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path not in KNOWN:
            raise ValueError(
                f"model.path={self.path!r} with model=stand_in: it can stand in for {', '.join(KNOWN)}"
            )
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"model.hidden={self.hidden} divided by model.heads={self.heads} must be an even whole number"
            )

    def make(self) -> Loaded:
        from gspo.model.stand_in import random_stand_in

        return random_stand_in(
            self.path,
            self.attention,
            self.hidden,
            self.layers,
            self.heads,
            POSITIONS,
            self.experts,
            seed=self.init_seed,
        )


@dataclass
class LoraSettings(Ranged, key="policy.lora"):
    """The settings of a LoRA adapter: h = W x + (alpha / rank) B A x, of which A and B alone are
    trained.
    """

    rank: int = ranged(0, least=0)  # 0: there is none, and all weights are trained
    # attention: q, k, v and o | experts: those of MoE layers | all: both, and other linear layers
    # but router and head
    targets: str = choice("all", ("attention", "experts", "all"))
    alpha: int = ranged(32, least=1)
