"""The methods that run inside vLLM's workers: they load weights and record routed experts.

vLLM mixes `WorkerExtension` into its worker class, in the engine's process or in its workers'
processes. gspo.rollout.engines.vllm_host calls the methods by name. Each method works around
something that vLLM 0.32.0 lacks or does wrongly, as its docstring says. After a change of version,
tests/unit/rollout/test_vllm.py shows which methods are still needed.

Shape suffixes: N tokens of a step, S positions of a sequence, L MoE layers, K experts per token.
"""

from __future__ import annotations

import base64
import io
import os
import select
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from gspo.data.batch import NOT_RECORDED
from gspo.rollout.engines.server_guard import (
    DESCRIPTION_VARIABLE,
    SERVER_PID_VARIABLE,
    WEIGHTS_FILE,
)


def end_with_server(server_pid: int) -> None:
    """End this process as soon as the server has ended in any way.

    A killed server cannot tell its workers to end, and they would keep their memory."""
    if server_pid not in ancestors():  # on another machine the number belongs to another process
        return
    try:
        pidfd = os.pidfd_open(server_pid)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([pidfd], [], [])
        os._exit(1)

    watcher = threading.Thread(target=wait, name="end with the server", daemon=True)
    watcher.start()


def ancestors() -> Iterator[int]:
    """Yield the PIDs of this process, of its parent, and so on."""
    pid = os.getpid()
    while pid > 1:
        yield pid
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        # The parent's PID comes after the state and the name, which is in brackets and may hold
        # blanks.
        after_name = status.rpartition(")")[2].split()
        pid = int(after_name[1])


if SERVER_PID_VARIABLE in os.environ:  # vLLM imports this module in each of a server's workers
    end_with_server(int(os.environ[SERVER_PID_VARIABLE]))


