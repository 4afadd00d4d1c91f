"""Lets only its owner's trainers use a vLLM server: the key, and the layer of the server that asks
for it.

`gspo serve` writes a random key into the server's folder, which no other user can read. The key is
never sent. On each connection the server first proves to the trainer that it knows the key, for a
random number of the trainer's. Then the trainer signs its request. Both sign the address at which
the server has the connection, so that nobody in between can pass proofs on. So neither prompts nor
requests go to whoever else listens at an address, or takes a port over.

vLLM imports `Guard` by its name (`vllm serve --middleware`). This module needs no vLLM.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# the environment variable that names the file in which a server describes itself
DESCRIPTION = "GSPO_SERVER"
# the environment variable with the number of the server's process
SERVERS_PROCESS = "GSPO_SERVERS_PROCESS"
KEY = "key"  # the file with the key, in the server's folder
WEIGHTS = "weights.safetensors"  # the file through which weights go, in the server's folder
PROOF = "/gspo/proof"
NONCE, SIGNATURE = "x-gspo-nonce", "x-gspo-signature"  # the headers of a request
MAX_NONCES = 1_000_000  # of earlier requests, whose numbers may not be used again
HEALTH = "/health"
CALLS = "/collective_rpc"
# The methods of WorkerExtension. vLLM's own methods of a worker write files, among other things.
METHODS = ("begin_load", "load_piece", "end_load", "stored_dtype", "install_capture", "routes_of")
MAX_BODY_BYTES = 64 << 20  # bytes of a request
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
EVERYWHERE = ("0.0.0.0", "[::]", "::")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def write_key(folder: Path) -> None:
    """Write a new key into a server's folder."""
    descriptor = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))


def proof(key: str, address: str, nonce: str) -> str:
    """Return what a server answers that knows the key: HMAC-SHA256 of its address and the trainer's
    number.
    """
    return signed(key, "server", address, nonce)


def signature(key: str, address: str, nonce: str, method: str, path: str, body: bytes) -> str:
    """Return the signature of a trainer's request to the server at an address."""
    return signed(key, "request", address, nonce, method, path, hashlib.sha256(body).hexdigest())


def signed(key: str, *texts: str) -> str:
    """Return HMAC-SHA256 of some texts, whose borders count."""
    return hmac.new(key.encode(), json.dumps(texts).encode(), hashlib.sha256).hexdigest()


def place(address: Any) -> str:
    """Return the host and port of one end of a connection, the same for both of its sides."""
    host, port = address[0].removeprefix("::ffff:"), address[1]
    return f"{host}:{port}"


class Guard:
    """An ASGI layer that answers 403 to requests of web pages and of other names, and 401 to
    unsigned ones.

    `/health` needs no key, since it says nothing but that the server answers."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self.app = app
        description = Path(os.environ[DESCRIPTION])
        self.key = description.with_name(KEY).read_text(encoding="ascii")
        self.hosts = names_of(json.loads(description.read_text(encoding="utf-8"))["url"])
        self.nonces: dict[str, None] = {}  # in the order of the requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on to vLLM."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if refused := self.why_not_from_here(headers):
            await answer(send, 403, refused)
        elif path == PROOF:
            await answer(send, 200, proof(self.key, place(scope["server"]), only(headers, NONCE)))
        elif path == HEALTH and scope["method"] == "GET":
            await self.app(scope, receive, send)
        else:
            await self.signed_request(scope, headers, path, receive, send)

    async def signed_request(
        self, scope: Scope, headers: dict[str, list[str]], path: str, receive: Receive, send: Send
    ) -> None:
        """Hand a request on if it is signed with the key. It is read as a whole before, since its
        body is signed.
        """
        body, nonce = await whole_body(receive), only(headers, NONCE)
        if body is None:
            await answer(
                send, 413, f"this server reads requests of at most {MAX_BODY_BYTES:,} bytes"
            )
            return
        target = scope["path"] + (
            f"?{scope['query_string'].decode('latin-1')}" if scope.get("query_string") else ""
        )
        expected = signature(self.key, place(scope["server"]), nonce, scope["method"], target, body)
        if (
            not hmac.compare_digest(only(headers, SIGNATURE).encode(), expected.encode())
            or nonce in self.nonces
        ):
            await answer(send, 401, "this server answers to trainers that know its key")
            return
        self.nonces[nonce] = None
        if len(self.nonces) > MAX_NONCES:
            del self.nonces[next(iter(self.nonces))]
        if path.rstrip("/") == CALLS:
            await self.call(scope, body, receive, send)
        else:
            await self.hand_on(scope, body, receive, send)

    def why_not_from_here(self, headers: dict[str, list[str]]) -> str:
        """Say why a request is refused whatever it asks; "" if it is not. Browsers name the page
        that sends a request, and trainers are no pages. A page whose own name leads to this machine
        gives that name as the host."""
        if "origin" in headers:
            return "this server does not answer to web pages"
        if self.hosts and only(headers, "host").lower() not in self.hosts:
            return "this server does not answer to this name"
        return ""

    async def call(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Hand a call of a worker's method on if it is one of METHODS, and loads no other file than
        the trainer's.
        """
        try:
            asked = json.loads(body)
            method, arguments = asked["method"], asked.get("args", [])
            known = method in METHODS and isinstance(arguments, list) and not asked.get("kwargs")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            known = False
        if not known:
            await answer(send, 403, f"this server calls {', '.join(METHODS)} and no other method")
            return
        if method == "load_piece" and arguments != [WEIGHTS]:
            await answer(
                send, 403, f"this server loads {WEIGHTS} in its own folder and no other file"
            )
            return
        # Written anew, so that vLLM cannot read the same bytes in another way.
        await self.hand_on(
            scope, json.dumps({"method": method, "args": arguments}).encode(), receive, send
        )

    async def hand_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Hand a request with this body on to vLLM."""
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> MutableMapping[str, Any]:
            return pending.pop() if pending else await receive()

        await self.app(scope, again, send)


def names_of(url: str) -> set[str]:
    """Return the values of a request's Host header that are a server's own; an empty set, which
    stands for any, if it listens at all addresses of the machine."""
    address = urlsplit(url)
    host = address.netloc.rpartition(":")[0].lower()
    if host in EVERYWHERE:
        return set()
    hosts = {host, *LOOPBACK} if host in LOOPBACK else {host}
    return {f"{name}:{address.port}" for name in hosts}


def only(headers: dict[str, list[str]], name: str) -> str:
    """Return a header's value; "" if it is missing or given twice."""
    values = headers.get(name, [])
    return values[0] if len(values) == 1 else ""


async def whole_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is larger than MAX_BODY_BYTES."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


async def answer(send: Send, status: int, text: str) -> None:
    """Answer a request with a line of plain text."""
    body = text.encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"x-content-type-options", b"nosniff"),
    ]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
