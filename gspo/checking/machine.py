"""Checks versions and devices, and measures the peak speeds of arithmetic and memory."""

import platform
import shutil
import subprocess

import torch
import transformers
from packaging.version import Version

from gspo.checking.bench import Bench
from gspo.checking.report import FAIL, OK, SKIP, SLOW, Finding, Findings, at_least

MIN_TORCH = "2.11"
MIN_TRANSFORMERS = "5.17"
MIN_CAPABILITY = (7, 0)  # the oldest GPUs for which PyTorch's wheels have kernels
MIN_MEMORY_GB = 6.0  # for the models of the speed checks
GB = 1e9
TERA = 1e12


def versions(bench: Bench) -> Findings:
    """Check the versions of the libraries."""
    for module, minimum in ((torch, MIN_TORCH), (transformers, MIN_TRANSFORMERS)):
        installed = Version(module.__version__)
        status = OK if installed >= Version(minimum) else FAIL
        yield Finding(status, module.__name__, module.__version__, f">= {minimum}")
    yield Finding(OK, "Python", platform.python_version())


def devices(bench: Bench) -> Findings:
    """Describe the device, and check its memory, its age and whether all GPUs are of a kind."""
    if not bench.on_gpu:
        yield Finding(OK, "device", f"CPU, {torch.get_num_threads()} threads")
        yield Finding(OK, "processor", (platform.processor() or platform.machine())[:34])
        return
    properties = torch.cuda.get_device_properties(bench.device)
    yield Finding(OK, "device", f"{properties.name}, CUDA {torch.version.cuda}")
    yield driver()
    memory = properties.total_memory / GB
    yield at_least("memory", memory, MIN_MEMORY_GB, "GB")
    capability = (properties.major, properties.minor)
    status = OK if capability >= MIN_CAPABILITY else FAIL
    yield Finding(
        status,
        "compute capability",
        "{}.{}".format(*capability),
        ">= {}.{}".format(*MIN_CAPABILITY),
    )
    bench.bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if not bench.bfloat16:
        yield Finding(SLOW, "bfloat16", "this GPU has none", "policy.precision=float32 is left")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    if len(names) > 1:
        yield Finding(
            SLOW,
            "GPUs of different kinds",
            ", ".join(sorted(names))[:60],
            "a run over all waits for the slowest",
        )


def driver() -> Finding:
    """Return the version of the GPU's driver, if nvidia-smi reports it."""
    if not shutil.which("nvidia-smi"):
        return Finding(SKIP, "driver", "not known: there is no nvidia-smi")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(SKIP, "driver", f"not known: {error}"[:60])
    if result.returncode:
        return Finding(
            SKIP,
            "driver",
            "not known: nvidia-smi failed (NVML)",
            detail=result.stderr or result.stdout,
        )
    return Finding(OK, "driver", result.stdout.split("\n")[0])


def ceilings(bench: Bench) -> Findings:
    """Measure the speed of large products and copies. Other checks compare with these numbers."""
    side = 8192 if bench.on_gpu else 1024
    dtypes = [torch.float32]
    if bench.bfloat16:
        dtypes.append(torch.bfloat16)
    for dtype in dtypes:
        a = torch.randn(side, side, device=bench.device, dtype=dtype)
        seconds = bench.seconds(lambda a=a: a @ a)
        flops = 2 * side**3 / seconds
        bench.matmul[dtype] = flops
        name = f"product of {side} x {side}, {short(dtype)}"
        yield Finding(OK, name, f"{flops / TERA:.3g} TFLOP/s")
    numel = 2**29 if bench.on_gpu else 2**24
    source = torch.ones(numel, dtype=torch.float32, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    bench.copy = 2 * source.nbytes / seconds
    yield Finding(OK, "copy within the device's memory", f"{bench.copy / GB:.3g} GB/s")
    if bench.on_gpu:
        pageable = torch.ones(2**26)
        on_device = torch.empty_like(pageable, device=bench.device)
        for kind, on_host in (("pageable", pageable), ("pinned", pageable.pin_memory())):
            seconds = bench.seconds(
                lambda on_host=on_host: on_device.copy_(on_host, non_blocking=True)
            )
            speed = pageable.nbytes / seconds
            yield Finding(OK, f"copy to the device, {kind}", f"{speed / GB:.3g} GB/s")


def short(dtype: torch.dtype) -> str:
    """Return a precision's name without the package's."""
    return str(dtype).removeprefix("torch.")
