"""The policy losses of verl, OpenRLHF, slime, SkyRL and AReaL in our terms.

Facts that the translations rest on, all of them in the peers' code:

    log-ratio bound  verl and SkyRL, GSPO: 10 above; verl token losses and SAPO, OpenRLHF PPO, SkyRL
                     token: +-20; none elsewhere: ours is then 80
    form of GSPO     verl and SkyRL stop the gradient of s_i (GSPO-token); the others go through the
                     mean (GSPO)
    rows             verl divides by the responses with tokens, or by global_batch_size if given;
                     OpenRLHF by those with tokens; slime and SkyRL by all
    AReaL            with sequence ratios, averages the advantages of a response first, then the
                     loss over tokens
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.objectives import (
    CISPO,
    GMPO,
    GRPO,
    GSPO,
    PPO,
    SAPO,
    DrGRPO,
    GSPOToken,
    Reinforce,
)
from gspo.algorithm.objectives.base import Clipped
from peers.options import Options, Untranslated
from peers.recipe import UNBOUNDED, Epsilon, PolicyLoss, as_given, response_mean
from peers.vectors import Entry

# GRPO otherwise; it is one formula, named after its use
TOKEN_OBJECTIVE = {"seq-mean-token-sum-norm": DrGRPO, "token-mean": PPO}


def per_token(entry: Entry) -> bool:
    """Return whether the case's advantages are [B, T]."""
    return entry.inputs["advantages"].ndim == 2


def clipped(
    kind: type[Clipped], low: float, high: float, dual: float | None, bound: float = UNBOUNDED
) -> Clipped:
    return kind(clip_low=low, clip_high=high, dual_clip=dual, log_ratio_bound=bound)


# -- verl


def verl_aggregation(mode: str, options: Options) -> Aggregation:
    """Translate verl's agg_loss. Its token-sum is a sum, and its -norm divides by the responses and
    by T (or loss_scale_factor)."""
    length = options.take("loss_scale_factor")
    by_mode = {
        "token-mean": Aggregation("token-mean"),
        "token-sum": Aggregation("seq-mean-token-sum", rows="one"),
        "seq-mean-token-sum": Aggregation("seq-mean-token-sum"),
        "seq-mean-token-mean": Aggregation("seq-mean-token-mean"),
        "seq-mean-token-sum-norm": Aggregation("seq-mean-token-sum-norm", length=int(length or 0)),
    }
    if mode not in by_mode:
        raise Untranslated(f"loss_agg_mode={mode}")
    return by_mode[mode]


def verl_epsilon(mode: str) -> Epsilon | None:
    return Epsilon(tokens=True) if mode == "seq-mean-token-mean" else None


def verl_totals(options: Options) -> Callable[[Tensor], Totals]:
    """Return what the aggregation counts. global_batch_size counts the responses of the whole
    optimizer step, also those without tokens."""
    rows, tokens = options.take("gbs", "global_batch_size"), options.take("batch_num_tokens")

    def totals(mask_BT: Tensor) -> Totals:
        counts = Totals.of(mask_BT)
        if rows is not None:
            counts = replace(counts, sequences=int(rows), rows=int(rows))
        return counts if tokens is None else replace(counts, tokens=int(tokens))

    return totals


def verl_hard_wired(options: Options) -> Aggregation:
    """Return the aggregation of gspo and sapo, which ignore the mode: the mean over responses with
    tokens, or over global_batch_size if given."""
    given = options.take("gbs", "global_batch_size") is not None
    return Aggregation("seq-mean-token-mean", rows="all" if given else "nonempty")


def verl_clip_range(options: Options) -> tuple[float, float]:
    """Return verl's clip range, lower and upper."""
    low = options.take("clip_ratio_low", default=0.2)
    high = options.take("clip_ratio_high", default=0.2)
    return low, high


def verl_gspo(options: Options, entry: Entry) -> PolicyLoss:
    # verl does not read these here
    options.ignore("mode", "loss_agg_mode", "c", "clip_ratio_c")
    low, high = verl_clip_range(options)
    return PolicyLoss(
        row="gspo_token" if per_token(entry) else "gspo",
        objective=clipped(GSPOToken, low, high, None, bound=10.0),
        aggregation=verl_hard_wired(options),
        totals=verl_totals(options),
        bound="upper",
        epsilon=Epsilon(tokens=True),
    )


