"""Attacks on files and the network: reading other people's files, leaving something behind, talking
to others.
"""

from audit.attack import Attack

FILES = (
    Attack(
        "read /etc/passwd", "a file of the system", 'granted(lambda: open("/etc/passwd").read())'
    ),
    Attack(
        "open by other calls",
        "openat2 instead of open; a path through the program's own descriptors",
        """
for fd in (call(437, 437, -100, b"@SECRET@", bytes(24), 24), call(257, 56, -100, b"@SECRET@", 0, 0)):
    quietly(lambda: find(os.read(fd, 100)))
for base in ("/proc/self/root", "/proc/thread-self/cwd", "/dev/fd/0/..", "/.", "/lib/../", "/usr/lib/.."):
    quietly(lambda: find(open(base + "@SECRET@", "rb").read()))
up = os.path.dirname(os.__file__) + "/.." * 12
quietly(lambda: find(open(up + "@SECRET@", "rb").read()))
""",
    ),
    Attack(
        "open by handle",
        "open_by_handle_at, which needs no path",
        """
handle, mount = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)), ctypes.c_int()
call(303, 264, -100, b"@SECRET@", handle, ctypes.byref(mount), 0)
for path in ("@FOLDER@", "/tmp", "/", os.path.dirname(os.__file__)):
    base = quietly(lambda: os.open(path, os.O_RDONLY))
    if base is not None: quietly(lambda: find(os.read(call(304, 265, base, handle, 0), 100)))
""",
    ),
    Attack(
        "list folders",
        "what lies in the root, the home, the temporary and the project's folders",
        """
folders = ("/", "/etc", "/home", "/root", "/tmp", "@FOLDER@", "@PROJECT@")
granted(*[lambda f=f: os.listdir(f) for f in folders])
""",
    ),
    Attack(
        "read the project",
        "the harness's own files, which may hold tests with answers",
        """
import glob, importlib
granted(lambda: open("@PROJECT@/experiments/audit/attacks/files.py").read(),
        lambda: open("@PROJECT@/gspo/tasks/base.py").read(), lambda: open("@PROJECT@/pyproject.toml").read(),
        lambda: importlib.import_module("gspo.algorithm"), lambda: importlib.import_module("gspo.tasks.base"))
""",
    ),
    Attack(
        "read installed packages",
        "files of installed packages, which may be benchmarks with their answers",
        """
import glob, importlib
def contents(folder):
    for file in glob.glob(folder + "/*/METADATA") + glob.glob(folder + "/*/__init__.py") + glob.glob(folder + "/*.py"):
        if allowed(lambda: open(file).read()): return True
    return False
for folder in "@PACKAGES@".split(os.pathsep): won(contents(folder))
sys.path[:0] = "@PACKAGES@".split(os.pathsep)
granted(*[lambda m=m: importlib.import_module(m) for m in ("pip", "setuptools", "numpy", "torch", "pytest")])
""",
    ),
    Attack(
        "links, folders, pipes",
        "everything else that can be made in a folder",
        """
place = "@FOLDER@/@NAME@"
for make in (lambda: os.symlink("@SECRET@", place), lambda: os.link("@SECRET@", place), lambda: os.mkfifo(place),
             lambda: os.mkdir(place), lambda: os.mknod(place), lambda: os.rename("@SECRET@", place)):
    quietly(make)
""",
    ),
    Attack(
        "change a file",
        "content, length, mode, owner, times and attributes of the secret file",
        """
path = "@SECRET@"
for change in (lambda: open(path, "a").write("x"), lambda: os.truncate(path, 1), lambda: os.chmod(path, 0o700),
               lambda: os.chown(path, 1, 1), lambda: os.utime(path, (1, 1)), lambda: os.setxattr(path, "user.x", b"x"),
               lambda: os.unlink(path)):
    quietly(change)
""",
    ),
    Attack(
        "change a mode by new calls",
        "fchmodat2, setxattrat, removing with unlinkat: calls that old deny lists do not name",
        """
call(452, 452, -100, b"@SECRET@", 0o700, 0)
call(463, 463, -100, b"@SECRET@", 0, b"user.x", struct.pack("QII", 0, 0, 0), 16)
call(263, 35, -100, b"@SECRET@", 0)
""",
    ),
    Attack(
        "marks on shared files",
        "locks, leases, times on the standard library, which the next program could see",
        """
import fcntl
fd = os.open(os.__file__, os.O_RDONLY)
granted(lambda: fcntl.flock(fd, fcntl.LOCK_SH), lambda: fcntl.lockf(fd, fcntl.LOCK_SH),
        lambda: fcntl.fcntl(fd, 1024, 0),
        lambda: fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", 0, 0, 0, 0, 0)), lambda: os.utime(os.__file__),
        lambda: os.setxattr(os.__file__, "user.x", b"x"))
""",
    ),
    Attack(
        "fill the disk",
        "64 MB in files",
        """
for folder in ("@FOLDER@", "/tmp", "/dev/shm"):
    quietly(lambda: [(file := open(folder + "/@NAME@", "wb")).write(bytes(1 << 20)) for _ in range(64)])
""",
    ),
    Attack(
        "temporary files",
        "the tempfile and shared_memory modules",
        """
import tempfile
from multiprocessing import shared_memory
def shared():
    memory = shared_memory.SharedMemory(create=True, size=64); memory.close(); memory.unlink()
granted(lambda: tempfile.TemporaryFile(), lambda: tempfile.TemporaryDirectory(), shared)
""",
    ),
    Attack(
        "write to the input",
        "changing the file from which the program reads",
        """
granted(lambda: os.pwrite(0, b"x", 0), lambda: os.write(os.open("/dev/stdin", 1), b"x"), lambda: os.truncate(0, 99))
""",
    ),
    Attack(
        "watch files",
        "inotify and fanotify",
        "granted(lambda: call(294, 26, 0), lambda: call(300, 262, 0, 0))",
    ),
    Attack(
        "devices",
        "kernel memory, terminals, disks",
        """
names = "mem kmsg port tty ptmx console fuse kvm net/tun loop-control input/event0 vda sda random".split()
granted(*[lambda n=n: os.open("/dev/" + n, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK) for n in names])
""",
    ),
    Attack(
        "type into the terminal",
        "TIOCSTI puts characters into the input of the user's shell",
        """
import fcntl
fds = [0, 1, 2, quietly(lambda: os.open("/dev/tty", os.O_RDWR))]
granted(*[lambda fd=fd: fcntl.ioctl(fd, 0x5412, b" ") for fd in fds if fd is not None])
""",
    ),
)

