"""The policy losses and masks of 2026 in our terms: VESPO, OPSM, M2PO, KPop, open-instruct's rho,
prime-rl, DRO, CTPO, P3O.

Facts that the translations rest on, all of them in the peers' code:

    VESPO            the engine's weights are a factor of W, also where TRL multiplies other losses
    OPSM             TRL's rule takes the engine's log-probs if the case is [rollout], else old ones;
                     slime's counter adds T / n_i for each dropped row
    M2PO             AReaL's loss divides by the tokens that remain
    KPop             AReaL's weights are float32
    prime-rl         no old policy: ours is given the engine's log-probs, which it does not read
    CTPO             a fork of verl: its token counts hold 1e-8
    P3O              the loss is a sum over tokens, in float32; the ESS of a response holds 1e-8

Shape suffixes: B responses, T response tokens.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.corrections import Correction
from gspo.algorithm.masks import M2PO, OPSM, KPop, RhoMask, binary_kl
from gspo.algorithm.objectives import (
    CTPO,
    CTPOLA,
    DAPO,
    DRO,
    P3O,
    PPO,
    VESPO,
    LossInputs,
    PrimeIPO,
    PrimeRL,
)
from gspo.data.masked import masked_mean, masked_sum
from peers.losses import verl_aggregation, verl_epsilon
from peers.options import Options, Untranslated
from peers.recipe import UNBOUNDED, Evaluation, PolicyLoss
from peers.result import Ours, Values
from peers.vectors import Entry

TOKEN_MEAN = Aggregation("token-mean")
P3O_EPSILON = 1e-8  # FeynRL adds it to a response's sum of squared ratios
NO_BOUND = 1e-30  # below every weight of RhoMask, whose exponent is bounded


def named_weights(options: Options, entry: Entry, option: str, name: str) -> str:
    """Return the input that holds the engine's weights, if the option is on."""
    if not options.take(option, default=False):
        return ""
    if name not in entry.inputs:
        raise Untranslated(f"{option} without {name} among the inputs")
    return name


# -- VESPO


def vespo_objective(options: Options, prefix: str) -> VESPO:
    return VESPO(
        k_positive=options.take(f"{prefix}k_pos", default=2.0),
        lambda_positive=options.take(f"{prefix}lambda_pos", default=3.0),
        k_negative=options.take(f"{prefix}k_neg", default=3.0),
        lambda_negative=options.take(f"{prefix}lambda_neg", default=2.0),
    )


def trl_vespo(options: Options, entry: Entry) -> PolicyLoss:
    level = options.take("importance_sampling_level", default="token")
    if level != "token":
        raise Untranslated(f"vespo with importance_sampling_level={level}")
    options.ignore_labels()
    return PolicyLoss(
        row="vespo",
        objective=vespo_objective(options, "vespo_"),
        aggregation=TOKEN_MEAN,
        weights=named_weights(options, entry, "importance_sampling_ratio", "tis_weights"),
        bound="same",
        outputs=vespo_gate,
    )


def vespo(options: Options, entry: Entry) -> PolicyLoss:
    mode = options.take("loss_agg_mode", default="token-mean")
    options.ignore_labels()
    return PolicyLoss(
        row="vespo",
        objective=vespo_objective(options, ""),
        aggregation=verl_aggregation(mode, options),
        weights=named_weights(options, entry, "rollout_is_weights", "tis_weights"),
        bound="same",
        epsilon=verl_epsilon(mode),
    )


def vespo_gate(evaluation: Evaluation, entry: Entry) -> dict[str, Values]:
    return {"phi": Values(evaluation.outputs.weight_BT[:, 0], entry.mask_BT.any(-1))}


# -- OPSM


def trl_opsm(options: Options, peer: PolicyLoss) -> PolicyLoss:
    """Add TRL's off-policy mask to its loss."""
    delta = options.take("off_policy_mask_threshold")
    if delta is None:
        return peer
    peer.correction = OPSM(delta=delta, against=behaviour(options))
    peer.outputs = kept_rows
    return peer


def behaviour(options: Options) -> str:
    """Return the policy that OPSM compares with, in our words."""
    is_old = options.take("old", default=False)
    options.ignore("rollout")
    return "old" if is_old else "engine"


def kept_rows(evaluation: Evaluation, entry: Entry) -> dict[str, Values]:
    weights_BT = torch.where(entry.mask_BT, required(evaluation.correction_BT), 1.0)
    return {"keep": Values(weights_BT.amin(-1))}


