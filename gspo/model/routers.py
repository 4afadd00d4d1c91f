"""The routers of transformers that can be recorded and replayed, and their gate formulas.

A router gives each token a logit per expert, selects K experts, and returns (logits, weights,
experts). How it selects does not matter in a replay, which brings the experts. So a replay needs
only the formula of the weights. It takes them from the *current* logits:

    all_softmax       w_e = p_e, p = softmax(logits)
    chosen_softmax    w_e = exp(logit_e) / sum over the K experts of exp(logit)
    sigmoid           w_e = s_e, s = sigmoid(logits)
    configured        w_e = s_e, s = the router's own score function of the logits

    w_e is then divided by the sum over the K experts if the router does so, and multiplied by
    the router's `routed_scaling_factor` if it has one.

Some families add a bias to the scores, and limit the choice to groups of experts (DeepSeek-V3,
arXiv:2412.19437, section 2.1.2). Both only change the selection. A replay therefore ignores them,
and the weights contain no bias. The bias `e_score_correction_bias` is a buffer: it is no parameter
and has no gradient. Training leaves it as it is in the model's folder.

These routers do not sort the K experts. So two choices are compared as sets.

Shape suffixes: N tokens, K experts per token, E experts.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gspo.data.batch import NOT_RECORDED
from gspo.model.sharding.dtensors import full_tensor

SELECTION_BIAS = "e_score_correction_bias"
# (router, logits [N, E]) -> scores [N, E]
Scores = Callable[[Any, Tensor], Tensor]


def softmax_scores(router: Any, logits_NE: Tensor) -> Tensor:
    """Return the softmax over all experts, in float32."""
    return logits_NE.softmax(-1, dtype=torch.float32)


def sigmoid_scores(router: Any, logits_NE: Tensor) -> Tensor:
    """Return the sigmoid of each logit, in float32."""
    return logits_NE.float().sigmoid()


def configured_scores(router: Any, logits_NE: Tensor) -> Tensor:
    """Return the scores by the function that the model's configuration names."""
    return router.score_fn(logits_NE)


@dataclass(frozen=True)
class GateFormula:
    """The formula by which a router weighs the experts of a token.

    scores         the score of every expert
    sum_epsilon    is added to the sum over the K experts before weights are divided by it
    only_chosen    weights are a softmax over the logits of the K experts, in the logits' precision
    """

    scores: Scores
    sum_epsilon: float = 0.0
    only_chosen: bool = False


ALL_SOFTMAX = GateFormula(softmax_scores)
CHOSEN_SOFTMAX = GateFormula(softmax_scores, only_chosen=True)
SIGMOID = GateFormula(sigmoid_scores)
SIGMOID_IN_GROUPS = GateFormula(sigmoid_scores, sum_epsilon=1e-20)
CONFIGURED = GateFormula(configured_scores, sum_epsilon=1e-20)

# The formula of each class of routers in transformers 5. All of them return (logits, weights,
# experts). Routers of other classes are neither recorded nor replayed.
FORMULAS = {
    "Qwen3MoeTopKRouter": ALL_SOFTMAX,
    "Qwen2MoeTopKRouter": ALL_SOFTMAX,
    "Qwen3NextTopKRouter": ALL_SOFTMAX,
    "Qwen3_5MoeTopKRouter": ALL_SOFTMAX,
    "OlmoeTopKRouter": ALL_SOFTMAX,
    "FlexOlmoTopKRouter": ALL_SOFTMAX,
    "MixtralTopKRouter": ALL_SOFTMAX,
    "MiniMaxTopKRouter": ALL_SOFTMAX,
    "GptOssTopKRouter": CHOSEN_SOFTMAX,
    "MiniMaxM2TopKRouter": SIGMOID,
    "DeepseekV3TopkRouter": SIGMOID_IN_GROUPS,
    "DeepseekV32TopkRouter": SIGMOID_IN_GROUPS,
    "Glm4MoeTopkRouter": SIGMOID_IN_GROUPS,
    "Glm4MoeLiteTopkRouter": SIGMOID_IN_GROUPS,
    "GlmMoeDsaTopkRouter": SIGMOID_IN_GROUPS,
    "KimiLinearTopkRouter": SIGMOID_IN_GROUPS,
    "Dots1TopkRouter": SIGMOID_IN_GROUPS,
    "NemotronHTopkRouter": SIGMOID_IN_GROUPS,
    "ExaoneMoeTopkRouter": SIGMOID_IN_GROUPS,
    "MiMoV2FlashTopkRouter": SIGMOID_IN_GROUPS,
    "SolarOpenTopkRouter": SIGMOID_IN_GROUPS,
    "DeepseekV4TopKRouter": CONFIGURED,
}
# They read a token's experts from a fixed table. Nothing can change, so there is nothing to
# record, to replay or to compare. But they have weights that are trained.
FIXED_ROUTERS = ("DeepseekV4HashRouter",)


