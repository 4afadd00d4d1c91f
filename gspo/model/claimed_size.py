"""Compares the size of a model in config.json with its weights, before the model is built.

A configuration of a few hundred bytes may ask for millions of layers, or for a vocabulary of
gigabytes. The files of weights list their tensors at their beginning, and this list is quick to
read.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from gspo.io import untrusted
from gspo.io.errors import SettingError

# the maximum that the format safetensors allows
MAX_HEADER_BYTES = 100 << 20
# of a configuration file, or of the weights' index
MAX_CONFIG_BYTES = 64 << 20
# In some quantized formats two parameters share a byte. Tied weights are stored once.
MAX_PARAMETERS_PER_BYTE = 2
# up to this number of layers is allowed with any weights
ALWAYS_ALLOWED_LAYERS = 64
# a model of up to this number of parameters is allowed with any weights
ALWAYS_ALLOWED_PARAMETERS = 1 << 24
# the maximum of an integer in a configuration, except for the names below, which are no sizes
MAX_SIZE = 10_000_000
NAMES_OF_NO_SIZE = ("theta", "base", "position", "length", "window", "freq", "seed", "token_id")
# transformers makes a name for each label of a classifier
MAX_LABELS = 100_000
# buffers, such as a table of all positions, of up to so many numbers are allowed with any weights
ALWAYS_ALLOWED_BUFFERS = 1 << 28
# parts of the names of settings that are a number of layers
LAYER_NAMES = ("layers", "n_layer", "n_blocks")
# Qwen2's number of layers without window, which may be more than the model's layers
NAMES_OF_NO_LAYERS = ("max_window_layers",)
# parts of the names of settings that are a size
SIZE_NAMES = (
    "vocab",
    "hidden",
    "size",
    "dim",
    "width",
    "embd",
    "inner",
    "heads",
    "experts",
    "rank",
)
GENERATION_CONFIG = "generation_config.json"
CONFIG_FILES = ("config.json", "tokenizer_config.json", GENERATION_CONFIG)
INDEX_FILE = "model.safetensors.index.json"


def check_stated_sizes(path: str) -> None:
    """Raise ValueError if a model folder's configuration states an impossible size.

    A size or a number of layers is impossible if it exceeds the maximum of all models, or of the
    folder's weights. Call this before transformers reads the configuration, because transformers
    makes lists of so many entries. A name on the hub is not checked."""
    folder = Path(path)
    if not folder.is_dir():
        return
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            for key, value in claimed_numbers(json_content(folder / name)):
                is_size = not any(part in key.lower() for part in NAMES_OF_NO_SIZE)
                maximum = MAX_LABELS if key.endswith("num_labels") else MAX_SIZE
                if is_size and abs(value) > maximum:
                    raise SettingError(
                        "model.path", path, f"{name} says {key}={value}, which no model has"
                    )
    try:
        stored = stored_in(path)
    # loading the model refuses such weights, and a plan needs none
    except ValueError:
        return
    if stored is None or not (folder / "config.json").is_file():
        return
    tensors, stored_bytes = stored
    max_layers = max(tensors, ALWAYS_ALLOWED_LAYERS)
    max_size = max(stored_bytes, ALWAYS_ALLOWED_PARAMETERS)
    for key, value in claimed_numbers(json_content(folder / "config.json")):
        name = key.rpartition(".")[2]
        is_layers = any(part in name for part in LAYER_NAMES) and name not in NAMES_OF_NO_LAYERS
        if is_layers and value > max_layers:
            raise SettingError(
                "model.path",
                path,
                f"config.json says {key}={value}, but its weights are {tensors} tensors",
            )
        if any(part in name for part in SIZE_NAMES) and value > max_size:
            raise SettingError(
                "model.path",
                path,
                f"config.json says {key}={value}, but its weights are {stored_bytes:,} "
                "bytes in all",
            )


def check_claimed_size(config: transformers.PretrainedConfig, path: str) -> None:
    """Raise ValueError if a configuration makes far more numbers than the weights have."""
    stored = stored_in(path)
    if stored is None:
        return
    try:
        with torch.device("meta"):
            outline = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # transformers raises exceptions of many types; the same error ends the loading of the model
    except Exception:
        return
    _, stored_bytes = stored
    claimed = sum(parameter.numel() for parameter in outline.parameters())
    max_numbers = MAX_PARAMETERS_PER_BYTE * stored_bytes
    exceeds = claimed > max(max_numbers, ALWAYS_ALLOWED_PARAMETERS)
    if not exceeds:
        claimed = sum(buffer.numel() for buffer in outline.buffers())
        exceeds = claimed > max(max_numbers, ALWAYS_ALLOWED_BUFFERS)
    if exceeds:
        raise SettingError(
            "model.path",
            path,
            f"config.json makes a model of {claimed:,} numbers, but its weights are "
            f"{stored_bytes:,} bytes in all",
        )


def stored_in(path: str) -> tuple[int, int] | None:
    """Return the number of tensors in a folder's weights, and of their bytes.

    Only the files that transformers would read are counted. The result is None for a path that is
    no folder, or a folder without weights."""
    folder = Path(path)
    files = weight_files(folder) if folder.is_dir() else []
    if not files:
        return None
    counts = [stored_tensors(file) for file in files]
    return sum(tensors for tensors, _ in counts), sum(stored for _, stored in counts)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a model's folder that transformers would read."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if not (folder / INDEX_FILE).exists():
        return sorted(folder.glob("*.safetensors"))
    index = json_content(folder / INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return [untrusted.path_inside(folder, name) for name in sorted({str(name) for name in names})]


def stored_tensors(file: Path) -> tuple[int, int]:
    """Return the number of tensors in a file of weights, and of their bytes.

    Raises ValueError for a file that is no safetensors, or is shorter than its tensors."""
    try:
        # the Hugging Face cache links to its files
        with untrusted.open_plain_file(file.resolve()) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
            size = os.fstat(opened.fileno()).st_size - 8 - length
        header.pop("__metadata__", None)
        offsets = [tensor["data_offsets"] for tensor in header.values()]
        if any(not 0 <= begin <= end <= size for begin, end in offsets):
            raise ValueError("it is shorter than its tensors")
        return len(offsets), sum(end - begin for begin, end in offsets)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors: {type(error).__name__}: {error}"[:300]
        ) from None


def json_content(file: Path) -> Any:
    """Return the content of a JSON file, None if it cannot be read.

    Loading the model refuses such a file."""
    try:
        return json.loads(untrusted.read_bytes(file.resolve(), MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def claimed_numbers(content: Any, prefix: str = "") -> list[tuple[str, int]]:
    """Return the integers of a configuration with their dotted keys, also of those in lists."""
    if isinstance(content, dict):
        numbers = []
        for key, value in content.items():
            numbers += claimed_numbers(value, f"{prefix}{key}.")
        return numbers
    if isinstance(content, list):
        return [number for item in content for number in claimed_numbers(item, prefix)]
    if isinstance(content, int) and not isinstance(content, bool):
        return [(prefix.rstrip("."), content)]
    return []
