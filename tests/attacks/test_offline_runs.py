"""An offline run reaches for no network and needs no home directory: real runs, whose every
connection is seen.
"""

import array
import fcntl
import os
import platform
import re
import select
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import forked
from commands import SMALL, command, environment, only_run
from gspo.tracking.wandb_run import refuse_settings_of_the_folder
from recorded_wandb import TABLES, pause, with_rollouts
from wandb_server import serving

FEW = ["steps=2", "cold_start.steps=0", "evaluation.problems=2", "tracking.wandb=offline"]
NUMBERS = {"x86_64": (42, 44), "aarch64": (203, 206)}  # connect, sendto
RECEIVE, ANSWER, GO_ON = 0xC0502100, 0xC0182101, 1  # of seccomp's notifications (linux/seccomp.h)

LISTEN = """
import array, ctypes, os, socket, struct, sys
connect, sendto, channel = map(int, sys.argv[1:4])
load = lambda place: (0x20, 0, 0, place)
filters = [load(0), (0x15, 4, 0, connect), (0x15, 0, 2, sendto), load(48), (0x15, 0, 1, 0), (6, 0, 0, 0x7FFF0000)]
filters += [(6, 0, 0, 0x7FC00000)]  # ask whoever listens: of sendto where it has an address
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *f) for f in filters))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(filters), ctypes.cast(code, ctypes.c_void_p))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
number = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
listener = libc.syscall(number, 1, 8, ctypes.byref(program))  # for this process and all that it starts
assert listener >= 0, os.strerror(ctypes.get_errno())
with socket.socket(fileno=channel) as parent:
    parent.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
os.close(listener)
os.execv(sys.argv[4], sys.argv[4:])
"""


def where_to(pid: int, address: int, length: int) -> str:
    """The internet address in another process's memory, in words; "" for a unix socket or the
    kernel's netlink.
    """
    with open(f"/proc/{pid}/mem", "rb") as memory:
        memory.seek(address)
        data = memory.read(min(length, 28))
    (family,) = struct.unpack_from("=H", data)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    if family == socket.AF_INET:
        return f"{socket.inet_ntoa(data[4:8])}:{int.from_bytes(data[2:4], 'big')}"
    return f"[{socket.inet_ntop(family, data[8:24])}]:{int.from_bytes(data[2:4], 'big')}"


def listen(listener: int, tried: list[str]) -> None:
    """Answer every asked-for connection: those within the machine's own unix sockets go on, others
    are written down.
    """
    connect, _ = NUMBERS[platform.machine()]
    while True:
        ready = select.poll()
        ready.register(listener, select.POLLIN)
        if ready.poll()[0][1] & select.POLLHUP:
            return
        asked = bytearray(80)
        try:
            fcntl.ioctl(listener, RECEIVE, asked)
            identity, pid, _, number = struct.unpack_from("=QIIi", asked)
            arguments = struct.unpack_from("=6Q", asked, 32)
            place = (
                where_to(pid, arguments[1], arguments[2])
                if number == connect
                else where_to(pid, *arguments[4:6])
            )
            if place:
                tried.append(place)
            fcntl.ioctl(
                listener,
                ANSWER,
                struct.pack("=QqiI", identity, 0, -101 if place else 0, 0 if place else GO_ON),
            )
        except OSError:  # who asked is gone
            continue


def watched(
    words: list[str], cwd: Path, env: dict[str, str]
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """A process that has ended, and the connections that it or any process of its tried, but for
    unix sockets.
    """
    ours, theirs = socket.socketpair()
    numbers = [*map(str, NUMBERS[platform.machine()]), str(theirs.fileno())]
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, *numbers, *words], cwd=cwd, env=env, text=True, pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    theirs.close()
    _, passed, *_ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    (listener,) = array.array("i", passed[0][2])
    tried: list[str] = []
    threading.Thread(target=listen, args=(listener, tried), daemon=True).start()
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(words, process.returncode, out, err), tried


TRIES = """
import socket, subprocess, sys
def attempt(what):
    try:
        what()
    except OSError:
        pass
attempt(lambda: socket.create_connection(("192.0.2.1", 4)))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.2", 5)))
attempt(lambda: socket.socket(socket.AF_INET6).connect(("2001:db8::1", 6)))
a, b = socket.socketpair()
a.send(b"x")
if len(sys.argv) < 2:
    subprocess.run([sys.executable, __file__, "again"], check=True)
"""


def test_the_watcher_sees_what_is_tried(tmp_path):
    (tmp_path / "tries.py").write_text(TRIES)
    done, tried = watched([sys.executable, str(tmp_path / "tries.py")], tmp_path, dict(os.environ))
    assert (
        done.returncode == 0 and tried == ["192.0.2.1:4", "192.0.2.2:5", "[2001:db8::1]:6"] * 2
    ), done.stderr


@pytest.mark.slow
def test_an_offline_run_tries_no_connection(tmp_path):
    told = {"WANDB_ERROR_REPORTING": "true", "GRADIO_ANALYTICS_ENABLED": "True"}
    done, tried = watched(command(*SMALL, *FEW), tmp_path, environment() | told)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(only_run(tmp_path).glob("wandb/offline-run-*/*.wandb")) and tried == []


