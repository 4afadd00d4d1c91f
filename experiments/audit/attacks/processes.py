"""Attacks on processes: starting more of them, running other programs, and reaching those that are
there.
"""

from audit.attack import Attack

START = (
    Attack(
        "fork by number",
        "fork, vfork and clone as system calls of the C library and by number",
        """
for work in (lambda: libc.fork(), lambda: call(57, -1), lambda: call(56, 220, 17, 0, 0, 0, 0),
             lambda: call(56, 220, 0x20000000 | 17, 0, 0, 0, 0), lambda: os.forkpty()[0]):
    pid = quietly(work)
    if pid == 0: time.sleep(0.3); os._exit(0)
    won((pid or 0) > 0)
""",
    ),
    Attack(
        "vfork by machine code",
        "vfork, and clone with shared memory but not as a thread (x86_64)",
        """
end = bytes([0x85, 0xC0, 0x74, 1, 0xC3, 0x31, 0xFF, 0xB8, 60, 0, 0, 0, 0x0F, 5])  # exit(0) in the child, else return
zero = bytes([0x31, 0xF6, 0x31, 0xD2, 0x45, 0x31, 0xD2, 0x45, 0x31, 0xC0])  # rsi, rdx, r10, r8
assert X86
won(machine_code(bytes([0xB8, 58, 0, 0, 0, 0x0F, 5]) + end) > 0)
won(machine_code(bytes([0xBF, 0x11, 0x41, 0, 0]) + zero + bytes([0xB8, 56, 0, 0, 0, 0x0F, 5]) + end) > 0)
""",
    ),
    Attack(
        "clone3",
        "the newer call, whose flags a filter cannot read",
        """
for size in (64, 80, 88):
    pid = call(435, 435, struct.pack("QQQQQQQQQQQ", 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), size)
    if pid == 0: time.sleep(0.2); os._exit(0)
    won(pid > 0)
""",
    ),
    Attack(
        "x32 numbers",
        "the second table of system calls of x86_64",
        """
for number in (57, 58, 520, 545): 
    pid = call(0x40000000 + number, -1)
    if pid == 0: os._exit(0)
    won(pid > 0)
won(call(0x40000000 + 39, -1) > 0)
""",
    ),
    Attack(
        "32-bit entry",
        "fork by int 0x80, whose numbers mean something else (x86_64)",
        """
assert X86
pid = machine_code(bytes([0x53, 0xB8, 2, 0, 0, 0, 0xCD, 0x80, 0x5B, 0xC3]))
if pid == 0: os._exit(0)
won(pid > 0)
""",
    ),
    Attack(
        "exec the interpreter or the loader",
        "another Python, or a program as an argument of the dynamic loader",
        """
import glob
quietly(lambda: os.execv(sys.executable, ["python", "-c", "print('@WORD@')"]))
for loader in glob.glob("/lib*/ld-*.so*") or ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"]:
    quietly(lambda: os.execv(loader, ["ld", "/bin/echo", "@WORD@"]))
""",
    ),
    Attack(
        "exec from memory",
        "memfd_create and execveat: a program without a file",
        """
fd = call(319, 279, b"x", 0)
if fd >= 0:
    os.write(fd, b"#!/bin/sh\\necho @WORD@\\n")
    empty = (ctypes.c_char_p * 2)(b"x", None)
    call(322, 281, fd, b"", empty, (ctypes.c_char_p * 1)(None), 0x1000)
""",
    ),
    Attack(
        "multiprocessing",
        "processes by the standard library",
        """
import multiprocessing
def work(): won(); time.sleep(0.2)
for method in ("fork", "spawn", "forkserver"):
    quietly(lambda: multiprocessing.get_context(method).Process(target=work, daemon=True).start())
time.sleep(0.2)
""",
    ),
    Attack(
        "survive as a daemon",
        "a process that goes on after the program's end",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(2); os._exit(0)
    os._exit(0)
time.sleep(0.2)  # the child must have left the group before this process ends
os._exit(0)
""",
    ),
    Attack(
        "keep running after the parent",
        "giving up the signal that ends it with its fork server; another process group",
        """
granted(lambda: libc.prctl(1, 0, 0, 0, 0), lambda: libc.prctl(4, 1, 0, 0, 0), lambda: libc.prctl(36, 1, 0, 0, 0))
quietly(os.setsid); quietly(lambda: os.setpgid(0, PARENT))
""",
    ),
    Attack(
        "thread bomb",
        "threads with small stacks, at most 200",
        """
threading.stack_size(32768); stop = threading.Event()
for _ in range(200): threading.Thread(target=stop.wait, args=(1.0,), daemon=True).start()
time.sleep(0.2)
""",
    ),
    Attack(
        "thread bomb by the C library",
        "threads that Python does not know of, at most 200",
        """
function = ctypes.cast(libc.pause, ctypes.c_void_p); attributes = ctypes.create_string_buffer(128)
libc.pthread_attr_init(attributes); libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(16384))
for _ in range(200): libc.pthread_create(ctypes.byref(ctypes.c_ulong()), attributes, function, None)
time.sleep(0.2)
""",
    ),
)

REACH = (
    Attack(
        "kill another process",
        "SIGTERM and SIGKILL",
        "for s in (15, 9): quietly(lambda: os.kill(int('@VICTIM@'), s))",
    ),
    Attack(
        "stop the fork server",
        "SIGSTOP to the parent; to its group",
        """
if PARENT != HOST:
    granted(lambda: os.kill(PARENT, signal.SIGSTOP), lambda: os.killpg(os.getpgid(PARENT), signal.SIGSTOP))
""",
    ),
    Attack(
        "signal everybody",
        "process ids 0, -1, 1 and whole groups; signal 0 only asks whether it would be allowed",
        """
granted(lambda: os.kill(-1, 0), lambda: os.kill(1, 0), lambda: os.killpg(os.getpgid(PARENT), 0),
        lambda: call(62, 129, 0, 0),
        lambda: call(62, 129, 0xFFFFFFFF, 0), lambda: call(62, 129, 0x100000000 + HOST, 0))
""",
    ),
    Attack(
        "signals by other calls",
        "tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal",
        """
info = struct.pack("iii", 23, 0, -1) + bytes(116)
works = []
for p in (HOST, PARENT, int("@VICTIM@")):
    works += [lambda p=p: call(200, 130, p, 23), lambda p=p: call(234, 131, p, p, 23),
              lambda p=p: call(129, 138, p, 23, info),
              lambda p=p: call(297, 240, p, p, 23, info), lambda p=p: call(424, 424, call(434, 434, p, 0), 23, 0, 0)]
granted(*works)
""",
    ),
    Attack(
        "signals by ownership of a file",
        "F_SETOWN, F_SETSIG and O_ASYNC: the kernel sends the signal",
        """
import fcntl
a, b = socket.socketpair()
granted(lambda: fcntl.fcntl(a, 8, HOST), lambda: fcntl.fcntl(a, 15, struct.pack("ii", 1, HOST)),
        lambda: fcntl.ioctl(a, 0x8901, struct.pack("i", HOST)))
""",
    ),
    Attack(
        "descriptors of processes",
        "pidfd_open, pidfd_getfd, and setns by a pidfd",
        """
works = [lambda p=p: call(434, 434, p, 0) for p in (HOST, PARENT, int("@VICTIM@"))]
granted(*works, lambda: call(438, 438, call(434, 434, PARENT, 0), 0, 0))
""",
    ),
    Attack(
        "limits of others",
        "prlimit on the harness, the fork server, another process",
        """
import resource as r
quietly(lambda: r.prlimit(int("@VICTIM@"), r.RLIMIT_NOFILE, (5, 5)))
granted(*[lambda p=p: r.prlimit(p, r.RLIMIT_CORE, r.prlimit(p, r.RLIMIT_CORE)) for p in (HOST, PARENT)])
""",
    ),
    Attack(
        "scheduling of others",
        "priority, affinity, policy and input-output priority",
        """
victim = int("@VICTIM@")
for work in (lambda: os.setpriority(0, victim, 10), lambda: os.sched_setaffinity(victim, {0}),
             lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0))): quietly(work)
granted(*[lambda p=p: os.sched_setaffinity(p, os.sched_getaffinity(p)) for p in (HOST, PARENT)],
        lambda: call(251, 30, 1, victim, 0x4004), lambda: os.setpriority(0, PARENT, os.getpriority(0, PARENT)))
""",
    ),
    Attack(
        "see other processes",
        "their command lines and environments",
        """
for p in (int("@VICTIM@"), HOST, PARENT, 1):
    for name in ("cmdline", "environ"): quietly(lambda: find(open(f"/proc/{p}/{name}", "rb").read()))
granted(lambda: any(name.isdigit() for name in os.listdir("/proc")))
""",
    ),
)
PROCESSES = START + REACH
