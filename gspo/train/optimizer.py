"""The optimizer and its groups of parameters: AdamW of PyTorch, or of bitsandbytes with moments of
8 bits.

For example, AdamW's two moments in float32 take 8 bytes for every weight. With
`optim.name=adamw_8bit` they take 2: each is a number of 8 bits, in blocks of 256 with a scale of
their own (arXiv:2110.02861). The update itself, and the moments of tensors with less than 4096
numbers, stay in float32. `paged_adamw_8bit` keeps them in memory that a GPU shares with the host,
whose pages leave the GPU where that is full (arXiv:2305.14314).
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from torch.optim import Optimizer

from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import device_mesh
from gspo.train.settings import OptimSettings


def make_optimizer(groups: list[dict[str, Any]], settings: OptimSettings) -> Optimizer:
    """Return the optimizer of these groups of parameters. Raises ValueError if it is not there, as
    `check_optimizer` does."""
    check_optimizer(settings, groups[0]["params"][0].device.type)
    betas = (settings.beta1, settings.beta2)
    common = {
        "lr": settings.lr,
        "betas": betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, **common, fused=True)
    import bitsandbytes  # it is an extra, and imported only where it is used

    paged = settings.name == "paged_adamw_8bit"
    return (bitsandbytes.optim.PagedAdamW8bit if paged else bitsandbytes.optim.AdamW8bit)(
        groups, **common
    )


def check_optimizer(settings: OptimSettings, device: str) -> None:
    """Raise ValueError, naming the setting, if the optimizer's library is not installed or cannot
    do it on `device`.
    """
    if settings.name == "adamw":
        return
    if not find_spec("bitsandbytes"):
        raise ValueError(
            f"optim.name={settings.name}: bitsandbytes is not installed; pip install 'gspo[eight_bit]'"
        )
    if settings.name == "paged_adamw_8bit" and not device.startswith("cuda"):
        raise ValueError(
            f"optim.name={settings.name}: pages move between a GPU and its host, and the policy is on {device}; use "
            "adamw_8bit"
        )


def parameter_groups(
    policy: Policy, router_lr_factor: float, freeze_router: bool
) -> list[dict[str, Any]]:
    """Return the optimizer's groups: all parameters, and the routers by themselves if their
    learning rate is another. Within each, parameters that are spread over other ranks than their
    neighbours, or over none as a critic's, are by themselves: the optimizer's fused and foreach
    forms take one kind at a time.

    Raises ValueError if there is no router to freeze or to give another learning rate."""
    everything = policy.parameters()
    groups: list[dict[str, Any]] = [{"params": everything}]
    if freeze_router:
        for parameter in policy.routing.parameters():
            parameter.requires_grad_(False)
        groups = [{"params": [p for p in everything if p.requires_grad]}]
    elif router_lr_factor != 1:
        routers = policy.routing.parameters()
        its_own = {id(p) for p in routers}
        others = [p for p in everything if id(p) not in its_own]
        groups = [{"params": others}, {"params": routers, "lr_factor": router_lr_factor}]
    return [
        group | {"params": list(alike)}
        for group in groups
        # a checkpoint counts on their order
        for _, alike in groupby(group["params"], key=device_mesh)
    ]
