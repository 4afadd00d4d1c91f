"""Compares the speed of sampling and learning with the limits of memory and arithmetic."""

import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.checking.bench import (
    DENSE,
    PROMPTS,
    SPARSE,
    Bench,
    Size,
    backward,
    config_of,
    digits_problem,
    packed,
    random_batch,
    sampled,
)
from gspo.checking.machine import GB, short
from gspo.checking.report import OK, SKIP, SLOW, Finding, Findings, at_least, at_most
from gspo.model.policy import Policy
from gspo.planning.memory import Work, batch, measure
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest

ROWS = (32, 256)
# Decoding is slow above this multiple of its floor, the time to read the bytes. On a GPU this is
# half the speed of an H200 (docs/gpu.md). The multiple is largest for small models, whose time goes
# to kernels and not to bytes.
MAX_OVER_FLOOR = {"cuda": 80.0, "cpu": 60.0}
# An update is slow below this share of the peak of large products. On a GPU this is half the share
# of an H200.
MIN_SHARE_OF_PEAK = {"cuda": 0.01, "cpu": 0.1}
# The first use of a shape is slow above this multiple of the second.
MAX_NEW_SHAPE_RATIO = 4.0
MAX_OVER_PLAN = 1.25  # times the planned memory
# These operations create a view, read a size or allocate, so they launch nothing.
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "split",
    "split_with_sizes", "unsqueeze", "squeeze", "unflatten", "detach", "alias", "as_strided",
    "unbind", "chunk", "narrow", "empty", "new_empty", "empty_like", "empty_strided",
    "view_as_real", "view_as_complex", "_conj", "lift_fresh",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts the operations that launch something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _, name = func._schema.name.split("::")
        if name not in VIEWS:
            self.count += 1
        return func(*args, **(kwargs or {}))


def decoding(bench: Bench) -> Findings:
    """Measure tokens per second at 32 and 256 rows.

    The floor is the time to read the weights and the cache."""
    for size in bench.sizes:
        policy = bench.policy(size, precision=bench.precision, dtype=bench.precision)
        tokens = 128 if bench.on_gpu else 24
        for rows in ROWS:
            name = f"decoding, {size.name}, {rows} rows"
            engine = LocalEngine(policy, batch_rows=rows, dtype=policy.model.dtype)
            started = time.perf_counter()
            decoded(engine, rows, 8)  # to warm up
            if time.perf_counter() - started > bench.seconds_left / 4:
                yield Finding(SKIP, name, "no time left")
                continue
            bench.synchronize()
            started = time.perf_counter()
            token_count, longest = decoded(engine, rows, tokens)
            bench.synchronize()
            seconds = time.perf_counter() - started
            step_bytes = bytes_of_step(policy, size, rows, longest)
            floor = longest * step_bytes / bench.copy
            ratio = seconds / floor
            bound = MAX_OVER_FLOOR[bench.device.type]
            finding = at_most(name, ratio, bound, status=SLOW)
            finding.number = f"{token_count / seconds:,.0f} tokens/s, {ratio:.1f} x floor"
            finding.bound = f"<= {bound:g} x the time of reading the bytes"
            yield finding
        launches = launches_of(bench, lambda engine=engine: decoded(engine, 32, 17))
        launches_per_layer = launches / 17 / size.layers
        name = f"launches for a token and layer, {size.name}"
        yield Finding(OK, name, f"{launches_per_layer:.0f}")


