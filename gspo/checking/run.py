"""Runs the checks in their order until the deadline."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gspo.checking import kernels, machine, speed, training
from gspo.checking.bench import Bench
from gspo.checking.report import FAIL, SKIP, Finding, Findings
from gspo.io.errors import first_line


@dataclass(frozen=True)
class Check:
    """A check: its name, its function, and the seconds that it may take on a CPU or GPU."""

    name: str
    function: Callable[[Bench], Findings]
    seconds: float


CHECKS = (
    Check("versions", machine.versions, 0),
    Check("devices", machine.devices, 0),
    Check("ceilings", machine.ceilings, 2),
    Check("kernels against float64", kernels.kernels_against_float64, 2),
    Check("precision of the head", kernels.head_precision, 1),
    Check("micro-batch cuts", training.micro_batch_cuts, 2),
    Check("engine against trainer", training.engine_against_trainer, 2),
    Check("Routing Replay", training.routing_replay, 1),
    Check("first use of new shapes", speed.new_shapes, 2),
    Check("waits for the GPU", speed.waits, 1),
    Check("learning", training.learning, 12),
    Check("decoding", speed.decoding, 8),
    Check("updates", speed.updates, 3),
    Check("memory against the plan", speed.memory_against_plan, 10),
    Check("killed and resumed", training.resume, 35),
    Check("vLLM", training.vllm_engine, 60),
)


def findings(bench: Bench, checks: tuple[Check, ...]) -> Findings:
    """Yield the findings of the checks. An exception in a check does not stop the others."""
    for check in checks:
        if bench.seconds_left < check.seconds:
            yield Finding(
                SKIP,
                check.name,
                f"{max(bench.seconds_left, 0):.0f} s left",
                f"needs {check.seconds:g} s: seconds=",
            )
            continue
        started = time.monotonic()
        try:
            yield from check.function(bench)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            yield Finding(
                FAIL, check.name, "out of memory; the other checks go on", detail=str(error)
            )
        except Exception as error:
            # An unknown machine can fail in any way, and the user needs to see it.
            yield Finding(
                FAIL,
                check.name,
                f"{type(error).__name__}: {first_line(error)}"[:150],
                detail=traceback.format_exc(),
            )
        finally:
            bench.seconds_by_check[check.name] = round(time.monotonic() - started, 2)
