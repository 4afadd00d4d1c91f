"""Says what a run needs of its GPUs before anything loads: memory in each phase, traffic, the time
of a step, and what to change if it does not fit.

    gspo plan model=hf model.path=Qwen/Qwen3-0.6B task=math policy.precision=bfloat16 --hardware
    rtx_4090 gspo plan model=hf model.path=Qwen/Qwen3-30B-A3B task=math parallel.mode=shard
    parallel.ranks=16
    gspo plan ... parallel.ranks=16,64,256          how it scales: a line for each number of GPUs

The words are those of `gspo train`. Beside them:

    --hardware NAME     the kind of GPU: h100 (default), h200, a100, a100_40gb, l40s, rtx_4090; with
                        other numbers h100,memory=94,network=25 (GB, GB/s)
    --prompt TOKENS     the tokens of a prompt (default: rollout.max_prompt_tokens, or 512)

No GPU and no weights are needed: the run's own forward and backward pass go through tensors without
content. It takes from some seconds to a minute. Times are those of a roofline, right to a factor of
two; docs/parallel.md says how they are made.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gspo.cli.option_files import composed_settings
from gspo.io.arguments import nearest
from gspo.planning.hardware import GB, RESERVE, hardware
from gspo.run.entry_point import command_line

if TYPE_CHECKING:
    from gspo.planning.plan import Plan
    from gspo.planning.scaling import Point

OPTIONS = {"--hardware": "h100", "--prompt": "0"}
RANKS = "parallel.ranks="
KINDS = ("update", "old log-probs", "exchange", "rollout")  # how the names of a plan's times begin


def main() -> None:
    """Print the plan of the run that the command line describes."""
    command_line(print_plan)


def print_plan() -> None:
    """Print the plan, or plans for several numbers of GPUs; the exit code is 1 if the run does not
    fit.
    """
    words, options = with_options(sys.argv[1:])
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        sys.exit(0 if words else 2)
    if not options["--prompt"].isdecimal():
        raise ValueError(f"--prompt {options['--prompt']} must be a number of tokens")
    gpu, prompt = hardware(options["--hardware"]), int(options["--prompt"])
    words, counts = with_counts(words)
    settings = composed_settings(words)
    from gspo.planning.plan import advice, plan  # these import PyTorch, which takes seconds
    from gspo.planning.scaling import smallest, strong, weak

    if counts:
        points = strong(settings, counts, gpu, prompt)
        print("\n".join(lines_of_scaling(points, weak(settings, points, gpu, prompt))))
        sys.exit(0 if smallest(points) else 1)
    made = plan(settings, gpu, prompt)
    print("\n".join([*lines_of(made), "", *advice(made)]))
    sys.exit(0 if made.fits else 1)


def with_options(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of `gspo train`, and the values of the options beside them."""
    words, options, rest = [], dict(OPTIONS), list(arguments)
    while rest:
        name, given, value = rest.pop(0).partition("=")
        if name in OPTIONS:
            if not given and not rest:
                raise ValueError(f"{name} needs a value")
            options[name] = value if given else rest.pop(0)
        elif name.startswith("-") and name not in ("-h", "--help"):
            raise ValueError(f"there is no option {name}; the nearest is {nearest(name, OPTIONS)}")
        else:
            words.append(name + given + value)
    return words, options


def with_counts(words: list[str]) -> tuple[list[str], list[int]]:
    """Return the words with one number of GPUs, and the numbers of `parallel.ranks=16,64`; none of
    these where it names one. Raises ValueError for what is not a number above 0."""
    named = [word.removeprefix(RANKS) for word in words if word.startswith(RANKS)]
    if not named or "," not in named[-1]:
        return words, []
    counts = named[-1].split(",")
    if wrong := [count for count in counts if not count.isdecimal() or not int(count)]:
        raise ValueError(
            f"{RANKS}{named[-1]}: {wrong[0]!r} must be a number of GPUs, as in {RANKS}16,64"
        )
    others = [word for word in words if not word.startswith(RANKS)]
    return [*others, f"{RANKS}{counts[0]}"], sorted({int(count) for count in counts})


