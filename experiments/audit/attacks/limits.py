"""Attacks on the limits of time, memory and output, and ways to end that should not harm later
programs.

No attack runs longer than @LONG@ seconds, a few times the limits of the suite, or takes more than
twice the memory.
"""

from audit.attack import Attack

STOPPED = ("timeout",)
WAIT = "end = until()\nwhile time.monotonic() < end: time.sleep(0.2)\n"
LOOP = "end = until()\nwhile time.monotonic() < end: pass\n"
DEAF = """
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
"""

TIME = (
    Attack("infinite loop", "computing for ever", LOOP, STOPPED),
    Attack("sleep", "waiting for ever", WAIT, STOPPED),
    Attack("sleep, signals ignored", "waiting, deaf to every signal", DEAF + WAIT, STOPPED),
    Attack(
        "loop, signals ignored",
        "computing, deaf to every signal that can be ignored",
        DEAF + LOOP,
        STOPPED,
    ),
    Attack(
        "loop, exceptions caught",
        "handlers for SIGTERM, SIGXCPU and SIGALRM, and every exception caught",
        """
for s in (signal.SIGTERM, signal.SIGXCPU, signal.SIGALRM, signal.SIGINT): signal.signal(s, lambda *a: None)
end = until()
while time.monotonic() < end:
    try:
        while time.monotonic() < end: pass
    except BaseException: pass
""",
        STOPPED,
    ),
    Attack(
        "signals blocked",
        "all signals masked",
        "signal.pthread_sigmask(signal.SIG_SETMASK, range(1, 65))\n" + LOOP,
        STOPPED,
    ),
    Attack(
        "one long computation in C",
        "a call during which Python looks at no signal",
        "import re\nre.match('(a+)+$', 'a' * 26 + 'b')",
        STOPPED,
    ),
    Attack(
        "pause",
        "signal.pause with a late alarm",
        "signal.setitimer(signal.ITIMER_REAL, LONG)\nsignal.pause()",
        STOPPED,
    ),
    Attack(
        "stop itself",
        "SIGSTOP to itself: no time passes for it",
        "threading.Timer(LONG, os._exit, (0,)).start()\nos.kill(os.getpid(), signal.SIGSTOP)\n"
        + WAIT,
        STOPPED,
    ),
    Attack(
        "timers",
        "an alarm every millisecond interrupts every wait",
        "signal.signal(signal.SIGALRM, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        + WAIT,
        STOPPED,
    ),
    Attack(
        "deadlock",
        "a lock that nobody gives back",
        "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=LONG)",
        STOPPED,
    ),
    Attack(
        "closed output, then waiting",
        "standard output closed, so that its reader might think it has ended",
        "for fd in (0, 1, 2): os.close(fd)\n" + WAIT,
        STOPPED,
    ),
    Attack(
        "exit handler",
        "atexit hangs",
        "import atexit\natexit.register(lambda: time.sleep(LONG)); sys.exit(0)",
        STOPPED,
    ),
    Attack(
        "destructor",
        "__del__ at the end of the program hangs",
        "class D:\n    def __del__(self): time.sleep(LONG)\nd = D(); e = [d]; del d; e.clear()",
        STOPPED,
    ),
    Attack(
        "thread after the end",
        "a thread that outlives the main one",
        "threading.Thread(target=time.sleep, args=(LONG,)).start()",
        STOPPED,
    ),
    Attack(
        "main thread gone, others wait",
        "the main thread ends by the system call, another sleeps",
        "threading.Thread(target=lambda: (time.sleep(LONG), os._exit(0))).start(); call(60, 93, 0)",
        STOPPED,
    ),
    Attack(
        "main thread gone, others compute",
        "the main thread ends by the system call, another loops",
        "def work():\n    end = until()\n    while time.monotonic() < end: pass\n    os._exit(0)\n"
        "threading.Thread(target=work).start(); call(60, 93, 0)",
        STOPPED,
    ),
    Attack(
        "busy threads",
        "eight threads: the time of all of them counts",
        """
import hashlib
def work():
    while time.monotonic() < end: hashlib.sha256(bytes(1 << 20))
end = until(); threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
        STOPPED,
    ),
    Attack(
        "threads that queue",
        "threads that wake all at once, so that waiting looks like queueing for the processor",
        """
def work():
    while (now := time.monotonic()) < end: libc.usleep(int(1e6 * (0.02 - now % 0.02)))
end = until(); threads = [threading.Thread(target=work) for _ in range(24)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
        STOPPED,
    ),
    Attack(
        "threads that come and go",
        "so many short threads that the time of none is seen",
        """
end = until()
while time.monotonic() < end:
    threads = [threading.Thread(target=time.sleep, args=(0.0005,)) for _ in range(20)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
""",
        STOPPED,
    ),
    Attack(
        "faults that are caught",
        "a handler for segmentation faults that returns to the fault",
        """
timer = threading.Timer(LONG, os._exit, (0,)); timer.daemon = True; timer.start()
signal.signal(signal.SIGSEGV, lambda *a: None); ctypes.string_at(0)
""",
        ("timeout", "exit"),
    ),
    Attack(
        "compile for ever",
        "a program that is only hard to compile",
        "compile('-'.join(['(1,' * 40 + ')' * 40] * 20000), 'x', 'eval')\n" + LOOP,
        ("timeout", "memory", "exit"),
    ),
)

SPACE = (
    Attack(
        "touch memory",
        "twice the limit in pieces",
        "kept = [bytearray(b'x' * (1 << 22)) for _ in range(int('@MEMORY@') * 2 >> 2)]\nwon()",
        ("memory", "timeout"),
    ),
    Attack(
        "memory, exceptions caught",
        "goes on after each MemoryError",
        """
kept = []
for _ in range(int("@MEMORY@") >> 1):
    try: kept.append(b"x" * (1 << 22))
    except MemoryError: pass
won(len(kept) << 2 > int("@MEMORY@"))
""",
        ("memory", "exit"),
    ),
    Attack(
        "memory by mmap",
        "private and shared maps, twice the limit",
        """
import mmap
maps = []
for i in range(int("@MEMORY@") >> 3):
    maps.append(mmap.mmap(-1, 1 << 24, flags=(mmap.MAP_SHARED if i % 2 else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS))
    for page in range(0, 1 << 24, 4096): maps[-1][page] = 1
won()
""",
        ("memory", "exit"),
    ),
    Attack(
        "memory by threads",
        "large stacks of many threads, used to the end",
        """
threading.stack_size(1 << 25)
def deep(n): return n and deep(n - 1)
def work():
    buffer = ctypes.create_string_buffer(1 << 24); ctypes.memset(buffer, 1, 1 << 24)
    kept.append(buffer); time.sleep(0.3)
kept = []; sys.setrecursionlimit(10**6)
for _ in range(int("@MEMORY@") >> 3): threading.Thread(target=work).start()
won(len(kept) << 4 > int("@MEMORY@"))
""",
        ("memory", "exit", "timeout"),
    ),
    Attack(
        "output flood",
        "lines without end, four times the limit and more",
        'end = until()\nwhile time.monotonic() < end: sys.stdout.write("\\n" * 100000)',
        ("output-limit",),
    ),
    Attack(
        "errors flood",
        "256 MB to standard error",
        'for _ in range(2560): sys.stderr.write("x" * 100000)',
        ("exit", "timeout", "output-limit"),
    ),
    Attack(
        "output by holes",
        "ftruncate, fallocate, pwrite far behind the end",
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
big = 1 << 26
for work in (lambda: os.ftruncate(1, big), lambda: os.posix_fallocate(1, 0, big), lambda: call(285, 47, 1, 0, 0, big),
             lambda: os.pwrite(1, b"x", big), lambda: os.lseek(1, big, 0) and os.write(1, b"x"),
             lambda: os.copy_file_range(0, 1, 1, 0, big), lambda: os.sendfile(1, 0, 0, 1)):
    quietly(work)
if os.fstat(1).st_size > int("@OUTPUT@"): os.pwrite(1, b"@WORD@", 0)
""",
        ("exit", "output-limit"),
    ),
    Attack(
        "output by mmap",
        "standard output as memory, made larger there",
        """
import mmap
size = int("@OUTPUT@") * 4
os.write(1, b" " * 4096); page = mmap.mmap(1, 4096)
quietly(lambda: page.resize(size)); won(os.fstat(1).st_size > int("@OUTPUT@"))
""",
    ),
    Attack(
        "output of odd bytes",
        "NUL, invalid UTF-8, escape sequences",
        'os.write(1, b"\\0\\xff\\xfe\\x1b]0;x\\7\\x1b[2J" * 100)',
        ("exit",),
    ),
    Attack(
        "output seals",
        "seals and modes on the output file",
        "import fcntl\ngranted(lambda: fcntl.fcntl(1, 1033, 4), lambda: os.fchmod(1, 0o777))",
    ),
)

ENDS = (
    Attack("leave early", "os._exit(0) without a result", "os._exit(0)", ("exit",)),
    Attack("segmentation fault", "a read at address 0", "ctypes.string_at(0)", ("exit",)),
    Attack("abort", "SIGABRT, with a core dump", "os.abort()", ("exit",)),
    Attack("kill itself", "SIGKILL to itself", "os.kill(os.getpid(), signal.SIGKILL)", ("exit",)),
    Attack(
        "deep recursion",
        "Python and C recursion without a limit",
        """
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self): return repr(self) + "x"
def f(n): return repr(A()) if n % 100 == 99 else 1 + f(n + 1)
f(0)
""",
        ("exit", "memory", "timeout"),
    ),
    Attack(
        "stack limit raised",
        "a stack as large as the kernel allows, then used up",
        """
import resource as r
quietly(lambda: r.setrlimit(r.RLIMIT_STACK, (r.getrlimit(r.RLIMIT_STACK)[1],) * 2))
sys.setrecursionlimit(10**9); text = "[" * 200000 + "]" * 200000
quietly(lambda: eval(text)); import json; quietly(lambda: json.loads(text))
class L(list): pass
x = L()
for _ in range(10**6): x = L([x])
del x
""",
        ("exit", "memory", "timeout"),
    ),
    Attack(
        "exit with an odd code",
        "SystemExit with objects that misbehave",
        "class E:\n    def __str__(self): return 1 / 0\nsys.exit(E())",
        ("exit",),
    ),
    Attack(
        "exceptions that misbehave",
        "an uncaught exception whose text hangs",
        "class E(BaseException):\n    def __str__(self): time.sleep(LONG)\n    __repr__ = __str__\nraise E",
        ("exit", "timeout"),
    ),
)
LIMITS = TIME + SPACE + ENDS
