"""The parts that all checks share: the device, the deadline, random models and their responses.

Models are created on the device with random weights. Nothing is downloaded.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor

from gspo.data.batch import TrainBatch
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Response, Score
from gspo.model.policy import Policy
from gspo.model.tiny import random_model
from gspo.model.tokenizer import character_tokenizer
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.tasks.base import Task

PROMPTS = ("7+5=?", "3-8+9-2=?", "4+4+4+4+4+4=?", "9-1=?")


@dataclass(frozen=True)
class Size:
    """The shape of a random Qwen3 model, or of a Qwen3-MoE if it has experts."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    width: int  # of the MLP, or of each expert
    experts: int = 0
    experts_per_token: int = 0
    vocabulary: int = 0  # 0: the size of the tokenizer


DENSE = Size(
    "dense",
    hidden=64,
    layers=3,
    heads=4,
    key_value_heads=2,
    head_dim=16,
    width=128,
)
SPARSE = Size(
    "MoE",
    hidden=64,
    layers=3,
    heads=4,
    key_value_heads=2,
    head_dim=16,
    width=32,
    experts=8,
    experts_per_token=2,
)
CPU_SIZES = (
    Size(
        "4 M dense",
        hidden=256,
        layers=4,
        heads=8,
        key_value_heads=4,
        head_dim=32,
        width=768,
        vocabulary=2048,
    ),
    Size(
        "10 M MoE",
        hidden=256,
        layers=4,
        heads=8,
        key_value_heads=4,
        head_dim=32,
        width=192,
        experts=16,
        experts_per_token=2,
        vocabulary=2048,
    ),
)
GPU_SIZES = (
    Size(
        "Qwen3-0.6B's shape",
        hidden=1024,
        layers=28,
        heads=16,
        key_value_heads=8,
        head_dim=128,
        width=3072,
        vocabulary=151_936,
    ),
    Size(
        "100 M MoE",
        hidden=512,
        layers=8,
        heads=8,
        key_value_heads=8,
        head_dim=64,
        width=256,
        experts=32,
        experts_per_token=4,
        vocabulary=16_384,
    ),
)


