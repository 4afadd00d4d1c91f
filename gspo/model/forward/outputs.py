"""The results of a forward pass: log-probs and entropy, from hidden states or from logits.

Shape suffixes: B responses, T response tokens, S all tokens, V vocabulary, L MoE layers, K experts
per token, N tokens laid out, M response tokens, W hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.model.forward.kernels import SPLITS, TokenLogProbs, sums_of_squares
from gspo.model.forward.network import Network, autocast_to
from gspo.model.forward.packing import Sequences


@dataclass
class PolicyOutput:
    """The results of a forward pass over a batch."""

    # float32, log pi(y_t | x, y_<t) at the sampling temperature. If the batch has kept tokens
    # (gspo.data.kept_tokens), it is the log-softmax over these
    logp_BT: Tensor
    # float32, -sum_v pi log pi of the same softmax; None if it was not requested. It has a gradient
    # only after `Policy.enable_entropy_gradient`
    entropy_BT: Tensor | None
    # int16, the experts that the routers chose at every position; None for a dense model
    experts_BSLK: Tensor | None
    # float32, the critic's V(x, y_<t); None without a critic
    values_BT: Tensor | None = None
    # float32, E sum_e load_e p_e, mean over MoE layers; None outside Routing.balancing
    balance_BT: Tensor | None = None
    # float32, sum_v pi_v^2 at the sampling temperature, without gradient; None if not requested
    sum_pi_squared_BT: Tensor | None = None

    def to_cpu(self) -> PolicyOutput:
        """Return log-probs, experts, values and sum_v pi_v^2 on the CPU.

        The copies from a GPU are complete once it is synchronized. PyTorch makes them in pinned
        memory."""
        output = PolicyOutput(_copy_to_cpu(self.logp_BT), None, None)
        if self.experts_BSLK is not None:
            output.experts_BSLK = _copy_to_cpu(self.experts_BSLK)
        if self.values_BT is not None:
            output.values_BT = _copy_to_cpu(self.values_BT)
        if self.sum_pi_squared_BT is not None:
            output.sum_pi_squared_BT = _copy_to_cpu(self.sum_pi_squared_BT)
        return output


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to the CPU."""
    return tensor.to(torch.device("cpu"), non_blocking=True)


def network_outputs(
    network: Network,
    sequences: Sequences,
    replay_NLK: Tensor | None,
    precision: torch.dtype,
    temperature: float,
    entropy: bool,
    sum_pi_squared: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Compute log-probs and entropy with our own forward, for response tokens only.

    Returns log-probs and entropy of the response tokens [M], the routers' choice of experts for all
    tokens [N, L, K], the hidden states that predict the response tokens [M, W], and sum_v pi_v^2
    [M] if it is requested."""
    device = sequences.tokens_N.device
    with autocast_to(device, precision):
        hidden_NW, experts_NLK = network(
            sequences.tokens_N,
            sequences.positions_N,
            sequences.longest,
            sequences.attend,
            replay_NLK,
        )
    hidden_MW = hidden_NW.index_select(0, sequences.predicting_M)
    has_float32_head = network.head_dtype == torch.float32
    head_input_MW = hidden_MW.to(torch.float32 if has_float32_head else precision)
    # If the layers are in float32 too, the user has chosen to pay for a float32 product.
    split = has_float32_head and precision != torch.float32 and SPLITS.get(device.type, False)
    logp_M, entropy_M = TokenLogProbs.apply(
        head_input_MW,
        network.head,
        sequences.target_M,
        temperature,
        entropy,
        split,
        sequences.kept,
    )
    squares_M = None
    if sum_pi_squared:
        squares_M = sums_of_squares(head_input_MW, network.head, temperature, split, sequences.kept)
    return logp_M, entropy_M, experts_NLK, hidden_MW, squares_M


def log_probs_of_logits(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the log-probs of tokens under logits, which have been divided by the temperature."""
    target_BT = logits_BTV.gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1)
    return target_BT - logits_BTV.logsumexp(-1)


def entropy_of_logits(logits_BTV: Tensor, gradient: bool) -> Tensor:
    """Return the entropy of the softmax of logits, with or without gradient."""
    if not gradient:
        return torch.special.entr(logits_BTV.detach().softmax(-1)).sum(-1)
    # entr has an infinite slope if a probability is too small for float32
    p_BTV = logits_BTV.softmax(-1)
    mean_logit_BT = (p_BTV * logits_BTV.masked_fill(p_BTV == 0, 0.0)).sum(-1)
    return logits_BTV.logsumexp(-1) - mean_logit_BT
