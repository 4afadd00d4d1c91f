"""A sequential design: seeds are added in blocks, and looking again does not cost the error rate.

A study looks at its data after n_1 < n_2 < ... < n_K seeds, and stops at the first look that
decides. If every look were judged at p < .05, four looks would find a difference that is not there
in 13 % of the studies. The alpha-spending function of Lan and DeMets (1983) with O'Brien and
Fleming's shape says how much of the error may be spent until look k:

    alpha(t) = 4 - 4 Phi(z_{alpha/4} / sqrt(t)),    t = n_k / n_K

The boundary z_k of look k is the number for which

    P(|Z_1| < z_1, ..., |Z_{k-1}| < z_{k-1}, |Z_k| >= z_k) = alpha(t_k) - alpha(t_{k-1})

if there is no difference. Z_k is the standardised mean of the first n_k seeds. A look is judged at
its nominal level 2 - 2 Phi(z_k): by the exact p, and by the interval of this level. Such intervals
cover the truth at all looks together in 95 % of the studies (repeated confidence intervals,
Jennison and Turnbull 1989). So "the same within a margin" may be judged at each look too.

The level of a look depends on its number of seeds alone, not on the data. The last look has nearly
the level of a study without looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from gspo.analysis.runs import RunsError

GRID_POINTS = 801  # of the integrals, odd as Simpson's rule wants it
OUTERMOST = 8.0  # standard deviations: beyond it lies 1e-15


@dataclass(frozen=True)
class Design:
    """The numbers of seeds at which a study is looked at, and its two-sided error rate."""

    looks: tuple[int, ...]
    alpha: float = 0.05

    def __post_init__(self) -> None:
        rising = all(first < second for first, second in pairwise((0, *self.looks)))
        if not self.looks or not rising:
            raise ValueError(f"looks={list(self.looks)}: give rising numbers of seeds above 0")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha={self.alpha:g}: it is a probability between 0 and 1")

    @property
    def maximum(self) -> int:
        """Return the largest number of seeds."""
        return self.looks[-1]

    def spent(self) -> list[float]:
        """Return the error that may be spent until each look."""
        from scipy.special import ndtr, ndtri

        z = -ndtri(self.alpha / 4)
        return [float(4 - 4 * ndtr(z / math.sqrt(n / self.maximum))) for n in self.looks]

    @cached_property
    def boundaries(self) -> tuple[float, ...]:
        """The boundary |Z| of each look."""
        from scipy.optimize import brentq

        boundaries: list[float] = []
        walk = Walk(np.zeros(1), np.ones(1), 0)
        spent_before = 0.0
        for seeds, spent in zip(self.looks, self.spent(), strict=True):

            def excess(z: float, walk: Walk, seeds: int, share: float) -> float:
                return walk.crossing(z, seeds) - share

            arguments = (walk, seeds, spent - spent_before)
            boundary = OUTERMOST
            # an early look of a long study may spend less than the grid can tell from nothing
            if excess(OUTERMOST, *arguments) < 0:
                boundary = float(brentq(excess, 0, OUTERMOST, arguments, xtol=1e-10))
            boundaries.append(boundary)
            walk = walk.within(boundary, seeds)
            spent_before = spent
        return tuple(boundaries)

    def level(self, seeds: int) -> float:
        """Return the nominal two-sided level of the look at this number of seeds.

        Raises ValueError for a number of seeds at which the design has no look."""
        from scipy.special import ndtr

        if seeds not in self.looks:
            looks = ", ".join(map(str, self.looks))
            raise ValueError(f"{seeds} seeds: the design looks at {looks} seeds alone")
        return float(2 - 2 * ndtr(self.boundaries[self.looks.index(seeds)]))

    def next_look(self, seeds: int) -> int:
        """Return the first look at or after a number of seeds, 0 if none is left."""
        return next((look for look in self.looks if look >= seeds), 0)


@dataclass(frozen=True)
class Walk:
    """The sum of the first `seeds` differences, of variance 1 each, of the studies that go on.

    `mass` is the probability of each point of `sums`: density times weight of the integral."""

    sums: np.ndarray
    mass: np.ndarray
    seeds: int

    def crossing(self, boundary: float, seeds: int) -> float:
        """Return the probability that |Z| is at or beyond a boundary at the next look."""
        from scipy.special import ndtr

        deviation = math.sqrt(seeds - self.seeds)
        limit = boundary * math.sqrt(seeds)
        above = ndtr((self.sums - limit) / deviation)
        below = ndtr((-self.sums - limit) / deviation)
        return float((self.mass * (above + below)).sum())

    def within(self, boundary: float, seeds: int) -> Walk:
        """Return the walk of the studies that cross no boundary at the next look either."""
        deviation = math.sqrt(seeds - self.seeds)
        limit = boundary * math.sqrt(seeds)
        sums = np.linspace(-limit, limit, GRID_POINTS)
        distances = (sums[:, None] - self.sums) / deviation
        densities = np.exp(-(distances**2) / 2) / (deviation * math.sqrt(2 * math.pi))
        simpson = np.full(GRID_POINTS, 2.0)
        simpson[1::2] = 4.0
        simpson[[0, -1]] = 1.0
        weights = simpson * (sums[1] - sums[0]) / 3
        return Walk(sums, weights * (densities @ self.mass), seeds)


# ------------------------------------------------------------------------------------------------
# for the commands of figures
def chosen_design(looks: Sequence[int]) -> Design | None:
    """Return the sequential design with these looks, None without looks; raise RunsError."""
    if not looks:
        return None
    try:
        return Design(tuple(looks))
    except ValueError as error:
        raise RunsError(str(error)) from None


def level_of(design: Design, seeds: int, pair: str = "") -> float:
    """Return the level of a design's look, or raise RunsError with the next look.

    `pair` names what has these seeds."""
    try:
        return design.level(seeds)
    except ValueError as error:
        following = design.next_look(seeds)
        hint = (
            f"run {following - seeds} more" if following else "choose seeds, as in where.seed=[1,2]"
        )
        raise RunsError(f"{pair}{': ' if pair else ''}{error}: {hint}") from None
