"""The optimizer and its parameter groups: AdamW of PyTorch, or of bitsandbytes with 8-bit moments.

AdamW's two moments in float32 take 8 bytes for every weight. With
`optim.name=adamw_8bit` they take 2: each is a number of 8 bits, in blocks of 256 that have a scale
each (arXiv:2110.02861). The update itself, and the moments of tensors with less than 4096 numbers,
stay in float32. `paged_adamw_8bit` keeps the moments in memory that a GPU shares with the host. Its
pages leave the GPU when the GPU is full (arXiv:2305.14314).
"""

from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from gspo.io.errors import SettingError
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import device_mesh
from gspo.train.settings import OptimSettings


def make_optimizer(groups: list[dict[str, Any]], settings: OptimSettings) -> Optimizer:
    """Return the optimizer of parameter groups. Raises ValueError as `check_optimizer` does."""
    parameter = groups[0]["params"][0]
    check_optimizer(settings, parameter.device.type)
    common: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, **common, fused=True)
    import bitsandbytes  # an optional dependency

    if settings.name == "paged_adamw_8bit":
        return bitsandbytes.optim.PagedAdamW8bit(groups, **common)
    return bitsandbytes.optim.AdamW8bit(groups, **common)


def check_optimizer(settings: OptimSettings, device: str) -> None:
    """Raise ValueError if the optimizer's library is not installed or does not support `device`."""
    if settings.name == "adamw":
        return
    if not find_spec("bitsandbytes"):
        raise SettingError(
            "optim.name",
            settings.name,
            "bitsandbytes is not installed",
            remedy="pip install -e '.[eight_bit]'",
        )
    if settings.name == "paged_adamw_8bit" and not device.startswith("cuda"):
        raise SettingError(
            "optim.name",
            settings.name,
            f"pages move between a GPU and its host, and the policy is on {device}",
            remedy="use adamw_8bit",
        )


def parameter_groups(
    policy: Policy, router_lr_factor: float, freeze_router: bool
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups.

    Routers have a group if their learning rate differs. Consecutive parameters that are sharded
    over the same ranks form a group, because the optimizer's fused and foreach forms do not mix
    them. A critic's parameters are not sharded, for example.

    Raises ValueError if there is no router to freeze or to give another learning rate.
    """
    parameters = policy.parameters()
    routers: list[Parameter] = []
    if freeze_router:
        for parameter in policy.routing.parameters():
            parameter.requires_grad_(False)
        parameters = [p for p in parameters if p.requires_grad]
    elif router_lr_factor != 1:
        routers = policy.routing.parameters()
        router_ids = {id(p) for p in routers}
        parameters = [p for p in parameters if id(p) not in router_ids]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if routers:
        groups.append({"params": routers, "lr_factor": router_lr_factor})
    return [
        group | {"params": list(same_mesh)}
        for group in groups
        # a checkpoint counts on their order
        for _, same_mesh in groupby(group["params"], key=device_mesh)
    ]
