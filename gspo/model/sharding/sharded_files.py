"""Reads a model's weights from its folder into shards, and writes shards as a model folder.

No rank ever holds the full model. While a rank reads, it holds its own shard and some rows of a
tensor. While it writes, it holds its shard, a full tensor and, in the CPU's memory, the files that
it will write. Rank k writes the files k, k + world_size, and so on.

transformers keeps the experts of a layer in one tensor. Its folders have tensors for each expert:

    mlp.experts.gate_up_proj[e]  =  mlp.experts.e.gate_proj.weight  above
                                    mlp.experts.e.up_proj.weight
    mlp.experts.down_proj[e]     =  mlp.experts.e.down_proj.weight
"""

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
from gspo.io.errors import SettingError
from gspo.io.files import errors_of_the_disk
from gspo.io.untrusted import open_plain_file
from gspo.model.claimed_size import check_claimed_size, weight_files
from gspo.model.folder_checks import check_tied_head, check_tokenizer_files
from gspo.model.forward.network import FAMILIES
from gspo.model.loading import (
    Loaded,
    load_config,
    load_tokenizer,
    reading_model,
    save_configuration,
    usable,
    writable,
)
from gspo.model.sharding.dtensors import architecture, full_tensor, local_tensor
from gspo.model.sharding.fsdp import Shards, local_rows

# bytes of a file of weights; files are smaller if there would be fewer files than ranks
FILE_BYTES = 4e9
# The matrices of an expert that lie above each other in one tensor, by their names in files.
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MIXTRAL_MATRICES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
# The routers of GLM-4.5 have a bias that is no parameter. Only parameters are read and written
# here.
SHARDED_FAMILIES = tuple(name for name in FAMILIES if name != "Glm4MoeForCausalLM")
STORED_DTYPES = ("F32", "BF16", "F16")


def tensors_in_files(
    architecture_name: str,
    name: str,
    rows: range,
    values: Tensor,
) -> Iterator[tuple[str, range, Tensor]]:
    """Yield the tensors of files that together are the rows `rows` of a parameter.

    `values` holds these rows of the parameter. Each tensor is yielded as its name, the range of its
    rows that `values` covers, and the part of `values` for these rows."""
    is_mixtral = architecture_name == "MixtralForCausalLM"
    if is_mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." not in name:
        yield name, rows, values
        return
    stem, _, parameter = name.rpartition(".")
    matrices = (MIXTRAL_MATRICES if is_mixtral else MATRICES)[parameter]
    for expert, value in zip(rows, values, strict=True):
        for matrix, part in zip(matrices, value.chunk(len(matrices)), strict=True):
            yield f"{stem}.{expert}.{matrix}.weight", range(len(part)), part


# -------------------------------------------------------------------------------------------------
# reading
def load_sharded(
    path: str,
    attention: str,
    shards: Shards,
    device: str,
    precision: torch.dtype,
) -> Loaded:
    """Load a model from a folder or by a hub name, in float32, with its weights sharded over ranks.

    Raises ValueError with a single-line message if the files cannot be read, or if the architecture
    is not known here."""
    with reading_model(path):
        folder = downloaded(path)
    check_same_files(path, folder, shards.ranks)
    check_tokenizer_files(str(folder))
    with reading_model(path):
        tokenizer = load_tokenizer(folder)
        config = load_config(str(folder), attention)
    model_class = (config.architectures or [""])[0]
    if model_class not in SHARDED_FAMILIES:
        raise SettingError(
            "parallel.mode",
            "shard",
            f"knows {', '.join(SHARDED_FAMILIES)}; model.path={path!r} is a {model_class!r}",
        )
    if getattr(config, "quantization_config", None):
        raise SettingError(
            "parallel.mode",
            "shard",
            f"reads weights of 16 or 32 bits; model.path={path!r} has quantized ones",
        )
    with reading_model(path):
        check_claimed_size(config, str(folder))
        check_tied_head(config, str(folder))
        with torch.device("meta"):
            model = getattr(transformers, model_class)(config).to(torch.float32)
        shards.shard_model(model, precision)
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
    """Return the folder of a model, and download it first if it is a name on the hub."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    )


def check_same_files(path: str, folder: Path, ranks: Ranks) -> None:
    """Raise ValueError on every rank if ranks have weight files of different names or sizes."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
    sizes_by_rank = ranks.all_gather(sizes)
    for rank, rank_sizes in enumerate(sizes_by_rank):
        if rank_sizes != sizes_by_rank[0]:
            raise SettingError(
                "model.path", path, f"rank {rank} finds other files there than rank 0"
            )


