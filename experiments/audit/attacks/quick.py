"""Nine attacks that a sandbox must stop before its first use. Each is on another layer, and none of
them waits.
"""

from audit.attack import Attack

QUICK_ATTACKS: tuple[Attack, ...] = (
    Attack(
        "fork bomb",
        "processes by fork, at most 64",
        """
pids = []
for _ in range(64):
    pids.append(quietly(os.fork))
    if pids[-1] == 0: time.sleep(0.5); os._exit(0)
if any(pids): time.sleep(0.2)
""",
    ),
    Attack("read a secret file", "a readable file of the user", 'print(open("@SECRET@").read())'),
    Attack(
        "write outside",
        "new files in every usual place",
        """
for folder in ("@FOLDER@", "/tmp", "/dev/shm", "/var/tmp", "/run/lock", "@PROJECT@", ".", "@PREFIX@",
               os.path.dirname(os.__file__), os.path.dirname(os.__file__) + "/__pycache__"):
    quietly(lambda: open(folder + "/@NAME@", "w").write("x"))
    quietly(lambda: os.close(os.open(folder, 0o20200000 | os.O_RDWR)) or won())  # O_TMPFILE
""",
    ),
    Attack(
        "abstract unix socket",
        "a socket without a path, which file permissions do not cover",
        'socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "\\0@ABSTRACT@")',
    ),
    Attack(
        "UDP",
        "a datagram",
        'socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", int("@UDP@")))',
    ),
    Attack(
        "signal the harness",
        "a harmless signal to the harness and to the fork server",
        """
granted(*[lambda p=p: os.kill(p, signal.SIGURG) for p in (HOST, PARENT)])
if PARENT != HOST: quietly(lambda: os.kill(PARENT, signal.SIGKILL))
""",
    ),
    Attack(
        "exec a shell",
        "a shell by every function of the standard library",
        """
import subprocess
line = "echo @WORD@"
for work in (lambda: os.system(line), lambda: subprocess.run(line, shell=True), lambda: os.popen(line).read(),
             lambda: os.posix_spawn("/bin/sh", ["sh", "-c", line], {}), lambda: libc.system(line.encode()),
             lambda: os.execv("/bin/sh", ["sh", "-c", line])):
    quietly(work)
""",
    ),
    Attack(
        "ptrace",
        "tracing the harness, the fork server, another process",
        """
works = [lambda p=p: call(101, 117, 0x4206, p, 0, 0) for p in (HOST, PARENT, int("@VICTIM@"))]
granted(*works, lambda: call(101, 117, 0, 0, 0, 0))
""",
    ),
    Attack("large allocation", "a list of 10^10", "x = [0] * 10**10\nwon()", ("memory", "exit")),
)
