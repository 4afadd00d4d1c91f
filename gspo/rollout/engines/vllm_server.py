"""The engine that samples with a vLLM server, which `gspo serve` has started, perhaps on other
machines.

Every rank sends its rows to the server, each as a request of its own with a seed of its own. Rank 0
hands the weights over: it writes them, piece by piece, to a folder that the server has made and
both can see, and the server loads them. As long as a trainer uses a server it holds a lock in that
folder, so that a second one is refused. The folder is found in the file system. It holds a key by
which server and trainer recognise each other, and what the server is.

This module speaks HTTP, and needs no vLLM.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import io
import json
import resource
import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.external import OutsideEngine
from gspo.rollout.engines.server_guard import (
    HEALTH,
    NONCE,
    PROOF,
    SIGNATURE,
    place,
    proof,
    signature,
)
from gspo.rollout.engines.vllm import TESTED_VERSION, logprobs_mode
from gspo.rollout.engines.vllm_host import Completion
from gspo.rollout.engines.weights_folder import RunningServer, ServerFolder, running_servers
from gspo.rollout.settings import VLLMServerRollout

CONNECT_SECONDS = 30.0
# A machine that is gone says nothing. After so many seconds of silence the kernel asks whether it
# is there, again after so many, and gives up after so many questions.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
# as many can be under way at a time, if as many files may be open; further ones wait here
MAX_REQUESTS = 4096
# The most bytes of an answer: the experts of some million positions, in base64. That of a server
# which has not proved what it is may have a few.
MAX_ANSWER_BYTES, MAX_UNVERIFIED_BYTES = 512 << 20, 64 << 10
START = "start one by `gspo serve`, with the words of this run"


class RequestRefused(RuntimeError):
    """The server has answered that it does not do what was asked."""


class VLLMServerClient:
    """A vLLM server at an address such as http://127.0.0.1:8000, with the methods that an `LLMHost`
    has.
    """

    def __init__(self, url: str, routes: bool, key: str = ""):
        self.name, self.routes, self.key = f"the vLLM server at {url}", routes, key
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        # the names of requests, which no other trainer has
        self.label, self.numbers = secrets.token_hex(8), count()
        # each waits for one of the requests that were added
        self.threads: ThreadPoolExecutor | None = None
        self.added: dict[Future[Completion], str] = {}  # with their names

    def call(self, path: str, body: Any = None) -> Any:
        """Send a request, with a body by POST, and return the answer. Raises EngineEnded if the
        server does not answer or has failed, RequestRefused if it refuses or is another one."""
        said = self.send(
            "GET" if body is None else "POST", path, None if body is None else json.dumps(body)
        )
        try:
            return json.loads(said) if said else None
        except (ValueError, RecursionError):
            raise EngineEnded(
                f"{self.name} answers {path} with something that is no JSON: {said[:200]!r}"
            ) from None

    def send(self, method: str, path: str, text: str | None = None) -> str:
        """Send a request and return the answer, on a connection on which the server has proved that
        it knows the key. Without a key only HEALTH can be asked for."""
        connection = HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.auto_open = 0  # a further connection might lead to another server
            address = place(connection.sock.getpeername())
            headers = {"Content-Type": "application/json"}
            if self.key:
                nonce = secrets.token_hex(16)
                connection.request("GET", PROOF, headers={NONCE: nonce})
                said = self._read(connection, PROOF, MAX_UNVERIFIED_BYTES)
                if not hmac.compare_digest(said.encode(), proof(self.key, address, nonce).encode()):
                    raise RequestRefused(
                        f"{self.name} is another one than `gspo serve` has started: it does not know the key"
                    )
                nonce, body = secrets.token_hex(16), (text or "").encode()
                headers |= {
                    NONCE: nonce,
                    SIGNATURE: signature(self.key, address, nonce, method, path, body),
                }
                if connection.sock is None:
                    raise EngineEnded(
                        f"{self.name} has ended a connection on which it was to be asked"
                    )
                keep_alive(connection.sock)
            connection.request(method, path, text, headers)
            return self._read(
                connection, path, MAX_ANSWER_BYTES if self.key else MAX_UNVERIFIED_BYTES
            )
        except (OSError, HTTPException) as error:
            raise EngineEnded(
                f"{self.name} does not answer: {error or type(error).__name__}"
            ) from None
        finally:
            connection.close()

    def _read(self, connection: HTTPConnection, path: str, most: int) -> str:
        """Return the answer to the last request, which may have so many bytes."""
        answer = connection.getresponse()
        content = answer.read(most + 1)
        if len(content) > most:
            raise EngineEnded(f"{self.name} answers {path} with more than {most:,} bytes")
        said = content.decode(errors="replace")
        if answer.status >= 500:
            raise EngineEnded(f"{self.name} has failed: {answer.status} {said[:200]!r}")
        if answer.status != 200:
            raise RequestRefused(f"{self.name} refuses {path}: {answer.status} {said[:200]!r}")
        return said

    def on_workers(self, method: str, *arguments: Any) -> Any:
        """Call a method of WorkerExtension on all workers, and return what the first returns."""
        answer = self.call("/collective_rpc", {"method": method, "args": arguments})
        return answer["results"][0] if answer else None

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Completion]:
        """Sample one response per prompt; `params` are the arguments of each one's SamplingParams."""
        names = [f"{self.label}n{next(self.numbers)}" for _ in prompts]
        with ThreadPoolExecutor(
            min(len(prompts), max_requests()), thread_name_prefix="request"
        ) as threads:
            sampled = list(threads.map(self._generate_one, names, prompts, params))
        # the CPU's way: WorkerExtension records them
        if self.routes and any(one.experts is None for one in sampled):
            experts = self.on_workers("routes_of", names)
            for name, one in zip(names, sampled, strict=True):
                one.experts = array(experts[name])
        return sampled

    def add(self, names: list[str], prompts: list[list[int]], params: list[dict[str, Any]]) -> None:
        """Send requests without waiting for them. Their responses come from `ended`, under these
        names, and without experts."""
        self.threads = self.threads or ThreadPoolExecutor(
            max_requests(), thread_name_prefix="request"
        )
        for name, prompt, own in zip(names, prompts, params, strict=True):
            there = f"{self.label}n{next(self.numbers)}"
            self.added[self.threads.submit(self._generate_one, there, prompt, own)] = name

    def ended(self) -> dict[str, Completion]:
        """Wait until at least one of the requests that were added has ended, and return those that
        have, by name.
        """
        done = wait(self.added, return_when=FIRST_COMPLETED).done if self.added else ()
        return {self.added.pop(future): future.result() for future in done}

    def abandon(self) -> None:
        """Break off the requests that were added and have not ended."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)
            if self.added:
                with contextlib.suppress(EngineEnded):
                    self.call("/abort_requests", {})
            self.threads.shutdown()
        self.threads, self.added = None, {}

    def _generate_one(self, name: str, prompt: list[int], params: dict[str, Any]) -> Completion:
        request = {"request_id": name, "token_ids": prompt, "sampling_params": params}
        answer = self.call("/inference/v1/generate", request)
        try:
            (choice,) = answer["choices"]
            finish_reason, token_ids = choice["finish_reason"], choice["token_ids"]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            experts = array(choice["routed_experts"]) if choice["routed_experts"] else None
        except (KeyError, TypeError, ValueError) as error:
            raise EngineEnded(
                f"{self.name} answers otherwise than vLLM does: {type(error).__name__} {error}"
            ) from None
        if finish_reason not in ("stop", "length"):
            raise EngineEnded(f"{self.name} has broken off a response: {finish_reason}")
        return Completion(token_ids, logprobs, experts, finish_reason)

    def begin_load(self) -> None:
        """Prepare for new weights. Nothing may be sampled until `end_load`."""
        self.on_workers("begin_load")

    def load(self, path: str) -> None:
        """Load the weights of this file in the server's folder, which is one of several."""
        self.on_workers("load_piece", Path(path).name)

    def end_load(self) -> None:
        """Sample from the weights that were loaded from now on."""
        self.on_workers("end_load")

    def stored_dtype(self) -> str:
        """Return the precision that all weights are stored in; "" if there are several."""
        return self.on_workers("stored_dtype")

    def forget_prefixes(self) -> bool:
        """Drop the cached keys and values of prompts; return whether that succeeded."""
        return self.call("/reset_prefix_cache", {})["success"]


