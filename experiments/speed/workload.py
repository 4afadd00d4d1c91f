"""The benchmark's workloads: a model, a task, sizes. The same folder and the same prompts go to
every side.

`tiny` starts from the testbed's cold start, so that responses have the lengths and rewards of real
runs. The others have random weights, with a last layer made such that responses end by themselves
after some hundred tokens, and a reward that such text can earn.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.io.arguments import nearest
from gspo.io.ranges import Ranged, ranged
from gspo.model.loading import save
from gspo.model.tokenizer import character_tokenizer
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic

TESTBED = (
    "experiment=tiny_moe",
    "task=math",
    "task.max_operands=6",
    "task.largest=5",
    "model.layers=6",
)
RANDOM = ("model=hf", "task=math", "objective=gspo_tiny")
OF_BATCH = ("prompts", "group_size", "new_tokens", "micro_batch_size", "batch_rows")
BFLOAT16 = (*RANDOM, "policy.precision=bfloat16", "rollout.dtype=bfloat16")
MIXED = (*BFLOAT16, "policy.checkpointing=true")


@dataclass
class Shape(Ranged, key="size"):
    """A Qwen3 model with random weights, or with experts a Qwen3-MoE."""

    hidden: int = ranged(least=1)
    layers: int = ranged(least=1)
    heads: int = ranged(least=1)
    key_value_heads: int = ranged(least=1)
    width: int = ranged(least=1)  # the width of the MLP, or of one expert
    experts: int = ranged(0, least=0)
    experts_per_token: int = ranged(0, least=0)
    vocabulary: int = ranged(0, least=0)  # 0 takes the tokenizer's
    tied: bool = False  # off by default, since tied random weights repeat one token
    # tokens after which a response ends on average, beyond the vocabulary's size
    mean_length: int = ranged(250, least=1)
    head_dim: int = ranged(0, least=0)  # of one attention head; 0 takes hidden / heads

    def __post_init__(self) -> None:
        super().__post_init__()
        divided = self.hidden % self.heads == 0 and self.hidden // self.heads % 2 == 0
        fits = self.head_dim % 2 == 0 if self.head_dim else divided
        if not fits or self.heads % self.key_value_heads:
            raise ValueError(
                f"size.head_dim={self.head_dim}, or with 0 size.hidden={self.hidden} divided by size.heads="
                f"{self.heads}, must be an even whole number, and size.key_value_heads={self.key_value_heads} must "
                "divide size.heads"
            )
        if self.experts_per_token > self.experts or (self.experts and not self.experts_per_token):
            raise ValueError(
                f"size.experts_per_token={self.experts_per_token} must lie in 1..size.experts={self.experts}"
            )


@dataclass
class Workload(Ranged, key="size"):
    """What is timed. If `shape` is None it is the testbed's cold-started model."""

    shape: Shape | None
    prompts: int = ranged(least=1)
    group_size: int = ranged(least=1)
    new_tokens: int = ranged(least=1)
    micro_batch_size: int = ranged(64, least=1)
    batch_rows: int = ranged(512, least=1)
    settings: tuple[str, ...] = field(default=RANDOM)
    peer: bool = True  # whether TRL runs it in a reasonable time

    def resized(self, sizes: dict[str, int]) -> Workload:
        """Return the workload with other sizes, of the model or of the batch. Raises ValueError for
        one that it does not have."""
        of_model = [f.name for f in fields(self.shape)] if self.shape else []
        for key in sizes:
            if key not in (available := [*of_model, *OF_BATCH]):
                raise ValueError(
                    f"size.{key}={sizes[key]}: this workload has no such size; the nearest is "
                    f"size.{nearest(key, available)} (of {', '.join(available)})"
                )
        shape = {key: value for key, value in sizes.items() if key in of_model}
        batch = {key: value for key, value in sizes.items() if key not in of_model}
        return replace(self, shape=replace(self.shape, **shape) if self.shape else None, **batch)

    def overrides(self) -> list[str]:
        """Return the workload as the arguments of `gspo train`."""
        return [
            *self.settings,
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.group_size={self.group_size}",
            f"rollout.max_new_tokens={self.new_tokens}",
            f"rollout.batch_rows={self.batch_rows}",
            f"trainer.micro_batch_size={self.micro_batch_size}",
            "trainer.minibatches=4",
            "optim.lr=5e-5",
        ]


