"""The layer of `gspo serve` that answers before vLLM does: web pages, foreign names and requests without the key.

tests/hostile/test_served.py does the same to a real server."""

import asyncio
import json

import pytest

from gspo.rollout import server_guard
from gspo.rollout.server_guard import CALLS, DESCRIPTION, KEY, METHODS, NONCE, PROOF, WEIGHTS, Guard, names_of, proof

HOST = "127.0.0.1:8000"


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
    monkeypatch.setenv(DESCRIPTION, str(tmp_path / "description.json"))
    behind = Behind()
    return Guard(behind), behind, (tmp_path / KEY).read_text(), tmp_path


def ask(guard, path, *headers, method="POST", body=b"", pieces=1, root=""):
    """Send a request and return (status, body). `headers` are pairs; Host is added if it is not among them."""
    if not any(name.lower() == "host" for name, _ in headers):
        headers = (("Host", HOST), *headers)
    size = max(1, len(body) // pieces)
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    messages = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": root}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers]
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def call(method, *arguments, **more):
    return json.dumps({"method": method, "args": arguments} | more).encode()


def test_a_web_page_is_refused_whatever_it_sends(guarded):
    guard, behind, key, _ = guarded
    bearer = ("Authorization", f"Bearer {key}")
    for origin in ("http://evil.example", "null", f"http://{HOST}", ""):
        for path in (CALLS, "/health", PROOF, "/v1/models"):
            assert ask(guard, path, bearer, ("Origin", origin))[0] == 403
    for host in ("evil.example:8000", "127.0.0.1", "127.0.0.1:8001", "127.0.0.1:8000.evil.example", ""):
        assert ask(guard, CALLS, bearer, ("Host", host), body=call("begin_load"))[0] == 403
    assert ask(guard, CALLS, bearer, ("Host", HOST), ("Host", HOST), body=call("begin_load"))[0] == 403
    assert not behind.reached
    for host in (HOST, "localhost:8000", "LOCALHOST:8000", "[::1]:8000"):
        assert ask(guard, "/v1/models", bearer, ("Host", host))[0] == 200


def test_nothing_but_health_answers_without_the_key(guarded):
    guard, behind, key, _ = guarded
    wrong = [
        [], [("Authorization", key)], [("Authorization", f"bearer {key}")], [("Authorization", f"Bearer {key[:-1]}")],
        [("Authorization", "Bearer ")], [("Authorization", f"Bearer {key}")] * 2, [("Authorization", "Bearer é")],
    ]  # fmt: skip
    for headers in wrong:
        for path in (
            CALLS,
            f"{CALLS}/",
            "/version",
            "/health/",
            "/inference/v1/generate",
            "/pause",
            "/docs",
            "//health",
        ):
            assert ask(guard, path, *headers, body=call("begin_load"))[0] == 401, (path, headers)
        assert ask(guard, "/health", *headers)[0] == 401, "only GET asks for health"
    assert not behind.reached
    assert ask(guard, "/health", method="GET") == (200, b"vLLM")
    assert ask(guard, "/base/health", method="GET", root="/base") == (200, b"vLLM")


def test_the_server_proves_that_it_knows_the_key(guarded):
    guard, behind, key, _ = guarded
    status, said = ask(guard, PROOF, (NONCE, "abc"), method="GET")
    assert (status, said.decode()) == (200, proof(key, "abc"))
    assert proof(key, "abc") != proof(key, "abd") and key not in proof(key, "abc") and not behind.reached


def test_only_the_extensions_methods_are_called_and_only_the_servers_file_loaded(guarded):
    guard, behind, key, folder = guarded
    bearer = ("Authorization", f"Bearer {key}")
    elsewhere = [f"../{WEIGHTS}", f"./{WEIGHTS}", str(folder / WEIGHTS), "/etc/passwd", "", [WEIGHTS], None]
    refused = [
        call("save_sharded_state", "/home/user", pattern="notes.txt"), call("load_model"), call("__class__"),
        b"", b"{", b"[]", b'"begin_load"', b"[" * 10**5, call(["begin_load"]), call({"a": 1}),
        call("begin_load", kwargs={"a": 1}), call("begin_load", args="x"),
        call("load_piece"), *(call("load_piece", path) for path in elsewhere),
        call("load_piece", WEIGHTS, WEIGHTS), call("load_piece", WEIGHTS, kwargs={"path": "/etc/passwd"}),
        b'{"method": "begin_load", "method": "save_sharded_state"}',
    ]  # fmt: skip
    for body in refused:
        for path in (CALLS, f"{CALLS}/"):
            assert ask(guard, path, bearer, ("Content-Type", "text/plain"), body=body)[0] == 403, body[:80]
    assert not behind.reached
    for method in METHODS:
        body = call(method, *([WEIGHTS] if method == "load_piece" else []))
        assert ask(guard, CALLS, bearer, body=body, pieces=3) == (200, b"vLLM")
        path, handed_on = behind.reached.pop()
        assert (path, json.loads(handed_on)) == (CALLS, json.loads(body))
    ask(guard, CALLS, bearer, body=b'{"method": "save_sharded_state", "method": "begin_load"}')
    assert behind.reached.pop() == (CALLS, b'{"method": "begin_load", "args": []}'), "there is one way to read it"


def test_a_body_without_end_is_not_collected(guarded, monkeypatch):
    guard, behind, key, _ = guarded
    monkeypatch.setattr(server_guard, "MOST_BODY", 1000)
    body = call("routes_of", "x" * 2000)
    assert ask(guard, CALLS, ("Authorization", f"Bearer {key}"), body=body, pieces=10)[0] == 403
    assert not behind.reached


def test_sockets_of_the_web_are_closed(guarded):
    guard, behind, _, _ = guarded
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}] and not behind.reached


def test_the_names_of_a_server():
    assert names_of("http://node-a:8000") == {"node-a:8000"}
    assert names_of("http://127.0.0.1:1") == {"127.0.0.1:1", "localhost:1", "[::1]:1"}
    assert names_of("http://0.0.0.0:8000") == names_of("http://[::]:8000") == set(), "any name may lead there"


def test_the_key_is_nobody_elses(guarded):
    _, _, key, folder = guarded
    assert (folder / KEY).stat().st_mode & 0o777 == 0o600 and len(key) == 64
    with pytest.raises(FileExistsError):
        server_guard.write_key(folder)
