"""The configurations of some public models.

With them, a laptop without network can plan runs of these models and build stand-ins for them. The
numbers and their names are from config.json on the hub.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# the name of the class in transformers without its ending, and the configuration
Model = tuple[str, dict[str, Any]]

QWEN3 = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}


def _qwen3(
    hidden: int,
    width: int,
    layers: int,
    heads: int,
    tied: bool = True,
) -> Model:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }
    return "Qwen3", QWEN3 | sizes


QWEN3_30B = {
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
QWEN25_1P5B = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
OLMOE_1B_7B = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
PUBLIC_MODELS: dict[str, Model] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-30B-A3B": ("Qwen3Moe", QWEN3 | QWEN3_30B),
    "Qwen/Qwen2.5-1.5B": ("Qwen2", QWEN25_1P5B),
    "allenai/OLMoE-1B-7B-0924": ("Olmoe", OLMOE_1B_7B),
}


def _same_shapes(name: str, public_name: str, positions: int | None = None) -> None:
    """Add a model that has the shapes of another, and perhaps another number of positions."""
    model_class, numbers = PUBLIC_MODELS[public_name]
    own = {"max_position_embeddings": positions} if positions else {}
    PUBLIC_MODELS[name] = (model_class, numbers | own)


for name in [name for name in PUBLIC_MODELS if name.startswith("Qwen/Qwen3")]:
    _same_shapes(f"{name}-Base", name, positions=32768)
for kind, kind_positions in (("Coder-", 32768), ("Math-", 4096)):
    _same_shapes(f"Qwen/Qwen2.5-{kind}1.5B", "Qwen/Qwen2.5-1.5B", kind_positions)
    _same_shapes(f"Qwen/Qwen2.5-{kind}1.5B-Instruct", "Qwen/Qwen2.5-1.5B", kind_positions)
_same_shapes("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B", positions=32768)
for kind in ("SFT", "Instruct"):
    _same_shapes(f"allenai/OLMoE-1B-7B-0924-{kind}", "allenai/OLMoE-1B-7B-0924")


def known_config(name: str) -> PretrainedConfig:
    """Return the configuration of a public model, with its architecture."""
    import transformers

    model_class, numbers = PUBLIC_MODELS[name]
    return with_architecture(getattr(transformers, f"{model_class}Config")(**numbers))


def with_architecture(config: PretrainedConfig) -> PretrainedConfig:
    """Set `architectures` in a configuration, as the files on the hub have it, and return it."""
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    return config
