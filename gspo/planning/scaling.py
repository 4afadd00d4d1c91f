"""How a run would scale: its plans for several numbers of GPUs side by side.

Strong scaling keeps a step's responses as they are and shares them out; weak scaling keeps a GPU's
share as it is, so that the step grows with the GPUs. An efficiency is what a GPU does in a second,
over what it does with the fewest GPUs that hold the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gspo.config.settings import Settings
from gspo.planning.hardware import Hardware
from gspo.planning.plan import Plan, plan


@dataclass
class Point:
    """A number of GPUs, with the plan for it, or why there can be none."""

    ranks: int
    made: Plan | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and the GPUs' memory holds it."""
        return self.made is not None and self.made.fits

    @property
    def step(self) -> float:
        """The seconds of a step."""
        return sum(self.made.times.values())

    @property
    def speed(self) -> float:
        """The responses that a GPU trains on in a second."""
        rollout = self.made.settings.rollout
        return rollout.prompts_per_step * rollout.group_size / self.step / self.ranks


def strong(
    settings: Settings, counts: list[int], hardware: Hardware, prompt: int = 0
) -> list[Point]:
    """Plan the run for each number of GPUs. Raises ValueError if there is a plan for none of them."""
    points = [point(settings, ranks, hardware, prompt) for ranks in counts]
    if not any(p.made for p in points):
        raise ValueError(points[0].refused)
    return points


def weak(
    settings: Settings, points: list[Point], hardware: Hardware, prompt: int = 0
) -> list[Point]:
    """Plan the run again for each number of GPUs, with as many prompts for each GPU as the smallest
    run that fits has. Empty if none fits."""
    base = smallest(points)
    if base is None:
        return []
    each = settings.rollout.prompts_per_step / base.ranks
    known = {p.ranks: p.made for p in points if p.made}
    return [
        point(
            replace(
                settings,
                rollout=replace(settings.rollout, prompts_per_step=max(round(each * p.ranks), 1)),
            ),
            p.ranks,
            hardware,
            prompt,
            known,
        )
        for p in points
    ]


def point(
    settings: Settings,
    ranks: int,
    hardware: Hardware,
    prompt: int,
    known: Mapping[int, Plan] | None = None,
) -> Point:
    """Plan the run for a number of GPUs."""
    wanted = replace(settings, parallel=replace(settings.parallel, ranks=ranks))
    try:
        return Point(ranks, plan(wanted, hardware, prompt, (known or {}).get(ranks)))
    except ValueError as error:
        return Point(ranks, None, str(error))


def smallest(points: list[Point]) -> Point | None:
    """Return the point with the fewest GPUs that hold the run, None if none does."""
    return min((p for p in points if p.fits), key=lambda p: p.ranks, default=None)


def efficiency(p: Point, base: Point | None) -> float | None:
    """Return what a GPU does in a second over what it does in `base`; None where either does not
    fit.
    """
    return p.speed / base.speed if base and p.fits else None
