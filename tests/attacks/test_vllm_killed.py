"""vLLM's process is killed, its group is signalled, its ports are looked at: real vLLM on the CPU.
`make test-vllm`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import SMALL, command, environment, only_run, train, wait_for_step
from daily import daily_but
from gspo.data.problems import Problem
from gspo.io.rows import read_rows
from gspo.io.telemetry import TELEMETRY_OFF
from gspo.model.policy import Policy
from gspo.model.settings import TinyDense
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.vllm import VLLMEngine
from gspo.rollout.engines.weights_folder import PREFIX
from gspo.rollout.vllm_settings import VLLMRollout
from processes import listening_addresses, open_files

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.vllm
RUN = [
    *SMALL,
    "model.hidden=64",
    "rollout=vllm",
    "steps=200",
    "checkpoint.every=1000",
    "evaluation.every=1000",
]
# in which a trainer must have said what happened, finished its step, saved and left, on a busy
# machine
SECONDS = 60


def engines(pid: int) -> list[psutil.Process]:
    family = psutil.Process(pid).children(recursive=True)
    return [p for p in family if "gspo.rollout.engines.engine_process" in p.cmdline()]


def begin(folder: Path, *overrides: str, **environ: str) -> subprocess.Popen:
    """A run in a group of its own, as `timeout` and schedulers make them."""
    return subprocess.Popen(
        command(*RUN, *overrides),
        cwd=folder,
        env=environment() | environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def last_line(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=SECONDS)[1].strip().splitlines()[-1]
    finally:
        process.kill()


def engine_folders(pid: int) -> list[Path]:
    """The folders through which this trainer passes weights: it holds a lock on each."""
    paths = [Path(target) for target in open_files(pid)]
    return [path for path in paths if path.name.startswith(PREFIX)]


def test_an_engine_that_is_killed_ends_the_run_with_what_is_whole(tmp_path):
    process = begin(tmp_path)
    wait_for_step(tmp_path, 3, process)
    (engine,) = engines(process.pid)
    (folder,) = engine_folders(process.pid)
    assert folder.exists()
    assert os.getpgid(engine.pid) == os.getsid(engine.pid) == engine.pid
    engine.send_signal(signal.SIGKILL)
    line = last_line(process)
    run = only_run(tmp_path)
    step = max(row["step"] for row in read_rows(run / "metrics.jsonl"))
    assert process.returncode == 1 and line == (
        f"error: vLLM's process (process {engine.pid}) was killed by SIGKILL, perhaps by the kernel because "
        f"memory ran out: `dmesg | grep -i oom` tells; saved up to step_{step:06d}; go on with "
        f"resume={run.relative_to(tmp_path)}"
    )
    assert json.loads((run / "status.json").read_text())["how"] == "failed"
    assert not folder.exists()
    done = train(tmp_path, f"resume={run}", f"steps={step + 1}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(step + 2))


def test_an_engine_that_ends_while_it_starts_is_told(tmp_path):
    process = begin(tmp_path)
    deadline = time.monotonic() + 300
    while (
        not (found := engines(process.pid))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.1)
    time.sleep(3)  # within its imports
    found[0].send_signal(signal.SIGTERM)
    line = last_line(process)
    assert process.returncode == 1 and f"vLLM's process (process {found[0].pid}) was" in line
    assert "SIGTERM" in line and "nothing was saved yet; go on with resume=" in line


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
NAMED = [
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "MASTER_ADDR",
    "VLLM_HOST_IP",
]


@pytest.mark.parametrize("own", daily_but(["true", "false"], "true"))
def test_no_port_is_open_to_other_machines_and_a_signal_to_the_group_leaves_nothing(tmp_path, own):
    """On a machine whose name stands for an address of its network, where the user may make one
    (root); here else.
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.9.8.7 lanbox\n")
    enter = ["unshare", "-m", "-n", "-u", "sh", "-c"]
    name = "hostname lanbox && ip link set lo up && ip addr add 10.9.8.7/24 dev lo && mount --bind hosts /etc/hosts"
    can = (
        subprocess.run([*enter, name], cwd=tmp_path, capture_output=True, check=False).returncode
        == 0
    )
    inner = command(*RUN, f"rollout.own_process={own}")
    environ = {key: value for key, value in environment().items() if key not in NAMED} | {
        "TMPDIR": str(temporary)
    }
    process = subprocess.Popen(
        [*enter, f'{name} && exec "$@"', "sh", *inner] if can else inner,
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_step(tmp_path, 1, process)
        family = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
        (folder,) = engine_folders(process.pid)
        below = engines(process.pid)
        assert len(below) == (own == "true")
        open_to = listening_addresses(member.pid for member in family)
        assert open_to and open_to <= LOOPBACK, open_to
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=SECONDS) == 143
    finally:
        process.kill()
    assert not psutil.wait_procs(below, timeout=20)[1] and not folder.exists()
    run = only_run(tmp_path)
    step = max(row["step"] for row in read_rows(run / "metrics.jsonl"))
    assert (run / "checkpoints" / "latest").read_text() == f"step_{step:06d}"
    assert [p.name for p in temporary.iterdir() if "wandb" not in p.name] == []


@pytest.mark.daily
def test_a_worker_that_is_killed_ends_the_engine():
    """Of an engine on several devices, two halves of the CPU here."""
    engine = VLLMEngine(
        Policy(*TinyDense(hidden=64, layers=2, heads=2).make()), VLLMRollout(tensor_parallel_size=2)
    )
    try:
        family = [
            psutil.Process(engine.host.process.pid),
            *psutil.Process(engine.host.process.pid).children(),
        ]
        workers = [p for p in family if "Worker" in p.name()]
        assert len(workers) == 2
        assert listening_addresses(member.pid for member in family) <= LOOPBACK
        workers[1].kill()
        with pytest.raises(
            EngineEnded, match=r"vLLM's process \(process \d+\) ended by itself with exit code 1"
        ):
            engine.load_weights(engine.policy.named_tensors())
            engine.generate(
                SamplingRequest(
                    [Problem("math", 0, "1+1=?", "2")], 2, Sampling(1.0, 9), (1, "test")
                )
            )
        assert not psutil.wait_procs(family, timeout=10)[1]
    finally:
        engine.close()


def test_vllm_sends_no_statistics():
    clean = {name: value for name, value in os.environ.items() if name not in TELEMETRY_OFF}
    script = "import gspo.cli; from vllm.usage.usage_lib import is_usage_stats_enabled; print(is_usage_stats_enabled())"
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
