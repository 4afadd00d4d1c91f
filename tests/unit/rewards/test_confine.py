"""The layers one by one: numbers against kernel headers, the filter on real calls, what is left
without a layer.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.rewards.sandbox import confine, launch, seccomp, self_test
from gspo.rewards.sandbox.runner import CodeRunner, Limits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="layers of Linux")
LIMITS = Limits(
    cpu_seconds=0.5, total_cpu_seconds=1, wall_seconds=0.5, memory_mb=256, output_bytes=1 << 16
)
ROOT = Path(__file__).parents[3]
X86_HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def in_child(work) -> int:
    """Exit status (or -signal) of a child that does the work; 99 if it raises."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(work()))
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not X86_HEADER.exists(), reason="no kernel headers")
def test_x86_64_numbers_are_those_of_the_kernel_headers():
    header = dict(re.findall(r"#define __NR_(\w+) (\d+)", X86_HEADER.read_text()))
    assert seccomp.numbers("x86_64") == {name: int(header[name]) for name in seccomp.NUMBERS}
    landlock = [
        header[f"landlock_{name}"] for name in ("create_ruleset", "add_rule", "restrict_self")
    ]
    assert landlock == [
        str(n)
        for n in (confine.LANDLOCK_CREATE, confine.LANDLOCK_ADD_RULE, confine.LANDLOCK_RESTRICT)
    ]


