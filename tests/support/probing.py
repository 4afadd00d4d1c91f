"""A batch of ours through the forward pass of transformers, with the probe."""

import torch

from gspo.data.batch import TrainBatch
from gspo.probe import RoutingProbe


def response_mask(batch: TrainBatch) -> torch.Tensor:
    """The response tokens among all positions."""
    no_response_BS = torch.zeros(len(batch), batch.prompt_width, dtype=torch.bool)
    return torch.cat([no_response_BS, batch.mask_BT], dim=1)


def forward(model, batch: TrainBatch, rows: slice = slice(None)):
    """The result of transformers' own forward pass."""
    return model(input_ids=batch.tokens_BS[rows], attention_mask=batch.attention_BS[rows])


def record(probe: RoutingProbe, model, batch: TrainBatch) -> torch.Tensor:
    """The experts of a forward pass, as the probe records them."""
    with probe.recording(), torch.no_grad():
        forward(model, batch)
    return probe.experts(batch.tokens_BS)


def log_probs(model, batch) -> torch.Tensor:
    """The log-probs of the response tokens, by transformers' own forward pass."""
    with torch.no_grad():
        logits = forward(model, batch).logits
    logits_BTV = logits[:, batch.prompt_width - 1 : -1].log_softmax(-1)
    tokens_BT1 = batch.tokens_BS[:, batch.prompt_width :].unsqueeze(-1)
    return logits_BTV.gather(-1, tokens_BT1).squeeze(-1)
