"""Compares the size of a model that config.json claims with the weights that are there, before the
model is built.

A configuration of a few hundred bytes may ask for millions of layers, or for a vocabulary of
gigabytes. The weights' files say at their beginning which tensors they hold, and reading that takes
next to no time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from gspo.io import untrusted

MOST_HEADER = 100 << 20  # bytes: what the format safetensors allows
MOST_SETTINGS = 64 << 20  # bytes of a file of settings, or of the weights' index
# numbers for each byte: of some quantized formats two share one, and tied weights are stored once
MORE_THAN_STORED = 2
FEW_LAYERS = 64  # as many are built whatever the weights are
SMALL = 1 << 24  # numbers: a model up to this size is built whatever its weights are
# of the whole numbers in a model's settings, but for those that stand for no size
LARGEST = 10_000_000
NO_SIZES = ("theta", "base", "position", "length", "window", "freq", "seed", "token_id")
# parts of the names of settings that say how many layers there are
LAYERS = ("layers", "n_layer", "n_blocks")
SIZES = ("vocab", "hidden", "size", "dim", "width", "embd", "inner", "heads", "experts", "rank")
SETTINGS = ("config.json", "tokenizer_config.json", "generation_config.json")
INDEX = "model.safetensors.index.json"


def check_stated_sizes(path: str) -> None:
    """Raise ValueError if a model folder's settings state a size, or a number of layers, beyond any
    model's or beyond what its weights have. This comes before transformers reads them, which makes
    lists of so many entries.

    A name of the hub is not checked."""
    folder = Path(path)
    for name in SETTINGS if folder.is_dir() else ():
        if (folder / name).is_file():
            for key, value in claimed_numbers(content_of(folder / name)):
                if abs(value) > LARGEST and not any(part in key.lower() for part in NO_SIZES):
                    raise ValueError(
                        f"model.path={path!r}: {name} says {key}={value}, which no model has"
                    )
    stored = stored_in(path)
    if stored is None or not (folder / "config.json").is_file():
        return
    tensors, size = stored
    for key, value in claimed_numbers(content_of(folder / "config.json")):
        name = key.rpartition(".")[2]
        if any(part in name for part in LAYERS) and value > max(tensors, FEW_LAYERS):
            raise ValueError(
                f"model.path={path!r}: config.json says {key}={value}, but its weights are {tensors} tensors"
            )
        if any(part in name for part in SIZES) and value > max(size, SMALL):
            raise ValueError(
                f"model.path={path!r}: config.json says {key}={value}, but its weights are {size:,} bytes in all"
            )


def check_claimed_size(config: transformers.PretrainedConfig, path: str) -> None:
    """Raise ValueError if a model folder's configuration makes far more numbers than its weights
    have.
    """
    stored = stored_in(path)
    if stored is None:
        return
    try:
        with torch.device("meta"):
            outline = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (
        Exception
    ):  # transformers raises exceptions of many types; loading the model says what is wrong
        return
    claimed = sum(parameter.numel() for parameter in outline.parameters())
    if claimed > max(MORE_THAN_STORED * stored[1], SMALL):
        raise ValueError(
            f"model.path={path!r}: config.json makes a model of {claimed:,} numbers, but its weights are {stored[1]:,} "
            "bytes in all"
        )


def stored_in(path: str) -> tuple[int, int] | None:
    """Return how many tensors, and bytes of them, a folder's weights have; None for another path,
    and for a folder without weights. Of several files those count that transformers would read."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    if (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    elif (folder / INDEX).exists():
        index = content_of(folder / INDEX)
        places = index.get("weight_map") if isinstance(index, dict) else None
        names = {str(name) for name in places.values()} if isinstance(places, dict) else set()
        files = [untrusted.path_inside(folder, name) for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    counts = [stored_tensors(file) for file in files]
    return sum(tensors for tensors, _ in counts), sum(size for _, size in counts)


def stored_tensors(file: Path) -> tuple[int, int]:
    """Return how many tensors, and bytes of them, a file of weights has. Raises ValueError for a
    file that is no safetensors, or shorter than its tensors."""
    try:
        with untrusted.open_plain_file(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MOST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
            size = os.fstat(opened.fileno()).st_size - 8 - length
        ends = [about["data_offsets"] for name, about in header.items() if name != "__metadata__"]
        if any(not 0 <= begin <= end <= size for begin, end in ends):
            raise ValueError("it is shorter than its tensors")
        return len(ends), sum(end - begin for begin, end in ends)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors: {type(error).__name__}: {error}"[:300]
        ) from None


def content_of(file: Path) -> Any:
    """Return what a JSON file holds; None for one that cannot be read, which loading the model
    refuses.
    """
    try:
        return json.loads(untrusted.read_bytes(file, MOST_SETTINGS))
    except (OSError, ValueError, RecursionError):
        return None


def claimed_numbers(content: Any, prefix: str = "") -> list[tuple[str, int]]:
    """Return the whole numbers of a configuration with their dotted keys."""
    if isinstance(content, dict):
        return [
            pair
            for key, value in content.items()
            for pair in claimed_numbers(value, f"{prefix}{key}.")
        ]
    if isinstance(content, int) and not isinstance(content, bool):
        return [(prefix.rstrip("."), content)]
    return []
