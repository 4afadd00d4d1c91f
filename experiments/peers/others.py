"""KL estimators, the KL coefficient's controller and the weights for the mismatch of engine and
trainer.

    KL bounds            verl k3: d within +-20 and the value within +-10; ROLL k3: the value within
                         +-10; OpenRLHF: every value within +-10; slime: low_var_kl within +-10, the
                         others not at all
    k1+, k3+             verl: the value of k1, k3 with the gradient of k2
    normalised weights   verl divides sequence weights by their mean over responses (ours: over
                         tokens): so each response is given to our TIS as one token that carries its
                         whole log-ratio
    segment              ROLL: the geometric mean over each unbroken run of response tokens: each
                         run is a response

Shape suffixes: B responses, T response tokens, 1 the only column of a response-level mask.
"""

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import EXPONENT_BOUND, MIS, TIS, Correction, Rejection
from gspo.algorithm.kl import KLCoefficient, KLInLoss, KLInReward
from gspo.algorithm.objectives import log_ratio
from gspo.data.masked import masked_sum
from peers.hugging import ms_swift_correction, trl_correction
from peers.options import Options, Untranslated
from peers.recipe import UNBOUNDED, described
from peers.result import Ours, Values
from peers.vectors import Entry

FREE = 1e6  # nats; beyond any log-ratio, for peers that set no bound where nothing is exponentiated
ESTIMATORS = {
    "k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs",
}  # fmt: skip


# -- KL estimators


def kl_estimator(options: Options, entry: Entry) -> Ours:
    named = [
        name for name in (*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS)) if options.take(name)
    ]
    name = options.take("kl_penalty", "kl_estimator", default=named[0] if named else "")
    if ESTIMATORS.get(name.removesuffix("+")) is None:
        raise Untranslated(f"KL estimator {name or entry.labels}")
    estimator, straight = ESTIMATORS[name.removesuffix("+")], name.endswith("+")
    d_bound, value_bound = kl_bounds(entry.peer, name.removesuffix("+"))
    # the gradient is that of k2 without any bound, and the bound on the value takes the place of
    # one on d
    if straight:
        d_bound = UNBOUNDED if estimator == "k3" else FREE
    kl = KLInLoss(
        estimator=estimator,
        log_ratio_bound=d_bound,
        value_bound=value_bound,
        gradient="k2" if straight else "own",
    )
    if not str(options.take("loss", default="masked token mean")).startswith("masked token mean"):
        raise Untranslated(f"loss: {options.take('loss')}")
    logp_BT = entry.inputs["logp"].clone().requires_grad_()
    kl_BT = kl.estimate(logp_BT, entry.inputs["ref_logp"], entry.mask_BT)
    loss = Aggregation("token-mean")(kl_BT, entry.mask_BT, Totals.of(entry.mask_BT))
    (grad_BT,) = torch.autograd.grad(loss, logp_BT)
    furthest = float(
        log_ratio(entry.inputs["logp"], entry.inputs["ref_logp"], entry.mask_BT).abs().max()
    )
    beyond = (
        estimator == "k3" and d_bound == UNBOUNDED and value_bound is None and furthest > UNBOUNDED
    )
    return Ours(
        section="KL estimators",
        row=estimator + ("+ (gradient of k2)" if straight else ""),
        setting=described(kl),
        loss=float(loss.detach()),
        grad_BT=grad_BT,
        outputs={"per_token_kl": Values(kl_BT.detach(), entry.mask_BT)},
        exponent=furthest if estimator == "k3" else 0.0,
        stated=f"log pi/pi_ref of {furthest:.4g} nats lies beyond our bound of {UNBOUNDED:g}"
        if beyond
        else "",
    )


