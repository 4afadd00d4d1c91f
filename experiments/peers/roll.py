"""The policy losses of ROLL in our terms.

rows          the responses with tokens; seq-mean-token-sum-norm divides by T only
dual clip     at 1 + 2 pg_clip, whatever pg_clip_low and pg_clip_high
token-mean    adds up padding too; it shows if the advantages are not masked. Our loss then gets a
              mask of ones, and with a sequence ratio every position gets the response's mean
              log-ratio
KL            k3 with the value within +-10, aggregated like the policy term, without the sample
              weights
"""

from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.kl import KLInLoss
from gspo.algorithm.objectives import CISPO, GRPO, GSPO
from peers.losses import TOKEN_OBJECTIVE, clipped
from peers.options import Options, Untranslated
from peers.recipe import UNBOUNDED, Epsilon, PolicyLoss
from peers.vectors import Entry

AGGREGATIONS = {
    "token-mean": Aggregation("token-mean"),
    "seq-mean-token-sum": Aggregation("seq-mean-token-sum"),
    "seq-mean-token-mean": Aggregation("seq-mean-token-mean"),
    # divides by T only
    "seq-mean-token-sum-norm": Aggregation("seq-mean-token-sum-norm", rows="one", length=0),
}


def aggregation_of(options: Options) -> Aggregation:
    mode = options.take("loss_agg_mode", default="seq-mean-token-mean")
    if mode not in AGGREGATIONS:
        raise Untranslated(f"loss_agg_mode={mode}")
    return AGGREGATIONS[mode]


def epsilon_of(aggregation: Aggregation, weights: bool, exponent: bool) -> Epsilon:
    """Return where ROLL has 1e-8: n_i + 1e-8 and V + 1e-8 in the means, and in the sum of the
    sample weights.
    """
    mean_of_responses = aggregation.mode in ("seq-mean-token-mean", "seq-mean-token-sum")
    return Epsilon(aggregation.mode == "seq-mean-token-mean", mean_of_responses, weights, exponent)


def roll(options: Options, entry: Entry) -> PolicyLoss:
    level = options.take("importance_sampling", "level", default="token")
    if level not in ("token", "seq"):
        raise Untranslated(f"importance_sampling={level}")
    aggregation, pg_clip = aggregation_of(options), options.take("pg_clip", default=0.2)
    low, high = (
        options.take("pg_clip_low", default=pg_clip),
        options.take("pg_clip_high", default=pg_clip),
    )
    if not options.take("use_pg_clip_range", default=True):
        low = high = pg_clip
    dual = 1 + 2 * pg_clip if options.take("dual_clip_loss", "dual_clip", default=False) else None
    kind = GSPO if level == "seq" else TOKEN_OBJECTIVE.get(aggregation.mode, GRPO)
    peer = PolicyLoss(kind.name, clipped(kind, low, high, dual), aggregation)
    peer.epsilon = epsilon_of(aggregation, weights=True, exponent=level == "seq")
    masked = options.take("advantages_masked", default=True)
    coef = options.take("kl_loss_coef", default=0.0)
    if options.take("use_kl_loss", default=False) and coef:
        peer.kl = KLInLoss(
            coef=coef, log_ratio_bound=UNBOUNDED, value_bound=10.0, aggregation=aggregation
        )
    if aggregation.mode == "token-mean" and not masked:
        peer.everywhere, peer.spread = True, level == "seq"
        peer.objective = clipped(GRPO, low, high, dual)
        peer.notes = [
            "ROLL's token-mean adds up the loss of padding too: our loss was given a mask of ones"
        ]
        if peer.kl is not None:
            raise Untranslated("KL in the loss with advantages_masked=False")
    return peer


def roll_cispo(options: Options, entry: Entry) -> PolicyLoss:
    objective = CISPO(
        clip_low=options.take("cispo_epsilon_low", default=0.2),
        clip_high=options.take("cispo_epsilon_high", default=0.2),
        mask_harmful=options.take("cispo_use_unified_mask", "unified_mask", default=False),
        log_ratio_bound=UNBOUNDED,
    )
    aggregation = aggregation_of(options)
    return PolicyLoss(
        "cispo",
        objective,
        aggregation,
        epsilon=epsilon_of(aggregation, weights=False, exponent=False),
    )


ROLL_LOSSES = {("ROLL", "ActorWorker.loss_func"): roll, ("ROLL", "_compute_cispo_loss"): roll_cispo}
