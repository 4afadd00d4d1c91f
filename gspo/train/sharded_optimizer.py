"""Writes the state of an optimizer that is spread over ranks, and reads it into any number of
ranks, by PyTorch's distributed checkpoint (DCP): every rank writes a file, and what a rank reads is
cut as it needs it.

optimizer/shard-00001-model-00001-of-00001.safetensors    rank 0's share of each parameter's exp_avg
                                                          and exp_avg_sq
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy

FOLDER = "optimizer"


def begin_writing(policy: Policy, optimizer: Optimizer, checkpoint: Path, ranks: Ranks) -> Future:
    """Copy this rank's share and begin to write it into the folder of a checkpoint. All ranks must
    call this. They exchange over `ranks`, which must be used for nothing else until the result is
    there."""
    return dcp.async_save(
        by_name(policy, optimizer),
        storage_writer=dcp.HuggingFaceStorageWriter(
            str(checkpoint / FOLDER), save_distributed=True
        ),
        process_group=ranks.group,
    )


def by_name(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state of every parameter that has one, under the parameter's name:
    `lm_head.weight/exp_avg`.
    """
    return {
        f"{name}/{key}": value
        for name, parameter in named_parameters(policy)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def named_parameters(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters of the model and of the critic."""
    head = policy.value_head.named_parameters(prefix="value_head") if policy.value_head else ()
    return [*policy.model.named_parameters(), *head]


def load_shards(folder: Path, policy: Policy, optimizer: Optimizer) -> None:
    """Fill an optimizer with the state that a checkpoint has for its parameters, each rank with its
    shard. Raises ValueError if the state is not that of these parameters."""
    reader = dcp.HuggingFaceStorageReader(str(folder / FOLDER))
    stored = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Tensor] = {}
    for name, parameter in named_parameters(policy):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{name}/{key}" not in stored:
                continue
            # where fused AdamW keeps it
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            like = step if key == "step" else torch.zeros_like(parameter)
            if stored[f"{name}/{key}"].size != like.shape:
                raise ValueError(f"{folder}: the optimizer's state of {name} has another shape")
            optimizer.state[parameter][key] = wanted[f"{name}/{key}"] = like.detach()
    if unknown := stored.keys() - wanted.keys():
        raise ValueError(
            f"{folder} has an optimizer's state of {min(unknown)}, which this model does not have"
        )
    dcp.load(wanted, storage_reader=reader, no_dist=not policy.shards)


def spread_state(optimizer: Optimizer) -> None:
    """Spread an optimizer's state, of which every rank has all, as the parameters are."""
    for parameter, state in optimizer.state.items():
        if hasattr(parameter, "device_mesh"):
            for key, value in state.items():
                if value.shape == parameter.shape and value.ndim:
                    mesh, placements = parameter.device_mesh, parameter.placements
                    state[key] = distribute_tensor(value, mesh, placements, src_data_rank=None)
