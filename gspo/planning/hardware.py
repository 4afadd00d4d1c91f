"""The machines that the planner knows, and the parts of their peak speeds that a run reaches.

Numbers are from the makers' data sheets: dense bfloat16 arithmetic without sparsity, and the
bandwidth of links in a single direction. `network` is a GPU's bandwidth to other machines, and
50 GB/s is a 400 Gb/s adapter per GPU.
"""

from dataclasses import dataclass, fields, replace

from gspo.io.arguments import nearest
from gspo.io.errors import SettingError

GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU, and the links between GPUs."""

    name: str
    memory: float  # GB
    flops: float  # 10^12 bfloat16 operations per second
    bandwidth: float  # GB/s of the GPU's memory
    link: float  # GB/s to the other GPUs of the machine, in one direction
    network: float  # GB/s to other machines
    per_machine: int  # GPUs in a machine

    def bandwidth_between(self, gpus: int) -> float:
        """Return the GB/s of a GPU to the other GPUs in a group of `gpus` GPUs."""
        return self.link if gpus <= self.per_machine else self.network


GPUS = {
    h.name: h
    for h in (
        Hardware("h200", 141, 989, 4800, 450, 50, 8),
        Hardware("h100", 80, 989, 3350, 450, 50, 8),
        Hardware("a100", 80, 312, 2039, 300, 25, 8),
        Hardware("a100_40gb", 40, 312, 1555, 300, 25, 8),
        Hardware("l40s", 48, 362, 864, 32, 25, 8),
        Hardware("rtx_4090", 24, 165, 1008, 32, 3, 1),
    )
}
# The reached fractions of the peaks. Large matrices reach more, small batches less.
ARITHMETIC = 0.4
MEMORY = 0.6


@dataclass(frozen=True)
class Launches:
    """The seconds that a layer takes in addition to its arithmetic, to launch many small kernels.

    Measured on an H200 (docs/gpu.md).
    """

    learning: float  # forward and backward of one micro-batch
    scoring: float  # forward of one micro-batch
    token: float  # one token of all rows in the in-process engine, replayed from a CUDA graph


DENSE_LAYER = Launches(learning=3e-3, scoring=1e-3, token=1.2e-4)
MOE_LAYER = Launches(learning=6e-3, scoring=2e-3, token=2e-4)
# GB of a GPU for neither PyTorch's tensors nor the engine: CUDA's context, NCCL's buffers,
# fragmentation
RESERVE = 5.0


def hardware(text: str) -> Hardware:
    """Return a kind of GPU: `h100`, or with other numbers `h100,memory=94,network=25`.

    Raises ValueError for an unknown kind and for a wrong number.
    """
    name, *changes = text.split(",")
    if name not in GPUS:
        raise SettingError(
            "hardware",
            name,
            remedy=f"choose one of {', '.join(GPUS)}; the nearest is {nearest(name, GPUS)}",
        )
    keys = [field.name for field in fields(Hardware) if field.name != "name"]
    numbers: dict[str, float] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in keys:
            raise SettingError("hardware", text, f"there is no {key}; a GPU has {', '.join(keys)}")
        try:
            numbers[key] = int(value) if key == "per_machine" else float(value)
        except ValueError:
            raise SettingError("hardware", text, f"{key}={value} must be a number") from None
        if not 0 < numbers[key] < float("inf"):
            raise SettingError("hardware", text, f"{key}={value} must be a number above 0")
    return replace(GPUS[name], **numbers)