def kl_bounds(peer: str, name: str) -> tuple[float, float | None]:
    """Return the bounds on d and on the value. d is unbounded where nothing is exponentiated, else
    bounded as far as ours."""
    k3 = ESTIMATORS[name] == "k3"
    free = UNBOUNDED if k3 else FREE
    if peer in ("verl", "ms-swift"):
        return (20.0, 10.0) if k3 else (free, None)
    if peer == "ROLL":
        return free, 10.0 if k3 else None
    if peer == "OpenRLHF":
        return free, 10.0
    if peer == "slime":
        return free, 10.0 if name == "low_var_kl" else None
    return free, None  # TRL has no bounds


# -- the coefficient's controller


def kl_controller(options: Options, entry: Entry) -> Ours:
    """Return the coefficient after each update. Where n > horizon the peers' factor leaves [0.8,
    1.2], and ours does not."""
    settings = {**entry.settings, **entry.config}
    options.read |= set(settings)
    kl = KLInReward(
        coef=settings["init_kl_coef"], target=settings["target_kl"], horizon=settings["horizon"]
    )
    coefficient, values = KLCoefficient(kl), []
    for current, responses in zip(
        entry.inputs["current_kl"].tolist(), entry.inputs["n_steps"].tolist(), strict=True
    ):
        coefficient.update(current, responses)
        values.append(coefficient.value)
    longest = float(entry.inputs["n_steps"].max())
    capped = f"n = {longest:g} exceeds the horizon: ours counts n / horizon at most 1"
    return Ours(
        section="KL coefficient",
        row="adaptive coefficient",
        setting=described(kl),
        outputs={"kl_coef": Values(torch.tensor(values, dtype=torch.float64))},
        stated=capped if longest > kl.horizon else "",
    )


# -- weights for the mismatch of engine and trainer


def verl_weights(options: Options, entry: Entry) -> Ours:
    level, threshold = (
        options.take("rollout_is", "level"),
        options.take("rollout_is_threshold", "threshold"),
    )
    normalize = bool(options.take("rollout_is_batch_normalize", "batch_normalize", default=False))
    if level not in ("token", "sequence"):
        raise Untranslated(f"rollout_is={level}")
    low, high = thresholds(threshold)
    kind = TIS if low is None else MIS
    ours = weights(
        kind(level=level, low=low or 0.0, high=high, normalize=normalize), entry, bounded=True
    )
    ours.epsilon = normalize
    return ours


def thresholds(given: object) -> tuple[float | None, float]:
    """Return the lower and the upper threshold of verl's "low_high", or of a single upper
    threshold.
    """
    low, _, high = str(given).rpartition("_")
    return (float(low) if low else None), float(high)


def verl_rejection(options: Options, entry: Entry) -> Ours:
    """Translate verl's rejection. The masks of several rules, separated by commas, are multiplied;
    k1 is judged as a ratio."""
    levels = {
        "token": "token",
        "seq_sum": "sequence",
        "seq_mean": "geometric",
        "seq_max": "largest",
    }
    rules = str(options.take("rollout_rs", "rs")).split(",")
    limits = str(options.take("rollout_rs_threshold", "threshold")).split(",")
    limits = limits * len(rules) if len(limits) == 1 else limits
    kept_BT, said = entry.mask_BT.double(), []
    for rule, limit in zip(rules, limits, strict=True):
        level, _, measure = rule.strip().rpartition("_")
        if level not in levels or measure not in ("k1", "k2", "k3"):
            raise Untranslated(f"rollout_rs={rule}")
        low, high = thresholds(limit)
        if measure == "k1":
            low = 1 / high if low is None else low
        rejection = Rejection(
            measure="ratio" if measure == "k1" else measure,
            level=levels[level],
            low=low or 0.0,
            high=high,
        )
        kept_BT = kept_BT * rejection(
            entry.inputs["old_logp"], entry.inputs["rollout_logp"], entry.mask_BT
        )
        said.append(described(rejection))
    ours = Ours("Corrections", f"rejection, {rules[0].rpartition('_')[0]}", " * ".join(said))
    ours.outputs["mask"] = Values(kept_BT, entry.mask_BT)
    ours.metrics["rollout_rs_masked_fraction"] = 1 - float(kept_BT.sum()) / max(
        int(entry.mask_BT.sum()), 1
    )
    ours.epsilon = True  # the fraction's denominator holds 1e-8
    return ours