def decoded(engine: LocalEngine, rows: int, tokens: int) -> tuple[int, int]:
    """Sample `rows` responses, and return their total tokens and the longest's tokens."""
    problems = [digits_problem(i) for i in range(rows // 8)]
    sampling = Sampling(1.0, tokens)
    groups = engine.generate(SamplingRequest(problems, 8, sampling, (1, "speed")))
    lengths = [len(response.token_ids) for group in groups for response in group]
    return sum(lengths), max(lengths)


def bytes_of_step(policy: Policy, size: Size, rows: int, tokens: int) -> float:
    """Return the bytes that decoding a token for all rows must read.

    These are the weights that the rows use, and the KV cache at half of the response's length."""
    embeddings = policy.model.get_input_embeddings()
    parameters = policy.model.num_parameters() - sum(p.numel() for p in embeddings.parameters())
    if size.experts:
        expert_parameters = 3 * size.layers * size.experts * size.hidden * size.width
        used_share = min(1.0, rows * size.experts_per_token / size.experts)
        parameters -= expert_parameters * (1 - used_share)
    cache_per_token = 2 * size.layers * size.key_value_heads * size.head_dim
    cache = cache_per_token * rows * (len(PROMPTS[0]) + tokens / 2)
    return policy.model.dtype.itemsize * (parameters + cache)


def launches_of(bench: Bench, work: Callable[[], object]) -> int:
    """Return the number of kernels that `work` launches, or on a CPU its number of operations."""
    if not bench.on_gpu:
        with Operations() as operations:
            work()
        return operations.count
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        bench.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events())


def updates(bench: Bench) -> Findings:
    """Measure the speed of a forward and backward pass, as a share of the peak."""
    bound = MIN_SHARE_OF_PEAK[bench.device.type]
    rows = 8
    prompt = 256 if bench.on_gpu else 32
    response = 768 if bench.on_gpu else 96
    for size in bench.sizes:
        policy = bench.policy(size, precision=bench.precision)
        micro = random_batch(rows, prompt, response, size.vocabulary, group=8)
        seconds = bench.seconds(
            lambda policy=policy, micro=micro: backward(policy, micro, rows), repeats=2
        )
        lengths = torch.full((rows,), prompt + response)
        # a group's rows share one pass through their prompt
        repeated_prompts = torch.full((rows - rows // 8,), prompt)
        forward_flops = policy.forward_flops(lengths) - policy.forward_flops(repeated_prompts)
        speed = 3 * forward_flops / seconds
        share = speed / bench.matmul[bench.precision]
        finding = at_least(f"update, {size.name}", share, bound, status=SLOW)
        finding.number = f"{rows * response / seconds:,.0f} tokens/s, {share:.0%} of peak"
        if share > 1:
            finding.number += " (other programs slowed the measurement of the peak)"
        finding.bound = f">= {bound:.0%} of peak"
        yield finding


def memory_against_plan(bench: Bench) -> Findings:
    """Compare the memory of an update with the memory that `gspo plan` predicts."""
    if not bench.on_gpu:
        yield Finding(
            SKIP, "memory against `gspo plan`", "a CPU's allocator does not say what is held"
        )
        return
    for size in bench.sizes:
        work = Work(
            ranks=1, shard_size=1, experts=1, rows=8, scored=8, prompt=256, response=768, group=8,
            precision=bench.precision, checkpointing=False,
        )  # fmt: skip
        plan = measure(config_of(size), work)
        policy = bench.policy(size, precision=bench.precision)
        torch.cuda.reset_peak_memory_stats(bench.device)
        backward(policy, batch(work, work.rows), work.rows)
        allocated = torch.cuda.max_memory_allocated(bench.device)
        ratio = allocated / (plan.weights + plan.trained + plan.update)
        finding = at_most(f"memory of an update, {size.name}", ratio, MAX_OVER_PLAN)
        finding.number = f"{allocated / GB:.2f} GB, {ratio:.2f} of the plan"
        finding.bound = f"<= {MAX_OVER_PLAN:g} of the plan"
        yield finding
        del policy


def waits(bench: Bench) -> Findings:
    """Count the waits of the CPU for the GPU in a forward and backward pass, by source line."""
    if not bench.on_gpu:
        yield Finding(SKIP, "waits for the GPU", "there is no GPU to wait for")
        return
    for size in (DENSE, SPARSE):
        policy = bench.policy(size, precision=bench.precision)
        micro = packed(policy, sampled(policy, 8, 24))
        backward(policy, micro, 8)  # to warm up
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                backward(policy, micro, 8)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts: Counter[str] = Counter()
        for warning in caught:
            if "called a synchronizing" in str(warning.message):
                counts[f"{warning.filename}:{warning.lineno}"] += 1
        name = f"waits in four micro-batches, {size.name}"
        finding = at_most(name, counts.total(), 0, status=SLOW, detail=dict(counts))
        if counts:
            line, _ = counts.most_common(1)[0]
            finding.bound += f"; most at {line}"
        yield finding


def new_shapes(bench: Bench) -> Findings:
    """Compare the first use of new shapes with the second.

    The first is slow if a library plans or compiles for each shape."""
    policy = bench.policy(SPARSE, precision=bench.precision)
    batches = [random_batch(8, 11 + i, 19 + 2 * i, 20, group=4) for i in range(8)]
    backward(policy, random_batch(8, 7, 9, 20, group=4), 8)  # to load the kernels

    def use_all() -> None:
        for micro in batches:
            backward(policy, micro, 8)

    first = bench.timed(use_all)
    second = min(bench.timed(use_all), bench.timed(use_all))
    detail = {"first_s": first, "second_s": second, "precision": short(bench.precision)}
    yield at_most(
        "first against second use of new shapes",
        first / second,
        MAX_NEW_SHAPE_RATIO,
        "x",
        status=SLOW,
        detail=detail,
    )
