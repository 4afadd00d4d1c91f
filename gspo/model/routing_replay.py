"""Records which experts each token is sent to, and sends tokens to recorded experts again (Routing
Replay).

Routing Replay sends every token to experts that were recorded before, so that numerator and
denominator of the ratio pi / pi_old go through the same network (GSPO paper, section 5.3). There
are two kinds (names of arXiv:2512.01374):

    R2   replays the experts that the trainer chose under the old policy, in the gradient steps
    R3   replays those that the engine chose while it sampled (arXiv:2510.11370), in the old
         log-probs and the gradient steps

Only the expert *indices* are replayed. The gate weights come from the *current* router:

    p = softmax(router logits)        w_e = p_e / sum_{e' in replayed} p_e'     (as the model itself
                                      normalises)

so the router keeps its gradient. Recording and replay use forward hooks on the routers of
transformers that are named below. Before a replay each router is tried once on random input, and
one with another gate formula is refused.

Shape suffixes: B rows, S positions, L MoE layers, K experts per token, E experts, N = B*S.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gspo.data.batch import NOT_RECORDED
from gspo.model.sharding.dtensors import full_tensor

# The routers that return (logits, weights, experts); those of other families are neither recorded
# nor replayed.
ROUTERS = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter")


class Routing:
    """Holds the hooks on a model's routers. For a dense model `layers` is 0 and nothing is
    recorded.
    """

    def __init__(self, model: nn.Module):
        self.routers = [m for m in model.modules() if type(m).__name__ in ROUTERS]
        self._own_LNK: list[Tensor | None] | None = None
        self._replay_BSLK: Tensor | None = None
        self._loads_LE: Tensor | None = None
        self._balances: list[Tensor] = []
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._hook, layer))

    @property
    def layers(self) -> int:
        """How many MoE layers the model has (L)."""
        return len(self.routers)

    @property
    def experts(self) -> int:
        """How many experts a layer has (E); 0 for a dense model."""
        return self.routers[0].num_experts if self.routers else 0

    @property
    def top_k(self) -> int:
        """How many experts a token goes to (K); 0 for a dense model."""
        return self.routers[0].top_k if self.routers else 0

    def parameters(self) -> list[nn.Parameter]:
        """Return the weights of all routers. Raises ValueError if there is none."""
        if not self.routers:
            raise ValueError(
                f"this model has no router that is known here; known are {', '.join(ROUTERS)}"
            )
        return [parameter for router in self.routers for parameter in router.parameters()]

    def check_replay(self) -> None:
        """Raise ValueError if there is no router to replay, or if a router's gate weights differ
        from our formula.
        """
        if not self.routers:
            raise ValueError(
                f"there is no router to replay; routing is known of {', '.join(ROUTERS)}"
            )
        for router in self.routers:
            _check_gate_formula(router)

    @contextmanager
    def recording(self, replay_BSLK: Tensor | None = None) -> Iterator[None]:
        """Within this context every forward records the routers' own choice. If `replay_BSLK` is
        given, tokens go to those experts instead."""
        self._own_LNK, self._replay_BSLK = [None] * self.layers, replay_BSLK
        try:
            yield
        finally:
            self._own_LNK = self._replay_BSLK = None

    @contextmanager
    def balancing(self, loads_LE: Tensor | None) -> Iterator[None]:
        """Within this context every forward computes E sum_e load_e p_e of each token and MoE
        layer, where p is the softmax of the router's logits and has a gradient. The loads lie on
        the model's device. Without them nothing is computed.

        The backward pass belongs into the context too: with checkpointing it repeats the forward.
        """
        self._loads_LE = loads_LE
        try:
            yield
        finally:
            self._loads_LE, self._balances = None, []

    def begin_forward(self) -> None:
        """Forget what an earlier forward computed within `balancing`."""
        self._balances = []

    def balance(self) -> Tensor | None:
        """Return what the forward computed within `balancing`, mean over the layers, [N]; None if
        nothing.
        """
        return torch.stack(self._balances).mean(0) if self._balances else None

    def recorded(self, rows: int) -> Tensor:
        """Return the routers' own choice in the last forward within `recording`, also during a
        replay, as [B, S, L, K]."""
        return torch.stack([own.view(rows, -1, own.shape[-1]) for own in self._own_LNK], dim=2).to(
            torch.int16
        )

    def _hook(self, layer: int, router: nn.Module, args: tuple, output: tuple) -> tuple | None:
        """Record a router's choice; during a replay, return weights and experts that replace its
        output.
        """
        logits_NE, weights_NK, own_NK = output
        if self._loads_LE is not None:
            p_NE = logits_NE.softmax(-1, dtype=torch.float32)
            self._balances.append(self.experts * (p_NE @ self._loads_LE[layer]))
        if self._own_LNK is None:
            return None
        self._own_LNK[layer] = own_NK.detach()
        if self._replay_BSLK is None:
            return None
        replay_NK = self._replay_BSLK[:, :, layer].reshape(own_NK.shape).to(own_NK.dtype)
        # padding keeps the router's own choice
        experts_NK = torch.where(replay_NK == NOT_RECORDED, own_NK, replay_NK)
        return (
            logits_NE,
            gate_weights(router, logits_NE, experts_NK).to(weights_NK.dtype),
            experts_NK,
        )


def gate_weights(router: nn.Module, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Return the softmax over all experts at the chosen ones [N, K], normalised over these if the
    model does so.
    """
    weights_NK = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, experts_NK)
    # Mixtral's router has no such setting and always normalises
    if getattr(router, "norm_topk_prob", True):
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return weights_NK


def _check_gate_formula(router: nn.Module) -> None:
    """Raise ValueError if our gate formula does not give the router's own weights on random input.
    All ranks must call this if its weights are spread over them."""
    parameters = {name: full_tensor(parameter) for name, parameter in router.named_parameters()}
    weight = parameters["weight"]
    probe = torch.randn(4, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        logits_NE, weights_NK, experts_NK = functional_call(router, parameters, (probe,))
        ours_NK = gate_weights(router, logits_NE, experts_NK).to(weights_NK.dtype)
    if not torch.allclose(ours_NK, weights_NK, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"{type(router).__name__} does not weigh experts by softmax over all of them: it cannot be replayed"
        )
