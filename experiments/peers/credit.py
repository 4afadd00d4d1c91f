"""The peers' advantages, reward normalisation and baselines in our terms.

    epsilon         added to the std: TRL, ms-swift 1e-4; verl, ROLL 1e-6; OpenRLHF 1e-9; std has
                    ddof 1 everywhere
    group of one    verl passes the raw reward (the vectorised RLOO: 0), divided by 1 + 1e-6 where
                    the others are divided by std + 1e-6; TRL and ms-swift: 0
    equal rewards   we give exactly 0; peers give 0 or what rounding leaves of it divided by epsilon
    NeMo-RL         reports baseline and std, which our Groups give; its std is sqrt(E[x^2] -
                    E[x]^2), exact to 1e-8

Shape suffixes: B responses, T response tokens, 1 the only column of a response-level mask.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.algorithm.advantages import (
    Advantage,
    Credit,
    GroupMean,
    GroupNormalized,
    Groups,
    LeaveOneOut,
    ReinforcePP,
    Returns,
    discounted,
)
from gspo.algorithm.reward_shaping import RewardShaping, RunningMoments
from peers.credit_2026 import group_ids, ms_swift_gdpo
from peers.options import Options, Untranslated
from peers.recipe import described
from peers.result import Ours, Values
from peers.vectors import Entry

ROUNDING = 8 * torch.finfo(torch.float64).eps
NEMO_STD = 3e-8  # tolerance for the cancellation in NeMo-RL's std


@dataclass
class ReturnsEverywhere(Returns):
    """ROLL's return, discounted at every position, masked ones included; it differs from ours with
    holes and gamma < 1."""

    def estimate(self, credit: Credit) -> Tensor:
        return discounted(credit.token_rewards_BT, torch.ones_like(credit.mask_BT), self.gamma)


@dataclass
class ScaledLeaveOneOut(GroupNormalized):
    """ms-swift's rloo with scale_rewards: the leave-one-out advantage over std + eps."""

    name: str = "rloo, scaled"

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        return super().compare(rewards_B, groups) * groups.size_B / (groups.size_B - 1).clamp(min=1)


def of_responses(estimator: Advantage, entry: Entry, options: Options) -> Ours:
    """Apply an estimator that knows a response only by its reward: [B], spread over the tokens if
    the peer gives [B, T]."""
    options.ignore("groups")
    rewards_B, groups_B = entry.inputs["rewards"], group_ids(entry)
    adv_B = estimator(
        Credit(rewards_B[:, None], torch.ones(len(rewards_B), 1, dtype=torch.bool), groups_B)
    ).squeeze(1)
    groups = Groups(groups_B)
    eps = getattr(estimator, "eps", 1.0)
    rounding_B = torch.where(groups.all_equal(rewards_B), ROUNDING * rewards_B.abs() / eps, 0.0)
    expected = entry.outputs["advantages"]
    if expected.ndim == 2:
        adv_B, rounding_B = (
            adv_B[:, None].expand_as(expected),
            rounding_B[:, None].expand_as(expected),
        )
    where = entry.mask_BT if expected.ndim == 2 else None
    return advantage(estimator, Values(adv_B, where, rounding_B))


def advantage(estimator: Advantage, values: Values, epsilon: bool = False) -> Ours:
    return Ours(
        "Advantages",
        estimator.name,
        described(estimator),
        outputs={"advantages": values},
        epsilon=epsilon,
    )


def trl_or_ms_swift(options: Options, entry: Entry) -> Ours:
    scale = options.take("scale_rewards", default="group")
    if scale == "gdpo":
        return ms_swift_gdpo(options, entry)
    if scale not in ("group", "batch", "none"):
        raise Untranslated(f"scale_rewards={scale}")
    named = [name for name in ("rloo", "reinforce_plus_plus") if options.take(name)]
    kind = options.take("advantage_estimator", default=named[0] if named else "grpo")
    if kind == "grpo" or (kind == "reinforce_plus_plus" and scale == "group"):
        estimator = GroupMean() if scale == "none" else GroupNormalized(eps=1e-4, std=scale)
    elif kind == "rloo":
        estimator = LeaveOneOut() if scale == "none" else ScaledLeaveOneOut(eps=1e-4, std=scale)
    elif kind == "reinforce_plus_plus":
        estimator = (
            GroupMean() if scale == "none" else ReinforcePP(baseline="group", whiten="responses")
        )
    else:
        raise Untranslated(f"advantage_estimator={kind}")
    return of_responses(estimator, entry, options)