NETWORK = (
    Attack(
        "TCP", "a loopback connection", 'socket.create_connection(("127.0.0.1", int("@TCP@")), 0.3)'
    ),
    Attack(
        "unix socket",
        "a socket in a folder",
        'socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "@UNIX@")',
    ),
    Attack(
        "socket pair sent elsewhere",
        "a permitted pair of datagram sockets, used with the address of another socket",
        """
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM | 0x800):
    for address in ("@UNIX@", "\\0@ABSTRACT@"):
        pair = quietly(lambda: socket.socketpair(socket.AF_UNIX, kind))
        if pair:
            quietly(lambda: pair[0].sendto(b"x", address)); quietly(lambda: pair[0].sendmsg([b"x"], [], 0, address))
            quietly(lambda: pair[0].connect(address)); quietly(lambda: pair[0].send(b"x"))
""",
    ),
    Attack(
        "raw socket calls",
        "socket by number: unix, internet, netlink, packet, crypto, vsock families",
        """
kinds = [(1, 1), (2, 1), (2, 2), (2, 3), (10, 2), (16, 3), (17, 3), (38, 5), (40, 1)]
granted(*[lambda f=f, t=t: call(41, 198, f, t, 0) for f, t in kinds])
""",
    ),
    Attack(
        "netlink",
        "the kernel's message sockets",
        "granted(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))",
    ),
    Attack(
        "listen",
        "a server of its own",
        """
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen(); won()
""",
    ),
    Attack(
        "send a descriptor",
        "sendmsg with SCM_RIGHTS, to hand files on",
        """
a, b = socket.socketpair(); granted(lambda: socket.send_fds(a, [b"x"], [0]))
""",
    ),
)
