"""The peers' advantages of 2026 in our terms: MaxRL, GDPO, NSR, OTB; and RAGEN's mutual information.

    group of one    MaxRL: the authors divide the reward by epsilon, SkyRL keeps it, prime-rl gives
                    0; GDPO: verl keeps the reward over 1 + epsilon, the others give 0; OTB: the
                    baseline is 0
    negative        MaxRL of negative rewards is refused in our settings; the formula is compared
    other values    NSR of rewards other than 0 and 1 is refused; the peer keeps them
    holes           NSR's peer starts the return anew at a masked position; ours is the response's
    variance proxy  verl counts the tokens of a response plus 1e-8

Shape suffixes: B responses, T response tokens, K named rewards.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.algorithm.advantages import Advantage, Credit, Groups, discounted
from gspo.algorithm.gdpo import GDPO
from gspo.algorithm.maxrl import MaxRL
from gspo.algorithm.mutual_information import RETRIEVAL_DEPTHS, prompt_information
from gspo.algorithm.nsr import NSR
from gspo.algorithm.otb import OTB, variance_proxies
from peers.options import Options, Untranslated
from peers.recipe import described
from peers.result import Ours, Values
from peers.vectors import Entry

# verl's names of the metrics of variance_proxies
VARIANCE_PROXIES = {
    "signal": "variance_proxy/proxy1_signal_strength",
    "power": "variance_proxy/proxy2_total_power",
    "noise": "variance_proxy/proxy3_pure_noise",
    "square": "variance_proxy/expected_a_squared",
    "score_norm": "variance_proxy/expected_w",
}

NEMO_EQUAL_OTHERS = (
    "where all other responses are equal, NeMo-RL's std may be 1e-8 of rounding instead of 0, and "
    "the difference is divided by it"
)


@dataclass
class AnyMaxRL(MaxRL):
    """MaxRL of any rewards, with the authors' division of a lone reward by epsilon.

    Of a group whose mean is negative, prime-rl gives 0."""

    lone_over_eps: bool = False
    negative_is_zero: bool = False

    def estimate(self, credit: Credit) -> Tensor:
        return self.of_rewards(credit.rewards_B, Groups(credit.groups_B))

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        adv_B = super().compare(rewards_B, groups)
        if self.negative_is_zero:
            adv_B = torch.where(groups.mean(rewards_B) <= 0, 0.0, adv_B)
        return adv_B

    def alone(self, rewards_B: Tensor) -> Tensor:
        return rewards_B / self.eps if self.lone_over_eps else rewards_B


@dataclass
class AnyNSR(NSR):
    """NSR of any rewards and masks, as the authors' code has it.

    The return starts anew at a masked position. So tokens before a hole have a return of 0, which
    counts as wrong with kind=negative. With kind=weighted, a response of another reward than 0 and
    1 keeps its return as its advantage."""

    kind: str = "weighted"

    def estimate(self, credit: Credit) -> Tensor:
        rewards_BT = credit.token_rewards_BT
        return_BT = torch.zeros_like(rewards_BT)
        running_B = torch.zeros_like(rewards_BT[:, 0])
        for t in reversed(range(rewards_BT.shape[1])):
            running_B = rewards_BT[:, t] + running_B
            return_BT[:, t] = running_B
            running_B = torch.where(credit.mask_BT[:, t], running_B, 0.0)
        if self.kind == "positive":
            return return_BT
        if self.kind == "negative":
            return return_BT - 1
        sum_B1 = rewards_BT.sum(-1, keepdim=True)
        adv_BT = torch.where(sum_B1 == 1, self.positive_weight * return_BT, return_BT)
        return torch.where(sum_B1 == 0, return_BT - 1, adv_BT)


def group_ids(entry: Entry) -> Tensor:
    names = [str(name) for name in entry.groups]
    return torch.tensor([names.index(name) for name in names])


def compared(
    estimator: Advantage, credit: Credit, entry: Entry, epsilon: bool = False, note: str = ""
) -> Ours:
    """Apply an estimator to a credit whose responses have a token each, or all their tokens."""
    adv_BT = estimator(credit)
    expected = entry.outputs["advantages"]
    where = None
    if expected.ndim == 1:
        adv_BT = adv_BT.squeeze(1)
    elif adv_BT.shape[1] == 1:
        # the peer spreads the advantage over the tokens
        adv_BT = adv_BT.expand_as(expected)
        where = entry.mask_BT
    return Ours(
        "Advantages",
        estimator.name,
        described(estimator),
        outputs={"advantages": Values(adv_BT, where)},
        epsilon=epsilon,
        notes=[note] if note else [],
    )


def by_response(rewards_B: Tensor, groups_B: Tensor) -> Credit:
    """Return the credit of responses of one token."""
    rewards_BT = rewards_B.unsqueeze(-1)
    return Credit(rewards_BT, torch.ones_like(rewards_BT, dtype=torch.bool), groups_B)


def rewards_of(entry: Entry) -> Tensor:
    """Return the reward of each response: the sum over its tokens, or the only one that there is."""
    if "token_level_rewards" in entry.inputs:
        return entry.inputs["token_level_rewards"].sum(-1)
    return entry.inputs["rewards"]


# -- MaxRL


def maxrl(options: Options, entry: Entry) -> Ours:
    epsilon = options.take("epsilon", default=1e-6)
    if entry.peer == "prime-rl":
        estimator = AnyMaxRL(negative_is_zero=True)
        credit = by_response(entry.inputs["rewards"], group_ids(entry))
    else:
        authors = entry.peer == "MaxRL"
        estimator = AnyMaxRL(eps=epsilon, group_of_one="reward", lone_over_eps=authors)
        credit = by_response(rewards_of(entry), group_ids(entry))
    note = ""
    if bool((credit.rewards_B < 0).any()):
        note = "negative rewards, which our settings refuse"
    return compared(estimator, credit, entry, note=note)


# -- NSR


def nsr(options: Options, entry: Entry) -> Ours:
    kind = options.take("advantage", default="weighted")
    weight = options.take("positive_advantage_weight", default=1.0)
    options.ignore("positive", "negative", "weighted")
    gamma = options.take("gamma", default=1.0)
    if gamma != 1:
        raise Untranslated(f"gamma={gamma}")
    weights = {"positive": (1.0, 0.0), "negative": (0.0, 1.0), "weighted": (weight, 1.0)}
    positive, negative = weights[kind]
    rewards_B = rewards_of(entry)
    mask_BT = entry.mask_BT
    has_holes = bool((mask_BT[:, 1:] & ~mask_BT[:, :-1]).any())
    is_binary = bool(((rewards_B == 0) | (rewards_B == 1)).all())
    estimator = NSR(positive_weight=positive, negative_weight=negative)
    credit = by_response(rewards_B, torch.zeros(len(rewards_B), dtype=torch.int64))
    if is_binary and not has_holes:
        return compared(estimator, credit, entry)
    token_rewards_BT = entry.inputs["token_level_rewards"]
    credit = replace(credit, token_rewards_BT=token_rewards_BT, mask_BT=mask_BT)
    estimator = AnyNSR(positive_weight=positive, negative_weight=negative, kind=kind)
    note = "the peer's return starts anew at a hole in the mask; ours is the response's reward"
    if not is_binary:
        note = "rewards other than 0 and 1, which our settings refuse"
    return compared(estimator, credit, entry, note=note)


# -- GDPO


def gdpo_credit(entry: Entry, weights: object) -> Credit:
    """Return the credit of responses of one token with several rewards."""
    rewards_BK = entry.inputs["rewards"]
    weights_K = torch.ones(rewards_BK.shape[1], dtype=torch.float64)
    if weights is not None:
        weights_K = torch.tensor(weights, dtype=torch.float64)
    credit = by_response(rewards_BK @ weights_K, group_ids(entry))
    return replace(credit, named_rewards_BK=rewards_BK, weights_K=weights_K)


def trl_gdpo(options: Options, entry: Entry) -> Ours:
    options.ignore("weights", "scale_rewards")
    how = options.take("multi_objective_aggregation", default="normalize_then_sum")
    if how != "normalize_then_sum":
        raise Untranslated(f"multi_objective_aggregation={how}")
    credit = gdpo_credit(entry, options.take("reward_weights"))
    return compared(GDPO(), credit, entry)


def ms_swift_gdpo(options: Options, entry: Entry) -> Ours:
    options.ignore("weights", "gdpo")
    credit = gdpo_credit(entry, options.take("reward_weights"))
    return compared(GDPO(eps=1e-8, whiten_eps=1e-8), credit, entry)


def verl_gdpo(options: Options, entry: Entry) -> Ours:
    options.ignore("weights", "gdpo_reward_keys")
    credit = gdpo_credit(entry, options.take("gdpo_reward_weights"))
    epsilon = options.take("epsilon", default=1e-6)
    estimator = GDPO(whiten="tokens", eps=epsilon, group_of_one="reward")
    # the whitening is over the tokens, so all of them are needed
    mask_BT = entry.mask_BT
    tokens = replace(credit, token_rewards_BT=torch.zeros(mask_BT.shape), mask_BT=mask_BT)
    return compared(estimator, tokens, entry, epsilon=True)


def nemo_gdpo(options: Options, entry: Entry) -> Ours:
    options.ignore("weights")
    others = options.take("use_leave_one_out_baseline", "leave_one_out", default=False)
    if not options.take("normalize_rewards", default=True):
        raise Untranslated("normalize_rewards=False")
    credit = gdpo_credit(entry, options.take("reward_weights"))
    baseline = "others" if others else "all"
    ours = compared(GDPO(eps=1e-6, whiten_eps=0.0, baseline=baseline), credit, entry)
    if others:
        ours.stated = NEMO_EQUAL_OTHERS
    return ours


# -- OTB


def otb_credit(options: Options, entry: Entry) -> Credit:
    weighted = options.take("rollout_is_weights", default=False)
    return Credit(
        entry.inputs["token_level_rewards"],
        entry.mask_BT,
        group_ids(entry),
        old_logp_BT=entry.inputs["old_logp"],
        sum_pi_squared_BT=entry.inputs["sum_pi_squared"],
        correction_BT=entry.inputs["rollout_is_weights"] if weighted else None,
    )


def otb(options: Options, entry: Entry) -> Ours:
    options.ignore("otb", "tir", "is", "no zero tail")
    multi_turn = "multi_turn" in entry.function
    estimator = OTB(
        eps=options.take("epsilon", default=1e-8),
        zero_tail=options.take("handle_zero_tail", default=True),
        align="token" if multi_turn else "column",
        group_of_one="reward",
    )
    credit = otb_credit(options, entry)
    ours = compared(estimator, credit, entry)
    # verl has the return before a masked position there, which our estimators do not read
    returns_BT = discounted(credit.token_rewards_BT, credit.mask_BT, 1.0)
    ours.outputs["returns"] = Values(returns_BT)
    return ours


def variance_proxy(options: Options, entry: Entry) -> Ours:
    """Return verl's metrics of the advantages of the case's first entry: OTB by column."""
    options.ignore("is", "no norm")
    norm = options.take("gradient_norm")
    credit = otb_credit(options, entry)
    estimator = OTB(align="column", group_of_one="reward")
    adv_BT = estimator(replace(credit, correction_BT=None))
    proxies = variance_proxies(adv_BT, credit, norm)
    metrics = {verl: proxies.get(name, 0.0) for name, verl in VARIANCE_PROXIES.items()}
    return Ours(
        "Advantages",
        "otb, variance_proxies",
        f"variance_proxies, {described(estimator)}",
        metrics=metrics,
        epsilon=True,
    )


# -- mutual information


def collapse_detector(options: Options, entry: Entry) -> Ours:
    """Return RAGEN's numbers of the collapse of prompts, by its own names."""
    own_R = entry.inputs["own_prompt"].long()
    mean_RP = entry.inputs["cross_logp_mean"]
    signatures_P = entry.inputs.get("signatures", torch.arange(mean_RP.shape[1]))
    ours = prompt_information(mean_RP, entry.inputs["cross_logp_sum"], own_R, signatures_P)
    metrics = {
        "collapse/mi_estimate": ours["mi"],
        "collapse/mi_upper_bound": ours["bound"],
        "collapse/matched_log_prob_mean": ours["matched"],
        "collapse/marginal_log_prob_mean": ours["marginal"],
        "collapse/mi_seq_estimate": ours["mi_sequence"],
        "collapse/conditional_entropy_est": -ours["matched"],
        "collapse/reasoning_entropy_est": -ours["marginal"],
        "collapse/conditional_entropy_seq_est": -ours["matched_sequence"],
        "collapse/reasoning_entropy_seq_est": -ours["marginal_sequence"],
    }
    for depth in RETRIEVAL_DEPTHS:
        at = "" if depth == 1 else f"@{depth}"
        retrieval, chance = ours[f"retrieval@{depth}"], ours[f"chance@{depth}"]
        metrics[f"collapse/retrieval_accuracy{at}"] = retrieval
        metrics[f"collapse/retrieval_chance_level{at}"] = chance
        metrics[f"collapse/retrieval_above_chance{at}"] = retrieval - chance
    return Ours("Mutual information", "prompt_information", "prompt_information", metrics=metrics)


CREDIT_2026 = {
    ("RAGEN", "CollapseDetector"): collapse_detector,
    ("MaxRL", "compute_maxrl_outcome_advantage"): maxrl,
    ("SkyRL", "compute_maxrl_advantage"): maxrl,
    ("prime-rl", "MaxRLAlgorithm.score_group"): maxrl,
    ("RLVR-Decomposed", "compute_psr_nsr_outcome_advantage"): nsr,
    ("TRL", "normalize_then_sum"): trl_gdpo,
    ("verl", "compute_gdpo_outcome_advantage"): verl_gdpo,
    ("NeMo-RL", "GDPOAdvantageEstimator"): nemo_gdpo,
    ("verl", "compute_optimal_token_baseline_advantage"): otb,
    ("verl", "compute_multi_turn_optimal_token_baseline_advantage"): otb,
    ("verl", "compute_variance_proxy_metrics"): variance_proxy,
}