@pytest.mark.skipif(not shutil.which("gcc"), reason="no preprocessor")
def test_aarch64_numbers_are_those_of_the_generic_header():
    options = [
        "-D__BITS_PER_LONG=64",
        "-D__ARCH_WANT_NEW_STAT",
        "-D__ARCH_WANT_SET_GET_RLIMIT",
        "-D__ARCH_WANT_SYS_CLONE3",
    ]
    command = [
        "gcc",
        "-E",
        "-dM",
        *options,
        "-include",
        "asm-generic/unistd.h",
        "-x",
        "c",
        "/dev/null",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("no kernel headers")
    defined = dict(re.findall(r"#define (__NR\w+) (\w+)", result.stdout))
    header = {name: defined.get(f"__NR_{name}") for name in seccomp.NUMBERS}
    header = {name: int(defined.get(value, value)) for name, value in header.items() if value}
    assert seccomp.numbers("aarch64") == header


def filtered(work, threads: bool = True) -> int:
    """What a child does under the filter alone."""

    def confined() -> int:
        confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
        confine.install(seccomp.for_process(seccomp.template(threads), os.getpid()))
        return work()

    return in_child(confined)


def refused(error: int, work) -> bool:
    try:
        work()
    except OSError as found:
        return found.errno == error
    return False


@pytest.mark.slow
def test_the_filter_allows_and_refuses_by_number_and_argument():
    parent = os.getpid()
    assert filtered(lambda: 0) == 0
    # ENOSYS: not in the list
    assert filtered(lambda: refused(38, lambda: os.symlink("a", "/tmp/b"))) == 1
    assert filtered(lambda: refused(1, os.fork)) == 1  # EPERM: a rule on the flags of clone
    assert filtered(lambda: refused(1, lambda: os.kill(parent, 0))) == 1  # EPERM: a rule
    assert filtered(lambda: os.kill(os.getpid(), 0) is None) == 1
    assert filtered(lambda: os.kill(os.getpid(), signal.SIGKILL) or 5) == -signal.SIGKILL
    assert filtered(lambda: confine.LIBC.syscall(9999) == -1 and ctypes.get_errno() == 38) == 1
    assert filtered(lambda: len(os.listdir("/")) > 0) == 1  # files are landlock's
    if os.uname().machine == "x86_64":
        assert filtered(lambda: confine.LIBC.syscall(0x40000000 + 39)) == -signal.SIGSYS


def test_threads_are_a_choice_of_the_filter():
    assert filtered(lambda: confine.threads_possible() > 0) == 1
    assert filtered(lambda: confine.threads_possible() == 0, threads=False) == 1


@pytest.mark.skipif(not confine.landlock_abi(), reason="no landlock")
def test_landlock_lets_read_what_it_names_and_nothing_else(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("x")
    (tmp_path / "out").write_text("y")

    def look() -> int:
        rules = confine.landlock_rules(confine.landlock_abi(), [str(tmp_path / "in")])
        confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
        confine.checked(confine.LIBC.syscall(confine.LANDLOCK_RESTRICT, rules, 0), "landlock")
        paths = [
            (tmp_path / "in" / "file", "r"),
            (tmp_path / "out", "r"),
            (tmp_path / "in" / "file", "a"),
            (tmp_path / "in" / "new", "w"),
        ]
        return sum(
            (not refused(13, lambda p=p, m=m: open(p, m).close())) << i
            for i, (p, m) in enumerate(paths)
        )

    assert in_child(look) == 0b0001


def test_resource_limits_hold_and_cannot_be_raised():
    import resource

    def limited() -> int:
        confine.limit_resources(confine.Bounds(1, 200, 4096))
        soft_is_hard = all(
            len(set(resource.getrlimit(r))) == 1
            for r in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
        )
        try:
            bytearray(300 << 20)
        except MemoryError:
            return soft_is_hard and resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
        return 0

    assert in_child(limited) == 1


@pytest.mark.slow
def test_the_plan_says_what_is_active():
    def plan() -> int:
        found, layers = confine.prepare(0x50000000, [os.path.dirname(os.__file__)])
        known = set(layers) == {"landlock", "seccomp", "user", "threads", "rlimits"}
        return known and bool(found.filter) == layers["seccomp"].startswith("on")

    assert in_child(plan) == 1


FAT = """
import mmap, os, signal, threading, time
from gspo.rewards.sandbox import confine

signal.alarm(60)
mapped = mmap.mmap(-1, 5 << 30, prot=mmap.PROT_READ)  # more than a child that is tried may map
for _ in range(6):  # stacks that a child can give to threads without mapping anything
    threading.Thread(target=time.sleep, args=(120,), daemon=True).start()
print(*sorted(confine.prepare(0x50000000, [os.path.dirname(os.__file__)])[1]))
os._exit(0)
"""


def test_a_process_larger_than_what_its_child_may_map_does_not_hang():
    """The child's threads find no memory, and end before they say that they have started."""
    done = subprocess.run([sys.executable, "-c", FAT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == [
        "landlock",
        "rlimits",
        "seccomp",
        "threads",
        "user",
    ]


WITHOUT = {  # the layers that a machine lacks, and whether programs are then refused
    ("landlock",): True,
    ("seccomp",): True,
    ("landlock", "seccomp"): True,
    (): False,
}


@pytest.mark.parametrize("missing", WITHOUT)
def test_missing_layers_are_refused_unless_boxed_or_allowed(missing):
    layers = {"landlock": "ABI 7", "seccomp": "on", "bubblewrap": "off: not installed"}
    layers |= {name: "off" for name in missing}
    problem = self_test.weakness(layers)
    assert bool(problem) == WITHOUT[missing] and all(name in problem for name in missing)
    assert self_test.weakness(layers | {"bubblewrap": "on"}) == ""


class OpenSlot:
    """A slot without any confinement: what the check is there to notice."""

    limits = LIMITS

    def layers(self):
        return {
            "landlock": "ABI 7",
            "seccomp": "on",
            "bubblewrap": "off",
            "threads": "none",
            "user": "",
            "rlimits": "",
        }

    def run_program(self, code, stdin, limits=None):
        from gspo.rewards.sandbox.runner import ProgramEnd

        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            input=stdin.encode(),
            capture_output=True,
            timeout=100,
        )
        return done.stdout, ProgramEnd("exit", done.returncode)


@pytest.mark.slow
def test_the_check_notices_every_probe_that_gets_through():
    with pytest.raises(ValueError, match="allow_weak_sandbox=False") as error:
        self_test.require(OpenSlot(), allow_weak=False)
    for name in self_test.PROBES:
        assert f"probe {name!r}: the program did it" in str(error.value)
    self_test.require(OpenSlot(), allow_weak=True)


@pytest.mark.slow
def test_layers_are_reported():
    with CodeRunner(LIMITS) as runner:
        layers = runner.layers()
    assert list(layers) == ["bubblewrap", "landlock", "seccomp", "user", "threads", "rlimits"]
    with CodeRunner(LIMITS, bubblewrap=False) as runner:
        assert runner.layers()["bubblewrap"] == "off: switched off"


def identity(**options) -> list[str]:
    code = "import os, resource\nprint(os.getuid(), os.getgroups(), os.getsid(0) == os.getpid(), len(os.environ))"
    with CodeRunner(LIMITS, **options) as runner:
        ((output, ended),) = runner.each(lambda slot, _: slot.run_program(code, ""), [0])
    assert ended.why == "exit"
    return output.decode().split(maxsplit=1)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_started_by_root_each_server_has_a_user_of_its_own():
    users = {identity(bubblewrap=False)[0] for _ in range(2)}
    rest = identity()[1]
    assert len(users) == 2 and all(int(user) not in (0, 65534) for user in users)
    assert rest == "[] True 0\n"


def test_what_bubblewrap_shows_of_the_package_is_enough_to_start(tmp_path):
    """A fork server that cannot import its parts there would fall back to fewer layers without a
    word.
    """
    command = launch.bubblewrap_command()
    shown = [Path(path) for path in command if path.startswith(str(ROOT / "gspo"))]
    assert shown
    for path in dict.fromkeys(shown):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        copy(path, tmp_path / path.relative_to(ROOT))
    script = tmp_path / launch.SCRIPT.relative_to(ROOT)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [
            sys.executable,
            "-s",
            "-P",
            "-S",
            "-B",
            str(script),
            str(theirs.fileno()),
            "0",
            "65000",
        ]
        with subprocess.Popen(command, env={}, pass_fds=[theirs.fileno()], cwd=tmp_path) as server:
            theirs.close()
            ours.settimeout(30)
            said = ours.recv(1 << 16)
            server.kill()
    assert "landlock" in json.loads(said.splitlines()[0])


USERNS = (
    "from gspo.rewards.sandbox.runner import CodeRunner\n"
    "r = CodeRunner(bubblewrap=False)\nprint(r.layers()['threads'])\nr.close()"
)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unshare"), reason="no unshare")
def test_where_the_spare_user_is_not_mapped_there_are_no_threads_but_the_rest_holds():
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", USERNS]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if "unshare" in result.stderr:
        pytest.skip("no user namespaces")
    # root's threads are not counted, a user's are
    assert result.stdout in ("none\n", "at most 32\n"), result.stderr
    assert result.stdout == "none\n" or os.geteuid() != 0


@pytest.mark.parametrize("abi", [1, 2, 3])
def test_no_file_can_be_emptied_under_an_older_landlock(tmp_path, abi):
    """Opening to read with O_TRUNC asks landlock only for the right to read, until ABI 3: the
    filter refuses it.
    """
    if confine.landlock_abi() < abi:
        pytest.skip("the kernel has no such landlock")
    file = tmp_path / "library.py"
    file.write_text("x = 1")
    rules = confine.landlock_rules(abi, [str(tmp_path)])

    def emptied() -> bool:
        confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
        confine.LIBC.syscall(confine.LANDLOCK_RESTRICT, rules, 0)
        confine.install(seccomp.for_process(seccomp.template(True), os.getpid()))
        for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
            try:
                os.open(file, mode | os.O_TRUNC)
            except PermissionError:
                continue
            return True
        return os.read(os.open(file, os.O_RDONLY), 9) != b"x = 1"

    assert in_child(emptied) == 0
    os.close(rules)


def test_installed_packages_cannot_be_read(tmp_path):
    for folder in ("python3.11/site-packages/answers", "python3.11/json", "site-packages", "x/y"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "python3.11" / "os.py").touch()
    (tmp_path / "link").symlink_to(Path("/etc"))
    files = {path for path, rights in confine.grants(str(tmp_path)) if rights & confine.READ_FILE}
    assert files == {str(tmp_path / name) for name in ("python3.11/json", "python3.11/os.py", "x")}
    code = (
        "import glob, os, sys\n"
        "for folder in glob.glob(sys.base_prefix + '/lib/*/*-packages') + glob.glob('/usr/lib/*/*-packages'):\n"
        "    print(folder)\n    for file in (glob.glob(folder + '/*') + glob.glob(folder + '/*/*.py'))[:200]:\n"
        "        try: open(file)\n        except OSError: continue\n        print('READ', file)"
    )
    # many packages on a slow disk take a while
    patient = dataclasses.replace(LIMITS, cpu_seconds=10, total_cpu_seconds=20, wall_seconds=20)
    with CodeRunner(patient, bubblewrap=False) as runner:
        ((output, ended),) = runner.each(lambda slot, _: slot.run_program(code, ""), [0])
    assert ended.why == "exit" and b"READ" not in output


MANY_FILES = """
import os, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(4500)]
from gspo.rewards.sandbox.runner import CodeRunner
program = "import os, resource\\nfor fd in range(4, 6000):\\n try: print(fd, os.fstat(fd))\\n except OSError: pass"
with CodeRunner() as runner:
    for _ in range(2):
        print(runner.each(lambda slot, _: slot.run_program(program, ""), [0])[0][0])
"""


@pytest.mark.slow
def test_a_harness_with_many_open_files_does_not_pass_its_control_socket_to_programs():
    import resource

    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 6000:
        pytest.skip("so many files cannot be opened here")
    done = subprocess.run(
        [sys.executable, "-c", MANY_FILES], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "b''\nb''\n", done.stderr


MANY_THREADS = """
import threading, time
from gspo.rewards.sandbox.runner import CodeRunner
program = "import threading\\nt = threading.Thread(target=print, args=(1,))\\nt.start()\\nt.join()"
with CodeRunner(bubblewrap=False) as runner:
    print(runner.layers()["threads"])
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
    print(runner.each(lambda slot, _: slot.run_program(program, ""), [0])[0][0])
"""


def ordinary_python() -> list[str]:
    """Starts some Python, which can start itself, as an ordinary user."""
    become = (
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        if os.geteuid() == 0
        else []
    )
    check = "import gspo, tomllib, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if (
                subprocess.run(
                    [*become, python, "-c", check], cwd=ROOT, capture_output=True
                ).returncode
                == 0
            ):
                return [*become, python, "-B"]
    pytest.skip("an ordinary user cannot run Python here")


@pytest.mark.slow
def test_the_threads_of_an_ordinary_user_are_counted_apart_from_those_of_the_harness():
    done = subprocess.run(
        [*ordinary_python(), "-c", MANY_THREADS], capture_output=True, text=True, cwd=ROOT
    )
    if done.stdout.startswith("none"):
        pytest.skip("no user namespaces")
    assert done.stdout == "at most 32\nb'1\\n'\n", done.stderr


def test_without_a_user_or_a_namespace_of_its_own_a_program_has_no_threads(monkeypatch):
    monkeypatch.setattr(
        confine, "user_choices", lambda uid, landlock: [{"reads_all": os.geteuid() == 0}]
    )
    plan, layers = confine.prepare(0, [os.path.dirname(os.__file__)])
    assert (plan.threads, layers["threads"]) == (0, "none" if plan.filter else "not limited")


def test_sockets_of_a_program_have_no_urgent_data():
    def works() -> bool:
        one, other = socket.socketpair()
        assert refused(1, lambda: one.send(b"x", socket.MSG_OOB)) and refused(
            1, lambda: one.recv(1, socket.MSG_OOB)
        )
        return (
            one.send(b"x", socket.MSG_DONTWAIT) == 1
            and other.recv(9, socket.MSG_PEEK) == other.recv(9) == b"x"
        )

    assert filtered(works) == 1
