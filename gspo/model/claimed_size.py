"""Compares the size of a model that config.json claims with the weights that are there, before the model is built.

A configuration of a few hundred bytes may ask for millions of layers, or for a vocabulary of gigabytes. The weights'
files say at their beginning which tensors they hold, and reading that takes next to no time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from gspo.core import untrusted

MOST_HEADER = 100 << 20  # bytes: what the format safetensors allows
# Tied weights are stored once, and of some quantized formats two numbers share a byte.
MORE_THAN_STORED = 4
FEW_LAYERS = 64  # as many are built whatever the weights are
SMALL = 1 << 24  # numbers: a model up to this size is built whatever its weights are
LAYERS = ("layers", "n_layer", "n_blocks")  # parts of the names of settings that say how many layers there are
SIZES = ("vocab", "hidden", "size", "dim", "width", "embd", "inner", "heads", "experts", "rank")


def check_stated_sizes(path: str) -> None:
    """Raise ValueError if a model folder's config.json states a size, or a number of layers, beyond what its weights
    have. This comes before transformers reads the file, which makes a list of as many entries as there are layers.

    A name of the hub is not checked."""
    file = Path(path) / "config.json"
    shapes = shapes_in(path)
    if shapes is None or not file.is_file():
        return
    tensors, numbers = len(shapes), sum(torch.Size(shape).numel() for shape in shapes)
    for key, value in claimed_numbers(untrusted.read_json(file)):
        name = key.rpartition(".")[2]
        if any(part in name for part in LAYERS) and value > max(tensors, FEW_LAYERS):
            raise ValueError(
                f"model.path={path!r}: config.json says {key}={value}, but its weights are {tensors} tensors"
            )
        if any(part in name for part in SIZES) and value > max(numbers, SMALL):
            raise ValueError(
                f"model.path={path!r}: config.json says {key}={value}, but its weights are {numbers:,} numbers in all"
            )


def check_claimed_size(config: transformers.PretrainedConfig, path: str) -> None:
    """Raise ValueError if a model folder's configuration makes far more numbers than its weights have."""
    shapes = shapes_in(path)
    if shapes is None:
        return
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    try:
        with torch.device("meta"):
            outline = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # transformers raises exceptions of many types; loading the model says what is wrong
        return
    claimed = sum(parameter.numel() for parameter in outline.parameters())
    if claimed > max(MORE_THAN_STORED * numbers, SMALL):
        raise ValueError(
            f"model.path={path!r}: config.json makes a model of {claimed:,} numbers, but its weights are {numbers:,} "
            "numbers in all"
        )


def shapes_in(path: str) -> list[list[int]] | None:
    """Return the shapes of all tensors in a folder's files of weights; None if there are none, or no folder."""
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    return [shape for file in files for shape in stored_shapes(file)] if files else None


def stored_shapes(file: Path) -> list[list[int]]:
    """Return the shapes of the tensors in a file of weights. Raises ValueError for a file that is no safetensors."""
    try:
        with untrusted.opened(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MOST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
        shapes = [about["shape"] for name, about in header.items() if name != "__metadata__"]
        return [shape for shape in shapes if all(isinstance(size, int) and 0 <= size < 2**48 for size in shape)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {type(error).__name__}: {error}"[:300]) from None


def claimed_numbers(content: Any, prefix: str = "") -> list[tuple[str, int]]:
    """Return the whole numbers of a configuration with their dotted keys."""
    if isinstance(content, dict):
        return [pair for key, value in content.items() for pair in claimed_numbers(value, f"{prefix}{key}.")]
    if isinstance(content, int) and not isinstance(content, bool):
        return [(prefix.rstrip("."), content)]
    return []