def slime_opsm(options: Options, entry: Entry) -> Ours:
    opsm = OPSM(delta=options.take("opsm_delta", default=1e-4), against=behaviour(options))
    kept_BT = opsm.loss_weights(inputs_of(entry))
    # a response without tokens is kept
    dropped_B = entry.mask_BT.any(-1) & ~kept_BT.any(-1)
    share_B = entry.mask_BT.shape[1] / entry.mask_BT.sum(-1).clamp(min=1)
    ours = Ours("Corrections", "opsm", f"OPSM(delta={opsm.delta:g}, against={opsm.against})")
    ours.outputs["keep_tokens"] = Values(kept_BT, entry.mask_BT)
    ours.outputs["opsm_clipfrac"] = Values(torch.where(dropped_B, share_B.double(), 0.0).sum())
    return ours


def inputs_of(entry: Entry) -> LossInputs:
    given = entry.inputs
    adv = given["advantages"]
    adv_BT = (adv if adv.ndim == 2 else adv.unsqueeze(-1)).expand_as(given["logp"])
    return LossInputs(
        logp_BT=given["logp"],
        old_logp_BT=given["old_logp"],
        adv_BT=adv_BT,
        mask_BT=entry.mask_BT,
        engine_logp_BT=given.get("rollout_logp"),
    )


def required(x_BT: Tensor | None) -> Tensor:
    if x_BT is None:
        raise Untranslated("the translation has no correction")
    return x_BT


# -- M2PO and KPop, both with AReaL's PPO loss


def areal_loss(options: Options, row: str, correction: Correction) -> PolicyLoss:
    clip = options.take("eps_clip", default=0.2)
    return PolicyLoss(
        row=row,
        objective=PPO(clip_low=clip, clip_high=clip, log_ratio_bound=UNBOUNDED),
        aggregation=TOKEN_MEAN,
        correction=correction,
    )


def m2po(options: Options, entry: Entry) -> PolicyLoss:
    options.ignore_labels()
    peer = areal_loss(options, "ppo, m2po", M2PO(threshold=options.take("m2_threshold")))
    peer.outputs = remaining_mask
    return peer


def remaining_mask(evaluation: Evaluation, entry: Entry) -> dict[str, Values]:
    return {"mask": Values(evaluation.inputs.mask_BT.double())}


def kpop(options: Options, entry: Entry) -> PolicyLoss:
    options.ignore_labels()
    expected = {"level": "token", "action": "mask", "metric": "binary_kl"}
    for name, value in expected.items():
        if options.take(name, default=value) != value:
            raise Untranslated(f"rejection sampling with {name}={options.take(name)}")
    peer = areal_loss(options, "ppo, kpop", KPop(high=options.take("upper")))
    peer.outputs = kept_tokens
    return peer


def kept_tokens(evaluation: Evaluation, entry: Entry) -> dict[str, Values]:
    # a weight is never exactly 0 unless its token is left out: its exponent is bounded
    return {"mask": Values((required(evaluation.correction_BT) != 0).double())}


def binary_kl_both_ways(options: Options, entry: Entry) -> Ours:
    if options.take("eps", default=1e-8) != 1e-8:
        raise Untranslated("another clamp of the probabilities")
    old_BT = entry.inputs["old_logp"]
    engine_BT = entry.inputs["rollout_logp"]
    ours = Ours("Corrections", "kpop, binary KL", "binary_kl")
    forward_BT = binary_kl(old_BT, engine_BT, entry.mask_BT)
    reverse_BT = binary_kl(engine_BT, old_BT, entry.mask_BT)
    ours.outputs["forward"] = Values(forward_BT, entry.mask_BT)
    ours.outputs["reverse"] = Values(reverse_BT, entry.mask_BT)
    return ours


# -- open-instruct


def rho(options: Options, entry: Entry) -> PolicyLoss:
    options.ignore_labels()
    if options.take("loss_fn", default="dapo") != "dapo":
        raise Untranslated(f"loss_fn={options.take('loss_fn')}")
    by_tv = options.take("rho_mask_tv_divergence", default=False)
    by_sequence = options.take("rho_mask_sequence_level", default=False)
    mask_low = options.take("rho_mask_lower_bound") or None
    mask_high = options.take("rho_mask_upper_bound") or None
    low = options.take("rho_clamp_lower_bound") or 0.0
    high = options.take("rho_clamp_upper_bound") or None
    level = "geometric" if by_sequence else "token"
    # ours must mask something, so a bound that no weight can cross stands for none
    correction = RhoMask(
        measure="tv" if by_tv else "ratio",
        level=level,
        mask_low=mask_low if mask_low or mask_high else NO_BOUND,
        mask_high=mask_high,
        low=low,
        high=high,
    )
    masked_by = "tv" if by_tv else f"{level} ratio"
    row = f"dapo, rho, {masked_by}" if mask_low or mask_high else "dapo, rho"
    clip_low = options.take("clip_lower", default=0.2)
    clip_high = options.take("clip_higher", default=0.2)
    return PolicyLoss(
        row=row,
        objective=DAPO(clip_low=clip_low, clip_high=clip_high, log_ratio_bound=UNBOUNDED),
        aggregation=TOKEN_MEAN,
        correction=correction,
        outputs=rho_outputs(correction, level, mask_low, high),
    )


