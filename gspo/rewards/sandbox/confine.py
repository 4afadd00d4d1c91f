"""Takes rights away from a process before it runs an untrusted program.

Each layer is useful without the others. `prepare` finds out which layers this machine offers, and
reports them:
- resource limits: CPU, address space, file size, open files, processes and threads.
- user: root becomes a user of its own. An ordinary user enters a user namespace, in which the limit
  on processes counts only the program's threads. Trying shows whether that limit binds. If it does
  not, no threads are allowed at all.
- capabilities: none. CAP_DAC_READ_SEARCH alone stays if the interpreter lies in a home that others
  cannot enter, and only under landlock, which then decides what may be read.
- landlock: read the standard library, shared libraries and time zones. Write nothing, no TCP, no
  signals out.
- seccomp: the filter of gspo/rewards/sandbox/seccomp.py.
Landlock does not cover metadata (whether a path exists, how long a file is). Bubblewrap hides that
too.

Sources: Linux man-pages landlock(7), seccomp(2), capabilities(7), prctl(2). This module uses the
standard library only, since it runs in the confined process.
"""

import _thread
import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gspo.rewards.sandbox import seccomp

LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CLONE_NEWUSER = 0x10000000
# these numbers are the same on every architecture
LANDLOCK_CREATE = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT = 446
READ_FILE = 1 << 2
READ_DIR = 1 << 3
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION = 0x20080522
NOBODY = 65534
MAX_THREADS = 32
LIBRARIES = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/lib32", "/usr/local/lib")
READABLE = (
    *LIBRARIES,
    "/usr/share/zoneinfo",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)
PACKAGES = ("site-packages", "dist-packages")
STACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Bounds:
    """The resource limits of one program."""

    cpu_seconds: float
    memory_mb: int
    output_bytes: int


@dataclass(frozen=True)
class ConfinementPlan:
    """The layers that confine a program on this machine."""

    uid: int | None = None  # the user that root becomes; None for others
    namespace: bool = False  # whether to enter a user namespace
    reads_all: bool = False  # whether to keep CAP_DAC_READ_SEARCH
    threads: int = MAX_THREADS
    landlock_fd: int | None = None
    landlock_abi: int = 0
    filter: bytes | None = None


class CannotConfine(OSError):
    """Raised when a planned layer could not be applied."""


def prctl(option: int, *values: object) -> int:
    four_values = (*values, 0, 0, 0, 0)[:4]
    arguments = (ctypes.c_ulong(v) if isinstance(v, int) else v for v in four_values)
    return LIBC.prctl(option, *arguments)


def checked(result: int, action: str) -> int:
    """Return the result of a system call. Raises CannotConfine if it failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise CannotConfine(error, f"{action}: {os.strerror(error)}")
    return result


def confine(plan: ConfinementPlan, bounds: Bounds, parent: int) -> None:
    """Apply every layer of the plan, in an order in which each is still possible.

    Raises OSError or ValueError.
    """
    limit_resources(bounds)
    if not LINUX:
        return
    change_user(plan)
    # Only after the change of user: a user namespace would remember this limit for the user
    # outside, whose other processes it would then count. The 4 more are the program itself and, in
    # bubblewrap, its fork server and init.
    limit("NPROC", plan.threads + 4 if plan.threads else 0)
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # set after the change of user, which clears it
    if os.getppid() != parent:
        os._exit(1)
    checked(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    if plan.landlock_fd is not None:
        checked(LIBC.syscall(LANDLOCK_RESTRICT, plan.landlock_fd, 0), "landlock")
        os.close(plan.landlock_fd)
    if plan.filter is not None:
        install(seccomp.for_process(plan.filter, os.getpid()))


def limit_resources(bounds: Bounds) -> None:
    """Set soft and hard limits to the same values, so that the program cannot raise them.

    The CPU limit is a back-stop: the fork server watches more closely."""
    limits = {
        "CPU": math.ceil(bounds.cpu_seconds) + 2,
        "AS": bounds.memory_mb << 20,
        "FSIZE": bounds.output_bytes,
        "NOFILE": 64,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    for name, value in limits.items():
        if name != "AS" or LINUX:  # macOS refuses limits on the address space
            limit(name, value)
    # programs may ask for more, since the address space bounds it
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if LINUX and (hard == resource.RLIM_INFINITY or hard > STACK_BYTES):
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))


def limit(name: str, value: int) -> None:
    """Lower the soft and the hard limit. A lower limit that was inherited stays."""
    number = getattr(resource, f"RLIMIT_{name}", None)
    if number is not None:
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def change_user(plan: ConfinementPlan) -> None:
    """Become the user of the plan and give up capabilities."""
    if plan.uid is not None:
        if plan.reads_all:
            prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(plan.uid, plan.uid, plan.uid)
        os.setresuid(plan.uid, plan.uid, plan.uid)
    if plan.namespace:
        checked(LIBC.unshare(CLONE_NEWUSER), "user namespace")
    set_capabilities(1 << CAP_DAC_READ_SEARCH if plan.reads_all else 0)


def set_capabilities(capabilities: int) -> None:
    """Keep only these capabilities, and none to inherit."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    low = capabilities & 0xFFFFFFFF
    high = capabilities >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    checked(LIBC.capset(header, data), "capabilities")


def drop_bounding_set() -> None:
    """Prevent all programs started from here on from gaining a capability.

    It needs CAP_SETPCAP, and matters little if exec is forbidden."""
    for capability in range(64):
        if prctl(PR_CAPBSET_DROP, capability) < 0:
            break


