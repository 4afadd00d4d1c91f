"""What runs inside vLLM's workers: loading weights, recording the experts of every position, ending with the trainer.
And the file in which the weights come there.

vLLM mixes `WorkerExtension` into its worker class, in the trainer's process or in one of its own; the trainer calls the
methods by name. Each of them works around something that vLLM 0.32.0 lacks or does wrongly, as its comments say; when
the version changes, tests/test_vllm.py shows which are still needed.

Shape suffixes: N tokens of one step, S positions of one sequence, L MoE layers, K experts per token.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gspo.rollout.routes import UNKNOWN
from gspo.run_files import errors_of_the_disk

MEMORY = "/dev/shm"  # a file system in memory, on Linux


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def memory_folder(size: int) -> tempfile.TemporaryDirectory:
    """A temporary folder for files of `size` bytes: in memory if there is room, else where such folders usually are."""
    fits = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1.5 * size
    return tempfile.TemporaryDirectory(prefix="gspo-vllm-", dir=MEMORY if fits else None)


def save_weights(tensors: dict[str, Tensor], folder: str) -> str:
    """Write weights for `load_from_file`: messages to another process cannot carry tensors. The file's path.

    Tied weights are written once, under their first name, as in a checkpoint; safetensors refuses the second.
    """
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        seen.setdefault(tensor.data_ptr(), name)
    path = str(Path(folder) / "weights.safetensors")
    with errors_of_the_disk(Path(path)):
        save_file({name: tensors[name].detach().contiguous() for name in seen.values()}, path)
    return path


class WorkerExtension:
    """Methods that the trainer calls on every worker by vLLM's collective_rpc.

    Results come back as msgpack, which knows bytes and plain containers but gives arrays back without their type.
    """

    def load_from_file(self, path: str) -> None:
        """Take over the weights of a safetensors file with the names of transformers."""
        model, on_cpu = self.model_runner.get_model(), self.device.type == "cpu"
        if on_cpu:
            forget_packing(model)
        self.reload_weights(weights_iterator=iter(load_file(path).items()))  # vLLM's worker has it
        if on_cpu:
            pack_head(model)

    def install_capture(self) -> None:
        """Record the experts of all positions that are fed from now on."""
        self.capture = Capture(self.model_runner)

    def pop_routes(self) -> dict[str, bytes]:
        """By request id, the experts recorded since the last call: int16 [S, L, K], in C order."""
        return {request: route_SLK.tobytes() for request, route_SLK in self.capture.pop().items()}

    def follow(self, pid: int) -> None:
        """End this worker and the engine's core when the process `pid`, the trainer, ends however it may.

        vLLM's processes wait for the next request on a socket; that nobody is left to send one goes unnoticed.
        """
        handle, parent = os.pidfd_open(pid), os.getppid()
        core = (
            parent if parent not in (1, pid) else None
        )  # several workers have a core above them; a single one is in it
        threading.Thread(target=_end_with, args=(handle, core), daemon=True).start()


def _end_with(handle: int, core: int | None) -> None:
    select.select([handle], [], [])  # readable once the process has ended
    if os.getppid() == core:
        os.kill(core, signal.SIGKILL)  # asked to end, it would wait for its workers
    os._exit(1)


def forget_packing(model: nn.Module) -> None:
    """Make the next load pack the experts' weights again.

    On the CPU vLLM packs them for its kernel after a load, but only if the layer has no kernel yet: at a second load
    unpacked weights would lie in packed storage, and the outputs would be wrong without any error.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(module).__name__ == "RoutedExperts" and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_head(model: nn.Module) -> None:
    """Pack the output layer's weights, after a load.

    Tied to the input embeddings it has no weights of its own that would be loaded, so a reload passes it by, and on the
    CPU it would go on with the packed copy that it made of the old ones. Without ties this repeats what was done.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


class Capture:
    """Experts of every position that a model runner feeds, by request.

    vLLM's own way (enable_return_routed_experts) needs its second model runner, which does not run on the CPU. Here the
    routers report their choice layer by layer, and the runner's books say whose tokens a step's rows are.

    A request that was preempted is fed again from its start on, and a long prompt may come in several pieces: pieces
    are laid over each other in the order in which they were fed, so the last pass over a position counts.
    """

    def __init__(self, runner):
        self.runner = runner
        self.step: dict[int, Tensor] = {}  # layer -> experts_NK of the step under way
        self.pieces: dict[str, list[tuple[int, np.ndarray]]] = {}  # request -> (first position, experts_NLK)
        layers = [m for m in runner.get_model().modules() if type(m).__name__ == "MoERunner"]
        if not layers:
            raise RuntimeError("rollout.routes=true: vLLM's model has no MoE layer whose experts could be recorded")
        for layer in layers:
            layer.router.set_capture_fn(partial(self._record, layer.layer_id))
        self.execute = runner.execute_model
        runner.execute_model = self._execute

    def _record(self, layer: int, experts_NK: Tensor) -> None:
        self.step[layer] = experts_NK.detach().to(torch.int16)  # a copy: the router's buffer is used again

    def _execute(self, scheduled, *args, **kwargs):
        self.step.clear()
        output = self.execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._file(scheduled)
        return output

    def _file(self, scheduled) -> None:
        """Hand the step's rows to the requests they belong to; they stand in the order of the runner's batch."""
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

    def pop(self) -> dict[str, np.ndarray]:
        """The experts of every request so far, [S, L, K]; UNKNOWN where a position was never fed."""
        routes = {}
        for request, pieces in self.pieces.items():
            length = max(start + len(piece) for start, piece in pieces)
            routes[request] = np.full((length, *pieces[0][1].shape[1:]), UNKNOWN, dtype=np.int16)
            for start, piece in pieces:
                routes[request][start : start + len(piece)] = piece
        self.pieces.clear()
        return routes
