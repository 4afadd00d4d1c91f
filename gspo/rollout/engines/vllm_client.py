"""The HTTP client of a vLLM server that `gspo serve` started. It needs no vLLM.

Server and client recognise each other by a key (gspo.rollout.engines.server_guard).
"""

import base64
import contextlib
import hmac
import io
import json
import resource
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.server_guard import (
    NONCE_HEADER,
    PROOF_PATH,
    RPC_PATH,
    SIGNATURE_HEADER,
    host_and_port,
    proof,
    server_address,
    signature,
)
from gspo.rollout.engines.vllm_host import PROMPT_LOGPROBS, Completion

T = TypeVar("T")
CONNECT_SECONDS = 30.0
# A machine that is gone sends nothing, so the kernel probes whether it still answers.
KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 60,  # seconds of silence before the first probe
    socket.TCP_KEEPINTVL: 15,  # seconds between probes
    socket.TCP_KEEPCNT: 4,  # unanswered probes that end the connection
}
EXCLUDED = -9999.0  # the server sends it for a log-prob of -inf
MAX_REQUESTS = 4096  # at a time, if so many files may be open. Further requests wait here
MAX_ANSWER_BYTES = 512 << 20  # the experts of about a million positions, in base64
MAX_UNVERIFIED_BYTES = 64 << 10  # of the answer of a server that has not proved its key


class RequestRefused(RuntimeError):
    """The server has refused a request."""


