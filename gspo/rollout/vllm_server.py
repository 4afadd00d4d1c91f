"""The engine that samples with a vLLM server, which `gspo serve` has started, perhaps on other machines.

Every rank sends its rows to the server, each as a request of its own with a seed of its own. Rank 0 hands the weights
over: it writes them, piece by piece, to a folder that the server has made and both can see, and the server loads them.
As long as a trainer uses a server it holds a lock in that folder, so that a second one is refused.

This module speaks HTTP, and needs no vLLM.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection, HTTPException
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from gspo.core.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engine_folder import ServersFolder
from gspo.rollout.engine_process import EngineEnded
from gspo.rollout.outside_engine import OutsideEngine
from gspo.rollout.settings import VLLMServerRollout
from gspo.rollout.vllm import TESTED_VERSION, logprobs_mode
from gspo.rollout.vllm_host import Sampled

CONNECT_SECONDS = 30.0
# A machine that is gone says nothing. After so many seconds of silence the kernel asks whether it is there, again after
# so many, and gives up after so many questions.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
MOST_REQUESTS = 4096  # as many can be under way at a time; further ones wait here
START = "start one by `gspo serve`, with the words of this run"


class Refused(RuntimeError):
    """The server has answered that it does not do what was asked."""


class Server:
    """A vLLM server at an address such as http://127.0.0.1:8000, with the methods that a `Host` has."""

    def __init__(self, url: str, routes: bool):
        self.name, self.routes = f"the vLLM server at {url}", routes
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.label, self.numbers = secrets.token_hex(8), count()  # the names of requests, which no other trainer has
        self.threads: ThreadPoolExecutor | None = None  # each waits for one of the requests that were added
        self.added: dict[Future[Sampled], str] = {}  # with their names

    def call(self, path: str, body: Any = None) -> Any:
        """Send a request, with a body by POST, and return the answer. Raises EngineEnded if the server does not answer
        or has failed, Refused if it refuses."""
        connection = HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            keep_alive(connection.sock)
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException) as error:
            raise EngineEnded(f"{self.name} does not answer: {error or type(error).__name__}") from None
        finally:
            connection.close()
        said = content.decode(errors="replace")
        if answer.status >= 500:
            raise EngineEnded(f"{self.name} has failed: {answer.status} {said[:200]}")
        if answer.status != 200:
            raise Refused(f"{self.name} refuses {path}: {answer.status} {said[:200]}")
        return json.loads(said) if said else None

    def on_workers(self, method: str, *arguments: Any) -> Any:
        """Call a method of WorkerExtension on all workers, and return what the first returns."""
        answer = self.call("/collective_rpc", {"method": method, "args": arguments})
        return answer["results"][0] if answer else None

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Sampled]:
        """Sample one response per prompt; `params` are the arguments of each one's SamplingParams."""
        names = [f"{self.label}n{next(self.numbers)}" for _ in prompts]
        with ThreadPoolExecutor(len(prompts), thread_name_prefix="request") as threads:
            sampled = list(threads.map(self._generate_one, names, prompts, params))
        if self.routes and any(one.experts is None for one in sampled):  # the CPU's way: WorkerExtension records them
            experts = self.on_workers("routes_of", names)
            for name, one in zip(names, sampled, strict=True):
                one.experts = array(experts[name])
        return sampled

    def add(self, names: list[str], prompts: list[list[int]], params: list[dict[str, Any]]) -> None:
        """Send requests without waiting for them. Their responses come from `ended`, under these names, and without
        experts."""
        self.threads = self.threads or ThreadPoolExecutor(MOST_REQUESTS, thread_name_prefix="request")
        for name, prompt, own in zip(names, prompts, params, strict=True):
            there = f"{self.label}n{next(self.numbers)}"
            self.added[self.threads.submit(self._generate_one, there, prompt, own)] = name

    def ended(self) -> dict[str, Sampled]:
        """Wait until at least one of the requests that were added has ended, and return those that have, by name."""
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

    def _generate_one(self, name: str, prompt: list[int], params: dict[str, Any]) -> Sampled:
        request = {"request_id": name, "token_ids": prompt, "sampling_params": params}
        (choice,) = self.call("/inference/v1/generate", request)["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineEnded(f"{self.name} has broken off a response: {choice['finish_reason']}")
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        experts = array(choice["routed_experts"]) if choice["routed_experts"] else None
        return Sampled(choice["token_ids"], logprobs, experts, choice["finish_reason"])

    def begin_load(self) -> None:
        """Prepare for new weights. Nothing may be sampled until `end_load`."""
        self.on_workers("begin_load")

    def load(self, path: str) -> None:
        """Load the weights of this file, which is one of several."""
        self.on_workers("load_piece", path)

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
        """Take the server and give it the policy's weights. Raises ValueError, in one line, if there is no server, if
        it does not fit the policy or the settings, or if another trainer uses it."""
        super().__init__(policy, settings, ranks or Ranks())
        description = check_server(settings)
        check_model(settings, description, {name: list(shape) for name, shape in self.shapes.items()})
        check_head(settings, description, str(policy.head_dtype).removeprefix("torch."))
        self.max_model_len = description["max_model_len"]
        self.server = Server(settings.url, settings.routes)
        if self.ranks.index == 0:
            self.folder = ServersFolder(description["folder"], settings.url)
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


def check_server(settings: VLLMServerRollout) -> dict[str, Any]:
    """Return what the server says of itself. Raises ValueError if there is none, or if it was started with another
    vLLM or other settings."""
    server = Server(settings.url, settings.routes)
    try:
        version = server.call("/version")["version"]
        description = server.on_workers("describe")
    except EngineEnded as error:
        raise ValueError(f"rollout.url={settings.url}: {error}; {START}") from None
    except Refused:
        raise ValueError(f"rollout.url={settings.url}: the server there was not started by `gspo serve`") from None
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
    return description


def check_model(settings: VLLMServerRollout, description: dict[str, Any], shapes: dict[str, Sequence[int]]) -> None:
    """Raise ValueError if the server's model has other weights, by their names and shapes."""
    for name in sorted(shapes.keys() | description["shapes"].keys()):
        ours, theirs = shapes.get(name), description["shapes"].get(name)
        if ours != theirs:
            raise ValueError(
                f"rollout.url={settings.url}: the server has another model: {name} is {theirs or 'not there'}, in this "
                f"run {ours or 'not there'}; {START}"
            )


def check_head(settings: VLLMServerRollout, description: dict[str, Any], head_dtype: str) -> None:
    """Raise ValueError if the server multiplies by its output head in another precision than the trainer."""
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