class VLLMServerEngine(OutsideEngine):
    """Samples with a vLLM server. All ranks send requests, and rank 0 hands the weights over."""

    def __init__(self, policy: Policy, settings: VLLMServerRollout, ranks: Ranks | None = None):
        """Take the server and give it the policy's weights. Raises ValueError, in one line, if
        there is no server, if it does not fit the policy or the settings, or if another trainer
        uses it."""
        super().__init__(policy, settings, ranks or Ranks())
        found = check_server(settings)
        description = found.description
        check_model(
            settings, description, {name: list(shape) for name, shape in self.shapes.items()}
        )
        check_head(settings, description, str(policy.head_dtype).removeprefix("torch."))
        self.max_model_len = description["max_model_len"]
        self.server = VLLMServerClient(settings.url, settings.routes, found.key)
        if self.ranks.rank == 0:
            self.folder = ServerFolder(found.path, settings.url)
        try:
            if self.folder:
                self._take(description["on_cpu"])
            self.load_weights(policy.named_tensors())
        except BaseException:
            self.close()
            raise

    def _take(self, on_cpu: bool) -> None:
        """Prepare the server for this trainer: what an earlier one has left there is broken off."""
        self.server.call("/abort_requests", {})
        if self.settings.routes and on_cpu:
            self.server.on_workers("install_capture")
        self._note_precision()

    @property
    def positions(self) -> int:
        """How many tokens of prompt and response together the server can hold."""
        return self.max_model_len

    def close(self) -> None:
        """Leave the server to others. May be called twice."""
        self.server.abandon()
        if self.folder:
            self.folder.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self.server, method)(*arguments)


