"""Prints the GPU memory, traffic and step time that a run needs, before anything loads.

    gspo plan model=hf model.path=Qwen/Qwen3-0.6B task=math policy.precision=bfloat16 \\
        hardware=rtx_4090
    gspo plan model=hf model.path=Qwen/Qwen3-30B-A3B task=math parallel.mode=shard \\
        parallel.ranks=16 hardware=h200 policy.precision=bfloat16 policy.checkpointing=true \\
        trainer.micro_batch_size=1 rollout.dtype=bfloat16 rollout.batch_rows=32
    gspo plan ... parallel.ranks=16,64,256        # scaling: a line for each number of GPUs

If the run does not fit, the plan suggests changes. All settings of `gspo train` are options too.

No GPU and no weights are needed: the run's forward and backward pass go through tensors without
content. It takes from some seconds to a minute. Times come from a roofline model and are right to a
factor of two. docs/parallel.md explains them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING

from gspo.cli.option_files import composed_settings, refuse_dashes
from gspo.io.arguments import HELP, help_text, option, parsed
from gspo.io.errors import SettingError
from gspo.planning.hardware import GB, GPUS, RESERVE, hardware
from gspo.run.entry_point import command_line

if TYPE_CHECKING:
    from gspo.planning.plan import Plan
    from gspo.planning.scaling import Point

RANKS = "parallel.ranks="
TIME_PREFIXES = ("update", "old log-probs", "exchange", "rollout")  # of the names of a plan's times


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command, besides the settings of a run."""

    hardware: str = option(
        "h100",
        f"the kind of GPU ({', '.join(GPUS)}), or one with other numbers in GB and GB/s: "
        "h100,memory=94,network=25",
    )
    prompt_tokens: int = option(
        0, "the tokens of a prompt (0: rollout.max_prompt_tokens, or 512)", least=0
    )


def main() -> None:
    """Print the plan of the run that the command line describes."""
    command_line(print_plan)


def print_plan() -> None:
    """Print the plan, or a scaling table. The exit code is 1 if the run does not fit."""
    words = sys.argv[1:]
    if not words or HELP & set(words):
        print(help_text(Options, __doc__))
        sys.exit(0 if words else 2)
    options, words = with_options(words)
    gpu = hardware(options.hardware)
    words, gpu_counts = with_counts(words)
    settings = composed_settings(words)
    # these import PyTorch, which takes seconds
    from gspo.planning.plan import advice, plan
    from gspo.planning.scaling import smallest, strong, weak

    if gpu_counts:
        points = strong(settings, gpu_counts, gpu, options.prompt_tokens)
        weak_points = weak(settings, points, gpu, options.prompt_tokens)
        print("\n".join(lines_of_scaling(points, weak_points)))
        sys.exit(0 if smallest(points) else 1)
    run_plan = plan(settings, gpu, options.prompt_tokens)
    print("\n".join([*lines_of(run_plan), "", *advice(run_plan)]))
    sys.exit(0 if run_plan.fits else 1)


def with_options(words: list[str]) -> tuple[Options, list[str]]:
    """Return this command's options, and the other words, which are settings of a run."""
    names = [field.name for field in fields(Options)]
    refuse_dashes(words, names)
    # a mistyped option of this command must not be taken for a setting
    option_words = [
        word for word in words if get_close_matches(word.partition("=")[0], names, 1, 0.8)
    ]
    return parsed(Options, option_words), [word for word in words if word not in option_words]


def with_counts(words: list[str]) -> tuple[list[str], list[int]]:
    """Return the words with one number of GPUs, and all numbers of `parallel.ranks=16,64`.

    The second list is empty if there is only one number. Raises ValueError for a number of GPUs
    that is not a positive integer."""
    values = [word.removeprefix(RANKS) for word in words if word.startswith(RANKS)]
    if not values or "," not in values[-1]:
        return words, []
    counts = values[-1].split(",")
    for count in counts:
        if not count.isdecimal() or not int(count):
            problem = f"{count!r} must be a number of GPUs, as in {RANKS}16,64"
            raise SettingError("parallel.ranks", values[-1], problem)
    other_words = [word for word in words if not word.startswith(RANKS)]
    return [*other_words, f"{RANKS}{counts[0]}"], sorted({int(count) for count in counts})


