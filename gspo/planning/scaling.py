"""The scaling of a run: its plans for several numbers of GPUs.

Strong scaling distributes the same responses of a step over more GPUs. Weak scaling keeps the
responses per GPU, so a step grows with the GPUs. The efficiency is the speed of a GPU, relative to
its speed in the run with the fewest GPUs that fits.
"""

from __future__ import annotations

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

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits into the GPUs' memory."""
        return self.plan is not None and self.plan.fits

    @property
    def step(self) -> float:
        """The seconds of a step."""
        return sum(self._existing_plan().times.values())

    @property
    def speed(self) -> float:
        """The responses per GPU and second."""
        rollout = self._existing_plan().settings.rollout
        return rollout.prompts_per_step * rollout.group_size / self.step / self.ranks

    def _existing_plan(self) -> Plan:
        """Return the plan. Raises ValueError with the reason if there is none."""
        if self.plan is None:
            raise ValueError(self.refused)
        return self.plan


def strong(
    settings: Settings, counts: list[int], hardware: Hardware, prompt: int = 0
) -> list[Point]:
    """Plan the run for each number of GPUs. Raises ValueError if all plans are refused."""
    points = [point(settings, ranks, hardware, prompt) for ranks in counts]
    if not any(p.plan for p in points):
        raise ValueError(points[0].refused)
    return points


def weak(
    settings: Settings, points: list[Point], hardware: Hardware, prompt: int = 0
) -> list[Point]:
    """Plan the run for each number of GPUs, with the prompts per GPU of the smallest run that fits.

    The result is empty if no run fits.
    """
    base = smallest(points)
    if base is None:
        return []
    prompts_per_gpu = settings.rollout.prompts_per_step / base.ranks
    grown = []
    for p in points:
        prompts = max(round(prompts_per_gpu * p.ranks), 1)
        grown_settings = replace(
            settings, rollout=replace(settings.rollout, prompts_per_step=prompts)
        )
        grown.append(point(grown_settings, p.ranks, hardware, prompt, p.plan))
    return grown


def point(
    settings: Settings,
    ranks: int,
    hardware: Hardware,
    prompt: int,
    earlier: Plan | None = None,
) -> Point:
    """Plan the run for a number of GPUs. `earlier` is an earlier plan for that number."""
    settings = replace(settings, parallel=replace(settings.parallel, ranks=ranks))
    try:
        return Point(ranks, plan(settings, hardware, prompt, earlier))
    except ValueError as error:
        return Point(ranks, None, str(error))


def smallest(points: list[Point]) -> Point | None:
    """Return the point with the fewest GPUs that fits, or None if none fits."""
    return min((p for p in points if p.fits), key=lambda p: p.ranks, default=None)


def efficiency(p: Point, base: Point | None) -> float | None:
    """Return the speed of a point's GPUs relative to `base`, or None if either does not fit."""
    return p.speed / base.speed if base and p.fits else None