TINY = Shape(
    hidden=64, layers=6, heads=4, key_value_heads=4, width=32, experts=16, experts_per_token=2
)
SMALL = Shape(hidden=512, layers=8, heads=8, key_value_heads=8, width=1024, mean_length=180)
SMALL_MOE = Shape(512, 8, 8, 8, width=256, experts=32, experts_per_token=4, mean_length=180)
# These have the sizes of Qwen2.5-1.5B, and of OLMoE-1B-7B (6.9 B parameters, 1.3 B active).
DENSE = Shape(1536, 28, 12, 2, width=8960, vocabulary=151_936, tied=True)
MOE = Shape(2048, 16, 16, 16, width=1024, experts=64, experts_per_token=8, vocabulary=50_304)
# These have the sizes of Qwen3-0.6B, and of an MoE of 100 M parameters.
QWEN3_0P6B = Shape(1024, 28, 16, 8, width=3072, vocabulary=151_936, tied=True, head_dim=128)
MOE_100M = Shape(512, 8, 8, 8, width=256, experts=32, experts_per_token=4, vocabulary=16_384)

WORKLOADS = {
    "tiny": Workload(None, 32, 8, 90, settings=TESTBED),
    "long": Workload(TINY, 32, 8, 512),
    "small": Workload(SMALL_MOE, 8, 8, 256, micro_batch_size=16),
    "small_dense": Workload(SMALL, 8, 8, 256, micro_batch_size=16),
    "gpu": Workload(DENSE, 32, 8, 2048, 8, 256, MIXED, peer=False),
    "gpu_moe": Workload(MOE, 32, 8, 2048, 8, 256, MIXED, peer=False),
    "qwen3_0p6b": Workload(QWEN3_0P6B, 16, 8, 256, 16, 256, BFLOAT16),
    "moe_100m": Workload(MOE_100M, 32, 8, 256, 64, 256, BFLOAT16),
}


class EvenText(ChainArithmetic):
    """A task with the same prompts in which a response is right if the sum of its characters' codes
    is even. Half of random text is, so groups have a signal, and no side of a comparison may leave
    out work that another does."""

    def score(self, answers: list[tuple[Problem, str, bool]]) -> list[Score]:
        even = [sum(map(ord, text)) % 2 == 0 for _, text, _ in answers]
        return [Score(float(right), "even" if right else "odd") for right in even]


def made_folder(shape: Shape, parent: Path) -> Path:
    """Return the folder of a shape's model with its tokenizer, made if it is not there yet."""
    key = hashlib.sha256(json.dumps(asdict(shape)).encode()).hexdigest()[:10]
    folder = parent / f"hidden{shape.hidden}-layers{shape.layers}-experts{shape.experts}-{key}"
    if not (folder / "config.json").exists():
        save(made(shape), character_tokenizer(), folder)
    return folder


def made(shape: Shape) -> PreTrainedModel:
    """Return the model, in float32, the same in every process."""
    tokenizer = character_tokenizer()
    common = {
        "vocab_size": shape.vocabulary or len(tokenizer), "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads, "head_dim": shape.head_dim or shape.hidden // shape.heads,
        "max_position_embeddings": 4096, "tie_word_embeddings": shape.tied, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    if shape.experts:
        sizes = {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "norm_topk_prob": True,
        }
        widths = {"moe_intermediate_size": shape.width, "intermediate_size": shape.width}
        kind, config = Qwen3MoeForCausalLM, Qwen3MoeConfig(**common, **sizes, **widths)
    else:
        kind, config = Qwen3ForCausalLM, Qwen3Config(**common, intermediate_size=shape.width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).to(torch.float32)
    end_after(model, tokenizer.eos_token_id, shape.mean_length)
    return model


@torch.no_grad()
def end_after(model: PreTrainedModel, end: int, tokens: int) -> None:
    """Make a response end after `tokens` tokens on average.

    The last hidden state has unit mean square, so with weights of standard deviation sigma the
    logits are normal with variance sigma^2 W. The end's row is 0, and with it its logit; the sum of
    V exponentials of the others is about V exp(sigma^2 W / 2), which shall be `tokens`. In a
    vocabulary larger than that the end is rarer.
    """
    head = model.lm_head.weight
    spread = math.sqrt(2 * max(math.log(tokens / len(head)), 0.02))
    head.mul_(spread / (head.std() * math.sqrt(head.shape[1])))
    head[end] = 0
