"""The policy losses of TRL and ms-swift in our terms; the two share the names of their options.

delta            clamps the unclipped ratio. If delta >= 1 + epsilon_high that is dual_clip = delta.
                 If it is smaller, then A > 0 is cut at delta, as with clip_high = delta - 1, and A
                 < 0 at 1 + epsilon_high, as with dual_clip = 1 + epsilon_high. Both together:
                 clip_high = min(epsilon_high, delta - 1), dual_clip = max(delta, 1 + epsilon_high)
cispo            clamps the ratio at epsilon_high itself, so clip_high = epsilon_high - 1, clip_low
                 = 1 (none below)
denominators     all B responses, those without tokens included; dr_grpo: B times
                 max_completion_length
luspo            TRL at the sequence level: LUSPO. At the token level it averages n_i l_it over B*T,
                 without the mask; no convention of ours, so our GRPO gets a mask of ones and
                 advantages times n_i
KL               TRL: k3 without bounds, not weighted; ms-swift: d within +-20, k3 within +-10, and
                 weighted by the rollout weights
rollout weights  "sequence" is the product of the token ratios in TRL, their geometric mean in
                 ms-swift
"""

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import MIS, TIS, Correction
from gspo.algorithm.kl import KLInLoss
from gspo.algorithm.objectives import (
    CISPO,
    DAPO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    DrGRPO,
    GSPOToken,
    Objective,
)
from peers.losses import clipped, per_token, sapo
from peers.off_policy import trl_opsm, trl_vespo
from peers.options import Options, Untranslated
from peers.recipe import UNBOUNDED, PolicyLoss, times_length
from peers.vectors import Entry

LEVELS = ("token", "sequence", "sequence_token")


def trl(options: Options, entry: Entry) -> PolicyLoss:
    if options.take("loss_type") == "vespo":
        return trl_vespo(options, entry)
    peer = shared(options, entry, default_loss="dapo")
    beta = options.take("beta", default=0.0)
    if beta:
        ratio = "none"
        if options.take("use_bias_correction_kl", default=False):
            ratio = (
                "token"
                if options.take("importance_sampling_level", default="token") == "token"
                else "sequence"
            )
        bound = UNBOUNDED  # TRL has no bound
        peer.kl = KLInLoss(
            coef=beta, log_ratio_bound=bound, times_ratio=ratio, aggregation=peer.aggregation
        )
        if peer.everywhere:
            raise Untranslated("KL in the loss with loss_type=luspo")
    mode = options.take("vllm_importance_sampling_mode")
    if mode is not None and "rollout_logp" in entry.inputs:
        peer.correction = trl_correction(mode, options)
    return trl_opsm(options, peer)


def ms_swift(options: Options, entry: Entry) -> PolicyLoss:
    peer = shared(options, entry, default_loss="grpo")
    beta = options.take("beta", default=0.0)
    if beta:
        peer.kl = KLInLoss(coef=beta, value_bound=10.0, weighted=True, aggregation=peer.aggregation)
    mode = options.take("rollout_importance_sampling_mode")
    if mode is not None and "rollout_logp" in entry.inputs:
        peer.correction = ms_swift_correction(mode, options)
    return peer


def shared(options: Options, entry: Entry, default_loss: str) -> PolicyLoss:
    loss_type = options.take("loss_type", default=default_loss)
    level = options.take("importance_sampling_level", "level", default="token")
    if level not in LEVELS:
        raise Untranslated(f"importance_sampling_level={level}")
    if loss_type == "luspo":
        return luspo(options, entry, level)
    mean, everyone = "seq-mean-token-mean", "all"
    aggregations = {
        "grpo": Aggregation(mean, rows=everyone),
        "sapo": Aggregation(mean, rows=everyone),
        "bnpo": Aggregation("token-mean"),
        "dapo": Aggregation("token-mean"),
        "cispo": Aggregation("token-mean"),
        "dr_grpo": Aggregation(
            "seq-mean-token-sum-norm",
            rows=everyone,
            length=int(options.take("max_completion_length", default=0)),
        ),
    }
    if loss_type not in aggregations:
        raise Untranslated(f"loss_type={loss_type}")
    objective = ratio_objective(options, entry, loss_type, level)
    row = "gspo_token" if level == "sequence_token" and per_token(entry) else objective.name
    if isinstance(objective, GSPOToken) and not per_token(entry):
        row = "gspo"
    return PolicyLoss(
        row, objective, aggregations[loss_type], counts_high=not cut_by_delta(options)
    )


