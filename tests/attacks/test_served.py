"""A real server of `gspo serve` under attack, and its end. `make test-vllm` runs it."""

import json
import os
import re
import signal
import time
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from gspo.rollout.engines.vllm_client import RequestRefused, VLLMServerClient
from gspo.rollout.engines.vllm_server import VLLMServerEngine
from gspo.rollout.engines.weights_folder import running_servers
from gspo.rollout.vllm_settings import VLLMServerRollout
from served import free_url, served
from vllm_engines import GREEDY, SERVER, sampled, whole_policy

pytestmark = pytest.mark.vllm


def ask(url: str, method: str, path: str, body: str = "", **headers: str) -> int:
    """Send a request as anything on this machine can, and return the status."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in ({"Content-Length": str(len(body))} | headers).items():
        connection.putheader(name, value)
    connection.endheaders(body.encode())
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_server_does_what_its_own_trainer_asks_and_nothing_else(tmp_path):
    precious = tmp_path / "precious" / "notes.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    url = free_url()
    with served(tmp_path, url, *SERVER) as process:
        engine = VLLMServerEngine(whole_policy(), VLLMServerRollout(url=url, batch_rows=8))
        before = tokens(engine)
        attack = json.dumps(
            {
                "method": "save_sharded_state",
                "kwargs": {"path": str(precious.parent), "pattern": "notes.txt"},
            }
        )
        as_a_page = {"Content-Type": "text/plain", "Origin": "http://evil.example"}
        assert ask(url, "POST", "/collective_rpc", attack, Host="evil.example", **as_a_page) == 403
        assert ask(url, "POST", "/collective_rpc", attack, **as_a_page) == 403
        assert ask(url, "POST", "/collective_rpc", attack) == 401
        paths = [
            "/inference/v1/generate",
            "/v1/completions",
            "/abort_requests",
            "/reset_prefix_cache",
            "/version",
        ]
        for path in [
            *paths,
            "/docs",
            "/openapi.json",
            "/metrics",
            "/server_info",
            "/sleep",
            "/pause",
        ]:
            assert {ask(url, "GET", path), ask(url, "POST", path, "{}")} == {401}, path
        (found,) = running_servers(VLLMServerClient(url, False).port, "")
        known = VLLMServerClient(url, False, found.key)
        with pytest.raises(RequestRefused, match=r"calls begin_load, .* and no other method"):
            known.call("/collective_rpc", json.loads(attack))
        foreign = tmp_path / "foreign.safetensors"
        foreign.write_bytes(b"x")
        with pytest.raises(
            RequestRefused, match=r"loads weights\.safetensors in its own folder and no other file"
        ):
            known.on_workers("load_piece", str(foreign))
        assert known.call("/version")["version"].startswith("0.")
        assert tokens(engine) == before, "the trainer goes on"
        engine.close()
        killed_with_all_its_processes(process.pid)
    assert precious.read_text() == "precious" and os.listdir(precious.parent) == ["notes.txt"]


def tokens(engine: VLLMServerEngine) -> list[list[int]]:
    return [response.token_ids for response in sampled(engine, GREEDY, False)]


def killed_with_all_its_processes(pid: int) -> None:
    """`kill -9` of the server ends its engine and workers, and gives their shared memory back."""
    children = psutil.Process(pid).children(recursive=True)
    assert children, "the engine has a process of its own"
    maps = "".join(Path(f"/proc/{child.pid}/maps").read_text() for child in children)
    shared = {Path(name) for name in re.findall(r"(/dev/shm/(?:psm_|torch_|sem\.)\S+)", maps)}
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, alive
    deadline = time.monotonic() + 30
    # Python's resource tracker removes them in the end
    while left := [path for path in shared if path.exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