class VLLMServerClient:
    """The client of a vLLM server at an address such as http://127.0.0.1:8000.

    It has the methods of an `LLMHost`."""

    def __init__(self, url: str, routes: bool, key: str = ""):
        self.name = f"the vLLM server at {url}"
        self.routes = routes
        self.key = key
        self.host, self.port = server_address(url)
        # request IDs that no other trainer has
        self.id_prefix = secrets.token_hex(8)
        self.id_numbers = count()
        # each thread waits for one of the requests that were added
        self.threads: ThreadPoolExecutor | None = None
        self.added: dict[Future[Completion], str] = {}  # -> the ID in `add`

    def call(self, path: str, body: Any = None) -> Any:
        """Send a request, by POST if it has a body, and return the answer.

        Raises EngineEnded if the server does not answer or has failed. Raises RequestRefused if it
        refuses the request or is not the server of `gspo serve`."""
        text = self.send("GET", path) if body is None else self.send("POST", path, json.dumps(body))
        if not text:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise EngineEnded(
                f"{self.name} answers {path} with something that is no JSON: {text[:200]!r}"
            ) from None

    def send(self, method: str, path: str, text: str | None = None) -> str:
        """Send a request and return the answer, after the server has proved that it knows the key.

        Without a key only HEALTH_PATH is answered."""
        connection = HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.auto_open = 0  # a further connection might lead to another server
            address = host_and_port(connection.sock.getpeername())
            headers = {"Content-Type": "application/json"}
            max_bytes = MAX_UNVERIFIED_BYTES
            if self.key:
                self._verify(connection, address)
                nonce = secrets.token_hex(16)
                body = (text or "").encode()
                headers[NONCE_HEADER] = nonce
                headers[SIGNATURE_HEADER] = signature(self.key, address, nonce, method, path, body)
                keep_alive(connection.sock)
                max_bytes = MAX_ANSWER_BYTES
            connection.request(method, path, text, headers)
            return self._read(connection, path, max_bytes)
        except (OSError, HTTPException) as error:
            raise EngineEnded(
                f"{self.name} does not answer: {error or type(error).__name__}"
            ) from None
        finally:
            connection.close()

    def _verify(self, connection: HTTPConnection, address: str) -> None:
        """Let the server prove that it knows the key, and keep the connection open.

        Raises RequestRefused if it does not know it, and EngineEnded if it ends the connection."""
        nonce = secrets.token_hex(16)
        connection.request("GET", PROOF_PATH, headers={NONCE_HEADER: nonce})
        answer = self._read(connection, PROOF_PATH, MAX_UNVERIFIED_BYTES)
        expected = proof(self.key, address, nonce)
        if not hmac.compare_digest(answer.encode(), expected.encode()):
            raise RequestRefused(
                f"{self.name} is another one than `gspo serve` has started: it does not know the "
                "key"
            )
        if connection.sock is None:
            raise EngineEnded(f"{self.name} closed the connection before the request was sent")

    def _read(self, connection: HTTPConnection, path: str, max_bytes: int) -> str:
        """Return the answer to the last request."""
        answer = connection.getresponse()
        content = answer.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise EngineEnded(f"{self.name} answers {path} with more than {max_bytes:,} bytes")
        text = content.decode(errors="replace")
        if answer.status >= 500:
            raise EngineEnded(f"{self.name} has failed: {answer.status} {text[:200]!r}")
        if answer.status != 200:
            raise RequestRefused(f"{self.name} refuses {path}: {answer.status} {text[:200]!r}")
        return text

    def on_workers(self, method: str, *arguments: Any) -> Any:
        """Call a method of WorkerExtension on all workers, and return the first result."""
        answer = self.call(RPC_PATH, {"method": method, "args": arguments})
        return answer["results"][0] if answer else None

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Completion]:
        """Sample a response to each prompt. `params` are the arguments of their SamplingParams."""
        request_ids = [self._new_id() for _ in prompts]
        completions = self._map(self._generate_one, request_ids, prompts, params)
        # on the CPU WorkerExtension records the experts
        if self.routes and any(completion.experts is None for completion in completions):
            experts = self.on_workers("routes_of", request_ids)
            for request_id, completion in zip(request_ids, completions, strict=True):
                completion.experts = decode_experts(experts[request_id])
        return completions

    def prompt_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return the log-probs of the tokens of each sequence, from the second token on."""
        return self._map(self._prompt_logprobs_of_one, sequences)

    def _map(self, function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        """Return the results of calls that each wait for a request.

        If one raises an exception, or on Ctrl-C, the other requests are aborted."""
        num_threads = max(1, min(len(arguments[0]), max_requests()))
        threads = ThreadPoolExecutor(num_threads, thread_name_prefix="request")
        try:
            futures = [threads.submit(function, *one) for one in zip(*arguments, strict=True)]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(EngineEnded, RequestRefused):
                self.call("/abort_requests", {})
            raise
        finally:
            threads.shutdown()

    def _prompt_logprobs_of_one(self, sequence: list[int]) -> list[float]:
        request = {
            "request_id": self._new_id(),
            "token_ids": sequence,
            "sampling_params": PROMPT_LOGPROBS,
        }
        answer = self.call("/inference/v1/generate", request)
        try:
            tokens = zip(answer["prompt_logprobs"][1:], sequence[1:], strict=True)
            return [float(of_token[str(token)]["logprob"]) for of_token, token in tokens]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineEnded(
                f"{self.name} answers otherwise than vLLM does: {type(error).__name__} {error}"
            ) from None

    def add(
        self, request_ids: list[str], prompts: list[list[int]], params: list[dict[str, Any]]
    ) -> None:
        """Send requests without waiting for them.

        `ended` returns their responses, by these IDs and without experts."""
        if not self.threads:
            self.threads = ThreadPoolExecutor(max_requests(), thread_name_prefix="request")
        for request_id, prompt, arguments in zip(request_ids, prompts, params, strict=True):
            server_id = self._new_id()
            future = self.threads.submit(self._generate_one, server_id, prompt, arguments)
            self.added[future] = request_id

    def ended(self) -> dict[str, Completion]:
        """Wait until an added request has finished, and return all that have, by ID."""
        if not self.added:
            return {}
        finished = wait(self.added, return_when=FIRST_COMPLETED).done
        return {self.added.pop(future): future.result() for future in finished}

    def abandon(self) -> None:
        """Abort the added requests that have not finished."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)
            if self.added:
                with contextlib.suppress(EngineEnded, RequestRefused):
                    self.call("/abort_requests", {})
            self.threads.shutdown()
        self.threads = None
        self.added = {}

    def _new_id(self) -> str:
        return f"{self.id_prefix}n{next(self.id_numbers)}"

    def _generate_one(
        self, request_id: str, prompt: list[int], params: dict[str, Any]
    ) -> Completion:
        request = {"request_id": request_id, "token_ids": prompt, "sampling_params": params}
        answer = self.call("/inference/v1/generate", request)
        try:
            (choice,) = answer["choices"]
            finish_reason = choice["finish_reason"]
            token_ids = choice["token_ids"]
            content = choice["logprobs"]["content"]
            logprobs = []
            finite_ids = []
            for token in content:
                logprobs.append(token["logprob"])
                kept = [top for top in token["top_logprobs"] if top["logprob"] > EXCLUDED]
                finite_ids.append([top["token_id"] for top in kept])
            routed_experts = choice["routed_experts"]
            experts = decode_experts(routed_experts) if routed_experts else None
        except (KeyError, TypeError, ValueError) as error:
            raise EngineEnded(
                f"{self.name} answers otherwise than vLLM does: {type(error).__name__} {error}"
            ) from None
        if finish_reason not in ("stop", "length"):
            raise EngineEnded(f"{self.name} has broken off a response: {finish_reason}")
        return Completion(token_ids, logprobs, experts, finish_reason, finite_ids)

    def begin_load(self) -> None:
        """Prepare for new weights. Nothing may be sampled until `end_load`."""
        self.on_workers("begin_load")

    def load(self, path: str) -> None:
        """Load the weights of this file in the server's folder, which holds a piece of them."""
        self.on_workers("load_piece", Path(path).name)

    def end_load(self) -> None:
        """Sample from the loaded weights from now on."""
        self.on_workers("end_load")

    def stored_dtype(self) -> str:
        """Return the dtype of all weights, "" if there are several."""
        return self.on_workers("stored_dtype")

    def forget_prefixes(self) -> bool:
        """Reset the prefix cache, and return whether that succeeded."""
        return self.call("/reset_prefix_cache", {})["success"]


def max_requests() -> int:
    """Return how many requests may be open at a time.

    Each needs an open file, and half of this process's open files are left for other uses."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return MAX_REQUESTS
    return max(1, min(MAX_REQUESTS, max_files // 2))


def keep_alive(connection: socket.socket) -> None:
    """Let a connection wait without a timeout, as long as the other machine is up."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def decode_experts(text: str) -> np.ndarray:
    """Return experts, int16 [positions fed, L, K], from a .npy file in base64."""
    file = io.BytesIO(base64.b64decode(text))
    return np.load(file, allow_pickle=False).astype(np.int16)
