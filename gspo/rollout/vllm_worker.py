"""What runs inside vLLM's workers: loading weights, recording the experts of every position.

vLLM mixes `WorkerExtension` into its worker class, in the process of the engine or below it; gspo.rollout.vllm_host
calls the methods by name. Each of them works around something that vLLM 0.32.0 lacks or does wrongly, as its comments
say; when the version changes, tests/unit/rollout/test_vllm.py shows which are still needed.

Shape suffixes: N tokens of one step, S positions of one sequence, L MoE layers, K experts per token.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gspo.rollout.route_checks import UNKNOWN


class WorkerExtension:
    """Methods that are called on every worker by vLLM's collective_rpc."""

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

    def pop_routes(self) -> dict[str, np.ndarray]:
        """By request id, the experts recorded since the last call: int16 [S, L, K]."""
        return self.capture.pop()


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
