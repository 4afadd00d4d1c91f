"""The attack suite against the sandbox, as root and as an ordinary user, with and without
bubblewrap; and against no sandbox at all, where the same programs must be seen to succeed."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest

from audit.attack import PRELUDE, run_attack
from audit.attacks import ATTACKS, SUITE_LIMITS, run_attacks
from audit.attacks.memory import SCAN
from audit.attacks.quick import QUICK_ATTACKS
from audit.scene import exposed, left_over, named, scene
from gspo.rewards.sandbox import self_test
from gspo.rewards.sandbox.runner import CodeRunner, ProgramEnd
from weak_runner import WeakRunner

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere programs are not confined"
)
ROOT = Path(__file__).parents[3]
QUICK = tuple(attack.name for attack in ATTACKS if "timeout" not in attack.ends)
SUITE = """
import json, sys
sys.path.insert(0, "experiments")
from audit.attacks import SUITE_LIMITS, run_attacks
from gspo.rewards.sandbox.runner import CodeRunner
with CodeRunner(SUITE_LIMITS, bubblewrap={bubblewrap}) as runner:
    print(json.dumps([runner.layers(), run_attacks(runner, {names})]))
"""


BECOME_USER = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
READ_ALL = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")


@cache
def user_command(reads_all: bool) -> tuple[str, ...]:
    """Starts Python as an ordinary user; `reads_all`: with the right to enter closed homes, as our
    own may be one.
    """
    if os.geteuid() != 0:
        if reads_all:
            pytest.skip("only root can give that right")
        return (sys.executable,)
    if not shutil.which("setpriv"):
        pytest.skip("no way to become an ordinary user: setpriv is not installed")
    check = "import subprocess, sys, gspo.rewards.sandbox.runner; subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, "/usr/bin/python3"):
        command = (*BECOME_USER, *(READ_ALL if reads_all else ()), python)
        if subprocess.run([*command, "-c", check], cwd=ROOT, capture_output=True).returncode == 0:
            return command
    pytest.skip("an ordinary user cannot run any interpreter that is new enough")


def suite_as(
    command: tuple[str, ...], bubblewrap: bool, names: tuple[str, ...] = ()
) -> dict[str, str]:
    """Runs the attacks in a process of its own and checks that all were stopped; the layers."""
    if bubblewrap and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    program = SUITE.format(bubblewrap=bubblewrap, names=names)
    done = subprocess.run(
        [*command, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    layers, results = json.loads(done.stdout)
    if (
        bubblewrap
        and subprocess.run(
            [*command[:-1], "bwrap", "--ro-bind", "/", "/", "true"], check=False
        ).returncode
    ):
        pytest.skip("bubblewrap does not work here")
    assert not bubblewrap or layers["bubblewrap"] == "on"
    assert len(results) == (len(names) or len(ATTACKS))
    assert [(name, seen) for name, stopped, seen in results if not stopped] == []
    return layers


def test_attacks_have_names_of_their_own_and_compile():
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names)) and len(names) >= 28 + 25
    with scene() as decoys:
        for attack in ATTACKS:
            text = decoys.fill(PRELUDE + attack.program + attack.before, SUITE_LIMITS)
            compile(text, attack.name, "exec")
            assert not any(
                f"@{word}@" in text
                for word in ("SECRET", "FOLDER", "TOKEN", "HOST", "NAME", "WORD")
            )


@pytest.mark.slow
def test_quick_attacks_are_stopped_as_the_present_user():
    suite_as((sys.executable,), bubblewrap=False, names=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("reads_all", [False, True])
def test_quick_attacks_are_stopped_as_an_ordinary_user(reads_all):
    layers = suite_as(
        user_command(reads_all),
        bubblewrap=False,
        names=tuple(attack.name for attack in QUICK_ATTACKS),
    )
    assert "user id" not in layers["user"]


@pytest.mark.slow
@pytest.mark.parametrize("bubblewrap", [False, pytest.param(True, marks=pytest.mark.daily)])
def test_all_attacks_are_stopped_as_the_present_user(bubblewrap):
    suite_as((sys.executable,), bubblewrap)


@pytest.mark.slow
@pytest.mark.parametrize("bubblewrap", [False, pytest.param(True, marks=pytest.mark.daily)])
@pytest.mark.parametrize("reads_all", [False, pytest.param(True, marks=pytest.mark.daily)])
def test_all_attacks_are_stopped_as_an_ordinary_user(reads_all, bubblewrap):
    suite_as(user_command(reads_all), bubblewrap)


@pytest.mark.slow
def test_all_attacks_are_stopped_for_root_of_a_user_namespace():
    command = ("unshare", "-U", "-r")
    if (
        not shutil.which("unshare")
        or subprocess.run([*command, "true"], capture_output=True).returncode
    ):
        pytest.skip("no user namespaces")
    suite_as((*command, sys.executable), bubblewrap=False)


# attacks that touch only decoys when nothing stops them: the suite must see every one succeed
HARMLESS = (
    "read /etc/passwd",
    "read a secret file",
    "list folders",
    "read the project",
    "write outside",
    "links, folders, pipes",
    "change a file",
    "temporary files",
    "TCP",
    "UDP",
    "unix socket",
    "abstract unix socket",
    "socket pair sent elsewhere",
    "listen",
    "fork bomb",
    "exec a shell",
    "survive as a daemon",
    "kill another process",
    "signal the harness",
    "see other processes",
    "environment",
    "inherited descriptors",
    "memory in pipes and sockets",
    "output by holes",
)
SLOW_HARMLESS = (
    "fill the disk",
    "thread bomb",
    "memory by mmap",
    "output flood",
    "infinite loop",
    "sleep",
    "deadlock",
    "exit handler",
    "busy threads",
    "main thread gone, others compute",
    "touch memory",
    "memory, exceptions caught",
    "memory by threads",
    "multiprocessing",
    "many descriptors",
    "output by mmap",
    "send a descriptor",
    "write to the input",
    "marks on shared files",
    "limits of others",
    "scheduling of others",
    "raw socket calls",
)


def stopped_without_a_sandbox(names: tuple[str, ...]) -> list[tuple[str, str]]:
    results = run_attacks(WeakRunner(SUITE_LIMITS), names)
    assert len(results) == len(names)
    return [(result.name, result.seen) for result in results if result.stopped]


@pytest.mark.slow
def test_without_a_sandbox_attacks_are_seen_to_succeed():
    assert stopped_without_a_sandbox(HARMLESS) == []


@pytest.mark.slow
def test_without_a_sandbox_more_attacks_are_seen_to_succeed():
    assert stopped_without_a_sandbox(SLOW_HARMLESS) == []


@pytest.mark.slow
def test_what_was_seen_says_which_effect_it_was():
    names = (
        "read a secret file",
        "TCP",
        "change a file",
        "kill another process",
        "survive as a daemon",
        "write outside",
    )
    seen = {result.name: result.seen for result in run_attacks(WeakRunner(SUITE_LIMITS), names)}
    assert seen["read a secret file"] == "the secret was printed"
    assert seen["TCP"] == "something arrived at the TCP socket"
    assert "files were changed" in seen["change a file"]
    assert "another process was changed" in seen["kill another process"]
    assert "went on after the end" in seen["survive as a daemon"]
    assert "was made" in seen["write outside"]


def test_a_claim_without_an_effect_proves_nothing():
    loud = ATTACKS[0]._replace(name="loud", program='print("I did it: root, secret, BROKE")')
    with scene() as decoys:
        assert run_attack(WeakRunner(SUITE_LIMITS), loud, decoys).stopped


def test_the_memory_scan_finds_what_is_in_memory():
    token = "tok" + "5a" * 12
    runner = WeakRunner(SUITE_LIMITS)
    with scene() as decoys:
        prelude = decoys.fill(PRELUDE, SUITE_LIMITS)
    # not spelled in the program
    kept = f'kept = [bytes.fromhex("{token.encode().hex()}")[:] for _ in range(100)]\n'
    output, _ = runner.run_program(prelude + kept + SCAN, "")
    assert token.encode() in output


@pytest.mark.parametrize("why", ["sandbox-error", "protocol", "compile-error"])
def test_a_failing_sandbox_is_no_success(why):
    class Failing(WeakRunner):
        def run_program(self, code, stdin):
            return b"", ProgramEnd(why)

    (result,) = run_attacks(Failing(SUITE_LIMITS), ("leave early",))
    assert not result.stopped and why in result.seen and "next program" in result.seen


def test_processes_that_are_left_are_found_and_ended():
    program = "import ctypes; ctypes.CDLL(None).prctl(15, b'decoyleft12345', 0, 0, 0); import time; time.sleep(20)"
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    deadline = time.monotonic() + 5
    while not named("decoyleft12345") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left_over("decoyleft12345", 0.0) == [process.pid]
    assert process.wait(5) == -9 and left_over("decoyleft12345", 0.0) == []


def test_the_scene_leaves_nothing_behind():
    before = set(os.listdir("/proc/self/fd"))
    with scene() as decoys, exposed(decoys):
        folder, victim = decoys.folder, decoys.victim
        assert os.environ["DECOY_SECRET"] == decoys.token and victim.poll() is None
    assert not folder.exists() and victim.poll() is not None and "DECOY_SECRET" not in os.environ
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_suite_runs_from_any_thread_and_refuses_unknown_names():
    found = []
    with CodeRunner(SUITE_LIMITS) as runner:
        names = ("read /etc/passwd", "signal the harness")
        thread = threading.Thread(target=lambda: found.extend(run_attacks(runner, names)))
        thread.start()
        thread.join()
        assert {result.name: result.stopped for result in found} == dict.fromkeys(names, True)
        with pytest.raises(ValueError, match="no attack is called 'nonsense'"):
            run_attacks(runner, ("nonsense",))


class Layered(WeakRunner):
    """A runner that says it confines programs, but does not."""

    def layers(self):
        return {
            "bubblewrap": "on",
            "landlock": "ABI 7",
            "seccomp": "on",
            "user": "user id 1",
            "threads": "at most 32",
        }


def outcome(runner) -> dict[str, str]:
    return runner.each(lambda slot, _: slot.layers() | self_test.run_probes(slot), [None])[0]


def test_the_self_test_names_the_probe_that_got_through(monkeypatch):
    monkeypatch.setattr(self_test, "_results", {})
    two = {"read a file": self_test.PROBES["read a file"], "do nothing": "pass"}
    monkeypatch.setattr(self_test, "PROBES", two)
    with pytest.raises(
        ValueError, match=r"allow_weak_sandbox=False.*: probe 'read a file': the program did it;"
    ):
        self_test.require(Layered(SUITE_LIMITS), allow_weak=False)
    self_test.require(Layered(SUITE_LIMITS), allow_weak=True)
    states = outcome(Layered(SUITE_LIMITS))
    assert states["do nothing"] == "stopped" and states["read a file"] == "the program did it"


@pytest.mark.slow
def test_without_a_sandbox_every_probe_gets_through(monkeypatch):
    """The last probe, which computes for seconds, is tested with the slow tests of confinement."""
    monkeypatch.setattr(self_test, "_results", {})
    probes = {n: p for n, p in self_test.PROBES.items() if n != "exceed the CPU limit"}
    monkeypatch.setattr(self_test, "PROBES", probes)
    assert self_test.run_probes(Layered(SUITE_LIMITS)) == dict.fromkeys(
        probes, "the program did it"
    )


@pytest.mark.parametrize("why", ["sandbox-error", "protocol", "compile-error"])
def test_a_failing_sandbox_does_not_stop_the_probes(why, monkeypatch):
    class Failing(Layered):
        def run_program(self, code, stdin, limits=None):
            return b"", ProgramEnd(why)

    monkeypatch.setattr(self_test, "_results", {})
    states = self_test.run_probes(Failing(SUITE_LIMITS))
    assert len(states) == len(self_test.PROBES) + 1 and all(why in s for s in states.values())


@pytest.mark.parametrize("missing", ["landlock", "seccomp"])
def test_too_few_layers_are_refused(missing):
    class Thin(Layered):
        def layers(self):
            return {**super().layers(), missing: "off", "bubblewrap": "off: not installed"}

    with pytest.raises(
        ValueError,
        match=f"{missing} not offered by the kernel, and bubblewrap is off: not installed",
    ):
        self_test.require(Thin(SUITE_LIMITS), allow_weak=False)
    self_test.require(Thin(SUITE_LIMITS), allow_weak=True)


@pytest.mark.slow
def test_the_self_test_passes_here_and_runs_once(monkeypatch):
    monkeypatch.setattr(self_test, "_results", {})
    with CodeRunner(SUITE_LIMITS) as runner:
        states = outcome(runner)
        assert all(states[name] == "stopped" for name in self_test.PROBES)
        assert {"landlock", "seccomp", "bubblewrap"} < set(states)
        monkeypatch.setattr(self_test, "PROBES", None)  # a second run would fail
        assert outcome(runner) == states
