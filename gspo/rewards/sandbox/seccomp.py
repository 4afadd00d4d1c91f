"""The seccomp filter: the system calls that a confined program may make, as a BPF program.

It is for Linux on x86_64 and aarch64, and it is an allow list. A call that is not in the list fails
with ENOSYS, so calls that later kernels add are refused without a change here. Some calls are
allowed for some arguments only (RULES). A call of another architecture's table (the 32-bit entry
int 0x80, x32 numbers) kills the process, since its numbers mean something else.

Sources of the numbers: <asm/unistd_64.h> and <asm-generic/unistd.h>, which test_confine.py
compares. "-" means that the architecture has no such call.
"""

import platform
import struct

# column of the table, and AUDIT_ARCH_*
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
TABLE = """
read:0/63 write:1/64 readv:19/65 writev:20/66 pread64:17/67 pwrite64:18/68 close:3/57
close_range:436/436 fstat:5/80 stat:4/- lstat:6/- newfstatat:262/79 statx:332/291 lseek:8/62
open:2/- openat:257/56 access:21/- faccessat:269/48 faccessat2:439/439 readlink:89/-
readlinkat:267/78 getdents64:217/61 getcwd:79/17 dup:32/23 dup2:33/- dup3:292/24 pipe:22/-
pipe2:293/59 fsync:74/82 fdatasync:75/83 mmap:9/222 munmap:11/215 mprotect:10/226 mremap:25/216
madvise:28/233 brk:12/214 rt_sigaction:13/134 rt_sigprocmask:14/135 rt_sigreturn:15/139
rt_sigpending:127/136 rt_sigtimedwait:128/137 rt_sigsuspend:130/133 sigaltstack:131/132 pause:34/-
alarm:37/- setitimer:38/103 getitimer:36/102 restart_syscall:219/128 clock_gettime:228/113
clock_getres:229/114 clock_nanosleep:230/115 nanosleep:35/101 gettimeofday:96/169 time:201/-
times:100/153 getrusage:98/165 getpid:39/172 getppid:110/173 gettid:186/178 getuid:102/174
geteuid:107/175 getgid:104/176 getegid:108/177 getgroups:115/158 getresuid:118/148 getresgid:120/150
getpgrp:111/- getpgid:121/155 getsid:124/156 uname:63/160 sched_yield:24/124
sched_getaffinity:204/123 getcpu:309/168 getrlimit:97/163 setrlimit:160/164 futex:202/98
set_robust_list:273/99 get_robust_list:274/100 rseq:334/293 exit:60/93 exit_group:231/94
wait4:61/260 waitid:247/95 getrandom:318/278 poll:7/- ppoll:271/73 select:23/- pselect6:270/72
epoll_create:213/- epoll_create1:291/20 epoll_ctl:233/21 epoll_wait:232/- epoll_pwait:281/22
eventfd2:290/19 recvfrom:45/207 kill:62/129 tgkill:234/131 clone:56/220 clone3:435/435 prctl:157/167
prlimit64:302/261 ioctl:16/29 fcntl:72/25 socketpair:53/199 sendto:44/206
"""
NUMBERS = {name: numbers for name, numbers in (item.split(":") for item in TABLE.split())}