def check_server(settings: VLLMServerRollout) -> RunningServer:
    """Return the folder, key and description of the server at the settings' address. Raises
    ValueError if there is none, if it is not this user's, or if it was started with another vLLM or
    other settings."""
    found, version = find_server(settings)
    description = found.description
    if not version.startswith(f"{TESTED_VERSION}."):
        raise ValueError(
            f"rollout.url={settings.url}: the server has vLLM {version}, this engine was tested with "
            f"{TESTED_VERSION}.*; install that there"
        )
    for key, value in (("dtype", settings.dtype), ("routes", settings.routes)):
        if description[key] != value:
            raise ValueError(
                f"rollout.{key}={value}: the server at {settings.url} was started with {description[key]}; {START}"
            )
    if description["logprobs_mode"] != logprobs_mode(settings):
        raise ValueError(
            f"rollout.url={settings.url}: the server there was started {'with' if not settings.rules else 'without'} "
            f"rollout.top_p, top_k or min_p, this run has {settings.rules or 'none of them'}: its log-probs would be "
            f"others than the ratio needs; {START}"
        )
    if settings.max_model_len not in (None, description["max_model_len"]):
        raise ValueError(
            f"rollout.max_model_len={settings.max_model_len}: the server at {settings.url} was started with "
            f"{description['max_model_len']}; {START}"
        )
    return found


def find_server(settings: VLLMServerRollout) -> tuple[RunningServer, str]:
    """Return the folder whose key the server at the settings' address knows, and the server's
    version of vLLM. Raises ValueError if there is none."""
    unknown = VLLMServerClient(settings.url, settings.routes)
    folders = list(running_servers(unknown.port, settings.folder))
    try:
        for found in folders:
            with contextlib.suppress(RequestRefused):
                return found, VLLMServerClient(settings.url, settings.routes, found.key).call(
                    "/version"
                )["version"]
        if not folders:
            with contextlib.suppress(RequestRefused):
                unknown.send("GET", HEALTH)
    except EngineEnded as error:
        raise ValueError(f"rollout.url={settings.url}: {error}; {START}") from None
    places = "the folder of one that listens at this port is not to be seen here"
    if folders:
        places = f"it does not know the key in {folders[0].path}"
    raise ValueError(
        f"rollout.url={settings.url}: what answers there is not a server that this user has started by `gspo serve`: "
        f"{places}; {START}, and give rollout.folder to both where they run on different machines"
    )


def max_requests() -> int:
    """Return how many requests can be under way: each is an open file, and half of those that this
    process may open are left to everything else."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_REQUESTS
        if allowed == resource.RLIM_INFINITY
        else max(1, min(MAX_REQUESTS, allowed // 2))
    )


def check_model(
    settings: VLLMServerRollout, description: dict[str, Any], shapes: dict[str, Sequence[int]]
) -> None:
    """Raise ValueError if the server's model has other weights, by their names and shapes."""
    for name in sorted(shapes.keys() | description["shapes"].keys()):
        ours, theirs = shapes.get(name), description["shapes"].get(name)
        if ours != theirs:
            raise ValueError(
                f"rollout.url={settings.url}: the server has another model: {name} is {theirs or 'not there'}, in this "
                f"run {ours or 'not there'}; {START}"
            )


def check_head(settings: VLLMServerRollout, description: dict[str, Any], head_dtype: str) -> None:
    """Raise ValueError if the server multiplies by its output head in another precision than the
    trainer.
    """
    theirs = description.get("head_dtype", "bfloat16")
    if settings.dtype == "bfloat16" and theirs != head_dtype:
        raise ValueError(
            f"policy.head_dtype={head_dtype}: the server at {settings.url} was started with {theirs}; {START}"
        )


def keep_alive(connection: socket.socket) -> None:
    """Let a connection wait for as long as the other machine is there."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def array(text: str) -> np.ndarray:
    """Return experts, int16 [positions fed, L, K], that came as a .npy file in base64."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False).astype(np.int16)
