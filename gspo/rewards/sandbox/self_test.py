"""Checks that the sandbox is as strong as it says: a few attacks before the first use, and refusal
if one succeeds.
"""

from __future__ import annotations

import os
from typing import Any

from gspo.rewards.sandbox.attack import run_attack
from gspo.rewards.sandbox.quick_attacks import QUICK_ATTACKS
from gspo.rewards.sandbox.scene import scene

# the results by user and layers, of this process or its parent
_results: dict[tuple[Any, ...], dict[str, str]] = {}


def require(slot: Any, allow_weak: bool) -> None:
    """Raise ValueError, with the reason, unless the slot confines programs or `allow_weak`."""
    if allow_weak:
        return
    problem = weakness(slot.layers())
    if not problem:
        problem = "; ".join(
            f"attack {name!r}: {seen}" for name, seen in attack(slot).items() if seen != "stopped"
        )
    if problem:
        raise ValueError(
            f"allow_weak_sandbox=False: programs would not be confined on this machine: {problem}; only the command "
            "line can allow that: allow_weak_sandbox=true where a run is evaluated or sampled, in training "
            "task.allow_weak_sandbox=true (of mixed tasks task.code.allow_weak_sandbox=true; beside resume= with ++)"
        )


def weakness(layers: dict[str, str]) -> str:
    """Return why the layers are too few, or "" if they suffice, which takes landlock and seccomp,
    or bubblewrap.
    """
    missing = [name for name in ("landlock", "seccomp") if layers[name].startswith("off")]
    if not missing or layers["bubblewrap"] == "on":
        return ""
    return f"{' and '.join(missing)} not offered by the kernel, and bubblewrap is {layers['bubblewrap']}"


def attack(slot: Any) -> dict[str, str]:
    """Run the quick attacks, once per user and kind of confinement, and return each one's result."""
    # "user" contains a number that differs for each slot
    layers = {name: state for name, state in slot.layers().items() if name != "user"}
    key = (os.geteuid(), *sorted(layers.items()))
    if key not in _results:
        with scene() as decoys:
            results = [run_attack(slot, attack, decoys) for attack in QUICK_ATTACKS]
        _results[key] = {
            result.name: "stopped" if result.stopped else result.seen for result in results
        }
    return _results[key]


def report(states: dict[str, str]) -> str:
    """Return the layers and attacks as lines for printing."""
    width = max(map(len, states), default=0)
    return "\n".join(f"  {name:<{width}}  {state}" for name, state in states.items())
