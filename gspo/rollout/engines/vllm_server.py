"""The engine that samples with a vLLM server, which `gspo serve` started, perhaps elsewhere.

Every rank sends its rows to the server, each as a request with its own seed. Rank 0 hands over the
weights. It writes them, piece by piece, to a folder that the server made, and the server loads
them. Both must see that folder. While a trainer uses a server it holds a lock in that folder, so a
second trainer is refused. The folder is found in the file system. It holds the server's
description, and a key by which server and trainer recognise each other.

gspo.rollout.engines.vllm_client speaks HTTP with the server. Neither module needs vLLM.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.distributed.ranks import Ranks
from gspo.io.errors import SettingError
from gspo.model.policy import Policy
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.server_guard import HEALTH_PATH
from gspo.rollout.engines.vllm import TESTED_VERSION, logprobs_mode
from gspo.rollout.engines.vllm_base import VLLMEngineBase
from gspo.rollout.engines.vllm_client import RequestRefused, VLLMServerClient
from gspo.rollout.engines.vllm_kept import max_logprobs
from gspo.rollout.engines.weights_folder import RunningServer, ServerFolder, running_servers
from gspo.rollout.vllm_settings import VLLMServerRollout

START = "start one with `gspo serve` and the settings of this run"


class VLLMServerEngine(VLLMEngineBase[VLLMServerRollout]):
    """An engine that samples with a vLLM server.

    All ranks send requests, and rank 0 hands over the weights."""

    def __init__(self, policy: Policy, settings: VLLMServerRollout, ranks: Ranks | None = None):
        """Take the server and give it the policy's weights.

        Raises ValueError, in a single line, if there is no server, if it does not fit the policy or
        the settings, or if another trainer uses it."""
        server = check_server(settings)
        description = server.description
        super().__init__(policy, settings, ranks or Ranks(), description["max_model_len"])
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        check_model(settings, description, shapes)
        check_head(settings, description, str(policy.head_dtype).removeprefix("torch."))
        self.client = VLLMServerClient(settings.url, settings.routes, server.key)
        if self.ranks.rank == 0:
            self.folder = ServerFolder(server.path, settings.url)
        try:
            if self.folder:
                self._prepare(description["on_cpu"])
            self.load_weights(policy.named_tensors())
        except BaseException:
            self.close()
            raise

    def _prepare(self, on_cpu: bool) -> None:
        """Prepare the server for this trainer, and abort the requests of an earlier trainer."""
        self.client.call("/abort_requests", {})
        if self.settings.routes and on_cpu:
            self.client.on_workers("install_capture")
        self._note_precision()

    def close(self) -> None:
        """Leave the server to others. May be called twice."""
        self.client.abandon()
        if self.folder:
            self.folder.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self.client, method)(*arguments)


def check_server(settings: VLLMServerRollout) -> RunningServer:
    """Return the folder, key and description of the server at the settings' address.

    Raises ValueError if there is none, if it is not this user's, or if it was started with another
    vLLM or other settings."""
    server, version = find_server(settings)
    description = server.description
    if not version.startswith(f"{TESTED_VERSION}."):
        raise SettingError(
            "rollout.url",
            settings.url,
            f"the server has vLLM {version}, this engine was tested with {TESTED_VERSION}.*",
            remedy=f"install vLLM {TESTED_VERSION} on the server's machine",
        )
    for key, value in (("dtype", settings.dtype), ("routes", settings.routes)):
        if description[key] != value:
            raise SettingError(
                f"rollout.{key}",
                value,
                f"the server at {settings.url} was started with {description[key]}",
                remedy=START,
            )
    # 0: the server was started without rollout.keep_mask
    server_max_logprobs = description.get("max_logprobs", 0)
    if settings.rules and bool(server_max_logprobs) != settings.keep_mask:
        raise SettingError(
            "rollout.keep_mask",
            settings.keep_mask,
            f"the server at {settings.url} was started with {bool(server_max_logprobs)}",
            remedy=START,
        )
    if description["logprobs_mode"] != logprobs_mode(settings):
        raise SettingError(
            "rollout.url",
            settings.url,
            f"the server was started {'with' if not settings.rules else 'without'} "
            f"rollout.top_p, top_k or min_p, and this run has {settings.rules or 'none of them'}: "
            "its log-probs would be of another distribution than the ratio needs",
            remedy=START,
        )
    if settings.keep_mask and server_max_logprobs < max_logprobs(settings):
        raise SettingError(
            "rollout.top_k",
            settings.top_k,
            f"with rollout.keep_mask=true, the server at {settings.url} was not started for so "
            "many kept tokens",
            remedy=START,
        )
    if settings.max_model_len not in (None, description["max_model_len"]):
        raise SettingError(
            "rollout.max_model_len",
            settings.max_model_len,
            f"the server at {settings.url} was started with {description['max_model_len']}",
            remedy=START,
        )
    return server


def find_server(settings: VLLMServerRollout) -> tuple[RunningServer, str]:
    """Return the server at the settings' address that knows its folder's key, and its version.

    Raises ValueError if there is none."""
    keyless = VLLMServerClient(settings.url, settings.routes)
    servers = list(running_servers(keyless.port, settings.folder))
    try:
        for server in servers:
            client = VLLMServerClient(settings.url, settings.routes, server.key)
            with contextlib.suppress(RequestRefused):
                return server, client.call("/version")["version"]
        if not servers:
            with contextlib.suppress(RequestRefused):
                keyless.send("GET", HEALTH_PATH)
    except EngineEnded as error:
        raise SettingError("rollout.url", settings.url, str(error), START) from None
    reason = "this machine sees no folder of a server that listens at this port"
    if servers:
        reason = f"the server that answers does not know the key in {servers[0].path}"
    raise SettingError(
        "rollout.url",
        settings.url,
        f"no server that this user started with `gspo serve` answers at this address: {reason}",
        remedy=f"{START}, on different machines with the same rollout.folder for both",
    )


def check_model(
    settings: VLLMServerRollout, description: dict[str, Any], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise ValueError if the server's model has other weights, by their names and shapes."""
    server_shapes = description["shapes"]
    for name in sorted(shapes.keys() | server_shapes.keys()):
        shape = shapes.get(name)
        server_shape = server_shapes.get(name)
        if shape != server_shape:
            raise SettingError(
                "rollout.url",
                settings.url,
                f"the server has another model: {name} is {server_shape or 'not there'}, "
                f"in this run {shape or 'not there'}",
                remedy=START,
            )


def check_head(settings: VLLMServerRollout, description: dict[str, Any], head_dtype: str) -> None:
    """Raise ValueError if the server and the trainer compute the output head in other dtypes."""
    server_dtype = description.get("head_dtype", "bfloat16")
    if settings.dtype == "bfloat16" and server_dtype != head_dtype:
        raise SettingError(
            "policy.head_dtype",
            head_dtype,
            f"the server at {settings.url} was started with {server_dtype}",
            remedy=START,
        )
