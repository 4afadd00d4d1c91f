"""The ASGI middleware of a vLLM server that admits only its owner's trainers, by a secret key.

`gspo serve` writes a random key into the server's folder, which no other user can read. The key is
never sent. On each connection the trainer first sends a nonce, and the server proves with it that
it knows the key. Then the trainer signs its request. Both sign the address at which the server has
the connection, so nobody in between can pass proofs on. A stranger who listens at the address, or
who takes over a port, gets neither prompts nor weights.

vLLM imports `Guard` by its name (`vllm serve --middleware`). This module needs no vLLM.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# the environment variable with the path of the file in which a server describes itself
DESCRIPTION_VARIABLE = "GSPO_SERVER"
# the environment variable with the server's process ID
SERVER_PID_VARIABLE = "GSPO_SERVERS_PROCESS"
KEY_FILE = "key"  # in the server's folder
WEIGHTS_FILE = "weights.safetensors"  # in the server's folder
NONCE_HEADER = "x-gspo-nonce"
SIGNATURE_HEADER = "x-gspo-signature"
PROOF_PATH = "/gspo/proof"
HEALTH_PATH = "/health"
RPC_PATH = "/collective_rpc"
# The methods of WorkerExtension. vLLM's own worker methods can write files, for example.
WORKER_METHODS = (
    "begin_load",
    "load_piece",
    "end_load",
    "stored_dtype",
    "install_capture",
    "routes_of",
)
MAX_NONCES = 1_000_000  # of earlier requests, which may not be used again
MAX_BODY_BYTES = 64 << 20  # of a request
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
ALL_INTERFACES = ("0.0.0.0", "[::]", "::")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def write_key(folder: Path) -> None:
    """Write a new key into a server's folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(folder / KEY_FILE, flags, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))


def proof(key: str, address: str, nonce: str) -> str:
    """Return a server's proof of its key: HMAC-SHA256 of its address and the trainer's nonce."""
    return hmac_sha256(key, "server", address, nonce)


def signature(
    key: str,
    address: str,
    nonce: str,
    method: str,
    path: str,
    body: bytes,
) -> str:
    """Return the signature of a trainer's request to the server at an address."""
    body_hash = hashlib.sha256(body).hexdigest()
    return hmac_sha256(key, "request", address, nonce, method, path, body_hash)


def hmac_sha256(key: str, *texts: str) -> str:
    """Return HMAC-SHA256 of the list of texts, in hexadecimal."""
    message = json.dumps(texts).encode()
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


def host_and_port(address: Any) -> str:
    """Return HOST:PORT of a socket address, the same on both sides of a connection."""
    host = address[0].removeprefix("::ffff:")
    port = address[1]
    return f"{host}:{port}"