@torch.no_grad()
def read_weights(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Fill this rank's shard of a model from the files of a folder.

    Raises ValueError for a weight that is missing or has another shape."""
    with ExitStack() as stack:
        file_of_tensor = {}
        for path in weight_files(folder):
            # refuses a file that is no regular file; the Hugging Face cache links to its files
            with open_plain_file(path.resolve()):
                file = stack.enter_context(safe_open(path, "pt"))
            file_of_tensor |= dict.fromkeys(file.keys(), file)
        for name, parameter in model.named_parameters():
            local = local_tensor(parameter)
            parts = tensors_in_files(architecture(model), name, local_rows(parameter), local)
            for part, rows, target in parts:
                if part not in file_of_tensor:
                    raise ValueError(f"{folder} has no weight {part}")
                stored = file_of_tensor[part].get_slice(part)
                if stored.get_dtype() not in STORED_DTYPES:
                    raise ValueError(
                        f"{folder}: {part} is of type {stored.get_dtype()}, not of 16 or 32 bits"
                    )
                shape = tuple(stored.get_shape())
                # A part of an expert is a whole tensor of the file. Of any other parameter the
                # file has all rows, and this rank reads some of them.
                is_expert_part = target is not local
                expected = tuple(target.shape if is_expert_part else parameter.shape)
                if shape != expected:
                    raise ValueError(f"{folder}: {part} has the shape {shape}, not {expected}")
                target.copy_(stored[rows.start : rows.stop])


# -------------------------------------------------------------------------------------------------
# writing
Files = dict[str, dict[str, Tensor]]  # tensors by name, by the name of their file


def local_files(model: transformers.PreTrainedModel, ranks: Ranks) -> tuple[Files, dict]:
    """Unshard a model tensor by tensor, and return the files that this rank writes.

    Returns copies of the tensors on the CPU, and the content of the index file. All ranks must call
    this."""
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    file_bytes = min(FILE_BYTES, total_bytes / ranks.world_size)
    file_of_parameter = {}
    bytes_before = 0
    for name, parameter in model.named_parameters():
        file_of_parameter[name] = int(bytes_before / file_bytes)
        bytes_before += parameter.numel() * parameter.element_size()
    # A tensor may be larger than a file, so some numbers are missing.
    numbers = sorted(set(file_of_parameter.values()))
    local: Files = {}
    weight_map: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        tensor = full_tensor(parameter.detach())
        index = numbers.index(file_of_parameter[name])
        file = f"model-{index + 1:05d}-of-{len(numbers):05d}.safetensors"
        is_local = index % ranks.world_size == ranks.rank
        if is_local:
            tensor = tensor.to("cpu", copy=True)
        rows = range(len(tensor))
        for part, _, value in tensors_in_files(architecture(model), name, rows, tensor):
            weight_map[part] = file
            if is_local:
                local.setdefault(file, {})[part] = value
    return local, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}


def write_files(files: Files, folder: Path) -> list[Path]:
    """Write this rank's weight files into a folder, and return their paths.

    Raises OSError if the disk fails."""
    for name, tensors in files.items():
        contiguous = {part: value.contiguous() for part, value in tensors.items()}
        with errors_of_the_disk(folder):
            save_file(contiguous, folder / name, {"format": "pt"})
    return [folder / name for name in files]


def write_rest(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    index: dict,
    folder: Path,
) -> None:
    """Write a model folder without its weights: their index, configurations and the tokenizer."""
    with errors_of_the_disk(folder):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=1), encoding="utf-8"
        )
    save_configuration(model, tokenizer, folder)
