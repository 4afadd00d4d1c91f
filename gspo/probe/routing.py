"""Records the experts of a Hugging Face MoE, and compares the experts of two passes.

    probe = RoutingProbe(model)
    with probe.recording():
        model(**batch)
    old_experts_BSLK = probe.experts(batch["input_ids"])
    ...                                                   # updates of the model
    with probe.recording():
        model(**batch)
    experts_BSLK = probe.experts(batch["input_ids"])
    routing_statistics(experts_BSLK, old_experts_BSLK, response_mask_BS, probe.num_experts)

Shape suffixes: B rows, S positions, L MoE layers, K experts per token, E experts, N = B * S
positions or the selected response tokens.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gspo.train.accumulator import MetricAccumulator
from gspo.train.routing import consistency, count_choices, measure_consistency

# the end of the class names of the routers of transformers 5, in lower case
ROUTER_NAME = "topkrouter"


class RoutingProbe:
    """The forward hooks on the routers of a Hugging Face MoE.

    A router is a module whose class is called ...TopKRouter. Of its results the hooks record the
    tensor of integers. They change nothing. Raises ValueError if the model has no router.
    """

    def __init__(self, model: nn.Module):
        self.routers = routers_of(model)
        if not self.routers:
            raise ValueError(
                f"{type(model).__name__} has no module called ...TopKRouter: it is a dense model, "
                "or an MoE whose routers are not known here, so there is no routing to measure"
            )
        self.num_experts = 0  # set by the first recording
        self._is_recording = False
        # the choices of each router, in the order of the forward passes
        self._chosen_NK: list[list[Tensor]] = [[] for _ in self.routers]
        self._hooks = [
            router.register_forward_hook(partial(self._hook, layer))
            for layer, router in enumerate(self.routers)
        ]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the experts of every forward pass within this context.

        Close it before `backward()`: with gradient checkpointing the backward pass repeats the
        forward pass. What an earlier context recorded is forgotten.
        """
        self._chosen_NK = [[] for _ in self.routers]
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def experts(self, tokens_BS: Tensor) -> Tensor:
        """Return the experts of the last `recording`, int16 [B, S, L, K].

        `tokens_BS` is the model's input. Of a batch that passed in chunks of rows it is the whole
        batch. Raises ValueError if the recorded passes were over another number of positions.
        """
        rows, positions = tokens_BS.shape
        layers = []
        for passes in self._chosen_NK:
            recorded = sum(len(chosen_NK) for chosen_NK in passes)
            if recorded != rows * positions:
                raise ValueError(
                    f"{recorded} positions were recorded, and the batch has {rows} x {positions}: "
                    "record one forward pass over all its positions, and close `recording` before "
                    "`backward()`"
                )
            chosen_NK = torch.cat(passes)
            layers.append(chosen_NK.view(rows, positions, -1))
        return torch.stack(layers, dim=2)

    def _hook(self, layer: int, router: nn.Module, args: tuple, output: tuple) -> None:
        """Record a router's choice."""
        if not self._is_recording:
            return
        choices = [tensor for tensor in output if not tensor.is_floating_point()]
        if len(choices) != 1:
            raise ValueError(
                f"{type(router).__name__} returns {len(choices)} tensors of integers: the probe "
                "does not know which of them are the experts"
            )
        widths = [tensor.shape[-1] for tensor in output if tensor.is_floating_point()]
        self.num_experts = max(widths)
        chosen_NK = choices[0].detach().flatten(0, -2)
        self._chosen_NK[layer].append(chosen_NK.to(torch.int16))


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a Hugging Face MoE, in the order of its layers."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith(ROUTER_NAME)]


def routing_statistics(
    experts_BSLK: Tensor,
    old_experts_BSLK: Tensor | None,
    response_BS: Tensor,
    num_experts: int,
    old_response_BS: Tensor | None = None,
) -> dict[str, float]:
    """Return routing/consistency, _layer_*, changed_any_layer, load_entropy, load_max, ...

    response_BS      bool, True on the response tokens of the model's input
    old_response_BS  the same for the old pass, if its padding differs; its rows are the same
    """
    accumulator = MetricAccumulator()
    add_routing(
        experts_BSLK,
        old_experts_BSLK,
        response_BS,
        num_experts,
        accumulator,
        old_response_BS=old_response_BS,
    )
    metrics = accumulator.result()
    return {name: value for name, value in metrics.items() if "_minibatch_" not in name}


def add_routing(
    experts_BSLK: Tensor,
    old_experts_BSLK: Tensor | None,
    response_BS: Tensor,
    num_experts: int,
    accumulator: MetricAccumulator,
    *,
    update_number: int = 2,
    old_response_BS: Tensor | None = None,
) -> None:
    """Add the routing of a forward pass to the metrics of a step.

    `update_number` counts the updates of the step from 1. Consistency is not measured in the first,
    which begins with the old policy.
    """
    experts_NLK = predicting_experts(experts_BSLK, response_BS)
    accumulator.expert_loads(count_choices(experts_NLK, num_experts))
    if update_number == 1 or old_experts_BSLK is None:
        return
    if old_response_BS is None:
        old_response_BS = response_BS
    old_experts_NLK = predicting_experts(old_experts_BSLK, old_response_BS)
    old_experts_NLK = old_experts_NLK.to(experts_NLK.device)
    if old_experts_NLK.shape != experts_NLK.shape:
        raise ValueError(
            f"the old experts of the response tokens have the shape {list(old_experts_NLK.shape)} "
            f"and the new {list(experts_NLK.shape)} (tokens, layers, experts per token): the two "
            "passes must hold the same rows in the same order"
        )
    same_NL = consistency(experts_NLK, old_experts_NLK)
    measure_consistency(same_NL, update_number, accumulator)


def predicting_experts(experts_BSLK: Tensor, response_BS: Tensor) -> Tensor:
    """Select the experts that predict the response tokens: [N, L, K].

    The position before a token predicts it.
    """
    if experts_BSLK.ndim != 4 or experts_BSLK.shape[:2] != response_BS.shape:
        raise ValueError(
            f"the experts have the shape {list(experts_BSLK.shape)} and the mask of response "
            f"tokens {list(response_BS.shape)}: they must be [rows, positions, layers, experts] "
            "and [rows, positions]"
        )
    predicts_BS = response_BS[:, 1:].bool()
    return experts_BSLK[:, :-1][predicts_BS.to(experts_BSLK.device)]
