"""Advantages, reward shaping, KL and corrections once more, in plain Python loops: an oracle.

Nothing of gspo or torch is used here, and nothing is clever: sums are written as the formulas write
them, one response and one token at a time. Where a formula is usually computed by a recursion, here
is its closed form.

Arrays are [B, T]; `mask` says which tokens count; `groups` names the problem of every response.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Batch:
    """Random responses of unequal length, with holes in the mask and text of no account in the
    masked places.
    """

    token_rewards: np.ndarray
    values: np.ndarray
    logp: np.ndarray
    other: np.ndarray  # log-probs of another policy: the reference, or the sampler
    mask: np.ndarray
    groups: np.ndarray


def ragged(seed: int, spread: float = 0.5, last_only: bool = False) -> Batch:
    """Groups of 1, 2, 3 and 4 responses, interleaved and labelled at random; the group of 3 has
    equal rewards.

    One response has no token at all. `spread` is the deviation of the two policies' log-ratio. With
    `last_only` the rewards lie on the last token of each response, as without KL in the reward.
    """
    rng = np.random.default_rng(seed)
    groups = rng.permutation(
        np.repeat(rng.choice(np.arange(-50, 50), 4, replace=False), [1, 2, 3, 4])
    )
    rows, width = len(groups), 7
    mask = np.arange(width) < rng.integers(2, width + 1, (rows, 1))
    # the first token stays: no response empty by accident
    mask[:, 1:-1] &= rng.random((rows, width - 2)) < 0.8
    token_rewards = rng.standard_normal((rows, width))
    labels, sizes = np.unique(groups, return_counts=True)
    mask[np.flatnonzero(groups == labels[sizes == 4])[0]] = False
    for row in np.flatnonzero(groups == labels[sizes == 3]):
        token_rewards[row] = 0.0
        # not a binary fraction: a rounded mean differs from it
        token_rewards[row, own(mask[row])[-1]] = 0.1
    for row in range(rows) if last_only else ():
        token_rewards[row, own(mask[row])[:-1]] = 0.0
    other = -1 - 3 * rng.random((rows, width))
    logp = np.minimum(other + spread * rng.standard_normal((rows, width)), -0.01)
    return Batch(token_rewards, rng.standard_normal((rows, width)), logp, other, mask, groups)


def own(mask_row) -> list[int]:
    """Columns of the tokens that count."""
    return [t for t, counts in enumerate(mask_row) if counts]


def mean(xs) -> float:
    return sum(xs) / len(xs)


def std(xs) -> float:
    """ddof 1; 0 for fewer than two values and for values that are all the same."""
    if len(xs) < 2 or len(set(xs)) == 1:
        return 0.0
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def bounded(x: float, bound: float) -> float:
    return max(-bound, min(bound, x))


# Advantages


def response_rewards(token_rewards, mask) -> list[float]:
    return [sum(float(row[t]) for t in own(m)) for row, m in zip(token_rewards, mask, strict=True)]


def spread_out(scores, mask) -> np.ndarray:
    """The score of each response on every token that counts."""
    adv = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        for t in own(m):
            adv[i, t] = scores[i]
    return adv


def by_group(token_rewards, mask, groups, score, group_of_one: str = "zero", eps=0.0) -> np.ndarray:
    """score(reward, rewards of the whole group, rewards of the batch), where the group has two
    different rewards.
    """
    rewards, scores = response_rewards(token_rewards, mask), []
    for i, reward in enumerate(rewards):
        members = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i]]
        if len(members) == 1:
            scores.append((reward - 0.0) / (1.0 + eps) if group_of_one == "reward" else 0.0)
        else:
            scores.append(0.0 if len(set(members)) == 1 else score(reward, members, rewards))
    return spread_out(scores, mask)


def group_normalized(
    token_rewards, mask, groups, eps=1e-6, over="group", group_of_one="zero"
) -> np.ndarray:
    def score(reward, members, batch):
        return (reward - mean(members)) / (std(members if over == "group" else batch) + eps)

    return by_group(token_rewards, mask, groups, score, group_of_one, eps)


def group_mean(token_rewards, mask, groups, group_of_one="zero") -> np.ndarray:
    return by_group(
        token_rewards, mask, groups, lambda r, members, _: r - mean(members), group_of_one
    )


def rloo(token_rewards, mask, groups, group_of_one="zero") -> np.ndarray:
    def score(reward, members, _):
        others = list(members)
        others.remove(reward)
        return reward - mean(others)

    return by_group(token_rewards, mask, groups, score, group_of_one)


def returns(token_rewards, mask, gamma=1.0) -> np.ndarray:
    """sum_{u >= t} gamma^(u-t) r_u, where t and u number the tokens that count."""
    result = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        columns = own(m)
        for t, column in enumerate(columns):
            result[i, column] = sum(
                gamma ** (u - t) * token_rewards[i][columns[u]] for u in range(t, len(columns))
            )
    return result


def gae(token_rewards, mask, values, gamma=1.0, lam=0.95) -> np.ndarray:
    """sum_{u >= t} (gamma lam)^(u-t) delta_u with delta_u = r_u + gamma V_{u+1} - V_u and V = 0
    after the end.
    """
    result = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        columns = own(m)
        v = [values[i][column] for column in columns] + [0.0]
        delta = [
            token_rewards[i][column] + gamma * v[t + 1] - v[t] for t, column in enumerate(columns)
        ]
        for t, column in enumerate(columns):
            result[i, column] = sum(
                (gamma * lam) ** (u - t) * delta[u] for u in range(t, len(columns))
            )
    return result


def reinforce_pp(token_rewards, mask, groups, gamma=1.0, baseline="none") -> np.ndarray:
    raw = (
        returns(token_rewards, mask, gamma)
        if baseline == "none"
        else group_mean(token_rewards, mask, groups)
    )
    return whiten_tokens(raw, mask)


def whiten_tokens(adv, mask) -> np.ndarray:
    """(A - mean) / sqrt(var + 1e-8) over every token that counts; as it is where that is a single
    one.
    """
    sample = [float(adv[i][t]) for i, m in enumerate(mask) for t in own(m)]
    result = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        for t in own(m):
            result[i, t] = adv[i][t]
            if len(sample) > 1:
                result[i, t] = (adv[i][t] - mean(sample)) / math.sqrt(std(sample) ** 2 + 1e-8)
    return result


def whiten_responses(adv, mask) -> np.ndarray:
    """(A - mean) / (std + 1e-4) over the means of the responses that have tokens; as it is where
    that is one.
    """
    sample = [mean([float(adv[i][t]) for t in own(m)]) for i, m in enumerate(mask) if own(m)]
    result = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        for t in own(m):
            result[i, t] = (
                adv[i][t] if len(sample) < 2 else (adv[i][t] - mean(sample)) / (std(sample) + 1e-4)
            )
    return result


def clipped(adv, bound) -> np.ndarray:
    return np.array([[bounded(float(a), bound) for a in row] for row in adv])


# Reward shaping


def shape(
    rewards, groups, seen, shift="none", scale="none", clip=math.inf, eps=1e-6
) -> list[float]:
    """`seen`: every reward of the run, these included."""
    result = []
    for i, reward in enumerate(rewards):
        sample = {
            "batch": list(rewards),
            "group": [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i]],
            "running": list(seen),
        }
        x = reward - (0.0 if shift == "none" else mean(sample[shift]))
        if scale != "none" and std(sample[scale]) > 0:
            x /= std(sample[scale]) + eps
        result.append(bounded(x, clip))
    return result


def overlong(length: int, limit: int, cache: int, penalty: float) -> float:
    """DAPO, Eq 13: 0 if |y| <= L - C; ((L - C) - |y|) / C up to L; -1 beyond. Times the penalty."""
    if cache == 0 or length <= limit - cache:
        return 0.0
    if length <= limit:
        return penalty * ((limit - cache) - length) / cache
    return -penalty


# KL


def kl(
    p: float, q: float, estimator: str, bound: float = math.inf, value_bound: float = math.inf
) -> float:
    """Of one token with probability p under the policy and q under the reference."""
    d = bounded(math.log(p / q), bound)
    r = math.exp(-d)  # q / p
    return bounded(
        {"k1": -math.log(r), "k2": d * d / 2, "k3": r - 1 - math.log(r), "abs": abs(d)}[estimator],
        value_bound,
    )


def kl_gradient(
    p: float, q: float, estimator: str, bound: float = math.inf, value_bound: float = math.inf
) -> float:
    """Its derivative by log p: 0 where a bound acts."""
    d = math.log(p / q)
    if abs(d) > bound or abs(kl(p, q, estimator)) > value_bound:
        return 0.0
    return {"k1": 1.0, "k2": d, "k3": 1 - q / p, "abs": math.copysign(1.0, d)}[estimator]


def kl_times_ratio(ps, qs, olds, estimator: str, level: str) -> list[float]:
    """The estimates of one response's tokens, each times p / old of the token, or of the response
    (geometric mean).
    """
    sequence = (math.prod(ps) / math.prod(olds)) ** (1 / len(ps))
    ratios = [sequence if level == "sequence" else p / old for p, old in zip(ps, olds, strict=True)]
    return [ratio * kl(p, q, estimator) for ratio, p, q in zip(ratios, ps, qs, strict=True)]


def peers_coefficient(beta: float, measured: float, target: float, n: int, horizon: float) -> float:
    """arXiv:1909.08593, section 2.2, as verl, ROLL and OpenRLHF have it."""
    return beta * (1 + bounded(measured / target - 1, 0.2) * n / horizon)


# Corrections


def weights(old, mu, mask, level: str) -> np.ndarray:
    """pi_old / mu of the token, its product over the response, or the geometric mean; within e^-20
    and e^20.
    """
    result = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        ratio = {t: math.exp(old[i][t]) / math.exp(mu[i][t]) for t in own(m)}
        for t in own(m):
            product = math.prod(ratio.values())
            w = {"token": ratio[t], "sequence": product, "geometric": product ** (1 / len(ratio))}[
                level
            ]
            result[i, t] = min(max(w, math.exp(-20)), math.exp(20))
    return result


def normalized(w, mask, level="token") -> np.ndarray:
    """Divided by their mean over the tokens, or the responses, that count; as they are where all
    are 0.
    """
    rows = [[float(w[i][t]) for t in own(m)] for i, m in enumerate(mask)]
    if level != "token":
        rows = [[sum(row) / len(row)] for row in rows if row]
    flat = [x for row in rows for x in row]
    return np.asarray(w) if sum(flat) == 0 else np.asarray(w) / (sum(flat) / len(flat))


def tis(old, mu, mask, level="token", low=0.0, high=2.0) -> np.ndarray:
    w = weights(old, mu, mask, level)
    return spread_tokens(mask, lambda i, t: min(max(w[i, t], low), high))


def mis(old, mu, mask, level="token", judged_by="", low=0.0, high=2.0) -> np.ndarray:
    w, judge = weights(old, mu, mask, level), weights(old, mu, mask, judged_by or level)
    return spread_tokens(mask, lambda i, t: w[i, t] if low <= judge[i, t] <= high else 0.0)


def rejection(old, mu, mask, measure="ratio", level="token", low=0.0, high=2.0) -> np.ndarray:
    w = weights(old, mu, mask, "token")

    def kept(i, t):
        def of_token(u):
            r = w[i, u]
            return {"ratio": r, "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[measure]

        values = [of_token(u) for u in own(mask[i])]
        total = math.prod(values) if measure == "ratio" else sum(values)
        average = total ** (1 / len(values)) if measure == "ratio" else total / len(values)
        value = {
            "token": of_token(t),
            "sequence": total,
            "geometric": average,
            "largest": max(values),
        }[level]
        return 1.0 if low <= value <= high else 0.0

    return spread_tokens(mask, kept)


def spread_tokens(mask, value) -> np.ndarray:
    result = np.zeros(np.shape(mask))
    for i, m in enumerate(mask):
        for t in own(m):
            result[i, t] = value(i, t)
    return result
