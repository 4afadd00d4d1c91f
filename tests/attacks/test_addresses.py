"""A stranger's run and whoever answers at an address: neither says where data goes, nor where files
are written.
"""

import json
import os
import resource
import threading
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from commands import SMALL, train
from composing import settings
from gspo.config.load import addresses, resumed_settings, write_settings
from gspo.rollout.engines import vllm_client, weights_folder
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.server_guard import (
    KEY_FILE,
    NONCE_HEADER,
    PROOF_PATH,
    SIGNATURE_HEADER,
    proof,
    signature,
    write_key,
)
from gspo.rollout.engines.vllm_client import VLLMServerClient, max_requests
from gspo.rollout.engines.vllm_server import check_server
from gspo.rollout.engines.weights_folder import EngineFolder, running_servers
from gspo.rollout.vllm_settings import VLLMServerRollout
from gspo.run.directory import settings_and_checkpoint
from refusals import refuses

ADDRESS = "http://127.0.0.1:9"
OPEN_ENV = ["task=openenv", f"task.url={ADDRESS}", "cold_start.steps=0"]


@contextmanager
def answering(answer):
    """A server that records what it is sent, and answers what `answer(path, headers)` says:
    (status, body).
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # with several requests on a connection

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.path, dict(self.headers), body))
            status, content = answer(self.path, self.headers)
            pieces = content if isinstance(content, list) else [content]
            self.send_response(status)
            self.send_header("Content-Length", str(sum(map(len, pieces))))
            self.end_headers()
            with suppress(OSError):  # who asked may have gone
                for piece in pieces:
                    self.wfile.write(piece)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def strangers(folder: Path, *words: str) -> Path:
    """A run directory that holds settings alone, which nobody signed here."""
    folder.mkdir()
    write_settings(settings(*words), folder)
    (folder / "signed.json").unlink()
    return folder


CASES = [(["rollout=vllm_server", f"rollout.url={ADDRESS}"], "rollout.url"), (OPEN_ENV, "task.url")]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "key"), CASES, ids=["vllm_server", "openenv"])
def test_an_address_of_a_strangers_run_is_refused_unless_the_command_gives_it(words, key, tmp_path):
    run = strangers(tmp_path / "run", *words)
    message = rf"addresses to which .* go: {key}={ADDRESS}\. If you want that, set {key}={ADDRESS}"
    with pytest.raises(ValueError, match=message):
        resumed_settings(run, [f"resume={run}"])
    again = resumed_settings(run, [f"resume={run}", f"{key}={ADDRESS}"])
    assert {
        "rollout.url": getattr(again.rollout, "url", ""),
        "task.url": getattr(again.task, "url", ""),
    }[key] == ADDRESS
    with refuses("optim.lr", "1", "may be changed"):
        resumed_settings(run, [f"resume={run}", f"{key}={ADDRESS}", "optim.lr=1"])
    write_settings(settings(*words), run)  # one's own run needs no such word
    resumed_settings(run, [f"resume={run}"])


def test_an_evaluation_of_a_strangers_run_reaches_no_address_either(tmp_path):
    run = strangers(tmp_path / "run", *OPEN_ENV)
    with pytest.raises(
        ValueError,
        match=rf"go: task\.url={ADDRESS}\. If you want that, set addresses=\[{ADDRESS}\]",
    ):
        settings_and_checkpoint(str(run), 0, False, False)
    assert settings_and_checkpoint(str(run), 0, False, False, [ADDRESS])[1] is None


def test_addresses_are_found_wherever_they_stand():
    deep = {
        "arguments": {
            "base_url": "HTTPS://a",
            "list": ["x", " ws://b", {"c": "grpc://d:1"}],
            "port": 8000,
        }
    }
    found = addresses(
        {"task": deep, "tracking": {"x": "http://w"}, "prompt": {"system": "See http://y"}}
    )
    assert found == {
        "task.arguments.base_url": "HTTPS://a",
        "task.arguments.list.1": " ws://b",
        "task.arguments.list.2.c": "grpc://d:1",
    }
    hidden = [
        "evil.example:8000/v1", "//evil.example/v1", "x http://evil", "simplecache::http://evil", "http:/evil",
        "\u200bhttp://evil", "ht\u200btp://evil", "localhost:8000", "10.0.0.1:80", "[::1]:80",
    ]  # fmt: skip
    for value in hidden:
        assert addresses({"task": {"arguments": {"judge": value}}}) == {
            "task.arguments.judge": value
        }, value
        assert addresses({"task": {"arguments": {value: 1}}}), "also as a name"
    for value in (
        "my_pkg.rewards:score",
        "runs/a/b",
        "Qwen/Qwen3-0.6B",
        "a: b",
        "12:30",
        "1.5",
        "x/y//",
        "",
    ):
        assert not addresses({"task": {"path": value}}), value
    assert not addresses(
        OmegaConf.to_container(OmegaConf.structured(settings("experiment=tiny_moe")))
    )


@pytest.mark.slow
def test_a_strangers_server_gets_no_prompt_and_no_file_is_written(tmp_path):
    """The attack as it was: settings alone, private rows, and a server that answers with a folder
    of the user's.
    """
    mine = tmp_path / "mine"
    mine.mkdir()
    precious = mine / "weights.safetensors"
    precious.write_bytes(b"precious")
    rows = tmp_path / "private"
    rows.mkdir()
    for name in ("train", "test"):
        text = "".join(
            f'{{"question": "private question {i} of {name}", "answer": "#### 1"}}\n'
            for i in range(8)
        )
        (rows / f"{name}.jsonl").write_text(text)

    def answer(path, headers):
        said = {
            "/version": {"version": "0.32.0"},
            "/collective_rpc": {"results": [{"folder": str(mine)}]},
        }
        return 200, json.dumps(said.get(path, {})).encode()

    with answering(answer) as (url, asked):
        words = [
            "rollout=vllm_server",
            f"rollout.url={url}",
            "task=gsm8k",
            f"task.path={rows}",
            "cold_start.steps=0",
        ]
        run = strangers(tmp_path / "run", *SMALL, *words)
        refused = train(tmp_path, f"resume={run}")
        assert refused.returncode == 2 and f"rollout.url={url}" in refused.stderr, refused.stderr
        assert not asked
        consented = train(tmp_path, f"resume={run}", f"rollout.url={url}")
        assert consented.returncode == 2 and "no server that this user started" in consented.stderr
        assert [path for path, _, _ in asked] == ["/health"]
    assert precious.read_bytes() == b"precious" and os.listdir(mine) == ["weights.safetensors"]


# ------------------------------------------------------------------------------------------------
# whoever answers
@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where servers make their folders."""
    monkeypatch.setattr(weights_folder, "MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(weights_folder.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    for name in ("memory", "temporary"):
        (tmp_path / name).mkdir()
    return tmp_path / "memory"


def servers_folder(url: str, parent: Path) -> EngineFolder:
    folder = EngineFolder(0, str(parent))
    write_key(folder.path)
    (folder.path / "description.json").write_text(json.dumps({"url": url}))
    return folder


def test_only_a_living_servers_own_folder_is_found(folders, tmp_path):
    url = "http://127.0.0.1:8123"
    good = servers_folder(url, folders)
    assert [found.path for found in running_servers(8123, "")] == [good.path]
    assert [found.path for found in running_servers(8123, str(folders))] == [good.path]
    assert not list(running_servers(8124, "")) and not list(
        running_servers(8123, str(tmp_path / "temporary"))
    )
    (folders / "gspo-vllm-link").symlink_to(good.path)
    (folders / "gspo-vllm-file").write_text("no folder")
    unlocked = servers_folder(url, folders)
    os.close(unlocked.lock)
    readable = servers_folder(url, folders)
    readable.path.chmod(0o755)
    linked = servers_folder(url, folders)
    (linked.path / KEY_FILE).unlink()
    (linked.path / KEY_FILE).symlink_to(good.path / KEY_FILE)
    broken = servers_folder(url, folders)
    (broken.path / "description.json").write_text("[" * 100_000)
    assert [found.path for found in running_servers(8123, "")] == [good.path]
    for server in (good, readable, linked, broken):
        server.close()


def test_who_does_not_know_the_key_gets_neither_prompts_nor_the_key(folders):
    with answering(lambda path, headers: (200, b'{"version": "0.32.0"}')) as (url, asked):
        folder = servers_folder(url, folders)
        key = (folder.path / KEY_FILE).read_text()
        with refuses("rollout.url", problem="no server that this user started"):
            check_server(VLLMServerRollout(url=url))
        folder.close()
    assert [path for path, _, _ in asked] == [PROOF_PATH]
    assert key not in json.dumps([[path, headers, body.decode()] for path, headers, body in asked])


def test_who_knows_the_key_is_asked_on_the_same_connection(folders):
    def answer(path, headers):
        return 200, proof(
            key, here, headers[NONCE_HEADER]
        ).encode() if path == PROOF_PATH else b'{"version": "0.1"}'

    with answering(answer) as (url, asked):
        here = url.removeprefix("http://")
        folder = servers_folder(url, folders)
        key = (folder.path / KEY_FILE).read_text()
        with refuses("rollout.url", problem="the server has vLLM 0.1"):
            check_server(VLLMServerRollout(url=url))
        folder.close()
    (first, _, _), (path, headers, _) = asked
    assert (first, path) == (PROOF_PATH, "/version")
    assert headers[SIGNATURE_HEADER] == signature(
        key, here, headers[NONCE_HEADER], "GET", "/version", b""
    )


def test_a_proof_that_is_passed_on_is_worth_nothing(folders):
    """A stranger at another address asks the real server for it."""

    def real(path, headers):
        return 200, proof(key, place, headers[NONCE_HEADER]).encode()

    with answering(real) as (url, _):
        place = url.removeprefix("http://")
        folder = servers_folder(url, folders)
        key = (folder.path / KEY_FILE).read_text()

        def passed_on(path, headers):
            connection = HTTPConnection(place)
            connection.request(
                "GET",
                path,
                headers={NONCE_HEADER: headers[NONCE_HEADER]} if NONCE_HEADER in headers else {},
            )
            return 200, connection.getresponse().read()

        with answering(passed_on) as (other, asked):
            # the same folder is found: its port is that of the stranger, at another address of this
            # machine
            (folder.path / "description.json").write_text(json.dumps({"url": other}))
            with refuses("rollout.url", problem="the server that answers does not know the key in"):
                check_server(VLLMServerRollout(url=other))
        folder.close()
    assert {path for path, _, _ in asked} == {PROOF_PATH}


def test_a_server_that_hangs_up_after_its_proof_gets_no_request(folders):
    """Who takes the port over could not be told apart on a new connection."""
    asked = []

    class ClosingClient(VLLMServerClient):
        def _read(self, connection, path, most):
            answer = super()._read(connection, path, most)
            connection.close()
            return answer

    def answer(path, headers):
        asked.append(path)
        return 200, proof(key, place, headers[NONCE_HEADER]).encode()

    key = "k" * 64
    with answering(answer) as (url, _):
        place = url.removeprefix("http://")
        server = ClosingClient(url, False, key)
        with pytest.raises(EngineEnded, match="closed the connection"):
            server.call("/inference/v1/generate", {"token_ids": [1]})
    assert asked == [PROOF_PATH]


def refusal(content, ask=lambda server: server.call("/x")) -> str:
    """What is said of a server that proves itself and answers this, with "ADDRESS" for its address."""

    def answer(path, headers):
        return 200, proof(
            "key", url.removeprefix("http://"), headers[NONCE_HEADER]
        ).encode() if path == PROOF_PATH else content

    with answering(answer) as (url, _), pytest.raises(EngineEnded) as caught:
        ask(VLLMServerClient(url, False, "key"))
    return str(caught.value).replace(url, "ADDRESS")


@pytest.mark.slow
def test_answers_of_something_else_are_one_line(monkeypatch):
    no_json = "the vLLM server at ADDRESS answers /x with something that is no JSON: "
    assert refusal(b"<html>\x1b[2J") == no_json + r"'<html>\x1b[2J'"
    assert refusal(b"[" * 200_000).startswith(no_json)
    for content in (
        b"null",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"finish_reason": "stop", "token_ids": [1]}]}',
    ):
        said = refusal(content, lambda server: server.generate([[1]], [{}]))
        assert said.startswith("the vLLM server at ADDRESS answers otherwise than vLLM does: ")
    monkeypatch.setattr(vllm_client, "MAX_ANSWER_BYTES", vllm_client.MAX_UNVERIFIED_BYTES + 1)
    said = refusal([b" " * 2**20] * 64)
    assert said == "the vLLM server at ADDRESS answers /x with more than 65,537 bytes"


def test_as_many_requests_as_files_may_be_open(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert max_requests() == 512
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert max_requests() == 4096
