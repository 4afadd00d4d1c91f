"""The scaling of a run: its plans for several numbers of GPUs.

Strong scaling distributes the same responses of a step over more GPUs. Weak scaling keeps the
responses per GPU, so a step grows with the GPUs. The efficiency is the speed of a GPU, relative to
its speed in the run with the fewest GPUs that fits.
"""

from dataclasses import dataclass, replace

from gspo.config.settings import Settings
from gspo.planning.hardware import Hardware
from gspo.planning.plan import Plan, plan


@dataclass
class Point:
    """A number of GPUs with the plan for it, or with the reason why there is no plan."""

    ranks: int
    plan: Plan | None
    refused: str = ""


def strong(settings: Settings, counts: list[int], hardware: Hardware, prompt: int) -> list[Point]:
    """Plan the run for each number of GPUs. Raises ValueError if all plans are refused."""
    points = [point(settings, ranks, hardware, prompt) for ranks in counts]
    if not any(p.plan for p in points):
        raise ValueError(points[0].refused)
    return points


def weak(settings: Settings, points: list[Point], hardware: Hardware, prompt: int) -> list[Point]:
    """Plan the run for each number of GPUs, with the prompts per GPU of the smallest run that fits.

    The result is empty if no run fits.
    """
    base = smallest(points)
    if base is None:
        return []
    prompts_per_gpu = settings.rollout.prompts_per_step / base.work.ranks
    grown = []
    for p in points:
        prompts = max(round(prompts_per_gpu * p.ranks), 1)
        try:
            rollout = replace(settings.rollout, prompts_per_step=prompts)
        except ValueError as error:
            grown.append(Point(p.ranks, None, str(error)))
            continue
        grown_settings = replace(settings, rollout=rollout)
        grown.append(point(grown_settings, p.ranks, hardware, prompt, p.plan))
    return grown


def point(
    settings: Settings, ranks: int, hardware: Hardware, prompt: int, earlier: Plan | None = None
) -> Point:
    """Plan the run for a number of GPUs. `earlier` is a plan for that number."""
    settings = replace(settings, parallel=replace(settings.parallel, ranks=ranks))
    try:
        return Point(ranks, plan(settings, hardware, prompt, earlier))
    except ValueError as error:
        return Point(ranks, None, str(error))


def smallest(points: list[Point]) -> Plan | None:
    """Return the plan with the fewest GPUs that fits, or None if none fits."""
    plans = [p.plan for p in points if p.plan and p.plan.fits]
    return min(plans, key=lambda p: p.work.ranks, default=None)


def efficiency(p: Plan, base: Plan | None) -> float | None:
    """Return the speed of a plan's GPUs relative to `base`, or None if either does not fit."""
    return speed(p) / speed(base) if base and p.fits else None


def speed(p: Plan) -> float:
    """Return the responses per GPU and second."""
    return p.responses / p.step_seconds / p.work.ranks