# -------------------------------------------------------------------------------------------------
# home directories
def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.mark.slow
def test_tables_are_staged_in_the_run_directory_and_cleared(tmp_path):
    (home := tmp_path / "home").mkdir()
    run = tmp_path / "gspo-seed1-abc"
    at_home = {"HOME": str(home)}
    with_rollouts(run, 0, 3, **at_home)
    (first,) = run.glob("wandb/offline-run-*")
    assert len(list((first / "staging").rglob("tmp*"))) > 1, "a later `wandb sync` needs them"
    pause()
    victim = tmp_path / "victim"
    (victim / "staging").mkdir(parents=True)
    (victim / "staging" / "mine").touch()
    (run / "wandb" / "offline-run-20200101_000000-abc").symlink_to(victim)
    with_rollouts(run, 4, 7, **at_home)
    assert not (first / "staging").exists() and files(victim) == ["staging/mine"]
    with serving() as server:
        pause()
        with_rollouts(run, 8, 9, **at_home, **server.environment)
        assert len(server.runs) == 1
    assert not list((run / "wandb").glob("*run-*-*/staging/artifacts")) and not list(
        run.glob("wandb/cache/artifacts")
    )
    assert files(home) == []


@pytest.mark.slow
def test_a_run_directory_does_not_say_where_the_key_goes(tmp_path):
    """W&B reads ./wandb/settings of the folder that it is started in."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "settings.yaml").touch()
    with serving() as server:
        (tmp_path / "wandb" / "settings").write_text(f"[default]\nbase_url = {server.address}\n")
        words = [
            sys.executable,
            "-c",
            TABLES.replace("table_rows=2", "wandb='online'"),
            ".",
            "0",
            "1",
        ]
        where = environment() | {"WANDB_API_KEY": "a" * 40}
        done = forked.run(words, cwd=tmp_path, env=where)
        assert (
            done.returncode != 0
            and "wandb/settings: W&B would take" in done.stderr
            and server.runs == {}
        )


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_nor_does_any_other_folder_that_a_run_is_started_in(tmp_path, monkeypatch, name):
    """A study's folder, or one within a run. What `wandb init` writes for W&B's own server is left
    alone.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    settings = tmp_path / name / "settings"
    settings.parent.mkdir()
    for text in (
        "[default]\nbase_url = https://api.wandb.ai/\nentity = me\n",
        "[default]\nentity = me\n",
    ):
        settings.write_text(text)
        refuse_settings_of_the_folder()
    for text in (
        "[default]\nbase_url = http://evil.example\n",
        "[default]\n BASE_URL: http://evil.example\n",
    ):
        settings.write_text(text)
        with pytest.raises(
            ValueError,
            match=rf"^{re.escape(name)}/settings: W&B would take .* WANDB_BASE_URL=\.\.\.$",
        ):
            refuse_settings_of_the_folder()
        with monkeypatch.context() as own:
            own.setenv("WANDB_BASE_URL", "http://evil.example")
            refuse_settings_of_the_folder()


def homeless(home: str | None) -> dict[str, str]:
    """The environment with another home directory, or with none named."""
    kept = {key: value for key, value in environment().items() if key != "HOME"}
    return (
        {key: value for key, value in kept.items() if key != "XDG_STATE_HOME"} | {"HOME": home}
        if home
        else kept
    )


@pytest.mark.slow
@pytest.mark.parametrize("home", ["/dev/null", "/proc/nothing", None])
def test_tracking_needs_no_home_directory(home, tmp_path):
    words = [
        sys.executable,
        "-c",
        TABLES.replace("table_rows=2", "wandb='offline'"),
        str(tmp_path),
        "0",
        "3",
    ]
    done = subprocess.run(words, env=homeless(home), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("home", ["/dev/null", pytest.param(None, marks=pytest.mark.daily)])
def test_everything_works_without_a_home_directory(home, tmp_path):
    def ended(command: str, *words: str, imported: bool = False) -> str:
        """Its error output. `imported`: what it imports has been imported elsewhere, with a home
        directory.
        """
        line = [sys.executable, "-P", "-m", "gspo", command, *words]
        if imported:
            done = forked.run(line, cwd=tmp_path, env=homeless(home))
        else:
            done = subprocess.run(
                line, cwd=tmp_path, env=homeless(home), capture_output=True, text=True, check=False
            )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-3000:])
        return done.stderr

    ended("train", *SMALL, *FEW, "tracking.rollouts_every=1")
    run = str(only_run(tmp_path))
    said = ended("train", f"resume={run}", "steps=3")
    assert ("there is no home directory for the key" in said) == (home is not None)
    ended("evaluate", f"run={run}", "problems=1", "k=1", imported=True)
    ended("sample", f"run={run}", "problems=1", "samples=1", imported=True)
    ended("report", str(run), imported=True)
    ended("figure", "curves", run)