def rho_outputs(
    correction: RhoMask, level: str, mask_low: float | None, high: float | None
) -> Callable[[Evaluation, Entry], dict[str, Values]]:
    """Return the function that computes the peer's masks from our weights."""

    def outputs(evaluation: Evaluation, entry: Entry) -> dict[str, Values]:
        weights_BT = required(evaluation.correction_BT)
        mask_BT = entry.mask_BT
        free_BT = free_weights(evaluation.inputs, level)
        dropped_BT = mask_BT & (weights_BT == 0)
        low_BT = torch.zeros_like(dropped_BT)
        if mask_low is not None:
            only_low = replace(correction, mask_high=None)
            low_BT = mask_BT & (only_low.loss_weights(evaluation.inputs) == 0)
        clamped_BT = torch.zeros_like(dropped_BT)
        if high is not None:
            clamped_BT = (free_BT > high) | (free_BT < correction.low)
        return {
            "weights": Values(weights_BT, mask_BT),
            "dropped": Values(dropped_BT.double(), mask_BT),
            "dropped_low": Values(low_BT.double(), mask_BT),
            "clamped": Values(clamped_BT.double(), mask_BT),
        }

    return outputs


def free_weights(inputs: LossInputs, level: str) -> Tensor:
    """Return the weights of a level before their bounds and masks."""
    free = RhoMask(level=level, mask_low=NO_BOUND, high=None)
    return free.loss_weights(inputs)


# -- prime-rl


def prime_rl(options: Options, entry: Entry) -> PolicyLoss:
    options.ignore_labels()
    shared = {
        "adv_scale": options.take("adv_tau", default=1.0),
        "kl_coef": options.take("kl_tau", default=1e-3),
        "log_ratio_bound": UNBOUNDED,
    }
    low = options.take("dppo_mask_low", default=0.2)
    high = options.take("dppo_mask_high", default=0.2)
    delta = options.take("ipo_threshold")
    if entry.function == "ipo_loss_fn":
        objective = PrimeIPO(delta=delta, **shared)
    else:
        objective = PrimeRL(delta_low=low, delta_high=high, **shared)
    return PolicyLoss(
        row=objective.name,
        objective=objective,
        aggregation=TOKEN_MEAN,
        weights=named_weights(options, entry, "loss_weights", "loss_weights"),
        outputs=prime_rl_metrics,
    )


def prime_rl_metrics(evaluation: Evaluation, entry: Entry) -> dict[str, Values]:
    """Return prime-rl's metrics, which are means over the tokens of each row."""
    inputs = evaluation.inputs
    mask_BT = entry.mask_BT
    log_BT = torch.where(mask_BT, inputs.logp_BT.detach() - inputs.engine_logp_BT, 0.0)
    mismatch_BT = log_BT.exp() - log_BT - 1
    positive_BT = inputs.advantage_BT > 0
    negative_BT = inputs.advantage_BT < 0
    # tokens with the advantage 0 count as masked too
    high_BT, low_BT, masked_BT = prime_rl_masks(evaluation)
    masked_BT = masked_BT & mask_BT
    values = {
        "masked_mismatch_kl": masked_mean(mismatch_BT, masked_BT),
        "unmasked_mismatch_kl": masked_mean(mismatch_BT, mask_BT & ~masked_BT),
        "is_masked": masked_mean(masked_BT.double(), mask_BT),
        "is_masked_low": masked_mean((negative_BT & low_BT).double(), mask_BT),
        "is_masked_high": masked_mean((positive_BT & high_BT).double(), mask_BT),
        "masked_advantage_positive": masked_mean(positive_BT.double(), masked_BT),
        "masked_advantage_negative": masked_mean(negative_BT.double(), masked_BT),
    }
    return {name: Values(value) for name, value in values.items() if name in entry.outputs}


