"""Refuses a model's folder that transformers would load in part, or otherwise than it is meant."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import transformers

from gspo.io.errors import SettingError
from gspo.io.tables import counted
from gspo.model.claimed_size import GENERATION_CONFIG, json_content

# quantization methods whose weights transformers dequantizes to 16 bits if it has no kernels
DEQUANTIZED_METHODS = ("mxfp4",)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tokenizer_config.json",
)
MAX_NAMED = 3  # missing weights that a message names


def check_complete(missing: Collection[str], path: str) -> None:
    """Raise ValueError if the files lack weights, which would be random and differ by process."""
    if not missing:
        return
    names = sorted(missing)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    raise SettingError(
        "model.path",
        path,
        f"its files lack {counted(len(names), 'weight')} of the model: "
        f"{', '.join(names[:MAX_NAMED])}{more}",
        remedy="use the folder of a whole causal model, with the names that transformers gives",
    )


def check_not_quantized(
    config: transformers.PretrainedConfig,
    path: str,
    allowed: tuple[str, ...] = DEQUANTIZED_METHODS,
) -> None:
    """Raise ValueError if a model's weights are quantized with a method that is not `allowed`."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    as_dict = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = getattr(as_dict.get("quant_method"), "value", as_dict.get("quant_method"))
    if method not in allowed:
        raise SettingError(
            "model.path",
            path,
            f"its weights are quantized ({method}), and such weights cannot be trained, "
            "not with policy.lora either",
            remedy="use the folder of 16 or 32 bits that it was made from",
        )


def check_generation_config(path: str) -> None:
    """Raise ValueError if a folder's generation_config.json cannot be read or names no stop tokens.

    transformers would load the model without it, and responses would not stop at its tokens."""
    file = Path(path) / GENERATION_CONFIG
    if not file.is_file():
        return
    content = json_content(file)
    if not isinstance(content, dict):
        raise SettingError(
            "model.path", path, f"{GENERATION_CONFIG} is no JSON object", remedy="mend or remove it"
        )
    stop_ids = content.get("eos_token_id")
    ids = stop_ids if isinstance(stop_ids, list) else [stop_ids]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | None):
            raise SettingError(
                "model.path",
                path,
                f"{GENERATION_CONFIG} says eos_token_id={stop_ids!r}",
                remedy="give the number of a token, or a list of numbers",
            )


def check_tokenizer_files(path: str) -> None:
    """Raise ValueError for a model folder without tokenizer.

    transformers would make a tokenizer that knows no text."""
    folder = Path(path)
    has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    if (folder / "config.json").is_file() and not has_tokenizer:
        raise SettingError(
            "model.path",
            path,
            f"has no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
            remedy="copy the tokenizer's files of the model that it was made from into the folder",
        )
