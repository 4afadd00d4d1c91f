"""The layer of `gspo serve` that answers before vLLM does: web pages, foreign names and requests
without the key.

tests/attacks/test_served.py does the same to a real server."""

import asyncio
import json
from itertools import count

import pytest

from gspo.rollout.engines import server_guard
from gspo.rollout.engines.server_guard import (
    DESCRIPTION_VARIABLE,
    KEY_FILE,
    NONCE_HEADER,
    PROOF_PATH,
    RPC_PATH,
    SIGNATURE_HEADER,
    WEIGHTS_FILE,
    WORKER_METHODS,
    Guard,
    host_and_port,
    host_names,
    proof,
    signature,
)

HOST = "127.0.0.1:8000"
NUMBERS = count()


class Behind:
    """What stands behind the guard: it records the requests that reach it."""

    def __init__(self):
        self.reached = []

    async def __call__(self, scope, receive, send):
        message = await receive() if scope["type"] == "http" else {}
        self.reached.append((scope.get("path"), message.get("body")))
        await server_guard.answer(send, 200, "vLLM")


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    server_guard.write_key(tmp_path)
    (tmp_path / "description.json").write_text(json.dumps({"url": f"http://{HOST}"}))
    monkeypatch.setenv(DESCRIPTION_VARIABLE, str(tmp_path / "description.json"))
    behind = Behind()
    return Guard(behind), behind, (tmp_path / KEY_FILE).read_text(), tmp_path


def ask(guard, path, *headers, method="POST", body=b"", pieces=1, root=""):
    """Send a request and return (status, body). `headers` are pairs; Host is added if it is not
    among them.
    """
    if not any(name.lower() == "host" for name, _ in headers):
        headers = (("Host", HOST), *headers)
    size = max(1, len(body) // pieces)
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": root,
        "server": ("127.0.0.1", 8000),
    }
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers]
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def signs(key, path, method="POST", body=b"", address=HOST, nonce=None):
    """The headers of a request that is signed with a key."""
    nonce = f"n{next(NUMBERS)}" if nonce is None else nonce
    return (NONCE_HEADER, nonce), (
        SIGNATURE_HEADER,
        signature(key, address, nonce, method, path, body),
    )


def call(method, *arguments, **more):
    return json.dumps({"method": method, "args": arguments} | more).encode()


def test_a_web_page_is_refused_whatever_it_sends(guarded):
    guard, behind, key, _ = guarded
    for origin in ("http://evil.example", "null", f"http://{HOST}", ""):
        for path in (RPC_PATH, "/health", PROOF_PATH, "/v1/models"):
            assert ask(guard, path, *signs(key, path), ("Origin", origin))[0] == 403
    body = call("begin_load")
    for host in (
        "evil.example:8000",
        "127.0.0.1",
        "127.0.0.1:8001",
        "127.0.0.1:8000.evil.example",
        "",
    ):
        assert (
            ask(guard, RPC_PATH, *signs(key, RPC_PATH, body=body), ("Host", host), body=body)[0]
            == 403
        )
    assert (
        ask(
            guard,
            RPC_PATH,
            *signs(key, RPC_PATH, body=body),
            ("Host", HOST),
            ("Host", HOST),
            body=body,
        )[0]
        == 403
    )
    assert not behind.reached
    for host in (HOST, "localhost:8000", "LOCALHOST:8000", "[::1]:8000"):
        assert ask(guard, "/v1/models", *signs(key, "/v1/models"), ("Host", host))[0] == 200


def test_nothing_but_health_answers_without_the_key(guarded):
    guard, behind, key, _ = guarded
    body = call("begin_load")
    for path in (
        RPC_PATH,
        f"{RPC_PATH}/",
        "/version",
        "/health/",
        "/inference/v1/generate",
        "/pause",
        "/docs",
        "//health",
    ):
        good = signs(key, path, body=body)
        wrong = [
            (), good[:1], good[1:], (*good, *good), (good[0], (SIGNATURE_HEADER, "é")),
            signs("another", path, body=body), signs(key, f"{path}x", body=body),
            signs(key, path, "GET", body), signs(key, path, body=body + b" "),
            signs(key, path, body=body, address="127.0.0.2:8000"), (("Authorization", f"Bearer {key}"),),
        ]  # fmt: skip
        for headers in wrong:
            assert ask(guard, path, *headers, body=body)[0] == 401, (path, headers)
    assert ask(guard, "/health")[0] == 401, "only GET asks for health"
    assert not behind.reached
    assert ask(guard, "/health", method="GET") == (200, b"vLLM")
    assert ask(guard, "/base/health", method="GET", root="/base") == (200, b"vLLM")


