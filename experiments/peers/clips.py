"""Each peer's clip counters, computed from our loss outputs. No two of them count the same thing.

    verl, OpenRLHF, SkyRL, AReaL, ms-swift   share of tokens that the band clips (`active`, without
                                             dual clip)
    TRL                                      the same; with one ratio per response the share of
                                             responses
    slime                                    mean over all responses of the share of their tokens
    ROLL ppo_ratio_*                         `outside`: whatever the advantage's sign, and summed
                                             over padding too, but divided by the response tokens:
                                             may exceed 1
    ROLL clipfrac                            `active`, aggregated as the loss is
    CISPO                                    verl, slime: `outside`; TRL, ms-swift: outside and A >
                                             0
    GMPO                                     verl: `outside` by the advantage's sign; TRL: `active`

These metrics are not compared, because they count no clips: ppo_kl, kl, ratio_*, approxkl,
policykl, pg_loss, kl_loss, rollout_is_*.

Shape suffixes: B responses, T response tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithm.objectives import CISPO, GMPO, SAPO, GSPOToken
from gspo.data.masked import masked_mean
from peers.recipe import Evaluation, PolicyLoss, by_sequence
from peers.vectors import Entry


class Counts:
    """The clip masks of an evaluation, and ways to average them."""

    def __init__(self, peer: PolicyLoss, evaluation: Evaluation):
        self.peer, self.mask_BT = peer, evaluation.mask_BT
        self.evaluation, outputs = evaluation, evaluation.outputs
        none_BT = torch.zeros_like(self.mask_BT)
        dual_BT = none_BT if outputs.dual_BT is None else outputs.dual_BT
        adv_BT = evaluation.inputs.advantage_BT
        self.gain_BT, self.cost_BT = adv_BT > 0, adv_BT < 0
        self.band_BT = outputs.is_clipped_BT & ~dual_BT  # the tokens that the band alone removes
        self.dual_BT, self.outside_BT = dual_BT, outputs.outside_BT
        self.low_BT, self.high_BT = self.band_BT & self.cost_BT, self.band_BT & self.gain_BT
        if not peer.counts_high:
            self.high_BT = none_BT

    def tokens(self, counted_BT: Tensor) -> float:
        """Return the share of the response tokens that are counted, in 0..1."""
        return int((counted_BT & self.mask_BT).sum()) / max(int(self.mask_BT.sum()), 1)

    def rows(self, counted_BT: Tensor) -> Tensor:
        """Return, for each response, the share of its tokens that are counted. Its shape is [B]."""
        return masked_mean(counted_BT.double(), self.mask_BT)


def verl(counts: Counts) -> dict[str, float]:
    upper_BT, lower_BT = counts.band_BT, counts.dual_BT
    if isinstance(counts.peer.objective, CISPO):
        upper_BT = counts.outside_BT
    elif isinstance(counts.peer.objective, GMPO):
        upper_BT, lower_BT = counts.outside_BT & counts.gain_BT, counts.outside_BT & counts.cost_BT
    return {
        "actor/pg_clipfrac": counts.tokens(upper_BT),
        "actor/pg_clipfrac_lower": counts.tokens(lower_BT),
    }


def trl(counts: Counts) -> dict[str, float]:
    """Return TRL's counters. Where the loss of a row is one number (a sequence ratio, or T = 1)
    each row counts once, also an empty one."""
    objective = counts.peer.objective
    if isinstance(objective, SAPO):
        return {}
    if isinstance(objective, CISPO):
        return {"cispo_clip_ratio": clipped_share(counts, counts.outside_BT & counts.gain_BT)}
    by_row = single_column(counts) or (
        by_sequence(objective) and not isinstance(objective, GSPOToken)
    )
    low_BT, high_BT = counts.low_BT, counts.high_BT
    low_B, high_B = counts.rows(low_BT), counts.rows(high_BT)
    low, high = counts.tokens(low_BT), counts.tokens(high_BT)
    if by_row:
        low, high = float(low_B.mean()), float(high_B.mean())
    seen_B = counts.mask_BT.any(-1) | by_row  # an empty row, 0/0, is left out
    if not seen_B.any():
        return {}
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "clip_ratio/low_min": float(low_B[seen_B].min()),
        "clip_ratio/high_max": float(high_B[seen_B].max()),
    }


def ms_swift(counts: Counts) -> dict[str, float]:
    """Return ms-swift's counters. Its minimum and maximum are over processes, of which there is
    one.
    """
    objective = counts.peer.objective
    if isinstance(objective, SAPO):
        return {}
    if isinstance(objective, CISPO):
        return {"cispo_clip_ratio": clipped_share(counts, counts.outside_BT & counts.gain_BT)}
    low, high = clipped_share(counts, counts.low_BT), clipped_share(counts, counts.high_BT)
    return {
        "low_clip_mean": low,
        "low_clip_min": low,
        "high_clip_mean": high,
        "high_clip_max": high,
        "region_clip_mean": low + high,
    }


def clipped_share(counts: Counts, counted_BT: Tensor) -> float:
    """Return the share of the tokens that are counted. With one column: the mean over all rows."""
    return (
        float(counts.rows(counted_BT).mean())
        if single_column(counts)
        else counts.tokens(counted_BT)
    )


def single_column(counts: Counts) -> bool:
    return counts.mask_BT.shape[1] == 1


def slime(counts: Counts) -> dict[str, float]:
    cispo = isinstance(counts.peer.objective, CISPO)
    return {
        "pg_clipfrac": float(counts.rows(counts.outside_BT if cispo else counts.band_BT).mean())
    }


def openrlhf(counts: Counts) -> dict[str, float]:
    return {"clip_ratio": counts.tokens(counts.band_BT)}


def areal(counts: Counts) -> dict[str, float]:
    return {"clip_mask_mean": counts.tokens(counts.band_BT)}


def roll(counts: Counts) -> dict[str, float]:
    peer, evaluation = counts.peer, counts.evaluation
    inputs = replace(evaluation.inputs, mask_BT=torch.ones_like(counts.mask_BT))
    outside_BT, ratio_BT = counts.outside_BT, None
    if by_sequence(peer.objective):  # ROLL broadcasts it over the row, padding included
        ratio_BT = peer.objective.sequence_ratio(evaluation.inputs)[0].expand_as(counts.mask_BT)
    else:
        outside_BT, ratio_BT = (
            peer.objective(inputs).outside_BT,
            peer.objective.token_ratio(inputs)[0],
        )
    tokens = max(evaluation.totals.tokens, 1)
    high, low = (
        float((outside_BT & (ratio_BT > 1)).sum()) / tokens,
        float((outside_BT & (ratio_BT < 1)).sum()) / tokens,
    )
    clipped = peer.aggregation(
        counts.band_BT.double(), evaluation.inputs.mask_BT, evaluation.totals
    )
    return {
        "actor/ppo_ratio_high_clipfrac@sum": high,
        "actor/ppo_ratio_low_clipfrac@sum": low,
        "actor/ppo_ratio_clipfrac@sum": high + low,
        "actor/clipfrac@sum": float(clipped),
    }


def feynrl(counts: Counts) -> dict[str, float]:
    """Return FeynRL's counter: the tokens whose ratio left [0.8, 1.2], which clips nothing."""
    inputs = counts.evaluation.inputs
    ratio_BT, _ = counts.peer.objective.token_ratio(inputs)
    return {"clipfrac": counts.tokens((ratio_BT > 1.2) | (ratio_BT < 0.8))}


COUNTERS = {
    "verl": verl,
    "CTPO": verl,
    "FeynRL": feynrl,
    "TRL": trl,
    "ms-swift": ms_swift,
    "slime": slime,
    "OpenRLHF": openrlhf,
    "SkyRL": openrlhf,
    "AReaL": areal,
    "ROLL": roll,
}


def counters(peer: PolicyLoss, evaluation: Evaluation, entry: Entry) -> dict[str, float]:
    """Return those of the entry's metrics that are clip counters, as the peer defines them,
    computed from our outputs."""
    if entry.peer not in COUNTERS or not entry.metrics:
        return {}
    ours = COUNTERS[entry.peer](Counts(peer, evaluation))
    return {name: ours[name] for name in entry.metrics if name in ours}
