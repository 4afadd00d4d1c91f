"""Routing Replay: records the experts of each token, and sends tokens to recorded experts again.

With a replay, numerator and denominator of the ratio pi / pi_old go through the same network (GSPO
paper, section 5.3). There are two kinds (names of arXiv:2512.01374):

    R2   replays the experts that the trainer chose under the old policy, in the gradient steps
    R3   replays the experts that the engine chose while it sampled (arXiv:2510.11370), in the old
         log-probs and the gradient steps

Only the expert *indices* are replayed. The gate weights come from the *current* router, which
therefore keeps its gradient. For example, a Qwen3-MoE computes:

    p = softmax(router logits)
    w_e = p_e / sum_{e' in replayed} p_e'     (normalised only if the model itself does so)

Recording and replay use forward hooks on the routers of transformers that are named in
gspo.model.routers, with the formula of each. Before a replay each router is tried on random input.
A router with another gate formula is refused.

Shape suffixes: B rows, S positions, L MoE layers, K experts per token, E experts, N = B*S.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gspo.model.routers import (
    FIXED_ROUTERS,
    FORMULAS,
    check_gate_formula,
    leave_out_of_autocast,
    probabilities,
    replayed,
)


class Routing:
    """The hooks on a model's routers.

    For a dense model `layers` is 0, and nothing is recorded. Layers whose experts follow from the
    token alone (FIXED_ROUTERS) are no MoE layers here.

    layer_numbers   the number of each MoE layer among all layers of the model, from 0
    """

    def __init__(self, model: nn.Module):
        self.routers: list[nn.Module] = []
        self.fixed_routers: list[nn.Module] = []
        self.layer_numbers: list[int] = []
        # the classes of modules whose name ends like a router's, but that FORMULAS lacks
        self._unknown: set[str] = set()
        for name, module in model.named_modules():
            class_name = type(module).__name__
            if class_name in FORMULAS:
                self.routers.append(module)
                self.layer_numbers.append(layer_number(name))
            elif class_name in FIXED_ROUTERS:
                self.fixed_routers.append(module)
            elif class_name.endswith(("Router", "Gate")):
                self._unknown.add(class_name)
        # set within `recording`: the experts that each router chose, by its layer
        self._chosen_NK: dict[int, Tensor] | None = None
        self._replay_BSLK: Tensor | None = None
        # set within `balancing`
        self._loads_LE: Tensor | None = None
        self._balances_LN: list[Tensor] = []
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._hook, layer))

    @property
    def layers(self) -> int:
        """The number of MoE layers (L)."""
        return len(self.routers)

    @property
    def experts(self) -> int:
        """The number of experts of a layer (E); 0 for a dense model."""
        return self._size("num_experts")

    @property
    def top_k(self) -> int:
        """The number of experts that a token goes to (K); 0 for a dense model."""
        return self._size("top_k")

    def _size(self, name: str) -> int:
        """Return a size that all routers have under this name; 0 for a dense model."""
        return getattr(self.routers[0], name) if self.routers else 0

    def parameters(self) -> list[nn.Parameter]:
        """Return the weights of all routers. Raises ValueError if there is no router."""
        if not self.routers:
            raise ValueError(f"this model has no supported router; {self._known()}")
        routers = self.routers + self.fixed_routers
        return [parameter for router in routers for parameter in router.parameters()]

    def check_replay(self) -> None:
        """Raise ValueError if there is no router, or if a router has another gate formula."""
        if not self.routers:
            raise ValueError(f"there is no router to replay; {self._known()}")
        for router in self.routers:
            check_gate_formula(router)

    def _known(self) -> str:
        """Return in words which routers are known, and which of the model's are not."""
        supported = f"supported routers are {', '.join(FORMULAS)}"
        if not self._unknown:
            return supported
        return f"{supported}. This model has {', '.join(sorted(self._unknown))}"

    def leave_out_of_autocast(self) -> None:
        """Make all routers compute in their weights' precision, in any autocast."""
        for router in self.routers + self.fixed_routers:
            leave_out_of_autocast(router)

    @contextmanager
    def recording(self, replay_BSLK: Tensor | None = None) -> Generator[None]:
        """Record the routers' choice in every forward within this context.

        If `replay_BSLK` is given, tokens go to these experts instead. The routers' own choice is
        recorded all the same."""
        self._chosen_NK = {}
        self._replay_BSLK = replay_BSLK
        try:
            yield
        finally:
            self._chosen_NK = None
            self._replay_BSLK = None

    @contextmanager
    def balancing(self, loads_LE: Tensor | None) -> Generator[None]:
        """Compute E sum_e load_e p_e of each token and MoE layer in every forward in this context.

        p are the router's probabilities (gspo.model.routers), which have a gradient. The loads are
        on the model's device. If they are None, nothing is computed. The backward pass must run in
        the context too, because with checkpointing it repeats the forward.
        """
        self._loads_LE = loads_LE
        try:
            yield
        finally:
            self._loads_LE = None
            self._balances_LN = []

    def begin_forward(self) -> None:
        """Forget the balance of an earlier forward."""
        self._balances_LN = []

    def balance(self) -> Tensor | None:
        """Return the balance of the last forward, mean over the layers [N]. None: not computed."""
        return torch.stack(self._balances_LN).mean(0) if self._balances_LN else None

    def recorded(self, rows: int) -> Tensor:
        """Return the routers' own choice in the last forward within `recording` [B, S, L, K]."""
        if self._chosen_NK is None:
            raise RuntimeError("the routers' choice is recorded within `recording` only")
        layers = []
        for layer in range(self.layers):
            chosen_NK = self._chosen_NK[layer]
            layers.append(chosen_NK.view(rows, -1, chosen_NK.shape[-1]))
        return torch.stack(layers, dim=2).to(torch.int16)

    def _hook(
        self,
        layer: int,
        router: nn.Module,
        args: tuple,
        output: tuple,
    ) -> tuple | None:
        """Record a router's choice. In a replay, return an output that replaces the router's."""
        logits_NE, weights_NK, chosen_NK = output
        if self._loads_LE is not None:
            p_NE = probabilities(router, logits_NE)
            self._balances_LN.append(self.experts * (p_NE @ self._loads_LE[layer]))
        if self._chosen_NK is None:
            return None
        self._chosen_NK[layer] = chosen_NK.detach()
        if self._replay_BSLK is None:
            return None
        replay_NK = self._replay_BSLK[:, :, layer].reshape(chosen_NK.shape)
        new_weights_NK, experts_NK = replayed(router, logits_NE, weights_NK, chosen_NK, replay_NK)
        return logits_NE, new_weights_NK, experts_NK


def layer_number(module_name: str) -> int:
    """Return the number of the layer that a module belongs to.

    >>> layer_number("model.layers.3.mlp.gate")
    3
    """
    numbers = [part for part in module_name.split(".") if part.isdecimal()]
    return int(numbers[0]) if numbers else 0