def lines_of(made: Plan) -> list[str]:
    """Return the plan as the lines of a terminal."""
    s, work, measured, gpu = made.settings, made.work, made.measured, made.hardware
    active = f", {measured.active / 1e9:.2f} of them active" if measured.active else ""
    each = s.rollout.prompts_per_step * s.rollout.group_size
    lines = [
        f"{s.model.source() or s.model.name}: {measured.parameters / 1e9:.2f} billion parameters{active}",
        f"{work.ranks} x {gpu.name} ({gpu.memory:g} GB), parallel.mode={s.parallel.mode}, {each} responses a step of "
        f"up to {work.prompt} + {work.response} tokens, {work.rows} in a micro-batch",
        "",
        f"memory of a GPU in GB, {RESERVE:g} of them for driver and libraries",
    ]
    for phase, held in made.phases.items():
        parts = ", ".join(
            f"{name} {size / GB:.1f}" for name, size in held.items() if size >= 0.05 * GB
        )
        lines.append(f"  {phase:<14}{sum(held.values()) / GB + RESERVE:7.1f}   {parts}")
    if made.traffic:
        parts = ", ".join(f"{name} {size / GB:.0f}" for name, size in made.traffic.items())
        lines += ["", f"exchange of a GPU in a step, GB: {parts}"]
    total = sum(made.times.values())
    lines += [
        "",
        f"a step takes about {seconds(total)}, if every response is of the greatest length",
    ]
    lines += [
        f"  {name:<32}{seconds(time):>8}  {time / total:4.0%}" for name, time in made.times.items()
    ]
    return [*lines, f"  most goes to {max(made.times, key=made.times.get)}"]


def lines_of_scaling(points: list[Point], grown: list[Point]) -> list[str]:
    """Return plans for several numbers of GPUs, with the same step and with a step that grows, as
    the lines of a terminal."""
    from gspo.planning.scaling import smallest

    made = next(p.plan for p in points if p.plan)
    first, second, *_ = lines_of(made)
    each, base = second.split(", ", 2)[2], smallest(points)
    lines = [
        first,
        f"{made.hardware.name} ({made.hardware.memory:g} GB), parallel.mode={made.settings.parallel.mode}",
    ]
    lines += ["", f"strong scaling: {each}", *scaling_table(points)]
    if base:
        rollout = base.plan.settings.rollout
        share = rollout.prompts_per_step * rollout.group_size / base.ranks
        lines += [
            "",
            f"weak scaling: {share:g} responses a step for each GPU",
            *scaling_table(grown),
        ]
    return lines


def scaling_table(points: list[Point]) -> list[str]:
    """Return a line for each number of GPUs: memory, a step's seconds and their parts, efficiency,
    what takes most.
    """
    from gspo.planning.scaling import efficiency, smallest

    head = f"{'GPUs':>6}{'responses':>11}{'GB':>6}{'step':>9}" + "".join(
        f"{kind:>15}" for kind in KINDS
    )
    lines, base = [f"{head}{'efficiency':>14}  most goes to"], smallest(points)
    for p in points:
        if not p.plan:
            lines.append(f"{p.ranks:>6}  {p.refused}")
            continue
        times, rollout = p.plan.times, p.plan.settings.rollout
        parts = [
            sum(time for name, time in times.items() if name.startswith(kind)) for kind in KINDS
        ]
        found = efficiency(p, base)
        lines.append(
            f"{p.ranks:>6}{rollout.prompts_per_step * rollout.group_size:>11}{p.plan.peak[1] / GB:>6.0f}"
            f"{seconds(p.step):>9}"
            + "".join(f"{seconds(part):>15}" for part in parts)
            + f"{'does not fit' if found is None else f'{found:.0%}':>14}  {max(times, key=times.get)}"
        )
    return lines


def seconds(time: float) -> str:
    return (
        f"{time:.2g} s" if time < 10 else f"{time:.0f} s" if time < 120 else f"{time / 60:.0f} min"
    )