class WorkerExtension:
    """The methods that vLLM's collective_rpc calls on every worker."""

    # the attributes of vLLM's worker class that are used here
    model_runner: Any
    vllm_config: Any
    device: torch.device

    capture: RoutedExpertsCapture | None = None

    def begin_load(self) -> None:
        """Begin to load weights that come in several files.

        vLLM's `reload_weights` takes all files at once, so its parts are called separately. A load
        that a killed trainer left open is ended first. vLLM would count its tensors among the new
        ones, and leave out the last tensors of a layer without an error."""
        model = self.model_runner.get_model()
        if any(get_layerwise_info(module).can_load() for module in model.modules()):
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(model, self.model_runner.model_config)
        if self.capture:
            self.capture.pieces.clear()  # of a killed trainer's requests
        if self.device.type == "cpu":
            forget_packing(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def load_piece(self, path: str) -> None:
        """Load the weights of a safetensors file, named as in transformers.

        A server only loads the file in its own folder, which may have another path for the trainer.
        """
        if DESCRIPTION_VARIABLE in os.environ:
            if path != WEIGHTS_FILE:
                raise ValueError(f"{path} is not {WEIGHTS_FILE}, the file in this server's folder")
            path = str(Path(os.environ[DESCRIPTION_VARIABLE]).with_name(WEIGHTS_FILE))
        weights = load_file(path)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(iter(weights.items()))

    def end_load(self) -> None:
        """End the load that `begin_load` began. Layers without new weights keep the old weights."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if self.device.type == "cpu":
            pack_head(model)

    def stored_dtype(self) -> str:
        """Return the dtype of all parameters, "" if they have several."""
        model = self.model_runner.get_model()
        dtypes = {str(parameter.dtype) for parameter in model.parameters()}
        if len(dtypes) != 1:
            return ""
        return dtypes.pop().removeprefix("torch.")

    def install_capture(self) -> None:
        """Record the experts of all positions that are fed from now on."""
        if not self.capture:
            self.capture = RoutedExpertsCapture(self.model_runner)

    def _installed_capture(self) -> RoutedExpertsCapture:
        """Return the recorder. Raises RuntimeError before `install_capture`."""
        if not self.capture:
            raise RuntimeError("no experts are recorded: install_capture was not called")
        return self.capture

    def pop_routes(self) -> dict[str, np.ndarray]:
        """Return, by request ID, the experts recorded since the last call: int16 [S, L, K]."""
        return self._installed_capture().pop()

    def routes_of(self, request_ids: list[str]) -> dict[str, str]:
        """Return and forget the experts of these requests of a server, as .npy files in base64.

        Inside the engine "generate-tokens-" comes before a request ID, and a hyphen with random
        letters after it."""
        capture = self._installed_capture()
        internal_ids = {
            internal_id.removeprefix("generate-tokens-").split("-")[0]: internal_id
            for internal_id in capture.pieces
        }
        routes = capture.pop({internal_ids[request_id] for request_id in request_ids})
        return {
            request_id: as_base64(routes[internal_ids[request_id]]) for request_id in request_ids
        }


def as_base64(array: np.ndarray) -> str:
    """Return an array as a .npy file in base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def forget_packing(model: nn.Module) -> None:
    """Make the next load pack the experts' weights again.

    On the CPU vLLM packs them for its kernel after a load, but only if the layer has no kernel yet.
    After a second load the kernel would read unpacked weights as packed weights, and the outputs
    would be wrong without any error.
    """
    for module in modules_of_class(model, "RoutedExperts"):
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_head(model: nn.Module) -> None:
    """Pack the output layer's weights again after a load.

    An output layer that is tied to the input embeddings has no weights to load, so a reload leaves
    it out. On the CPU it would then keep using the packed copy of the old weights. For an untied
    layer this repeats vLLM's own packing.
    """
    for module in modules_of_class(model, "ParallelLMHead"):
        module.quant_method.process_weights_after_loading(module)


def modules_of_class(model: nn.Module, name: str) -> list[Any]:
    """Return the modules of a class of vLLM, by its name."""
    return [module for module in model.modules() if type(module).__name__ == name]


class RoutedExpertsCapture:
    """A recorder of the experts of every position that a model runner feeds, by request.

    vLLM's own way (enable_return_routed_experts) needs its second model runner, which does not run
    on the CPU. Here each layer's router reports its choice. The runner's input batch says to which
    request each row belongs.

    A request that was preempted is fed again from its start, and a long prompt may be fed in
    several pieces. Later pieces overwrite earlier pieces, so the last pass over a position counts.
    """

    def __init__(self, runner: Any):
        self.runner = runner
        self.step: dict[int, Tensor] = {}  # layer -> experts_NK of the current step
        # request ID -> pieces (first position, experts_NLK)
        self.pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
        layers = modules_of_class(runner.get_model(), "MoERunner")
        if not layers:
            raise RuntimeError(
                "rollout.routes=true: vLLM's model has no MoE layer whose experts could be recorded"
            )
        for layer in layers:
            layer.router.set_capture_fn(partial(self._record, layer.layer_id))
        self.execute_model = runner.execute_model
        runner.execute_model = self._execute_model

    def _record(self, layer: int, experts_NK: Tensor) -> None:
        """Keep the choice of a layer's router in the current step."""
        # a copy, because the router reuses its buffer
        self.step[layer] = experts_NK.detach().to(torch.int16)

    def _execute_model(self, scheduled, *args, **kwargs):
        """Run a step of the model, and store its experts by request."""
        self.step.clear()
        output = self.execute_model(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._store(scheduled)
        return output

    def _store(self, scheduled) -> None:
        """Give each request its rows of the step, which are in the order of the runner's batch."""
        experts_of_layers = [self.step[layer] for layer in sorted(self.step)]
        experts_NLK = torch.stack(experts_of_layers, dim=1).numpy()
        if len(experts_NLK) != scheduled.total_num_scheduled_tokens:
            raise RuntimeError(
                f"the routers saw {len(experts_NLK)} tokens in a step of "
                f"{scheduled.total_num_scheduled_tokens}: the experts cannot be told apart; use "
                "rollout.routes=false"
            )
        batch = self.runner.input_batch
        row = 0
        for i, request_id in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[request_id]
            position = int(batch.num_computed_tokens_cpu[i])
            piece = (position, experts_NLK[row : row + count])
            self.pieces.setdefault(request_id, []).append(piece)
            row += count

    def pop(self, request_ids: set[str] | None = None) -> dict[str, np.ndarray]:
        """Return and forget the experts [S, L, K] of these requests, by default of all.

        They are NOT_RECORDED at a position that was not fed."""
        routes = {}
        for request_id in list(self.pieces) if request_ids is None else request_ids:
            pieces = self.pieces.pop(request_id)
            length = max(position + len(experts_NLK) for position, experts_NLK in pieces)
            layers_and_experts = pieces[0][1].shape[1:]
            route_SLK = np.full((length, *layers_and_experts), NOT_RECORDED, dtype=np.int16)
            for position, experts_NLK in pieces:
                route_SLK[position : position + len(experts_NLK)] = experts_NLK
            routes[request_id] = route_SLK
        return routes