def formula_of(router: object) -> GateFormula:
    """Return the gate formula of a router of a known class."""
    return FORMULAS[type(router).__name__]


def gate_weights(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Return the router's weights of the given experts [N, K], for its present logits."""
    formula = formula_of(router)
    if formula.only_chosen:
        return logits_NE.gather(-1, experts_NK).softmax(-1)
    weights_NK = formula.scores(router, logits_NE).gather(-1, experts_NK)
    # routers without this setting always normalise
    if getattr(router, "norm_topk_prob", True):
        sum_N1 = weights_NK.sum(-1, keepdim=True)
        weights_NK = weights_NK / (sum_N1 + formula.sum_epsilon)
    factor = getattr(router, "routed_scaling_factor", 1.0)
    return weights_NK if factor == 1 else weights_NK * factor


def replayed(
    router: Any, logits_NE: Tensor, weights_NK: Tensor, chosen_NK: Tensor, replay_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gate weights and the experts of a replay, [N, K] each.

    At NOT_RECORDED, as at padding, a token keeps the router's own choice."""
    replay_NK = replay_NK.to(chosen_NK.dtype)
    experts_NK = torch.where(replay_NK == NOT_RECORDED, chosen_NK, replay_NK)
    return gate_weights(router, logits_NE, experts_NK).to(weights_NK.dtype), experts_NK


def probabilities(router: Any, logits_NE: Tensor) -> Tensor:
    """Return the router's probabilities of all experts [N, E], which sum to 1.

    Scores that do not sum to 1 are divided by their sum, as in the balancing loss of DeepSeek-V3
    (arXiv:2412.19437, equation 19)."""
    scores_NE = formula_of(router).scores(router, logits_NE)
    if formula_of(router).scores is softmax_scores:
        return scores_NE
    return scores_NE / scores_NE.sum(-1, keepdim=True)


def check_gate_formula(router: nn.Module) -> None:
    """Raise ValueError if `gate_weights` does not give the router's own weights on random input.

    A router that selects with a bias gets a random bias, which must not change the weights. If the
    router's weights are sharded, all ranks must call this."""
    tensors = {name: full_tensor(tensor) for name, tensor in router.state_dict().items()}
    weight = tensors["weight"]
    generator = torch.Generator().manual_seed(0)
    arguments = [torch.randn(4, weight.shape[-1], generator=generator).to(weight)]
    bias_E = torch.randn(len(weight), generator=generator).to(weight)
    if SELECTION_BIAS in tensors:
        tensors[SELECTION_BIAS] = bias_E
    elif SELECTION_BIAS in inspect.signature(type(router).forward).parameters:
        arguments.append(bias_E)
    with torch.no_grad():
        logits_NE, weights_NK, experts_NK = functional_call(router, tensors, tuple(arguments))
        ours_NK = gate_weights(router, logits_NE, experts_NK).to(weights_NK.dtype)
    if not torch.allclose(ours_NK, weights_NK, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"the weights of {type(router).__name__} differ from its formula in "
            "gspo.model.routers: it cannot be replayed"
        )


def leave_out_of_autocast(router: nn.Module) -> None:
    """Make a router compute in its weights' precision, for any input and autocast.

    Rounded logits would send tokens to other experts."""
    router.forward = MethodType(_forward, router)


def _forward(router: Any, hidden: Tensor, *arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the forward of a router."""
    with torch.autocast(hidden.device.type, enabled=False):
        return type(router).forward(router, hidden.to(router.weight.dtype), *arguments)