def prime_rl_masks(evaluation: Evaluation) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the probability is too high, too low, and where the loss is masked."""
    objective = evaluation.objective
    change_BT = objective.probability_change(evaluation.inputs)
    if isinstance(objective, PrimeIPO):
        high_BT = change_BT > objective.delta
        low_BT = change_BT < -objective.delta
        return high_BT, low_BT, high_BT | low_BT
    high_BT = change_BT > objective.delta_high
    low_BT = change_BT < -objective.delta_low
    return high_BT, low_BT, torch.where(evaluation.inputs.advantage_BT > 0, high_BT, low_BT)


# -- DRO, CTPO, P3O


def dro(options: Options, entry: Entry) -> PolicyLoss:
    options.ignore_labels()
    mode = options.take("loss_agg_mode", default="token-mean")
    return PolicyLoss(
        row="dro",
        objective=DRO(beta=options.take("dro_beta")),
        aggregation=verl_aggregation(mode, options),
        weights=named_weights(options, entry, "rollout_is_weights", "rollout_is_weights"),
        bound="same",
        epsilon=verl_epsilon(mode),
    )


def ctpo(options: Options, entry: Entry) -> PolicyLoss:
    options.ignore_labels()
    mode = options.take("loss_agg_mode", default="token-mean")
    prefix = {"cumprod": "product", "geomean": "geometric"}[options.take("ratio_mode")]
    clip, dual = options.take("clip_ratio"), options.take("clip_ratio_c")
    low, high = options.take("la_clip_low"), options.take("la_clip_high")
    adaptive_dual, power = options.take("la_clip_c"), options.take("clip_ratio_la_power")
    if power is None:
        objective = CTPO(clip_low=clip, clip_high=clip, dual_clip=dual, prefix=prefix)
    else:
        objective = CTPOLA(
            clip_low=low, clip_high=high, dual_clip=adaptive_dual, power=power, prefix=prefix
        )
    return PolicyLoss(
        row=objective.name,
        objective=objective,
        aggregation=verl_aggregation(mode, options),
        bound="same",
        epsilon=verl_epsilon(mode),
    )


def p3o(options: Options, entry: Entry) -> PolicyLoss:
    for name in ("ent_coeff", "kl_coeff"):
        if options.take(name, default=0.0):
            raise Untranslated(f"{name}={options.take(name)}")
    # they are for a counter only
    options.ignore("clip_low", "clip_high")
    return PolicyLoss(
        row="p3o",
        objective=P3O(log_ratio_bound=UNBOUNDED),
        aggregation=Aggregation("seq-mean-token-sum", rows="one"),
    )


def p3o_ess_of_rows(options: Options, entry: Entry) -> Ours:
    """Return the ESS of each response as FeynRL computes it.

    FeynRL has (sum w)^2 / (n (sum w^2 + 1e-8)), ours has no 1e-8. So ours is multiplied by
    sum w^2 / (sum w^2 + 1e-8), which is 0 for a response without tokens."""
    inputs = inputs_of(entry)
    objective = P3O(log_ratio_bound=UNBOUNDED)
    shares = []
    for row in range(len(entry.mask_BT)):
        of_row = replace(
            inputs,
            **{
                name: getattr(inputs, name)[row : row + 1]
                for name in ("logp_BT", "old_logp_BT", "adv_BT", "mask_BT")
            },
        )
        shares.append(objective.statistic(of_row))
    ratio_BT, _ = objective.token_ratio(inputs)
    squares_B = masked_sum(ratio_BT.square(), entry.mask_BT)
    ess_B = torch.stack(shares) * squares_B / (squares_B + P3O_EPSILON)
    ours = Ours("Corrections", "p3o, ESS of a response", "P3O.statistic with 1e-8")
    ours.outputs["ess"] = Values(ess_B)
    return ours


OFF_POLICY_LOSSES = {
    ("VESPO", "compute_policy_loss_vespo"): vespo,
    ("AReaL", "_apply_m2po_masking"): m2po,
    ("AReaL", "apply_rejection_sampling"): kpop,
    ("open-instruct", "compute_rho_correction"): rho,
    ("prime-rl", "default_loss_fn"): prime_rl,
    ("prime-rl", "ipo_loss_fn"): prime_rl,
    ("verl", "compute_policy_loss_dro"): dro,
    ("CTPO", "cum_token"): ctpo,
    ("FeynRL", "P3O.compute_policy_loss"): p3o,
}
OFF_POLICY_OTHERS = {
    ("slime", "compute_opsm_mask"): slime_opsm,
    ("AReaL", "compute_binary_kl_divergence"): binary_kl_both_ways,
    ("FeynRL", "P3O.calculate_seq_ess"): p3o_ess_of_rows,
}
