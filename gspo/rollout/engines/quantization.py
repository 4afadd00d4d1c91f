"""Weights rounded as in an engine of low precision, to study the mismatch of engine and trainer.

    rollout.quantization=fp8_e4m3        weights of 3 mantissa bits, with a scale per output row.
                                         Sums stay as they are
    rollout.quantization=int3            weights that are -3, -2, ..., 3 thirds of the largest
                                         weight of their row

The matrices of attention, MLPs and experts are rounded. As in engines, embeddings, output layer,
norms and routers are not.
"""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gspo.model.policy import Policy

# The largest number of each format. int2 has the four numbers -1.5, -0.5, 0.5 and 1.5. The other
# integers also have 0.
MAX_NUMBER = {
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "fp4_e2m1": 6.0,
    "int4": 7.0,
    "int3": 3.0,
    "int2": 1.5,
}
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # without sign
MIN_SCALE = 1e-30  # of a row of zeros


def quantized(weight: Tensor, number_format: str) -> Tensor:
    """Round a matrix [..., out, in] to a format.

    Each output row is scaled: its largest weight becomes the largest number of the format."""
    weight_float = weight.detach().float()
    max_weight = weight_float.abs().amax(-1, keepdim=True)
    scale = (max_weight / MAX_NUMBER[number_format]).clamp(min=MIN_SCALE)
    scaled = weight_float / scale
    if number_format in FP8_DTYPES:
        rounded = scaled.to(FP8_DTYPES[number_format]).float()
    elif number_format == "int2":
        rounded = (scaled.floor() + 0.5).clamp(-1.5, 1.5)
    elif number_format in ("int3", "int4"):
        rounded = scaled.round()
    else:
        numbers = scaled.new_tensor(FP4_NUMBERS)
        midpoints = (numbers[1:] + numbers[:-1]) / 2
        nearest = torch.bucketize(scaled.abs(), midpoints)
        rounded = numbers[nearest].copysign(scaled)
    return (rounded * scale).to(weight.dtype)


@torch.no_grad()
def quantize(policy: Policy, number_format: str) -> None:
    """Round the matrices of a policy's layers in place."""
    model = policy.model
    not_rounded = [model.get_output_embeddings().weight]
    transposed_ids = set()  # of matrices [..., in, out]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            not_rounded.append(module.weight)
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False):
            transposed_ids |= {id(parameter) for parameter in module.parameters(recurse=False)}
    if policy.routing.layers:
        not_rounded += policy.routing.parameters()
    not_rounded_ids = {id(parameter) for parameter in not_rounded}
    for name, parameter in model.named_parameters():
        is_bias = name.endswith("bias")  # of experts, [E, out]
        if parameter.ndim >= 2 and not is_bias and id(parameter) not in not_rounded_ids:
            if id(parameter) in transposed_ids:
                parameter.copy_(quantized(parameter.mT, number_format).mT)
            else:
                parameter.copy_(quantized(parameter, number_format))
