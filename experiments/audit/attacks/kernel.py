"""Attacks on rarely used parts of the kernel, and on the confinement itself.

An error such as ENOENT or EINVAL from a call that needs a right would mean that the right was
there; see `passes`.
"""

from audit.attack import Attack

PASSES = """
def passes(work, *errors):  # succeeded, or failed only by these errors
    ctypes.set_errno(0)
    try: result = work()
    except OSError as error: return error.errno in errors
    except Exception: return False
    return result != -1 or ctypes.get_errno() in errors
"""

KERNEL = (
    Attack(
        "io_uring",
        "system calls without system calls",
        "granted(lambda: call(425, 425, 4, bytes(120)))",
    ),
    Attack(
        "bpf",
        "programs in the kernel",
        "granted(lambda: call(321, 280, 0, struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(100), 72))",
    ),
    Attack(
        "perf events",
        "counters and samples of processes",
        """
event = struct.pack("IIQQQQQ", 1, 112, 0, 0, 0, 0, 0x61) + bytes(64)
granted(lambda: call(298, 241, event, 0, -1, -1, 0), lambda: call(298, 241, event, PARENT, -1, -1, 0))
""",
    ),
    Attack(
        "userfaultfd",
        "page faults of the kernel stopped at will",
        "granted(lambda: call(323, 282, 1), lambda: call(323, 282, 0))",
    ),
    Attack(
        "files without a file",
        "memfd_create, memfd_secret, pkeys, splice and vmsplice into pipes",
        """
a, b = os.pipe()
granted(lambda: call(319, 279, b"x", 0), lambda: call(447, 447, 0),
        lambda: call(278, 75, b, struct.pack("PN", id(os), 8), 1, 0),
        lambda: call(275, 76, a, 0, b, 0, 1, 2) if ctypes.get_errno() != 38 else -1)
""",
    ),
    Attack(
        "namespaces",
        "unshare, setns: the start of most ways out",
        """
for flag in (0x10000000, 0x20000, 0x10020000, 0x20000000, 0x40000000): granted(lambda: libc.unshare(flag))
granted(lambda: call(308, 268, os.open(f"/proc/{HOST}/ns/net", os.O_RDONLY), 0),
        lambda: call(308, 268, call(434, 434, PARENT, 0), 0x20000))
""",
    ),
    Attack(
        "mounts",
        "old and new calls to mount, pivot_root",
        PASSES
        + """
won(passes(lambda: libc.mount(b"x", b"/", b"nosuchfs", 0, 0), 19))
won(passes(lambda: call(155, 41, b"/", b"/"), 16, 22)); won(passes(lambda: call(166, 39, b"/nosuch", 0), 2))
granted(lambda: call(430, 430, b"tmpfs", 0), lambda: call(428, 428, -100, b"/", 1))
""",
    ),
    Attack(
        "chroot and chdir",
        "another root or another folder",
        """
granted(lambda: os.chroot("/"), lambda: os.chdir("@FOLDER@"), lambda: os.listdir(".."))
""",
    ),
    Attack(
        "become root",
        "user and group ids, capabilities",
        """
header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *[0xFFFFFFFF] * 6)
granted(lambda: os.setresuid(0, 0, 0), lambda: os.setuid(0), lambda: os.setresgid(0, 0, 0), lambda: os.setgroups([0]),
        lambda: libc.capset(header, data), lambda: libc.prctl(47, 2, 2, 0, 0), lambda: libc.prctl(28, 1, 0, 0, 0))
""",
    ),
    Attack(
        "settings of the machine",
        "host name, ports, swap, kernel log, modules: rights that only an administrator has",
        PASSES
        + """
name = os.uname().nodename.encode()
won(passes(lambda: call(170, 161, name, len(name)))); won(passes(lambda: call(172, -1, 3)))
won(passes(lambda: call(175, 105, 0, 0, b""), 8, 14, 22)); won(passes(lambda: call(103, 116, 10, 0, 0)))
won(passes(lambda: call(167, 224, b"/nosuch", 0), 2))
""",
    ),
    Attack(
        "raise the limits",
        "setrlimit and prlimit above what was set",
        """
import resource as r
def more(what):
    low, high = r.getrlimit(what)
    if high < 0: return False
    r.setrlimit(what, (high + 1, high + 1)); return True
names = (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NPROC, r.RLIMIT_NOFILE,
         r.RLIMIT_CORE, r.RLIMIT_MEMLOCK, r.RLIMIT_MSGQUEUE)
granted(*[lambda w=w: more(w) for w in names])
granted(*[lambda w=w: call(302, 261, 0, w, struct.pack("QQ", (1 << 64) - 1, (1 << 64) - 1), 0) for w in names])
""",
    ),
    Attack(
        "real-time and priority",
        "a policy or priority that others must wait for; locked memory",
        """
granted(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)), lambda: os.setpriority(0, 0, -5),
        lambda: os.nice(-5), lambda: call(314, 274, 0, struct.pack("IIQiIQQQ", 48, 1, 0, 0, 1, 0, 0, 0), 0),
        lambda: call(251, 30, 1, 0, 0x2000))
""",
    ),
    Attack(
        "a second filter",
        "a looser filter, taking landlock off, new privileges",
        PASSES
        + """
granted(lambda: call(317, 277, 2, 0, struct.pack("I", 0x7FFF0000)), lambda: libc.prctl(38, 0, 0, 0, 0),
        lambda: call(444, 444, struct.pack("QQQ", 1, 0, 0), 8, 0))
won(passes(lambda: call(317, 277, 1, 0, 0), 14)); won(passes(lambda: libc.prctl(22, 2, 0, 0, 0), 14))
""",
    ),
    Attack(
        "process attributes",
        "prctl: dumpable, child subreaper, core scheduling, addresses, tracer; arch_prctl",
        """
granted(lambda: libc.prctl(4, 1, 0, 0, 0), lambda: libc.prctl(36, 1, 0, 0, 0), lambda: libc.prctl(62, 1, 0, 0, 0),
        lambda: libc.prctl(0x59616D61, -1, 0, 0, 0), lambda: libc.prctl(35, 9, id(os), 0, 0))
""",
    ),
    Attack(
        "read /sys and /proc",
        "what the kernel tells of the machine",
        """
granted(lambda: os.listdir("/sys"), lambda: open("/proc/meminfo").read(), lambda: open("/proc/1/cmdline").read(),
        lambda: open("/proc/self/status").read(), lambda: open("/proc/self/mountinfo").read(),
        lambda: open("/sys/kernel/mm/ksm/run").read())
""",
    ),
    Attack(
        "write to /proc and /sys",
        "its own name, out-of-memory score, id maps",
        """
for path in ("/proc/self/comm", "/proc/self/oom_score_adj", "/proc/self/coredump_filter", "/proc/self/timerslack_ns"):
    granted(lambda: open(path, "r+b").close())
""",
    ),
    Attack(
        "many descriptors",
        "more than 300 open files",
        "fds = [os.dup(0) for _ in range(300)]; won()",
    ),
    Attack(
        "memory in pipes and sockets",
        "more than 64 MB in the kernel's buffers, which the address space does not count",
        """
import fcntl
held = 0
def fill(fd):
    global held
    os.set_blocking(fd, False)
    try:
        while held < 80 << 20: held += os.write(fd, bytes(1 << 16))
    except BlockingIOError: pass
kept = []
while held < 80 << 20:
    a, b = os.pipe(); kept.append((a, b)); quietly(lambda: fcntl.fcntl(b, 1031, 1 << 20)); fill(b)
    c, d = socket.socketpair(); kept.append((c, d)); quietly(lambda: c.setsockopt(1, 7, 1 << 22)); fill(c.fileno())
won()
""",
    ),
)
