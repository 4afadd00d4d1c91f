"""An attack on the sandbox: a program that tries to have an effect, and what the harness saw when
it ran.

An attack succeeds only by an effect that the harness observes (scene.py): a file, a message, a dead
process, too much memory, the secret in the output. Where success leaves no trace outside the
program (the kernel grants a forbidden system call), the program reports it by `won`, which prints a
random word of this run. tests/unit/rewards/test_attacks.py tests that these programs do win where
nothing confines them.

In a program, @SECRET@, @HOST@ and so on stand for the decoys; see `Scene.values`.
"""

import time
from typing import Any, NamedTuple

from audit.scene import Scene, Watch, left_over, long_seconds
from gspo.rewards.sandbox.session import Limits

HONEST = "import builtins, math\nprint(6 * 7, hasattr(builtins, 'left') or hasattr(math, 'left'))"
# seconds beyond ten times the limits, so that a busy machine does not count as a breach
PATIENCE = 20.0

PRELUDE = """
import ctypes, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
MACHINE = os.uname().machine if sys.platform == "linux" else ""  # the numbers are those of Linux
ARM, X86 = MACHINE == "aarch64", MACHINE == "x86_64"
HOST, PARENT, LONG = int("@HOST@"), os.getppid(), float("@LONG@")
def quietly(work):
    try: return work()
    except Exception: return None
quietly(lambda: libc.prctl(15, b"@NAME@", 0, 0, 0))  # the harness finds our processes and threads by this name
def won(done=True):
    if done: os.write(1, b"@WORD@")
def call(x86, arm, *values):  # a system call by its number on either machine
    number = arm if ARM else x86 if X86 else -1
    if number < 0: return -1
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(v) if isinstance(v, int) else v for v in values])
def allowed(work):
    try: result = work()
    except Exception: return False
    return result is not False and result != -1
def granted(*works):  # won if any of the calls neither raises nor returns -1 or False
    won(any([allowed(work) for work in works]))
def machine_code(code):  # runs instructions; the number in rax
    import mmap
    page = mmap.mmap(-1, 4096, prot=7); page.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
def find(data):  # prints secrets
    import re
    for token in re.findall(rb"tok[0-9a-f]{24}", data): os.write(1, token)
def until(): return time.monotonic() + LONG
"""


class Attack(NamedTuple):
    """One attack. `before` is a program that runs first; `ends` lists how the attack must end
    (empty: in any way).
    """

    name: str
    tries: str
    program: str
    ends: tuple[str, ...] = ()
    before: str = ""


class AttackResult(NamedTuple):
    """What became of one attack. `seen` lists its effects if it succeeded, and otherwise says how
    the program ended.
    """

    name: str
    stopped: bool
    seen: str


def run_attack(slot: Any, attack: Attack, decoys: Scene) -> AttackResult:
    """Run one attack in a slot, then an honest program, and look for effects."""
    if attack.before:
        slot.run_program(decoys.fill(attack.before, slot.limits), decoys.token)
    program = decoys.fill(PRELUDE + attack.program, slot.limits)
    start = time.monotonic()
    with Watch(decoys.name) as watch:
        output, ended = slot.run_program(program, "input\n")
    seconds = time.monotonic() - start
    breaches = [
        *_breaches(attack, slot.limits, output, ended, seconds, decoys),
        *watch.breaches(slot.limits.memory_mb),
    ]
    if left := left_over(decoys.name):
        breaches.append(f"{len(left)} processes went on after the end")
    breaches += decoys.effects()
    honest, after = slot.run_program(HONEST, "")
    if honest != b"42 False\n":
        breaches.append(f"the next program gave {honest[:40]!r} ({after.why})")
    return AttackResult(
        attack.name, not breaches, "; ".join(breaches) or f"ended by {ended.why} {ended.code}"
    )


def _breaches(
    attack: Attack, limits: Limits, output: bytes, ended: Any, seconds: float, decoys: Scene
) -> list[str]:
    """Return what the output and the end of the program show to be breaches."""
    # it ended by an error of its own
    failed = ended.why == "exit" and ended.code != 0 and seconds < long_seconds(limits)
    found = []
    if decoys.token.encode() in output:
        found.append("the secret was printed")
    if decoys.word.encode() in output:
        found.append("the kernel granted what must be refused")
    if len(output) > limits.output_bytes:
        found.append(f"{len(output)} bytes of output")
    if ended.why in ("sandbox-error", "compile-error", "protocol"):
        found.append(f"the sandbox failed: {ended.why} {getattr(ended, 'detail', '')}")
    # a timeout also counts as stopped, since the machine may be busy
    elif attack.ends and ended.why not in (*attack.ends, "timeout") and not failed:
        found.append(f"ended by {ended.why} {ended.code}, not by {' or '.join(attack.ends)}")
    if seconds > 10 * (limits.total_cpu_seconds + limits.wall_seconds) + PATIENCE:
        found.append(f"it took {seconds:.0f} s")
    if ended.cpu_seconds > limits.total_cpu_seconds + 2:
        found.append(f"{ended.cpu_seconds:.1f} s of CPU time")
    if ended.memory_mb > limits.memory_mb + 32:
        found.append(f"{ended.memory_mb:.0f} MB of memory")
    return found
