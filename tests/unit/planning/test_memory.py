"""What the planner says of memory, against what real processes take, and against numbers worked out
by hand.
"""

import ctypes
import gc

import pytest
import torch
from transformers import OlmoeConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from builders import small_policy
from daily import daily_but
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.model.settings import LoraSettings
from gspo.planning.memory import Work, batch, measure
from gspo.planning.models import class_of
from memory import peak
from ranked import ranked

SIZES = {
    "vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS = {
    "dense": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "untied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "moe": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=384
    ),
    "qwen2.5": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "olmoe": lambda: OlmoeConfig(
        **SIZES | {"intermediate_size": 384, "num_key_value_heads": 8},
        num_experts=16,
        num_experts_per_tok=4,
    ),
}


def small_config(kind):
    config = CONFIGS[kind]()
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config._attn_implementation = "sdpa"
    config.eos_token_id = config.pad_token_id = 0
    return config


def work(ranks=1, size=1, rows=4, response=400, **others):
    others = {
        "precision": torch.float32,
        "checkpointing": False,
        "cuda": False,
        "experts": 1,
    } | others
    return Work(
        ranks=ranks,
        shard_size=size,
        rows=rows,
        scored=rows,
        prompt=40,
        response=response,
        group=rows,
        **others,
    )


def taken(config, work: Work, ranks: Ranks) -> tuple[int, int, int]:
    """Bytes of this rank's weights, and by how much it grows in scoring and in two micro-batches
    that learn.
    """
    give_back_at_once()  # spreading frees most of the model, which later tensors would take unseen
    model = class_of(config)(config)
    shards = None
    if work.shard_size > 1:
        from gspo.model.sharding.fsdp import Shards

        shards = Shards(ranks, work.shard_size, "cpu", work.experts)
        shards.shard_model(model, work.precision)
    policy = Policy(
        model,
        small_policy().tokenizer,
        precision=work.precision,
        checkpointing=work.checkpointing,
        shards=shards,
    )
    if work.lora.rank:
        policy.adapt(work.lora, seed=1)
    micro = batch(work, work.rows)
    micro.tokens_BS.random_(1, config.vocab_size)  # equal tokens would all go to the same experts
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with peak() as scoring, torch.no_grad():
        policy.forward(micro)
    with peak() as update:
        for _ in range(2):
            policy.forward(micro).logp_BT.sum().backward()
    weights = sum((p.to_local() if shards else p).nbytes for p in model.parameters())
    return weights, scoring[0], update[0]


def give_back_at_once() -> None:
    """Let the C library give memory back where it is freed, instead of keeping it for later."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: from 64 KB on


CASES = {
    "dense": ("dense", work()),
    "untied": ("untied", work()),
    "moe": ("moe", work()),
    "moe, layers computed again": ("moe", work(checkpointing=True)),
    "dense, layers computed again": ("dense", work(checkpointing=True)),
    "untied, layers computed again": ("untied", work(checkpointing=True)),
    "qwen2.5": ("qwen2.5", work()),
    "qwen2.5, layers computed again": ("qwen2.5", work(checkpointing=True)),
    "olmoe": ("olmoe", work()),
    "olmoe, layers computed again": ("olmoe", work(checkpointing=True)),
    "dense, adapter": ("dense", work(lora=LoraSettings(8))),
    "untied, adapter, layers computed again": (
        "untied",
        work(lora=LoraSettings(8), checkpointing=True),
    ),
    "moe, adapter": ("moe", work(lora=LoraSettings(8))),
    "moe, two ranks": ("moe", work(2, 2)),
    "dense, two ranks": ("dense", work(2, 2)),
    "moe, three ranks": ("moe", work(3, 3, checkpointing=True)),
    "moe, two copies": ("moe", work(4, 2, rows=2)),
    "moe, experts dealt to two": ("moe", work(2, 2, experts=2)),
    "moe, experts dealt to two of four": ("moe", work(4, 4, rows=2, experts=2, checkpointing=True)),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_attn_implementation", "eager"),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    ],
)
def test_a_setting_that_rules_out_our_forward_has_no_plan(name, value):
    config = small_config("dense")
    setattr(config, name, value)
    with pytest.raises(ValueError, match="run through gspo's own forward, and a setting of this"):
        measure(config, work())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    daily_but(
        CASES,
        "olmoe",
        "moe, adapter",
        "moe, experts dealt to two of four",
    ),
)
def test_real_processes_take_what_was_planned(case):
    """Within 15 %, of what the rank with most grows beside its weights: gradients of what is
    trained, activations, gathered weights, logits."""
    kind, at_once = CASES[case]
    planned = measure(small_config(kind), at_once)
    found = ranked(at_once.ranks, lambda ranks: taken(small_config(kind), at_once, ranks))
    weights, scoring, update = (max(each) for each in zip(*found, strict=True))
    assert weights == pytest.approx(planned.weights, rel=0.01)
    assert update == pytest.approx(planned.trained + planned.update, rel=0.15)
    assert 0.5 * planned.scoring < scoring < 1.3 * planned.scoring, (
        "too short to be seen whole, and never the most"
    )