def test_a_request_is_not_heard_twice(guarded, monkeypatch):
    guard, behind, key, _ = guarded
    headers = signs(key, "/version", "GET")
    assert ask(guard, "/version", *headers, method="GET")[0] == 200
    assert ask(guard, "/version", *headers, method="GET")[0] == 401
    monkeypatch.setattr(server_guard, "MAX_NONCES", 3)
    for _ in range(9):
        assert ask(guard, "/version", *signs(key, "/version", "GET"), method="GET")[0] == 200
    assert len(guard.nonces) <= 3 and len(behind.reached) == 10


def test_the_server_proves_that_it_knows_the_key(guarded):
    """At its own address, so that the proof is worth nothing to somebody who passes it on at
    another.
    """
    guard, behind, key, _ = guarded
    status, said = ask(guard, PROOF_PATH, (NONCE_HEADER, "abc"), method="GET")
    assert (status, said.decode()) == (200, proof(key, HOST, "abc"))
    others = {
        proof(key, "127.0.0.2:8000", "abc"),
        proof(key, HOST, "abd"),
        signature(key, HOST, "abc", "", "", b""),
    }
    assert said.decode() not in others and key not in said.decode() and not behind.reached
    assert (
        host_and_port(("::ffff:10.0.0.1", 5, 0, 0))
        == host_and_port(("10.0.0.1", 5))
        == "10.0.0.1:5"
    )


def test_only_the_extensions_methods_are_called_and_only_the_servers_file_loaded(guarded):
    guard, behind, key, folder = guarded
    elsewhere = [
        f"../{WEIGHTS_FILE}",
        f"./{WEIGHTS_FILE}",
        str(folder / WEIGHTS_FILE),
        "/etc/passwd",
        "",
        [WEIGHTS_FILE],
        None,
    ]
    refused = [
        call("save_sharded_state", "/home/user", pattern="notes.txt"), call("load_model"), call("__class__"),
        b"", b"{", b"[]", b'"begin_load"', b"[" * 10**5, call(["begin_load"]), call({"a": 1}),
        call("begin_load", kwargs={"a": 1}), call("begin_load", args="x"),
        call("load_piece"), *(call("load_piece", path) for path in elsewhere),
        call("load_piece", WEIGHTS_FILE, WEIGHTS_FILE), call("load_piece", WEIGHTS_FILE, kwargs={"path": "/etc/passwd"}),
        b'{"method": "begin_load", "method": "save_sharded_state"}',
    ]  # fmt: skip
    for body in refused:
        for path in (RPC_PATH, f"{RPC_PATH}/"):
            headers = (*signs(key, path, body=body), ("Content-Type", "text/plain"))
            assert ask(guard, path, *headers, body=body)[0] == 403, body[:80]
    assert not behind.reached
    for method in WORKER_METHODS:
        body = call(method, *([WEIGHTS_FILE] if method == "load_piece" else []))
        assert ask(guard, RPC_PATH, *signs(key, RPC_PATH, body=body), body=body, pieces=3) == (
            200,
            b"vLLM",
        )
        path, handed_on = behind.reached.pop()
        assert (path, json.loads(handed_on)) == (RPC_PATH, json.loads(body))
    body = b'{"method": "save_sharded_state", "method": "begin_load"}'
    ask(guard, RPC_PATH, *signs(key, RPC_PATH, body=body), body=body)
    assert behind.reached.pop() == (RPC_PATH, b'{"method": "begin_load", "args": []}'), (
        "there is one way to read it"
    )


def test_a_body_without_end_is_not_collected(guarded, monkeypatch):
    guard, behind, key, _ = guarded
    monkeypatch.setattr(server_guard, "MAX_BODY_BYTES", 1000)
    body = call("routes_of", "x" * 2000)
    assert ask(guard, RPC_PATH, *signs(key, RPC_PATH, body=body), body=body, pieces=10)[0] == 413
    assert not behind.reached


def test_sockets_of_the_web_are_closed(guarded):
    guard, behind, _, _ = guarded
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}] and not behind.reached


def test_the_names_of_a_server():
    assert host_names("http://node-a:8000") == {"node-a:8000"}
    assert host_names("http://127.0.0.1:1") == {"127.0.0.1:1", "localhost:1", "[::1]:1"}
    assert host_names("http://0.0.0.0:8000") == host_names("http://[::]:8000") == set(), (
        "any name may lead there"
    )


def test_the_key_is_nobody_elses(guarded):
    _, _, key, folder = guarded
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600 and len(key) == 64
    with pytest.raises(FileExistsError):
        server_guard.write_key(folder)