def verl_grpo(options: Options, entry: Entry) -> Ours:
    options.ignore("group_of_one", "std")
    mean_only = options.take("mean_only", default=False) or not options.take(
        "norm_adv_by_std_in_grpo", default=True
    )
    if mean_only:
        return of_responses(GroupMean(group_of_one="reward"), entry, options)
    return of_responses(GroupNormalized(group_of_one="reward"), entry, options)


def verl_rloo(options: Options, entry: Entry) -> Ours:
    options.ignore("group_of_one")
    vectorized = "vectorized" in entry.function
    return of_responses(
        LeaveOneOut(group_of_one="zero" if vectorized else "reward"), entry, options
    )


def verl_reinforce_pp(options: Options, entry: Entry) -> Ours:
    """Return verl's returns, whitened over the tokens; `returns` are those before whitening."""
    gamma = options.take("gamma", default=1.0)
    credit = token_credit(entry)
    ours = advantage(
        ReinforcePP(gamma=gamma),
        Values(ReinforcePP(gamma=gamma)(credit), entry.mask_BT),
        epsilon=True,
    )
    ours.outputs["returns"] = Values(Returns(gamma=gamma)(credit), entry.mask_BT)
    return ours


def verl_reinforce_pp_baseline(options: Options, entry: Entry) -> Ours:
    """Return rewards minus the group's mean, then whitened over the tokens; a group of one keeps
    its reward.
    """
    estimator = GroupMean(name="reinforce_pp", whiten="tokens", group_of_one="reward")
    return advantage(estimator, Values(estimator(token_credit(entry)), entry.mask_BT), epsilon=True)


def openrlhf(options: Options, entry: Entry) -> Ours:
    estimators = {
        "rloo": LeaveOneOut(),
        "dr_grpo": GroupMean(),
        "group_norm": GroupNormalized(eps=1e-9),
    }
    named = [name for name in estimators if options.take(name)]
    if len(named) != 1:
        raise Untranslated("an advantage estimator other than rloo, dr_grpo and group_norm")
    return of_responses(estimators[named[0]], entry, options)


def roll_advantage(options: Options, entry: Entry) -> Ours:
    kind = options.take("adv_estimator", default="reinforce")
    if kind not in ("reinforce", "grpo"):  # ROLL has one function for both
        raise Untranslated(f"adv_estimator={kind}")
    whiten = "tokens" if options.take("whiten_advantages", "whiten", default=False) else "none"
    clip = options.take("advantage_clip", "clip")
    estimator = ReturnsEverywhere(
        gamma=options.take("gamma", default=1.0), whiten=whiten, clip=clip
    )
    ours = advantage(
        estimator, Values(estimator(token_credit(entry)), entry.mask_BT), epsilon=whiten == "tokens"
    )
    if clip is not None:
        free_BT = replace(estimator, clip=None)(token_credit(entry))
        # ROLL counts padding too
        ours.metrics["critic/advantage_clip_frac"] = float((free_BT.abs() > clip).double().mean())
    return ours


def token_credit(entry: Entry) -> Credit:
    """Return the rewards of single tokens; a reward per response is put on the last token of the
    mask.
    """
    mask_BT = entry.mask_BT
    token_rewards_BT = entry.inputs.get("token_level_rewards")
    if token_rewards_BT is None:
        last_B = (mask_BT * torch.arange(mask_BT.shape[1])).amax(-1)
        token_rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
        token_rewards_BT[torch.arange(len(last_B)), last_B] = entry.inputs["rewards"]
    has_groups = entry.settings.get("groups") or entry.settings.get("num_generations")
    return Credit(
        token_rewards_BT, mask_BT, group_ids(entry) if has_groups else torch.arange(len(mask_BT))
    )


def roll_reward_norm(options: Options, entry: Entry) -> Ours:
    shift = options.take("mean", "norm_mean_type")
    scale = options.take("std", "norm_std_type")
    return shaped(RewardShaping(shift=shift or "none", scale=scale or "none"), entry, options)


