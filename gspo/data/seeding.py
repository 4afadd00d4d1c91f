"""Randomness as a function of position.

Every random number of a run is determined by (run seed, purpose, place where it is needed). There
is no generator whose state would have to be saved or advanced: a resumed run, a run with another
batch size and a response with other neighbours in its batch get the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np


def seed_for(*position: int | str) -> int:
    """Compute a 64-bit seed for a position such as (run seed, "rollout", problem, sample).

    >>> seed_for(1, "rollout", 7) == seed_for(1, "rollout", 7)
    True
    >>> seed_for(1, 23) == seed_for(12, 3)
    False
    """
    text = "\x1f".join(f"{type(item).__name__}:{item}" for item in position)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def generator(*position: int | str) -> random.Random:
    """Make a Python generator that is seeded by a position; tasks build problems with it."""
    return random.Random(seed_for(*position))


def uniforms(count: int, *position: int | str) -> np.ndarray:
    """Draw `count` float64 numbers in [0, 1) for a position; the i-th does not depend on `count`."""
    return uniform_rows(count, [position])[0]


def uniform_rows(count: int, positions: Sequence[tuple[int | str, ...]]) -> np.ndarray:
    """Draw `count` float64 numbers in [0, 1) for each position. Shape [positions, count]."""
    rows = np.empty((len(positions), count))
    bits = np.random.Philox(key=0)
    generator = np.random.Generator(bits)
    # A new key starts the same generator anew. Making a generator takes several times as long, as
    # NumPy asks the system for random bits that the key then replaces.
    start = bits.state
    for row, position in zip(rows, positions, strict=True):
        start["state"]["key"][0] = seed_for(*position)
        bits.state = start
        generator.random(out=row)
    return rows


def permutation(count: int, *position: int | str) -> np.ndarray:
    """Draw a permutation of range(count) for a position."""
    return np.random.Generator(np.random.Philox(key=seed_for(*position))).permutation(count)