class Guard:
    """An ASGI middleware that passes only signed requests on to vLLM.

    It answers 403 to web pages and foreign Host names, and 401 to unsigned requests. `/health`
    needs no key, because it only says that the server is up."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self.app = app
        description = Path(os.environ[DESCRIPTION_VARIABLE])
        self.key = description.with_name(KEY_FILE).read_text(encoding="ascii")
        url = json.loads(description.read_text(encoding="utf-8"))["url"]
        self.hosts = host_names(url)
        self.nonces: dict[str, None] = {}  # in the order of the requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to vLLM."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            values = headers.setdefault(name.decode("latin-1").lower(), [])
            values.append(value.decode("latin-1"))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        refusal = self.refusal(headers)
        if refusal:
            await answer(send, 403, refusal)
        elif path == PROOF_PATH:
            address = host_and_port(scope["server"])
            nonce = single_value(headers, NONCE_HEADER)
            await answer(send, 200, proof(self.key, address, nonce))
        elif path == HEALTH_PATH and scope["method"] == "GET":
            await self.app(scope, receive, send)
        else:
            await self.check_signature(scope, headers, path, receive, send)

    async def check_signature(
        self,
        scope: Scope,
        headers: dict[str, list[str]],
        path: str,
        receive: Receive,
        send: Send,
    ) -> None:
        """Pass a request on if it is signed with the key, otherwise answer 401.

        Its whole body is read first, because the body is signed too."""
        body = await read_body(receive)
        if body is None:
            message = f"this server reads requests of at most {MAX_BODY_BYTES:,} bytes"
            await answer(send, 413, message)
            return
        target = scope["path"]
        if scope.get("query_string"):
            target += f"?{scope['query_string'].decode('latin-1')}"
        nonce = single_value(headers, NONCE_HEADER)
        address = host_and_port(scope["server"])
        expected = signature(self.key, address, nonce, scope["method"], target, body)
        received = single_value(headers, SIGNATURE_HEADER)
        is_valid = hmac.compare_digest(received.encode(), expected.encode())
        if not is_valid or nonce in self.nonces:
            await answer(send, 401, "this server answers to trainers that know its key")
            return
        self.nonces[nonce] = None
        if len(self.nonces) > MAX_NONCES:
            oldest = next(iter(self.nonces))
            del self.nonces[oldest]
        if path.rstrip("/") == RPC_PATH:
            await self.check_rpc(scope, body, receive, send)
        else:
            await self.pass_on(scope, body, receive, send)

    def refusal(self, headers: dict[str, list[str]]) -> str:
        """Return why a request is refused before its signature is read, "" if it is not.

        Browsers send the page's name as Origin, and trainers send none. A page whose name resolves
        to this machine sends that name as Host."""
        if "origin" in headers:
            return "this server does not answer to web pages"
        host = single_value(headers, "host").lower()
        if self.hosts and host not in self.hosts:
            return "this server does not answer to this name"
        return ""

    async def check_rpc(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Pass on a call of a method in WORKER_METHODS, otherwise answer 403.

        `load_piece` may only load the file that the trainer writes."""
        try:
            request = json.loads(body)
            method = request["method"]
            arguments = request.get("args", [])
            is_list = isinstance(arguments, list)
            is_allowed = method in WORKER_METHODS and is_list and not request.get("kwargs")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_allowed = False
        if not is_allowed:
            message = f"this server calls {', '.join(WORKER_METHODS)} and no other method"
            await answer(send, 403, message)
            return
        if method == "load_piece" and arguments != [WEIGHTS_FILE]:
            message = f"this server loads {WEIGHTS_FILE} in its own folder and no other file"
            await answer(send, 403, message)
            return
        # serialized again, so vLLM cannot parse the same bytes in another way
        checked_body = json.dumps({"method": method, "args": arguments}).encode()
        await self.pass_on(scope, checked_body, receive, send)

    async def pass_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Pass a request with this body on to vLLM."""
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> MutableMapping[str, Any]:
            return pending.pop() if pending else await receive()

        await self.app(scope, receive_again, send)


def server_address(url: str) -> tuple[str, int]:
    """Return the host and the port of a server's URL. Raises ValueError for another kind of URL."""
    must_be = f"{url!r} must be http://HOST:PORT, such as http://127.0.0.1:8000"
    try:
        address = urlsplit(url)
        host = address.hostname
        port = address.port
    except ValueError:  # a port that is no number
        raise ValueError(must_be) from None
    if not host or not port or address.scheme != "http" or address.path.strip("/"):
        raise ValueError(must_be)
    return host, port


def host_names(url: str) -> set[str]:
    """Return the Host headers that are a server's own names.

    If it listens on all interfaces, the set is empty, and any Host is admitted."""
    address = urlsplit(url)
    host = address.netloc.rpartition(":")[0].lower()
    if host in ALL_INTERFACES:
        return set()
    hosts = {host, *LOOPBACK_HOSTS} if host in LOOPBACK_HOSTS else {host}
    return {f"{name}:{address.port}" for name in hosts}


def single_value(headers: dict[str, list[str]], name: str) -> str:
    """Return a header's value, "" if it is missing or given twice."""
    values = headers.get(name, [])
    return values[0] if len(values) == 1 else ""


async def read_body(receive: Receive) -> bytes | None:
    """Return the body of a request, or None if it is larger than MAX_BODY_BYTES."""
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
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