def roll_legacy_rewards(options: Options, entry: Entry) -> Ours:
    """Translate reward_norm, where `shift` only shifts. adv_estimator=grpo always takes the branch
    for groups.
    """
    clip = options.take("reward_clip")
    reward_norm = options.take("reward_norm")
    labels = [name for name in ("null", "group", "batch", "running", "grpo") if options.take(name)]
    over = reward_norm or (labels[0] if labels else "null")
    over = {"null": "none", "grpo": "group"}.get(over, over)
    only_shift = options.take("shift", default=False)
    only_scale = options.take("scale", default=False)
    shift = "none" if over == "running" and only_scale and not only_shift else over
    scale = "none" if only_shift else over
    eps = torch.finfo(torch.float32).eps if over == "running" else 1e-6
    return shaped(RewardShaping(shift=shift, scale=scale, clip=clip, eps=eps), entry, options)


def shaped(shaping: RewardShaping, entry: Entry, options: Options) -> Ours:
    options.ignore("groups")
    rewards_B = entry.inputs["rewards"]
    value_B = shaping(rewards_B, group_ids(entry), RunningMoments())
    stated = ""
    if bool((value_B == rewards_B).all()) and shaping.scale != "none" and shaping.shift == "none":
        stated = "all rewards are equal: we leave them as they are, ROLL divides them by epsilon"
    expected = entry.outputs["rewards"]
    if expected.shape != value_B.shape:
        stated = f"ROLL returns shape {list(expected.shape)} here, for rewards of shape {list(value_B.shape)}"
    rounding_B = torch.where(
        Groups(group_ids(entry)).all_equal(rewards_B), ROUNDING * rewards_B.abs() / shaping.eps, 0.0
    )
    return Ours(
        section="Rewards",
        row=f"shift {shaping.shift}, scale {shaping.scale}" + (", clip" if shaping.clip else ""),
        setting=described(shaping),
        outputs={"rewards": Values(value_B, None, rounding_B)},
        stated=stated,
    )


def nemo_baseline(options: Options, entry: Entry) -> Ours:
    """Return NeMo-RL's baseline, reward - advantage; with leave_one_out from the statistics of the
    group's other responses."""
    others = options.take("leave_one_out", default=True)
    options.ignore("groups")
    rewards_B, groups = entry.inputs["rewards"], Groups(group_ids(entry))
    estimator = LeaveOneOut() if others else GroupMean()
    credit = Credit(
        rewards_B[:, None], torch.ones(len(rewards_B), 1, dtype=torch.bool), group_ids(entry)
    )
    baseline_B, std_B = rewards_B - estimator(credit).squeeze(1), groups.std(rewards_B)
    # S is the sum of squares about the mean; without response i it is S - (r_i - mean)^2 G/(G-1)
    if others:
        rest_B = (groups.size_B - 1).clamp(min=1)
        squares_B = std_B.square() * rest_B
        off_B = (rewards_B - groups.mean(rewards_B)).square() * groups.size_B / rest_B
        std_B = ((squares_B - off_B).clamp(min=0) / (rest_B - 1).clamp(min=1)).sqrt()
    return Ours(
        section="Advantages",
        row=estimator.name,
        setting=f"rewards - {described(estimator)}; Groups.std",
        outputs={
            "baseline": Values(baseline_B),
            "std": Values(std_B, None, torch.full_like(std_B, NEMO_STD)),
        },
    )


CREDIT = {
    ("TRL", "advantages"): trl_or_ms_swift,
    ("ms-swift", "compute_advantages"): trl_or_ms_swift,
    ("verl", "compute_grpo_outcome_advantage"): verl_grpo,
    ("verl", "compute_grpo_vectorized_outcome_advantage"): verl_grpo,
    ("verl", "compute_rloo_outcome_advantage"): verl_rloo,
    ("verl", "compute_rloo_vectorized_outcome_advantage"): verl_rloo,
    ("verl", "compute_reinforce_plus_plus_outcome_advantage"): verl_reinforce_pp,
    ("verl", "compute_reinforce_plus_plus_baseline_outcome_advantage"): verl_reinforce_pp_baseline,
    ("OpenRLHF", "reward_shaping"): openrlhf,
    ("ROLL", "compute_advantage"): roll_advantage,
    ("ROLL", "reward_norm"): roll_reward_norm,
    ("ROLL", "reward_postprocess"): roll_legacy_rewards,
    ("NeMo-RL", "calculate_baseline_and_std_per_prompt"): nemo_baseline,
}
