"""Reads a model's weights from its folder straight into shards, and writes shards as a model
folder.

No rank ever holds the whole model. While it reads, a rank holds its own shard and some rows of one
tensor. While it writes, it holds beside its shard one whole tensor and, in the CPU's memory, the
files that it is to write: rank k writes file k, k + ranks and so on.

transformers keeps the experts of a layer in one tensor, where its folders have tensors for each
expert:

    mlp.experts.gate_up_proj[e]  =  mlp.experts.e.gate_proj.weight  above
                                 mlp.experts.e.up_proj.weight
    mlp.experts.down_proj[e]     =  mlp.experts.e.down_proj.weight
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gspo.distributed.ranks import Ranks
from gspo.io.files import errors_of_the_disk
from gspo.io.untrusted import open_plain_file
from gspo.model.forward.network import FAMILIES
from gspo.model.loading import (
    Loaded,
    check_tokenizer_files,
    load_config,
    one_line,
    save_configuration,
    usable,
    writable,
)
from gspo.model.sharding.dtensors import architecture, full_tensor
from gspo.model.sharding.fsdp import Shards, own_rows

FILE_BYTES = 4e9  # a file of weights has so many, or fewer if ranks would be left without one
# The matrices of an expert that lie above each other in one tensor, by the names that files give
# them.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
PARTS_OF_MIXTRAL = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def in_files(
    kind: str, name: str, rows: range, values: Tensor
) -> Iterator[tuple[str, range, Tensor]]:
    """Yield the tensors of a file that together are the rows `rows` of a parameter of an
    architecture `kind`: the name of each, which of its rows, and the part of `values`, the
    parameter's rows, that they are."""
    mixtral = kind == "MixtralForCausalLM"
    stem = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    if ".experts." not in name:
        yield stem, rows, values
        return
    stem, _, matrix = stem.rpartition(".")
    parts = (PARTS_OF_MIXTRAL if mixtral else PARTS)[matrix]
    for expert, value in zip(rows, values, strict=True):
        for part, of_part in zip(parts, value.chunk(len(parts)), strict=True):
            yield f"{stem}.{expert}.{part}.weight", range(len(of_part)), of_part


# ------------------------------------------------------------------------------------------------------------
# reading
def load_spread(
    path: str, attention: str, shards: Shards, device: str, precision: torch.dtype
) -> Loaded:
    """Load a model from a folder or by a hub name, with its weights, in float32, spread over ranks.

    Raises ValueError, in one line, if the files cannot be read, or are of an architecture that is
    not known here."""
    with one_line(path):
        folder = downloaded(path)
    check_same_files(path, folder, shards.ranks)
    check_tokenizer_files(str(folder))
    with one_line(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = load_config(str(folder), attention)
    kind = (config.architectures or [""])[0]
    if kind not in FAMILIES:
        raise ValueError(
            f"parallel.mode=shard knows {', '.join(FAMILIES)}; model.path={path!r} is a {kind!r}"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"parallel.mode=shard reads weights of 16 or 32 bits; model.path={path!r} has quantized ones"
        )
    with one_line(path):
        with torch.device("meta"):
            model = getattr(transformers, kind)(config).to(torch.float32)
        shards.spread(model, precision)
        model.to_empty(device=device)
        # buffers are in no file: they follow from the configuration
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
        if (folder / "generation_config.json").exists():
            model.generation_config = writable(
                transformers.GenerationConfig.from_pretrained(folder)
            )
        read_weights(model, folder)
    return model, usable(tokenizer, path)


def downloaded(path: str) -> Path:
    """Return the folder of a model, and download it if it is on the hub alone."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    )


def check_same_files(path: str, folder: Path, ranks: Ranks) -> None:
    """Raise ValueError on every rank if one has other files of weights than rank 0, by their names
    and sizes.
    """
    first, *others = ranks.all_gather(
        {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
    )
    for index, found in enumerate(others, start=1):
        if found != first:
            raise ValueError(
                f"model.path={path!r}: rank {index} finds other files there than rank 0"
            )


@torch.no_grad()
def read_weights(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Fill this rank's shard of a model from the files of a folder. Raises ValueError for a weight
    that is missing or has another shape."""
    with ExitStack() as stack:
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            with open_plain_file(path):  # a regular file
                file = stack.enter_context(safe_open(path, "pt"))
            files |= dict.fromkeys(file.keys(), file)
        for name, parameter in model.named_parameters():
            rows, shape = own_rows(parameter), tuple(parameter.shape)
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            for part, wanted, target in in_files(architecture(model), name, rows, local):
                if part not in files:
                    raise ValueError(f"{folder} has no weight {part}")
                stored = files[part].get_slice(part)
                if stored.get_dtype() not in ("F32", "BF16", "F16"):
                    raise ValueError(
                        f"{folder}: {part} is of type {stored.get_dtype()}, not of 16 or 32 bits"
                    )
                expected = shape if target is local else tuple(target.shape)
                if tuple(stored.get_shape()) != expected:
                    raise ValueError(
                        f"{folder}: {part} has the shape {tuple(stored.get_shape())}, not {expected}"
                    )
                target.copy_(stored[wanted.start : wanted.stop])


# ------------------------------------------------------------------------------------------------------------
# writing
Files = dict[str, dict[str, Tensor]]  # tensors by name, by the name of their file


def own_files(model: transformers.PreTrainedModel, ranks: Ranks) -> tuple[Files, dict]:
    """Gather a spread model tensor by tensor. Returns copies on the CPU of what this rank is to
    write, and the content of the index file. All ranks must call this."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    each = min(FILE_BYTES, total / ranks.world_size)
    numbers, before = {}, 0
    for name, parameter in model.named_parameters():
        numbers[name] = int(before / each)
        before += parameter.numel() * parameter.element_size()
    # a tensor may fill several
    places = {number: place for place, number in enumerate(sorted(set(numbers.values())))}
    mine: Files = {}
    where: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        tensor, number = full_tensor(parameter.detach()), places[numbers[name]]
        file = f"model-{number + 1:05d}-of-{len(places):05d}.safetensors"
        kept = tensor.to("cpu", copy=True) if number % ranks.world_size == ranks.rank else tensor
        for part, _, value in in_files(architecture(model), name, range(len(tensor)), kept):
            where[part] = file
            if kept is not tensor:
                mine.setdefault(file, {})[part] = value
    return mine, {"metadata": {"total_size": total}, "weight_map": where}


def write_files(files: Files, folder: Path) -> list[Path]:
    """Write this rank's files of weights into a folder; return their paths. Raises OSError if the
    disk fails.
    """
    for name, tensors in files.items():
        with errors_of_the_disk(folder):
            save_file(
                {part: value.contiguous() for part, value in tensors.items()},
                folder / name,
                {"format": "pt"},
            )
    return [folder / name for name in files]


def write_rest(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    index: dict,
    folder: Path,
) -> None:
    """Write what a model folder has beside its weights: the index of their files, configurations
    and the tokenizer.
    """
    with errors_of_the_disk(folder):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=1), encoding="utf-8"
        )
    save_configuration(model, tokenizer, folder)