def lines_of(plan: Plan) -> list[str]:
    """Return the plan as lines of text."""
    s = plan.settings
    measured = plan.measured
    model = s.model.source() or s.model.name
    word = "million"
    unit = 1e6
    if measured.parameters >= 1e8:
        word = "billion"
        unit = 1e9
    active = f", {measured.active / unit:.2f} of them active" if measured.active else ""
    lines = [
        f"{model}: {measured.parameters / unit:.2f} {word} parameters{active}",
        f"{plan.work.ranks} x {hardware_text(plan)}, {step_text(plan)}",
        "",
        f"memory of a GPU in GB, {RESERVE:g} of them for driver and libraries",
    ]
    for phase, sizes in plan.phases.items():
        parts = ", ".join(
            f"{name} {size / GB:.1f}" for name, size in sizes.items() if size >= 0.05 * GB
        )
        lines.append(f"  {phase:<14}{sum(sizes.values()) / GB + RESERVE:7.1f}   {parts}")
    if plan.traffic:
        parts = ", ".join(f"{name} {size / GB:.0f}" for name, size in plan.traffic.items())
        lines += ["", f"exchange of a GPU in a step, GB: {parts}"]
    total = plan.step_seconds
    lines.append("")
    lines.append(
        f"a step takes about {seconds(total)}, if every response is of the greatest length"
    )
    for name, time in plan.times.items():
        lines.append(f"  {name:<32}{seconds(time):>8}  {time / total:4.0%}")
    lines.append(f"  the longest part is {plan.bottleneck}")
    if plan.record_bytes:
        lines += ["", record_text(plan)]
    return lines


def record_text(plan: Plan) -> str:
    """Return the size of the records of steps in words."""
    tracking = plan.settings.tracking
    size = plan.record_bytes
    text = f"the record of a step takes up to {size / GB:.2g} GB"
    last = min(tracking.record_last, plan.settings.steps)
    if last:
        text += f", the last {last} together {last * size / GB:.2g}"
    count = plan.settings.steps // tracking.record_every if tracking.record_every else 0
    if count:
        text += f", the {count} of all {plan.settings.steps} steps {count * size / GB:.2g}"
    if tracking.record_experts and plan.measured.experts:
        text += "; without experts (tracking.record_experts=false) it takes far less"
    return text


def hardware_text(plan: Plan) -> str:
    """Return the GPU and the parallel mode in words."""
    gpu = plan.hardware
    return f"{gpu.name} ({gpu.memory:g} GB), parallel.mode={plan.settings.parallel.mode}"


def step_text(plan: Plan) -> str:
    """Return the responses of a step and their tokens in words."""
    work = plan.work
    return (
        f"{plan.responses} responses a step of up to {work.prompt} + {work.response} "
        f"tokens, {work.rows} in a micro-batch"
    )


def lines_of_scaling(strong_points: list[Point], weak_points: list[Point]) -> list[str]:
    """Return plans for several numbers of GPUs as lines of text.

    A step has the same responses in `strong_points`, and the same per GPU in `weak_points`."""
    from gspo.planning.scaling import smallest

    first_plan = next(point.plan for point in strong_points if point.plan)
    lines = [lines_of(first_plan)[0], hardware_text(first_plan)]
    lines += ["", f"strong scaling: {step_text(first_plan)}", *scaling_table(strong_points)]
    base = smallest(strong_points)
    if base:
        share = base.responses / base.work.ranks
        lines += ["", f"weak scaling: {share:g} responses a step for each GPU"]
        lines += scaling_table(weak_points)
    else:
        lines += ["", "with a single number of GPUs, gspo plan suggests settings that fit"]
    return lines


def scaling_table(points: list[Point]) -> list[str]:
    """Return a line for each number of GPUs: memory, times, efficiency, the largest time."""
    from gspo.planning.scaling import efficiency, smallest

    base = smallest(points)
    head = f"{'GPUs':>6}{'responses':>11}{'GB':>6}{'step':>9}"
    head += "".join(f"{prefix:>15}" for prefix in TIME_PREFIXES)
    lines = [f"{head}{'efficiency':>14}  longest part"]
    for point in points:
        plan = point.plan
        if not plan:
            lines.append(f"{point.ranks:>6}  {point.refused}")
            continue
        share = efficiency(plan, base)
        efficiency_text = "does not fit" if share is None else f"{share:.0%}"
        line = f"{point.ranks:>6}{plan.responses:>11}"
        line += f"{plan.peak[1] / GB:>6.0f}{seconds(plan.step_seconds):>9}"
        for prefix in TIME_PREFIXES:
            part = sum(time for name, time in plan.times.items() if name.startswith(prefix))
            line += f"{seconds(part):>15}"
        lines.append(f"{line}{efficiency_text:>14}  {plan.bottleneck}")
    return lines


def seconds(time: float) -> str:
    """Return a time in seconds or minutes in words."""
    if time < 10:
        return f"{time:.2g} s"
    if time < 120:
        return f"{time:.0f} s"
    return f"{time / 60:.0f} min"
