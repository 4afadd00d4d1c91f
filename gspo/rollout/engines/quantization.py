"""Rounds weights as an engine of low precision holds them, to study what the mismatch of engine and
trainer does.

    rollout.quantization=fp8_e4m3        weights of 3 mantissa bits, a scale for each output row;
                                         sums stay as they are
    rollout.quantization=int3            weights that are -3, -2, ..., 3 thirds of their row's
                                         largest

Rounded are the matrices of attention, MLPs and experts. As in engines, embeddings, output layer,
norms and routers are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.model.policy import Policy

# The largest number of each format. int2 has the four numbers -1.5, -0.5, 0.5 and 1.5, the other
# integers also 0.
LARGEST = {
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "fp4_e2m1": 6.0,
    "int4": 7.0,
    "int3": 3.0,
    "int2": 1.5,
}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # those without sign


def rounded(weight: Tensor, kind: str) -> Tensor:
    """Round a matrix [..., out, in] to a format, each output row scaled so that its largest weight
    is the format's.
    """
    scale = (weight.detach().float().abs().amax(-1, keepdim=True) / LARGEST[kind]).clamp(min=1e-30)
    scaled = weight.detach().float() / scale
    if kind in FP8:
        near = scaled.to(FP8[kind]).float()
    elif kind == "int2":
        near = (scaled.floor() + 0.5).clamp(-1.5, 1.5)
    elif kind in ("int3", "int4"):
        near = scaled.round()
    else:
        numbers = scaled.new_tensor(FP4_NUMBERS)
        middles = (numbers[1:] + numbers[:-1]) / 2
        near = numbers[torch.bucketize(scaled.abs(), middles)].copysign(scaled)
    return (near * scale).to(weight.dtype)


@torch.no_grad()
def quantize(policy: Policy, kind: str) -> None:
    """Round the matrices of a policy's layers in place."""
    model = policy.model
    kept = {
        id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    kept |= {
        id(parameter) for router in policy.routing.routers for parameter in router.parameters()
    }
    for parameter in model.parameters():
        if parameter.ndim >= 2 and id(parameter) not in kept:
            parameter.copy_(rounded(parameter, kind))
