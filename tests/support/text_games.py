"""Environments with the interface of Gymnasium, as someone would write them, without the package."""

import random
import time

import numpy as np


class Doors:
    """One of `doors` doors hides the way out; a wrong one costs a tenth, and there are three tries."""

    def __init__(self, doors: int = 4):
        self.doors = doors

    def reset(self, seed=None):
        self.way, self.left = random.Random(seed).randint(1, self.doors), 3
        return f"There are {self.doors} doors.", {"way": self.way}

    def step(self, action):
        self.left -= 1
        out = action == str(self.way)
        return (
            ("Out!" if out else "A wall."),
            np.float32(1.0 if out else -0.1),
            out,
            self.left == 0,
            {},
        )


class Numbers(Doors):
    """Shows arrays and mappings."""

    def reset(self, seed=None):
        super().reset(seed)
        return {
            "grid": np.arange(4).reshape(2, 2),
            "at": (np.int64(1), 2.5),
            "name": "A",
            "seen": np.bool_(True),
        }, {}


class Odd(Doors):
    """Does not keep to the interface; `what` says how."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def reset(self, seed=None):
        if self.what == "raises" or (self.what == "sometimes" and seed % 2):
            raise OSError("the game server answered 503")
        if self.what == "hangs":
            time.sleep(3)
        seen = {"reset": "seen", "object": (object(), {}), "surrogate": ("1-\ud83d 5", {})}
        return seen.get(self.what) or super().reset(seed)

    def step(self, action):
        return ("seen", 1.0, True, {}) if self.what == "step" else super().step(action)
