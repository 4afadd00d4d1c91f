"""The code that runs inside vLLM's workers: it loads weights and records the experts of every
position.

vLLM mixes `WorkerExtension` into its worker class, in the engine's process or in one that it
starts; gspo.rollout.engines.vllm_host calls the methods by name. Each of them works around something that
vLLM 0.32.0 lacks or does wrongly, as its docstring says. When the version changes,
tests/unit/rollout/test_vllm.py shows which are still needed.

Shape suffixes: N tokens of one step, S positions of one sequence, L MoE layers, K experts per
token.
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

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from gspo.rollout.engines.route_checks import UNKNOWN
from gspo.rollout.engines.server_guard import DESCRIPTION, SERVERS_PROCESS, WEIGHTS


def end_with(process: int) -> None:
    """Let this process end as soon as the server's has ended, however that was: a killed server
    cannot tell its workers, and they would keep their memory."""
    if process not in ancestors():  # on another machine that number is another process's
        return
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end with the server", daemon=True).start()


def ancestors() -> Iterator[int]:
    """Yield the numbers of this process, of its parent, and so on."""
    process = os.getpid()
    while process > 1:
        yield process
        try:
            text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        # behind the name, which may hold blanks, and the state
        process = int(text.rpartition(")")[2].split()[1])


if SERVERS_PROCESS in os.environ:  # vLLM imports this module in each of a server's workers
    end_with(int(os.environ[SERVERS_PROCESS]))


class WorkerExtension:
    """The methods that vLLM's collective_rpc calls on every worker."""

    capture: Capture | None = None

    def begin_load(self) -> None:
        """Begin to load weights that come in several files: vLLM's `reload_weights` takes them all
        at once, so its parts are called here one by one."""
        model = self.model_runner.get_model()
        if self.capture:
            self.capture.pieces.clear()  # of requests that a killed trainer never asked for
        if self.device.type == "cpu":
            forget_packing(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def load_piece(self, path: str) -> None:
        """Load the weights of a safetensors file whose names are those of transformers. A server
        loads that of its own folder alone, whose path may be another one for the trainer."""
        if DESCRIPTION in os.environ:
            if path != WEIGHTS:
                raise ValueError(f"{path} is not {WEIGHTS}, the file in this server's folder")
            path = str(Path(os.environ[DESCRIPTION]).with_name(WEIGHTS))
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(iter(load_file(path).items()))

    def end_load(self) -> None:
        """End what `begin_load` began. A layer of which no weight has come keeps those that it had."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if self.device.type == "cpu":
            pack_head(model)

    def stored_dtype(self) -> str:
        """Return the precision of all parameters, "" if they differ in it."""
        found = {str(parameter.dtype) for parameter in self.model_runner.get_model().parameters()}
        return found.pop().removeprefix("torch.") if len(found) == 1 else ""

    def install_capture(self) -> None:
        """Record the experts of all positions that are fed from now on."""
        self.capture = self.capture or Capture(self.model_runner)

    def pop_routes(self) -> dict[str, np.ndarray]:
        """Return, by request id, the experts recorded since the last call: int16 [S, L, K]."""
        return self.capture.pop()

    def routes_of(self, names: list[str]) -> dict[str, str]:
        """Return the experts of these requests of a server, as .npy files in base64, and forget
        them. Inside the engine the name of a request stands between "generate-tokens-" and a hyphen
        with random letters."""
        by_name = {
            inside.removeprefix("generate-tokens-").split("-")[0]: inside
            for inside in self.capture.pieces
        }
        found = self.capture.pop({by_name[name] for name in names})
        return {name: as_text(found[by_name[name]]) for name in names}


def as_text(array: np.ndarray) -> str:
    """Return an array as a .npy file in base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def forget_packing(model: nn.Module) -> None:
    """Make the next load pack the experts' weights again.

    On the CPU vLLM packs them for its kernel after a load, but only if the layer has no kernel yet.
    After a second load unpacked weights would be read as packed ones, and the outputs would be
    wrong without any error.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if (
            type(module).__name__ == "RoutedExperts"
            and getattr(method, "moe_kernel", None) is not None
        ):
            method.moe_kernel = None


def pack_head(model: nn.Module) -> None:
    """Pack the output layer's weights again after a load.

    An output layer that is tied to the input embeddings has no weights of its own to load, so a
    reload passes it by, and on the CPU it would keep using the packed copy of the old weights. For
    an untied layer this repeats what vLLM has just done.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


class Capture:
    """Records, by request, the experts of every position that a model runner feeds.

    vLLM's own way (enable_return_routed_experts) needs its second model runner, which does not run
    on the CPU. Here the routers report their choice layer by layer, and the runner's input batch
    says which request each row belongs to.

    A request that was preempted is fed again from its start, and a long prompt may come in several
    pieces. Pieces overwrite each other in the order in which they were fed, so the last pass over a
    position counts.
    """

    def __init__(self, runner):
        self.runner = runner
        self.step: dict[int, Tensor] = {}  # layer -> experts_NK of the current step
        # request -> (first position, experts_NLK)
        self.pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
        layers = [m for m in runner.get_model().modules() if type(m).__name__ == "MoERunner"]
        if not layers:
            raise RuntimeError(
                "rollout.routes=true: vLLM's model has no MoE layer whose experts could be recorded"
            )
        for layer in layers:
            layer.router.set_capture_fn(partial(self._record, layer.layer_id))
        self.execute = runner.execute_model
        runner.execute_model = self._execute

    def _record(self, layer: int, experts_NK: Tensor) -> None:
        """Keep what one layer's router has chosen in the current step."""
        # a copy, because the router reuses its buffer
        self.step[layer] = experts_NK.detach().to(torch.int16)

    def _execute(self, scheduled, *args, **kwargs):
        """Run one step of the model, and file the experts that it used."""
        self.step.clear()
        output = self.execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._file(scheduled)
        return output

    def _file(self, scheduled) -> None:
        """Give each request its rows of the step. The rows are in the order of the runner's batch."""
        experts_NLK = torch.stack([self.step[layer] for layer in sorted(self.step)], dim=1).numpy()
        if len(experts_NLK) != scheduled.total_num_scheduled_tokens:
            raise RuntimeError(
                f"the routers saw {len(experts_NLK)} tokens in a step of {scheduled.total_num_scheduled_tokens}: "
                "the experts cannot be told apart; use rollout.routes=false"
            )
        batch, row = self.runner.input_batch, 0
        for i, request in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[request]
            start = int(batch.num_computed_tokens_cpu[i])
            self.pieces.setdefault(request, []).append((start, experts_NLK[row : row + count]))
            row += count

    def pop(self, requests: set[str] | None = None) -> dict[str, np.ndarray]:
        """Return and forget the experts of these requests, by default of all, [S, L, K]; UNKNOWN
        where no position was fed."""
        routes = {}
        for request in list(self.pieces) if requests is None else requests:
            pieces = self.pieces.pop(request)
            length = max(start + len(piece) for start, piece in pieces)
            routes[request] = np.full((length, *pieces[0][1].shape[1:]), UNKNOWN, dtype=np.int16)
            for start, piece in pieces:
                routes[request][start : start + len(piece)] = piece
        return routes