def landlock_abi() -> int:
    """Return the version of landlock that the kernel offers, or 0 for none."""
    if not LINUX:
        return 0
    return max(0, LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def landlock_rules(abi: int, readable: list[str]) -> int:
    """Return a file descriptor for a rule set that refuses all it can except reading `readable`.

    Many processes can apply it."""
    rights_count = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)
    file_rights = (1 << rights_count) - 1
    tcp_rights = 3 if abi >= 4 else 0
    scopes = 3 if abi >= 6 else 0
    attributes = (ctypes.c_uint64 * 3)(file_rights, tcp_rights, scopes)
    # an older kernel knows fewer of the attributes, and accepts the others if they are 0
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    rules = checked(LIBC.syscall(LANDLOCK_CREATE, attributes, size, 0), "landlock rules")
    rights_by_path = {}
    for path in readable:
        if os.path.exists(path):
            rights_by_path.update(grants(path))
    for path, rights in rights_by_path.items():
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
        checked(LIBC.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0), f"landlock rule for {path}")
        os.close(fd)
    return rules


def grants(path: str) -> Iterator[tuple[str, int]]:
    """Yield the paths below a path and the rights on each.

    They allow to read everything except installed packages, which may include benchmarks with
    their answers."""
    if not os.path.isdir(path):
        yield path, READ_FILE
        return
    yield path, READ_DIR  # this lets the names of everything below be listed
    for entry in os.scandir(path):
        if entry.is_symlink():  # its target lies in here too, or is none of our concern
            continue
        if entry.is_dir() and entry.name.startswith("python"):
            yield from grants(entry.path)
        elif entry.name not in PACKAGES:
            yield entry.path, READ_FILE | READ_DIR if entry.is_dir() else READ_FILE


def install(program: bytes) -> None:
    """Install a seccomp filter, which cannot be removed."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    pointer = ctypes.byref(Program(len(program) // 8, program))
    checked(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, pointer), "seccomp")


def prepare(uid: int, readable: list[str]) -> tuple[ConfinementPlan, dict[str, str]]:
    """Return the strongest plan that works here, and its layers in words.

    The plan is found by trying, in children that end at once. Root becomes the user `uid`, an id
    that nobody else has. Programs may read `readable` beside the system's libraries.
    """
    abi = landlock_abi()
    landlock_fd = landlock_rules(abi, [*readable, *READABLE]) if abi else None
    seccomp_filter = seccomp.template(True) if LINUX and seccomp.supported() else None
    plan = ConfinementPlan(landlock_fd=landlock_fd, landlock_abi=abi, filter=seccomp_filter)
    if seccomp_filter is not None:
        without_landlock = replace(plan, landlock_fd=None)
        seccomp_works = any(  # reads_all is for an interpreter in a closed home
            attempt(replace(without_landlock, reads_all=reads_all), []) >= 0
            for reads_all in (False, True)
        )
        if not seccomp_works:
            plan = replace(plan, filter=None)
    for user_fields in user_choices(uid, bool(abi)):
        choice = replace(plan, **user_fields)
        threads_started = attempt(choice, readable)
        if threads_started >= 0:
            break
    else:
        raise CannotConfine("no way to confine a child that can still read the standard library")
    has_own_user = not LINUX or choice.namespace or choice.uid is not None
    # otherwise the limit counts the user's other processes, or does not bind
    if not has_own_user or not 0 < threads_started <= MAX_THREADS + 4:
        filter_without_threads = seccomp.template(False) if plan.filter else None
        choice = replace(choice, threads=0, filter=filter_without_threads)
    return choice, describe(choice)


def user_choices(uid: int, landlock: bool) -> list[dict[str, object]]:
    """Return fields of ConfinementPlan for each way to change the user, the best first."""
    if not LINUX:
        return [{}]
    if os.geteuid() == 0:
        users = [{"uid": uid}, {"uid": NOBODY}, {}]
    else:
        users = [{"namespace": True}, {}]
    reads_choices = (False, True) if landlock else (False,)
    return [{**user, "reads_all": reads} for user in users for reads in reads_choices]


def attempt(plan: ConfinementPlan, readable: list[str]) -> int:
    """Confine a child by the plan and return the number of threads that it could start.

    Return -1 if confining or reading failed."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 255
        try:
            confine(plan, Bounds(10, 4096, 0), parent)
            for folder in readable:
                if os.path.isdir(folder):
                    os.listdir(folder)
            with open(os.__file__, "rb") as file:
                file.read(1)
            code = threads_possible()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if 0 <= code <= 2 * MAX_THREADS else -1


def threads_possible() -> int:
    """Start threads until that fails, and return how many started.

    At most eight more are started than should be possible."""
    for count in range(MAX_THREADS + 8):
        try:  # threading.Thread would wait for ever for a thread that has found no memory left
            _thread.start_new_thread(time.sleep, (5,))
        except RuntimeError:
            return count
    return MAX_THREADS + 8


def describe(plan: ConfinementPlan) -> dict[str, str]:
    """Return the layers of a plan in words."""
    landlock = "off"
    if plan.landlock_abi:
        landlock = f"ABI {plan.landlock_abi}: files"
        if plan.landlock_abi >= 4:
            landlock += ", TCP"
        if plan.landlock_abi >= 6:
            landlock += ", signals, abstract sockets"
    if plan.uid is not None:
        user = f"user id {plan.uid}"
    else:
        user = "a user namespace" if plan.namespace else "the harness's own user"
    if plan.reads_all:
        user += ", may read what landlock allows whoever owns it"
    if plan.threads:
        threads = f"at most {MAX_THREADS}"
    else:
        threads = "none" if plan.filter else "not limited"
    return {
        "landlock": landlock,
        "seccomp": "on: an allow list of system calls" if plan.filter else "off",
        "user": user,
        "threads": threads,
        "rlimits": "CPU, memory, file size, open files" if LINUX else "CPU, file size, open files",
    }