def verl_vanilla(options: Options, entry: Entry) -> PolicyLoss:
    mode = options.take("mode", "loss_agg_mode", default="token-mean")
    kind = TOKEN_OBJECTIVE.get(mode, GRPO)
    low, high = verl_clip_range(options)
    objective = clipped(kind, low, high, options.take("c", "clip_ratio_c", default=3.0), bound=20.0)
    aggregation = verl_aggregation(mode, options)
    return PolicyLoss(
        row=objective.name,
        objective=objective,
        aggregation=aggregation,
        totals=verl_totals(options),
        bound="same",
        epsilon=verl_epsilon(mode),
    )


def verl_cispo(options: Options, entry: Entry) -> PolicyLoss:
    mode = options.take("mode", "loss_agg_mode", default="token-mean")
    low, high = verl_clip_range(options)
    return PolicyLoss(
        row="cispo",
        objective=CISPO(clip_low=low, clip_high=high, log_ratio_bound=20.0),
        aggregation=verl_aggregation(mode, options),
        totals=verl_totals(options),
        bound="same",
        epsilon=verl_epsilon(mode),
    )


def verl_sapo(options: Options, entry: Entry) -> PolicyLoss:
    options.ignore("mode", "loss_agg_mode", "clip_ratio_low", "clip_ratio_high")
    return PolicyLoss(
        row="sapo",
        objective=sapo(options, bound=20.0),
        aggregation=verl_hard_wired(options),
        totals=verl_totals(options),
        bound="same",
        epsilon=Epsilon(tokens=True),
    )


def verl_gmpo(options: Options, entry: Entry) -> PolicyLoss:
    low, high = verl_clip_range(options)
    return PolicyLoss(
        row="gmpo",
        objective=GMPO(clip_low=low, clip_high=high, log_ratio_bound=UNBOUNDED),
        aggregation=Aggregation("seq-mean-token-mean", rows="all"),
        epsilon=Epsilon(tokens=True, exponent=True),
    )


def verl_reinforce(options: Options, entry: Entry) -> PolicyLoss:
    # without a ratio there is no clip
    options.ignore("clip_ratio_low", "clip_ratio_high")
    mode = options.take("mode", "loss_agg_mode", default="token-mean")
    return PolicyLoss(
        row="reinforce",
        objective=Reinforce(),
        aggregation=verl_aggregation(mode, options),
        totals=verl_totals(options),
        epsilon=verl_epsilon(mode),
    )


def sapo(options: Options, bound: float, level: str = "token") -> SAPO:
    positive, negative = options.take("sapo_temperatures", "taus", default=(1.0, 1.05))
    return SAPO(
        tau_positive=options.take("tau_pos", "sapo_tau_pos", default=positive),
        tau_negative=options.take("tau_neg", "sapo_tau_neg", default=negative),
        level=level,
        log_ratio_bound=bound,
    )


# -- OpenRLHF, slime, SkyRL, AReaL


def openrlhf(options: Options, entry: Entry) -> PolicyLoss:
    kind = options.take("policy_loss_type", "kind", default="ppo")
    if kind not in ("ppo", "gspo"):
        raise Untranslated(f"policy_loss_type={kind}")
    # gspo always uses the mean of means
    by_token = options.take("token_level_loss", default=True) and kind == "ppo"
    low, high = (
        options.take("clip_eps_low", default=0.2),
        options.take("clip_eps_high", default=0.2),
    )
    dual = options.take("dual_clip")
    if kind == "gspo":
        objective = clipped(GSPO, low, high, dual)
    else:
        objective = clipped(PPO if by_token else GRPO, low, high, dual, bound=20.0)
    return PolicyLoss(
        row=objective.name,
        objective=objective,
        aggregation=Aggregation("token-mean" if by_token else "seq-mean-token-mean"),
        bound="none" if kind == "gspo" else "same",
        epsilon=None if by_token else Epsilon(tokens=True),
    )


