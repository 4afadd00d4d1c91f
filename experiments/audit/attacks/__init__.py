"""The attack suite: programs that try to leave the sandbox, read what is not theirs, or outlast
their limits.

    runner = CodeRunner(SUITE_LIMITS)
    for result in run_attacks(runner):
        print(result.name, result.stopped, result.seen)

An attack counts as stopped if the harness saw no effect of any kind: see `run_attack` of
experiments/audit/attack.py. Only decoys are attacked, and the damage is bounded should the
sandbox fail: at most 64 processes, 64 MB of files, and twice the memory limit.
"""

from typing import Any

from audit.attack import Attack, AttackResult, run_attack
from audit.attacks.files import FILES, NETWORK
from audit.attacks.kernel import KERNEL
from audit.attacks.limits import LIMITS
from audit.attacks.memory import MEMORY
from audit.attacks.processes import PROCESSES
from audit.attacks.quick import QUICK_ATTACKS
from audit.scene import exposed, scene
from gspo.rewards.sandbox.session import Limits

ATTACKS: tuple[Attack, ...] = QUICK_ATTACKS + FILES + NETWORK + PROCESSES + MEMORY + KERNEL + LIMITS
SUITE_LIMITS = Limits(
    cpu_seconds=0.5, total_cpu_seconds=1.0, wall_seconds=0.5, memory_mb=256, output_bytes=1 << 16
)


def run_attacks(runner: Any, names: tuple[str, ...] = ()) -> list[AttackResult]:
    """Run the suite, or the named attacks, on a CodeRunner that nobody else uses: its servers are
    started anew.

    With SUITE_LIMITS it takes about 20 seconds; programs that wait take as long as the runner's
    limits let them. Raises ValueError for a name that no attack has.
    """
    if unknown := set(names) - {attack.name for attack in ATTACKS}:
        raise ValueError(f"names: no attack is called {sorted(unknown)[0]!r}")
    chosen = [attack for attack in ATTACKS if not names or attack.name in names]
    # so that the servers inherit the decoys in the environment and among the descriptors
    runner.close()
    with scene() as decoys, exposed(decoys):
        results = runner.each(
            lambda slot, _: [run_attack(slot, attack, decoys) for attack in chosen], [None]
        )[0]
        runner.close()
    return results
