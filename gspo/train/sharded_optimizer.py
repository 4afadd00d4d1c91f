"""Writes the optimizer's state of a sharded model, and reads it into any number of ranks.

It uses PyTorch's distributed checkpoint (DCP). Every rank writes a file, and each rank reads the
parts that it needs.

optimizer/shard-00001-model-00001-of-00001.safetensors    rank 0's share of each parameter's exp_avg
                                                          and exp_avg_sq
"""

from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gspo.distributed.ranks import DistributedRanks, Ranks
from gspo.model.policy import Policy

FOLDER = "optimizer"


def begin_writing(policy: Policy, optimizer: Optimizer, checkpoint: Path, ranks: Ranks) -> Future:
    """Copy this rank's share, begin to write it into a checkpoint's folder, and return the future.

    All ranks must call this. They exchange over `ranks`, which must be used for nothing else until
    the future is done."""
    if not isinstance(ranks, DistributedRanks):
        raise TypeError("DCP exchanges over a group of torch.distributed")
    folder = str(checkpoint / FOLDER)
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    tensors = by_name(policy, optimizer)
    saving = dcp.async_save(tensors, storage_writer=writer, process_group=ranks.group)
    return saving if isinstance(saving, Future) else saving.upload_completion


def by_name(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by the names of the parameters: `lm_head.weight/exp_avg`."""
    tensors = {}
    for name, parameter in named_parameters(policy):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            tensors[f"{name}/{key}"] = value
    return tensors


def named_parameters(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters of the model and of the critic."""
    parameters = list(policy.model.named_parameters())
    if policy.value_head:
        parameters += policy.value_head.named_parameters(prefix="value_head")
    return parameters


def load_shards(folder: Path, policy: Policy, optimizer: Optimizer) -> None:
    """Load a checkpoint's state into an optimizer, each rank its shard.

    Raises ValueError if the state belongs to other parameters."""
    reader = dcp.HuggingFaceStorageReader(str(folder / FOLDER))
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_parameters(policy):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            path = f"{name}/{key}"
            metadata = stored.get(path)
            if metadata is None:
                continue
            if key == "step":
                # fused AdamW keeps it on the parameter's device
                tensor = torch.zeros((), dtype=torch.float32, device=parameter.device)
            else:
                tensor = torch.zeros_like(parameter).detach()
            if not isinstance(metadata, TensorStorageMetadata) or metadata.size != tensor.shape:
                raise ValueError(f"{folder}: the optimizer's state of {name} has another shape")
            optimizer.state[parameter][key] = tensor
            tensors[path] = tensor
    unknown = stored.keys() - tensors.keys()
    if unknown:
        raise ValueError(
            f"{folder} has an optimizer's state of {min(unknown)}, which this model does not have"
        )
    dcp.load(tensors, storage_reader=reader, no_dist=not policy.shards)


def shard_state(optimizer: Optimizer) -> None:
    """Shard an optimizer's state as its parameters are sharded. Every rank has all of the state."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for key, value in state.items():
                if value.shape == parameter.shape and value.ndim:
                    state[key] = distribute_tensor(
                        value, mesh, parameter.placements, src_data_rank=None
                    )