def ratio_objective(options: Options, entry: Entry, loss_type: str, level: str) -> Objective:
    low, high = band(options)
    if loss_type == "cispo":
        if level != "token":
            raise Untranslated("CISPO with a sequence ratio")
        return CISPO(clip_low=1.0, clip_high=high - 1, log_ratio_bound=UNBOUNDED)
    if loss_type == "sapo" and level == "sequence_token" and per_token(entry):
        raise Untranslated(
            "SAPO with a sequence ratio, no gradient through the mean and advantages per token"
        )
    if loss_type == "sapo":
        return sapo(options, UNBOUNDED, "token" if level == "token" else "sequence")
    by_loss = {"dr_grpo": DrGRPO, "dapo": DAPO, "bnpo": DAPO}
    kind = {"sequence": GSPO, "sequence_token": GSPOToken}.get(level) or by_loss.get(
        loss_type, GRPO
    )
    delta = options.take("delta")
    if delta is None:
        return clipped(kind, low, high, None)
    return clipped(kind, low, min(high, delta - 1), max(delta, 1 + high))


def band(options: Options) -> tuple[float, float]:
    low = options.take("epsilon_low", "epsilon", default=0.2)
    return low, options.take("epsilon_high", default=low)


def cut_by_delta(options: Options) -> bool:
    """Return whether delta lies inside the band. It then hides the upper clip from the peers'
    counters, which look at the clamped ratio."""
    delta = options.take("delta")
    return delta is not None and delta <= 1 + band(options)[1]


def luspo(options: Options, entry: Entry, level: str) -> PolicyLoss:
    if entry.peer != "TRL" or level == "sequence_token":
        raise Untranslated(f"loss_type=luspo of {entry.peer} at level {level}")
    objective = ratio_objective(options, entry, "grpo", level)
    if level == "sequence":
        objective = clipped(LUSPO, objective.clip_low, objective.clip_high, objective.dual_clip)
        return PolicyLoss(
            "luspo",
            objective,
            Aggregation("seq-mean-token-mean", rows="all"),
            counts_high=not cut_by_delta(options),
        )
    return PolicyLoss(
        "luspo",
        objective,
        Aggregation("token-mean"),
        totals=everything,
        advantages=times_length,
        everywhere=True,
        counts_high=not cut_by_delta(options),
        notes=[
            "TRL averages n_i l_it over B*T, padding included: our loss was given a mask of ones and n_i A_i"
        ],
    )


def everything(mask_BT) -> Totals:
    return Totals.of(mask_BT | True)


def trl_gmpo(options: Options, entry: Entry) -> PolicyLoss:
    """Translate TRL's GMPO, in which a response without tokens has the ratio 1 and so adds the
    constant -A_i / B, without gradient."""
    low, high = (
        options.take("epsilon_low", "epsilon", default=0.4),
        options.take("epsilon_high", default=0.4),
    )
    peer = PolicyLoss(
        row="gmpo",
        objective=GMPO(clip_low=low, clip_high=high, log_ratio_bound=UNBOUNDED),
        aggregation=Aggregation("seq-mean-token-mean", rows="all"),
    )
    if not entry.mask_BT.any(-1).all():
        peer.empty_rows_cost = True
        peer.notes = [
            "TRL adds the constant -A_i/B for a response without tokens; so did we for the comparison"
        ]
    return peer


def trl_correction(mode: str, options: Options) -> Correction:
    """Translate TRL's weights, bounded to [clip_min, clip_max]; "sequence" is the product of the
    token ratios.
    """
    low, high = options.take("clip_min", default=0.0), options.take("clip_max")
    level, _, how = mode.partition("_")
    if level not in ("token", "sequence") or how not in ("truncate", "mask"):
        raise Untranslated(f"vllm_importance_sampling_mode={mode}")
    return (TIS if how == "truncate" else MIS)(level=level, low=low, high=high)


def ms_swift_correction(mode: str, options: Options) -> Correction:
    """Translate ms-swift's weights; "sequence" is the geometric mean, and sequence_mask keeps the
    token weights of the responses it keeps."""
    high = options.take("threshold", "rollout_importance_sampling_threshold")
    by_mode = {
        "token_truncate": TIS(level="token", high=high),
        "token_mask": MIS(level="token", high=high),
        "sequence_truncate": TIS(level="geometric", high=high),
        "sequence_mask": MIS(level="token", judged_by="geometric", high=high),
    }
    if mode not in by_mode:
        raise Untranslated(f"rollout_importance_sampling_mode={mode}")
    return by_mode[mode]


HUGGING_LOSSES = {
    ("TRL", "_compute_loss"): trl,
    ("TRL", "experimental.gspo_token._compute_loss"): trl,
    ("TRL", "gmpo._compute_loss"): trl_gmpo,
    ("TRL", "experimental.gmpo._compute_loss"): trl_gmpo,
    ("ms-swift", "_compute_loss_and_metrics"): ms_swift,
}