@dataclass
class Bench:
    """The machine under test. `matmul` and `copy` are its measured peak speeds."""

    device: torch.device
    deadline: float  # by time.monotonic
    bfloat16: bool = True
    matmul: dict[torch.dtype, float] = field(default_factory=dict)  # FLOP/s of large products
    seconds_by_check: dict[str, float] = field(default_factory=dict)
    copy: float = 0.0  # bytes that a copy within the device's memory reads and writes per second

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def precision(self) -> torch.dtype:
        """The precision in which models train on this device."""
        return torch.bfloat16 if self.on_gpu and self.bfloat16 else torch.float32

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The models whose speed is measured."""
        return GPU_SIZES if self.on_gpu else CPU_SIZES

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """Return the shortest time of `repeats` calls of `work`, after a call to warm up."""
        work()
        return min(self.timed(work) for _ in range(repeats))

    def timed(self, work: Callable[[], object]) -> float:
        """Return the seconds of a call of `work`."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started

    def model(self, size: Size, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
        """Return a model with random weights, created on the device."""
        with self.device:
            model = random_model(kind_of(size), config_of(size), seed=0)
        return model.to(dtype)

    def policy(
        self, size: Size, precision: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32
    ) -> Policy:
        """Return a policy on the device with weights in `dtype` and products in `precision`.

        Small models get weights with a large spread. Otherwise tokens and experts would be nearly
        tied."""
        model = self.model(size, dtype)
        if not size.vocabulary:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        return Policy(model, character_tokenizer(), precision=precision)


def kind_of(size: Size) -> type[transformers.PreTrainedModel]:
    """Return the class of a model of this size."""
    return transformers.Qwen3MoeForCausalLM if size.experts else transformers.Qwen3ForCausalLM


def config_of(size: Size) -> transformers.PretrainedConfig:
    """Return the configuration of a model of this size."""
    tokenizer = character_tokenizer()
    shared: dict[str, Any] = {
        "vocab_size": size.vocabulary or len(tokenizer),
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.width,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "architectures": [kind_of(size).__name__],
    }
    if not size.experts:
        return transformers.Qwen3Config(**shared)
    return transformers.Qwen3MoeConfig(
        **shared,
        num_experts=size.experts,
        num_experts_per_tok=size.experts_per_token,
        moe_intermediate_size=size.width,
        norm_topk_prob=True,
    )


def problems() -> list[Problem]:
    """Return four problems with prompts of different lengths."""
    return [digits_problem(i) for i in range(len(PROMPTS))]


def digits_problem(index: int) -> Problem:
    """Return a problem of the task Digits."""
    prompt = PROMPTS[index % len(PROMPTS)]
    return Problem("digits", index, prompt, None)


def sampled(
    policy: Policy, group_size: int, tokens: int, record_experts: bool = False
) -> list[Response]:
    """Sample responses to the problems with the in-process engine."""
    engine = LocalEngine(policy, dtype=policy.model.dtype)
    return sampled_by(engine, group_size, tokens, record_experts)


def sampled_by(
    engine: Engine, group_size: int, tokens: int, record_experts: bool = False
) -> list[Response]:
    """Sample responses to the problems with an engine."""
    sampling = Sampling(1.0, tokens)
    request = SamplingRequest(
        problems(), group_size, sampling, (1, "check"), record_experts=record_experts
    )
    groups = engine.generate(request)
    return list(chain.from_iterable(groups))


def packed(policy: Policy, responses: list[Response]) -> TrainBatch:
    """Return the responses as a batch with random advantages."""
    batch = pack(responses, policy.pad_id)
    generator = torch.Generator().manual_seed(2)
    adv_B1 = torch.randn(len(responses), 1, generator=generator)
    adv_BT = adv_B1.repeat(1, batch.mask_BT.shape[1])
    old_batch = batch.with_old_policy(batch.engine_logp_BT)
    return old_batch.with_advantages(adv_BT)


def random_batch(rows: int, prompt: int, response: int, vocabulary: int, group: int) -> TrainBatch:
    """Return a batch of `rows` random responses, with a random prompt for each `group` rows."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(vocabulary, (rows // group, prompt), generator=generator)
    responses = torch.randint(vocabulary, (rows, response), generator=generator)
    tokens = torch.cat([prompts.repeat_interleave(group, 0), responses], 1)
    mask = torch.ones(rows, response, dtype=torch.bool)
    zeros = torch.zeros(rows, response)
    return TrainBatch(
        tokens_BS=tokens,
        attention_BS=torch.ones_like(tokens, dtype=torch.bool),
        mask_BT=mask,
        sampled_BT=mask.clone(),
        engine_logp_BT=zeros,
        old_logp_BT=zeros,
        adv_BT=torch.randn(rows, 1, generator=generator).expand(rows, response).contiguous(),
        prompts_B=torch.arange(rows) // group,
    )


def backward(policy: Policy, batch: TrainBatch, micro_batch_size: int) -> list[Tensor]:
    """Return the gradients of the sum of advantage times log-prob.

    Parameters without a gradient are left out."""
    for micro in batch.split(micro_batch_size):
        output = policy.forward(micro, entropy=False)
        on_device = micro.to(policy.device)
        products_BT = output.logp_BT * on_device.adv_BT
        loss = torch.where(on_device.mask_BT, products_BT, 0.0).sum()
        loss.backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    policy.model.zero_grad(set_to_none=True)
    return gradients


def relative_error(tensors: list[Tensor], references: list[Tensor]) -> float:
    """Return the largest error of the tensors, as a share of the reference's largest number.

    It is NaN if a tensor contains NaN."""
    errors = []
    for tensor, reference in zip(tensors, references, strict=True):
        error = (tensor - reference).abs().max()
        largest = reference.abs().max().clamp(min=1e-6)
        errors.append(error / largest)
    return float(torch.stack(errors).max())


@dataclass
class Digits(Task):
    """A task that a random model learns in a hundred steps: the reward is the share of digits."""

    name: str = "digits"

    def size(self, split: str) -> None:
        return None

    def problem(self, seed: int, split: str, index: int) -> Problem:
        return digits_problem(index)

    def score(self, answers: list[tuple[Problem, str, bool]]) -> list[Score]:
        scores = []
        for _, text, _ in answers:
            digits = sum(map(str.isdigit, text))
            share = digits / max(len(text), 1)
            scores.append(Score(share, "digits"))
        return scores

    def evaluation_sets(self) -> list[str]:
        return []