def trl_weights(options: Options, entry: Entry) -> Ours:
    correction = trl_correction(options.take("vllm_importance_sampling_mode", "mode"), options)
    return weights(correction, entry)


def ms_swift_weights(options: Options, entry: Entry) -> Ours:
    correction = ms_swift_correction(
        options.take("rollout_importance_sampling_mode", "mode"), options
    )
    return weights(correction, entry)


def roll_weights(options: Options, entry: Entry) -> Ours:
    level, high = options.take("weight_type"), options.take("upper_bound")
    if level not in ("token", "geometric", "sequence", "segment"):
        raise Untranslated(f"weight_type={level}")
    correction = TIS(level="geometric" if level == "segment" else level, high=high)
    ours = weights(correction, entry, runs=level == "segment")
    ours.epsilon = level in ("geometric", "segment")
    if level == "segment":
        ours.row = "tis, segment"
        ours.notes = [
            "each unbroken run of response tokens was given to our TIS as a response of its own"
        ]
    return ours


def weights(
    correction: Correction, entry: Entry, bounded: bool = False, runs: bool = False
) -> Ours:
    """Return the correction's weights; `bounded` if the peer too keeps the exponent within +-20."""
    old_BT, behaviour_BT, mask_BT = (
        entry.inputs["old_logp"],
        entry.inputs["rollout_logp"],
        entry.mask_BT,
    )
    m_BT = log_ratio(old_BT, behaviour_BT, mask_BT)
    if runs:
        value_BT = sum(
            correction(old_BT, behaviour_BT, run_BT) for run_BT in unbroken_runs(mask_BT)
        )
    else:
        value_BT = correction(old_BT, behaviour_BT, mask_BT)
    exponent_BT = m_BT if correction.level == "token" else masked_sum(m_BT, mask_BT)
    furthest = float(exponent_BT.abs().max())
    stated = ""
    if furthest > EXPONENT_BOUND and not bounded:
        stated = f"an exponent of {furthest:.4g} lies beyond our bound of {EXPONENT_BOUND:g}; the peer has none"
    row, values = f"{correction.name}, {correction.level}", Values(value_BT, mask_BT)
    # the peer gives one weight per response
    if entry.outputs["weights"].shape[-1] == 1 != mask_BT.shape[-1]:
        first_B1 = mask_BT.int().argmax(-1, keepdim=True)
        values = Values(value_BT.gather(-1, first_B1), mask_BT.any(-1, keepdim=True))
    return Ours(
        "Corrections", row, described(correction), outputs={"weights": values}, stated=stated
    )


def unbroken_runs(mask_BT: Tensor) -> list[Tensor]:
    """Return masks that split each row into its runs of response tokens: the first runs of all
    rows, then the second ones, and so on."""
    before_BT = torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]
    number_BT = (mask_BT & ~before_BT).cumsum(-1)
    return [mask_BT & (number_BT == k) for k in range(1, int(number_BT.max()) + 1)] or [mask_BT]


OTHERS = {
    ("verl", "kl_penalty"): kl_estimator,
    ("ROLL", "compute_approx_kl"): kl_estimator,
    ("OpenRLHF", "compute_approx_kl"): kl_estimator,
    ("slime", "compute_approx_kl"): kl_estimator,
    ("verl", "core_algos.AdaptiveKLController"): kl_controller,
    ("ROLL", "kl_controller.AdaptiveKLController"): kl_controller,
    ("verl", "compute_rollout_correction_weights"): verl_weights,
    ("verl", "compute_rollout_rejection_mask"): verl_rejection,
    ("TRL", "vllm_importance_sampling"): trl_weights,
    ("ms-swift", "_apply_rollout_importance_sampling"): ms_swift_weights,
    ("ROLL", "compute_train_infer_correction"): roll_weights,
}
