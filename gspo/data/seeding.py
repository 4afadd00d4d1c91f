"""Randomness as a function of position.

Run seed, purpose and position determine every random number of a run. No generator has a state that
must be saved or advanced. So the numbers are the same in a resumed run, in a run with another batch
size, and for a response with other neighbours in its batch.
"""

import hashlib
import random
from collections.abc import Sequence

import numpy as np
from numpy import ndarray


def seed_for(*position: int | str) -> int:
    """Compute a 64-bit seed for a position such as (run seed, "rollout", problem, sample).

    >>> seed_for(1, "rollout", 7) == seed_for(1, "rollout", 7)
    True
    >>> seed_for(1, 23) == seed_for(12, 3)
    False
    """
    text = "\x1f".join(f"{type(item).__name__}:{item}" for item in position)
    hashed = hashlib.blake2b(text.encode(), digest_size=8)
    return int.from_bytes(hashed.digest(), "big")


def generator(*position: int | str) -> random.Random:
    """Return a Python generator seeded by a position, with which tasks build problems."""
    return random.Random(seed_for(*position))


def numpy_generator(*position: int | str) -> np.random.Generator:
    """Return a NumPy generator seeded by a position."""
    bits = np.random.Philox(key=seed_for(*position))
    return np.random.Generator(bits)


def uniform_rows(count: int, positions: Sequence[tuple[int | str, ...]]) -> ndarray:
    """Draw `count` float64 numbers in [0, 1) for each position. Shape [positions, count].

    The i-th number of a position is the same for any count."""
    rows = np.empty((len(positions), count))
    bits = np.random.Philox(key=0)
    generator = np.random.Generator(bits)
    # A new key restarts the generator. Making a generator would take several times as long, because
    # NumPy asks the system for random bits that the key then replaces.
    state = bits.state
    key = state["state"]["key"]
    for row, position in zip(rows, positions, strict=True):
        key[0] = seed_for(*position)
        bits.state = state
        generator.random(out=row)
    return rows


def permutation(count: int, *position: int | str) -> ndarray:
    """Draw a permutation of range(count) for a position."""
    rng = numpy_generator(*position)
    return rng.permutation(count)