def slime(options: Options, entry: Entry) -> PolicyLoss:
    """Translate slime's three losses; slime averages over the samples' means outside of them."""
    reduction = options.take("reduction", default="mean over B samples")
    if not reduction.startswith("mean over B samples"):
        raise Untranslated(f"reduction={reduction}")
    low = options.take("eps_clip", default=0.2)
    high, dual = options.take("eps_clip_high", default=low), options.take("eps_clip_c")
    if entry.function == "compute_cispo_loss":
        objective = CISPO(clip_low=low, clip_high=high, log_ratio_bound=UNBOUNDED)
    else:
        kind = GSPO if entry.function.startswith("compute_gspo_kl") else GRPO
        objective = clipped(kind, low, high, dual)
    return PolicyLoss(objective.name, objective, Aggregation("seq-mean-token-mean", rows="all"))


def skyrl(options: Options, entry: Entry) -> PolicyLoss:
    """Translate SkyRL's losses. `sequence_mean` divides the advantages by n_i B in advance, which
    is our mean of means over all rows."""
    reduction = options.take("loss_reduction", default="token_mean").split()[0]
    aggregations = {
        "sequence_mean": ("seq-mean-token-mean", "all"),
        "token_mean": ("token-mean", "nonempty"),
    }
    if reduction not in aggregations:
        raise Untranslated(f"loss_reduction={reduction}")
    low, high = (
        options.take("eps_clip_low", default=0.2),
        options.take("eps_clip_high", default=0.2),
    )
    if entry.function == "gspo_policy_loss":
        row, objective = (
            "gspo_token" if per_token(entry) else "gspo",
            clipped(GSPOToken, low, high, None, bound=10.0),
        )
    elif entry.function == "sapo_policy_loss":
        row, objective = "sapo", sapo(options, bound=20.0)
    else:
        dual = options.take("clip_ratio_c", default=3.0)
        if options.take("policy_loss_type", default="regular") != "dual_clip":
            dual = None
        objective = clipped(PPO if reduction == "token_mean" else GRPO, low, high, dual, bound=20.0)
        row = objective.name
    bound = "upper" if entry.function == "gspo_policy_loss" else "same"
    mode, rows = aggregations[reduction]
    return PolicyLoss(row, objective, Aggregation(mode, rows=rows), bound=bound)


def areal(options: Options, entry: Entry) -> PolicyLoss:
    level = options.take("importance_sampling_level", default="token")
    if level not in ("token", "sequence"):
        raise Untranslated(f"importance_sampling_level={level}")
    low = options.take("eps_clip", default=0.2)
    high, dual = options.take("eps_clip_higher", default=low), options.take("c_clip")
    if "sapo" in entry.function or options.take("use_sapo_loss", default=False):
        objective = sapo(options, UNBOUNDED, level)
    else:
        objective = clipped(GSPO if level == "sequence" else PPO, low, high, dual)
    return PolicyLoss(
        row=objective.name,
        objective=objective,
        aggregation=Aggregation("token-mean"),
        advantages=response_mean if level == "sequence" else as_given,
    )


LOSSES = {
    ("verl", "compute_policy_loss_gspo"): verl_gspo,
    ("verl", "compute_policy_loss_vanilla"): verl_vanilla,
    ("verl", "compute_policy_loss_cispo"): verl_cispo,
    ("verl", "compute_policy_loss_sapo"): verl_sapo,
    ("verl", "compute_policy_loss_geo_mean"): verl_gmpo,
    ("verl", "compute_policy_loss_gpg"): verl_reinforce,
    ("verl", "compute_policy_loss_reinforce"): verl_reinforce,
    ("OpenRLHF", "PolicyLoss"): openrlhf,
    ("slime", "compute_policy_loss"): slime,
    ("slime", "compute_cispo_loss"): slime,
    ("slime", "compute_gspo_kl+compute_policy_loss"): slime,
    ("SkyRL", "gspo_policy_loss"): skyrl,
    ("SkyRL", "sapo_policy_loss"): skyrl,
    ("SkyRL", "ppo_policy_loss"): skyrl,
    ("AReaL", "ppo_actor_loss_fn"): areal,
    ("AReaL", "sapo_loss_fn"): areal,
}
