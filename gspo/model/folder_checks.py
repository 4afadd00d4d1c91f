"""Refuses a model's folder that transformers would load in part, or otherwise than it is meant."""

import json
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open

from gspo.io import untrusted
from gspo.io.errors import SettingError
from gspo.io.tables import counted
from gspo.model.claimed_size import GENERATION_CONFIG, MAX_CONFIG_BYTES, weight_files

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
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ROWS_AT_ONCE = 4096  # rows of a vocabulary that are compared at a time
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


def check_tied_head(config: transformers.PretrainedConfig, path: str) -> None:
    """Raise ValueError if the files hold a head that differs from the embedding it is tied to.

    It is for models that are built without their weights. transformers compares the two itself when
    it loads weights."""
    if not getattr(config, "tie_word_embeddings", False) or not Path(path).is_dir():
        return
    with ExitStack() as stack:
        stored = {}
        for file in weight_files(Path(path)):
            try:
                opened = stack.enter_context(safe_open(file, "pt"))
            # whoever reads the weights refuses the file
            except (OSError, SafetensorError):
                return
            names = {HEAD, EMBEDDING}.intersection(opened.keys())
            stored |= dict.fromkeys(names, opened)
        if len(stored) < 2:
            return
        head = stored[HEAD].get_slice(HEAD)
        embedding = stored[EMBEDDING].get_slice(EMBEDDING)
        rows = embedding.get_shape()[0]
        is_same = head.get_shape() == embedding.get_shape() and all(
            torch.equal(head[i : i + ROWS_AT_ONCE], embedding[i : i + ROWS_AT_ONCE])
            for i in range(0, rows, ROWS_AT_ONCE)
        )
    if not is_same:
        raise SettingError(
            "model.path",
            path,
            f"config.json says tie_word_embeddings=true, but {HEAD} differs from the input "
            "embedding",
            remedy="set it to false",
        )


def check_generation_config(path: str) -> None:
    """Raise ValueError if a folder's generation_config.json cannot be read or names no stop tokens.

    transformers would load the model without it, and responses would not stop at its tokens."""
    file = Path(path) / GENERATION_CONFIG
    if not file.is_file():
        return
    try:
        # as transformers reads it: without byte order mark, in UTF-8
        content = json.loads(untrusted.read_bytes(file.resolve(), MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise SettingError(
            "model.path", path, f"{GENERATION_CONFIG} is no JSON object", remedy="fix or remove it"
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
