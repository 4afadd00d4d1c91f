"""An engine's process that is killed, that kills, that outlives: real processes, a small object in
vLLM's place.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gspo.io.telemetry import TELEMETRY_OFF
from gspo.rollout.engines import weights_folder as engine_folder
from gspo.rollout.engines.engine_process import EngineEnded, EngineProcess
from gspo.rollout.engines.weights_folder import EngineFolder, remove_left_behind
from processes import alive
from small_engine import Small

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]))
    started = []

    def begin(how: str = "") -> EngineProcess:
        (tmp_path / "engine").mkdir()
        started.append(EngineProcess("the engine", Small, {"how": how}, tmp_path / "engine"))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def end_soon(*pids: int) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def later(seconds: float, do) -> None:
    threading.Timer(seconds, do).start()


def test_it_answers_in_a_session_and_folder_of_its_own(start, tmp_path):
    engine = start()
    big = os.urandom(5_000_000)  # more than a socket holds
    assert engine.ask("echo", big) == big
    pid, session, folder = engine.ask("where")
    assert pid == session == engine.process.pid != os.getsid(0) and folder == str(
        tmp_path / "engine"
    )
    with pytest.raises(RuntimeError, match="a name"):
        engine.ask("fail")
    assert engine.ask("echo", b"still") == b"still"
    engine.close()
    engine.close()
    assert engine.process.returncode == -signal.SIGKILL or engine.process.returncode == 0
    assert not alive(pid)


def test_its_libraries_report_nothing_and_our_environment_stays(start, monkeypatch):
    for name in TELEMETRY_OFF:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    before = dict(os.environ)
    assert start().ask("environment").items() >= TELEMETRY_OFF.items()
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.parametrize("number, words", [
    (signal.SIGKILL, r"the engine \(process \d+\) was killed by SIGKILL, perhaps by the kernel because memory ran out"),
    (signal.SIGTERM, r"was ended by SIGTERM"),
])  # fmt: skip
def test_its_end_is_noticed_while_it_is_waited_for(start, number, words):
    engine = start()
    below = engine.ask("start")  # which holds the socket open
    later(0.5, lambda: engine.process.send_signal(number))
    started = time.monotonic()
    with pytest.raises(EngineEnded, match=words):
        engine.ask("work", 600)
    assert time.monotonic() - started < 5
    assert end_soon(below)
    with pytest.raises(EngineEnded, match=words):
        engine.ask("echo", b"")


@pytest.mark.slow
def test_its_end_is_noticed_while_it_is_not_waited_for_and_in_the_middle_of_a_message(start):
    engine = start()
    engine.process.send_signal(signal.SIGSTOP)  # so that the message fills the socket
    later(0.5, lambda: engine.process.send_signal(signal.SIGKILL))
    with pytest.raises(EngineEnded, match="SIGKILL"):
        engine.ask("echo", bytes(50_000_000))
    engine.close()


def test_an_exit_of_its_own_is_told_as_such(start):
    with pytest.raises(EngineEnded, match=r"ended by itself with exit code 7"):
        start().ask("leave", 7)


@pytest.mark.parametrize("how, error, words", [
    ("refuses", RuntimeError, "^no room\nsecond line"), ("dies", EngineEnded, "was killed by SIGKILL"),
])  # fmt: skip
def test_a_start_that_fails_says_why_and_leaves_no_process(start, how, error, words):
    before = children()
    with pytest.raises(error, match=words):
        start(how)
    assert children() <= before


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_closing_does_not_wait_for_an_answer_that_was_given_up(start):
    engine = start()

    def interrupt(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            engine.ask("work", 600)
    finally:
        signal.signal(signal.SIGALRM, before)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5 and not alive(engine.process.pid)


TRAINER = """
import sys
from pathlib import Path
from small_engine import Small
from gspo.rollout.engines.engine_process import EngineProcess
folder = Path(sys.argv[1])
folder.mkdir()
engine = EngineProcess("the engine", Small, {}, folder)
print(engine.ask("where")[0], engine.ask("start"), flush=True)
engine.ask("work", 600)
"""


def test_it_ends_with_a_trainer_that_is_killed_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]))
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "engine")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            pid, below = trainer.stdout.readline().split()
            assert alive(int(pid)) and alive(int(below))
        finally:
            trainer.kill()
    assert end_soon(int(pid), int(below)) and not (tmp_path / "engine").exists()


@pytest.mark.slow
def test_a_signal_to_the_trainers_group_does_not_reach_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]))
    script = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)\n" + TRAINER.replace(
        "600", "1.5"
    )
    script += "print('answered', flush=True)"
    command = [sys.executable, "-c", script, str(tmp_path / "engine")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        trainer.stdout.readline()
        os.killpg(trainer.pid, signal.SIGTERM)
        assert trainer.stdout.readline() == "answered\n"
        trainer.kill()


def test_only_ones_own_folders_that_nobody_uses_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_folder, "MEMORY", str(tmp_path))
    monkeypatch.setattr(engine_folder, "MIN_AGE_SECONDS", 0.0)
    used = EngineFolder(1)
    assert used.path.parent == tmp_path and used.path.stat().st_mode & 0o777 == 0o700
    names = ["gspo-vllm-left", "gspo-vllm-open", "another"]
    left, opened, another = (tmp_path / name for name in names)
    kept = tmp_path / "kept"
    for folder in (left, opened, another, kept):
        folder.mkdir(0o700)
        (folder / "weights.safetensors").write_bytes(b"x")
    opened.chmod(0o755)  # not made by us: others may look into it
    (tmp_path / "gspo-vllm-link").symlink_to(kept)
    (tmp_path / "gspo-vllm-file").write_text("x")
    if os.geteuid() == 0:
        (stranger := tmp_path / "gspo-vllm-stranger").mkdir(0o700)
        os.chown(stranger, 12345, 12345)
    time.sleep(0.05)
    remove_left_behind(str(tmp_path))
    assert not left.exists()
    assert {p.name for p in tmp_path.iterdir()} >= {used.path.name, "gspo-vllm-open", "another", "kept",
                                                    "gspo-vllm-link", "gspo-vllm-file"}  # fmt: skip
    assert os.geteuid() or stranger.exists()
    assert (kept / "weights.safetensors").exists()
    used.close()
    used.close()
    assert not used.path.exists()


def test_a_folder_that_is_a_moment_old_is_left_to_its_owner(tmp_path):
    (tmp_path / "gspo-vllm-new").mkdir(0o700)
    remove_left_behind(str(tmp_path))
    assert (tmp_path / "gspo-vllm-new").exists()