OWN_PID = 0x7A5C3E19  # stands for the process's own id, which is only known after the fork
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# dup, flags, pipe sizes and seals, but no locks, owners or leases
FCNTLS = (0, 1, 2, 3, 4, 1030, 1031, 1032, 1034)
CLONE_THREAD = 0x10000
AF_UNIX = 1
SOCK_STREAM = 1
MSG_OOB = 1  # a little-used part of the kernel through which sandboxes have been escaped
# they empty a file without the right to write, which landlock before ABI 3 lets pass
O_TRUNC = 0o1000
O_ACCMODE = 0o3
# For each call its conditions, (argument, test, values). All must hold, or else the call fails with
# EPERM.
RULES = {
    "open": [(1, "truncate", ())],
    "openat": [(2, "truncate", ())],
    "kill": [(0, "in", (OWN_PID,))],
    "tgkill": [(0, "in", (OWN_PID,))],
    "clone": [(0, "has", (CLONE_THREAD,))],
    "prctl": [(0, "in", (15, 16))],  # PR_SET_NAME, PR_GET_NAME
    "prlimit64": [(0, "in", (0, OWN_PID))],
    "ioctl": [(1, "in", IOCTLS)],
    "fcntl": [(1, "in", FCNTLS)],
    # asyncio needs stream sockets, whereas datagrams could be sent elsewhere
    "socketpair": [(0, "in", (AF_UNIX,)), (1, "low4", (SOCK_STREAM,))],
    "sendto": [(4, "null", ()), (3, "without", (MSG_OOB,))],  # without an address
    "recvfrom": [(3, "without", (MSG_OOB,))],
}
# fails with ENOSYS, so that the C library falls back to clone, whose flags can be read here
REFUSED = {"clone3"}

# codes of BPF instructions
LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_ABOVE = 0x35
JUMP_BITS = 0x45
AND = 0x54
RETURN = 0x06
# results of the filter
ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x00050000 | 1
ENOSYS = 0x00050000 | 38
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def supported() -> bool:
    """Return whether there is a table for this machine (64-bit interpreters only)."""
    return platform.machine() in MACHINES and struct.calcsize("P") == 8


def numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the table's system calls that a machine has."""
    column, _ = MACHINES[machine]
    table = {}
    for name, columns in NUMBERS.items():
        number = columns.split("/")[column]
        if number != "-":
            table[name] = int(number)
    return table


def template(threads: bool, machine: str = "") -> bytes:
    """Return the filter as struct sock_filter[], with OWN_PID still to be filled in.

    Without `threads`, clone is refused."""
    machine = machine or platform.machine()
    table = numbers(machine)
    refused = REFUSED if threads else REFUSED | {"clone"}
    code: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, MACHINES[machine][1]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":  # refuse the x32 table
        code += [(JUMP_ABOVE, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    allow = (RETURN, 0, 0, ALLOW)
    for name, number in table.items():
        if name not in RULES and name not in refused:
            code += [(JUMP_EQUAL, 0, 1, number), allow]
    for name, conditions in RULES.items():
        if name not in refused and name in table:
            block = []
            for condition in conditions:
                block += _check(*condition)
            code += [(JUMP_EQUAL, 0, len(block) + 1, table[name]), *block, allow]
    code += [(RETURN, 0, 0, ENOSYS)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _check(argument: int, test: str, values: tuple[int, ...]) -> list[Instruction]:
    """Return instructions that go on if the argument passes and return EPERM if not.

    The kernel too reads only 32 bits of these arguments."""
    low_half = 16 + 8 * argument
    load = (LOAD, 0, 0, low_half)
    refuse = (RETURN, 0, 0, EPERM)
    if test == "null":  # a pointer, of which both halves are read
        is_zero = (JUMP_EQUAL, 1, 0, 0)
        return [load, is_zero, refuse, (LOAD, 0, 0, low_half + 4), is_zero, refuse]
    if test == "truncate":  # passes without O_TRUNC, or with the right to write
        masks = [
            (JUMP_BITS, 0, 4, O_TRUNC),
            (AND, 0, 0, O_ACCMODE),
            (JUMP_EQUAL, 2, 0, 1),
            (JUMP_EQUAL, 1, 0, 2),
        ]
        return [load, *masks, refuse]
    if test == "without":
        return [load, (JUMP_BITS, 0, 1, values[0]), refuse]
    if test == "has":
        return [load, (JUMP_BITS, 1, 0, values[0]), refuse]
    mask = [(AND, 0, 0, 0xF)] if test == "low4" else []
    jumps = [(JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [load, *mask, *jumps, refuse]


def for_process(filter_template: bytes, pid: int) -> bytes:
    """Return the filter of one process."""
    return filter_template.replace(struct.pack("<I", OWN_PID), struct.pack("<I", pid))
