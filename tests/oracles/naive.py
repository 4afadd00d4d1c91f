"""The objectives and aggregations once more, written from the papers, in plain Python and
probabilities: an oracle.

Nothing of gspo or torch is used here, and nothing is clever: one response at a time, one token at a
time. `sg` is what the papers call the stop-gradient: the probabilities as they are, held fixed
while `pi` moves. So a difference quotient of these losses in `pi` is the gradient also of the
objectives that contain a stop-gradient.

There is no numerical bound on log-ratios here: compare only where none acts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass
class Batch:
    """Arrays [B, T]: log-probs under pi, pi_old and the sampler mu; advantages; which tokens count."""

    logp: np.ndarray
    old: np.ndarray
    mu: np.ndarray
    adv: np.ndarray
    mask: np.ndarray

    def map(self, change) -> Batch:
        return Batch(*(change(getattr(self, field.name)) for field in fields(self)))


def ragged(
    seed: int, scale: float, rows: int = 12, width: int = 9, by_token: bool = False
) -> Batch:
    """Random responses of 1 to `width` tokens, with holes in the mask (as multi-turn responses have
    them).

    `scale` is the standard deviation of the log-ratios. One advantage per response (one of them 0),
    or per token.
    """
    rng = np.random.default_rng(seed)
    old = -1 - 3 * rng.random((rows, width))
    # a probability is below 1
    logp = np.minimum(old + scale * rng.standard_normal((rows, width)), -0.01)
    mu = np.minimum(old + 0.3 * scale * rng.standard_normal((rows, width)), -0.01)
    adv = rng.standard_normal((rows, width if by_token else 1)) * np.ones((1, width))
    adv[1] = 0.0
    mask = np.arange(width) < rng.integers(1, width + 1, (rows, 1))
    mask[0] = [True, False, False] + [True] * (width - 3)
    mask[2] = [False, True] * (width // 2) + [False] * (width % 2)
    return Batch(logp, old, mu, adv, mask)


@dataclass
class Response:
    """The tokens of one response that count: probabilities, and the advantage of each."""

    pi: list[float]
    sg: list[float]  # pi, held fixed
    old: list[float]
    mu: list[float]
    adv: list[float]
    turns: list[tuple[int, int]]  # the first token of each turn and the one after its last
    ess: float  # of the token ratios sg / old of the whole batch

    def __len__(self) -> int:
        return len(self.pi)


@dataclass
class Token:
    """What an objective says of one token."""

    loss: float
    weight: float  # w in: the gradient of -J is -w A grad log pi
    active: bool  # the clip or mask removed its gradient
    outside: bool  # the ratio (for DPPO the difference of probabilities) lies outside the range
    pull: float = 0.0  # the gradient of the loss that does not come from the advantage


def clip(x: float, lowest: float, highest: float) -> float:
    return min(max(x, lowest), highest)


def sequence_ratio(pi: list[float], old: list[float]) -> float:
    """( pi(y|x) / pi_old(y|x) ) ^ (1/|y|), the probability of a response being the product over its
    tokens.
    """
    return (math.prod(pi) / math.prod(old)) ** (1 / len(pi))


def ppo_token(ratio: float, adv: float, low: float, high: float, dual: float | None) -> Token:
    """arXiv:1707.06347 Eq 7; dual clip, arXiv:1912.09729: max( min(r A, clip(r) A), c A ) for A <
    0.
    """
    gain = min(ratio * adv, clip(ratio, 1 - low, 1 + high) * adv)
    if dual is not None and adv < 0:
        gain = max(gain, dual * adv)
    good_enough = adv > 0 and ratio > 1 + high
    bad_enough = adv < 0 and ratio < 1 - low
    far_too_bad = dual is not None and adv < 0 and ratio > dual
    active = good_enough or bad_enough or far_too_bad
    return Token(-gain, 0.0 if active else ratio, active, not 1 - low <= ratio <= 1 + high)


# ---- one ratio per response
# ------------------------------------------------------------------------------------------


def gspo(y: Response, clip_low, clip_high, dual_clip) -> list[Token]:
    """arXiv:2507.18071, Eq 5 and 7. The response's own objective stands at each of its tokens."""
    s = sequence_ratio(y.pi, y.old)
    return [ppo_token(s, adv, clip_low, clip_high, dual_clip) for adv in y.adv]


def gspo_token(y: Response, clip_low, clip_high, dual_clip) -> list[Token]:
    """arXiv:2507.18071, Eq 13-14: s_it = sg[s_i] pi(y_it) / sg[pi(y_it)]."""
    s = sequence_ratio(y.sg, y.old)
    return [
        ppo_token(s * pi / sg, adv, clip_low, clip_high, dual_clip)
        for pi, sg, adv in zip(y.pi, y.sg, y.adv, strict=True)
    ]


def luspo(y: Response, clip_low, clip_high, dual_clip) -> list[Token]:
    """arXiv:2602.05261: |y_i| times GSPO's."""
    tokens = gspo(y, clip_low, clip_high, dual_clip)
    return [
        replace(token, loss=len(y) * token.loss, weight=len(y) * token.weight) for token in tokens
    ]


def gmpo(y: Response, clip_low, clip_high) -> list[Token]:
    """arXiv:2507.20673: the geometric mean of the ratios, each held back on the side to which A
    pushes it.
    """
    adv = y.adv[0]
    ratios = [pi / old for pi, old in zip(y.pi, y.old, strict=True)]
    lowest, highest = math.exp(-clip_low), math.exp(clip_high)
    if adv > 0:
        held = [min(w, highest) for w in ratios]
    elif adv < 0:
        held = [max(w, lowest) for w in ratios]
    else:
        held = [1.0 for w in ratios]
    mean = math.prod(held) ** (1 / len(y))
    active = [adv != 0 and w != h for w, h in zip(ratios, held, strict=True)]
    return [
        Token(-mean * adv, 0.0 if gone else mean, gone, not lowest <= w <= highest)
        for w, gone in zip(ratios, active, strict=True)
    ]


# ---- one ratio per token
# ---------------------------------------------------------------------------------------------


def grpo(y: Response, clip_low, clip_high, dual_clip) -> list[Token]:
    """arXiv:2507.18071, Eq 2-3. PPO, Dr.GRPO and DAPO have the same per token."""
    return [
        ppo_token(pi / old, adv, clip_low, clip_high, dual_clip)
        for pi, old, adv in zip(y.pi, y.old, y.adv, strict=True)
    ]


def reinforce(y: Response) -> list[Token]:
    return [
        Token(-adv * math.log(pi), 1.0, False, False) for pi, adv in zip(y.pi, y.adv, strict=True)
    ]


def cispo(y: Response, clip_low, clip_high, mask_harmful) -> list[Token]:
    """arXiv:2506.13585, Eq 4-5; with mask_harmful Eq 6-7, the mask of PPO."""
    tokens = []
    for pi, sg, old, adv in zip(y.pi, y.sg, y.old, y.adv, strict=True):
        w = sg / old
        masked = mask_harmful and (
            (adv > 0 and w > 1 + clip_high) or (adv < 0 and w < 1 - clip_low)
        )
        weight = 0.0 if masked else clip(w, 1 - clip_low, 1 + clip_high)
        tokens.append(
            Token(
                -weight * adv * math.log(pi), weight, masked, w < 1 - clip_low or w > 1 + clip_high
            )
        )
    return tokens


def minirl(y: Response, clip_low, clip_high) -> list[Token]:
    """arXiv:2512.01374: M sg[w] A log pi."""
    tokens = []
    for pi, sg, old, adv in zip(y.pi, y.sg, y.old, y.adv, strict=True):
        w = sg / old
        masked = (adv > 0 and w > 1 + clip_high) or (adv < 0 and w < 1 - clip_low)
        weight = 0.0 if masked else w
        tokens.append(
            Token(
                -weight * adv * math.log(pi), weight, masked, w < 1 - clip_low or w > 1 + clip_high
            )
        )
    return tokens


def dppo(y: Response, delta) -> list[Token]:
    """arXiv:2602.04879, binary total variation, anchored to the sampler mu; the ratio is not
    clipped.
    """
    tokens = []
    for pi, sg, mu, adv in zip(y.pi, y.sg, y.mu, y.adv, strict=True):
        masked = (adv > 0 and sg - mu > delta) or (adv < 0 and mu - sg > delta)
        kept = 0.0 if masked else 1.0
        tokens.append(Token(-kept * pi / mu * adv, kept * pi / mu, masked, abs(sg - mu) > delta))
    return tokens


def sapo(y: Response, tau_positive, tau_negative, level) -> list[Token]:
    """arXiv:2511.20347: f(r) = 4/tau sigmoid(tau (r - 1)), f'(r) = sech^2 x = 1 - tanh^2 x, x =
    tau/2 (r - 1).
    """
    tokens = []
    for pi, old, adv in zip(y.pi, y.old, y.adv, strict=True):
        r = pi / old if level == "token" else sequence_ratio(y.pi, y.old)
        tau = tau_positive if adv > 0 else tau_negative
        gate = 4 / tau / (1 + math.exp(-tau * (r - 1)))
        tokens.append(Token(-gate * adv, r * (1 - math.tanh(tau / 2 * (r - 1)) ** 2), False, False))
    return tokens


# ---- formulas of 2026
# ------------------------------------------------------------------------------------------------


def gspo_turn(y: Response, clip_low, clip_high, dual_clip) -> list[Token]:
    """arXiv:2511.20718: GSPO's ratio of each turn, with the gradient of the token's own log-prob."""
    tokens = []
    for begin, end in y.turns:
        turn = slice(begin, end)
        s = sequence_ratio(y.sg[turn], y.old[turn])
        for pi, sg, adv in zip(y.pi[turn], y.sg[turn], y.adv[turn], strict=True):
            tokens.append(ppo_token(s * pi / sg, adv, clip_low, clip_high, dual_clip))
    return tokens


def vespo(y: Response, k_positive, lambda_positive, k_negative, lambda_negative) -> list[Token]:
    """arXiv:2602.10693: phi(W) = W^k e^(lambda (1 - W)), W the probability ratio of the response."""
    product = math.prod(y.sg) / math.prod(y.old)
    tokens = []
    for pi, adv in zip(y.pi, y.adv, strict=True):
        k, lam = (k_positive, lambda_positive) if adv >= 0 else (k_negative, lambda_negative)
        phi = product**k * math.exp(lam * (1 - product))
        tokens.append(Token(-phi * adv * math.log(pi), phi, False, False))
    return tokens


def prefix_ratios(y: Response, prefix: str) -> list[float]:
    ratios = []
    for t in range(1, len(y) + 1):
        product = math.prod(y.sg[:t]) / math.prod(y.old[:t])
        ratios.append(product if prefix == "product" else product ** (1 / t))
    return ratios


def ctpo(y: Response, clip_low, clip_high, dual_clip, prefix) -> list[Token]:
    """arXiv:2605.07331: the ratio of the prefix."""
    ratios = prefix_ratios(y, prefix)
    return [
        ppo_token(r * pi / sg, adv, clip_low, clip_high, dual_clip)
        for r, pi, sg, adv in zip(ratios, y.pi, y.sg, y.adv, strict=True)
    ]


def ctpo_la(y: Response, clip_low, clip_high, dual_clip, prefix, power) -> list[Token]:
    """arXiv:2605.07331: the same with the range [e^(-low t^p), e^(high t^p)] at position t."""
    tokens = []
    for t, r in enumerate(prefix_ratios(y, prefix), start=1):
        low = 1 - math.exp(-clip_low * t**power)
        high = math.exp(clip_high * t**power) - 1
        dual = None if dual_clip is None else math.exp(dual_clip * t**power)
        tokens.append(ppo_token(r * y.pi[t - 1] / y.sg[t - 1], y.adv[t - 1], low, high, dual))
    return tokens


def dro(y: Response, beta) -> list[Token]:
    """verl: A log pi - beta/2 log(pi/pi_old)^2."""
    tokens = []
    for pi, old, adv in zip(y.pi, y.old, y.adv, strict=True):
        d = math.log(pi / old)
        loss = beta / 2 * d * d - adv * math.log(pi)
        tokens.append(Token(loss, 1.0, False, False, pull=beta * d))
    return tokens


def engine_ratio(y: Response, removed, adv_scale, kl_coef) -> list[Token]:
    """prime-rl: the ratio to the sampler under a mask, and kl_coef log(pi/mu)^2 for every token."""
    tokens = []
    for pi, sg, mu, adv in zip(y.pi, y.sg, y.mu, y.adv, strict=True):
        gone, outside = removed(sg - mu, adv)
        weight = 0.0 if gone else adv_scale * pi / mu
        log = math.log(pi / mu)
        loss = kl_coef * log * log - weight * adv
        tokens.append(Token(loss, weight, gone and adv != 0, outside, pull=2 * kl_coef * log))
    return tokens


def prime_rl(y: Response, delta_low, delta_high, adv_scale, kl_coef) -> list[Token]:
    def removed(change: float, adv: float) -> tuple[bool, bool]:
        gone = change > delta_high if adv > 0 else change < -delta_low
        return gone, change > delta_high or change < -delta_low

    return engine_ratio(y, removed, adv_scale, kl_coef)


def prime_rl_ipo(y: Response, delta, adv_scale, kl_coef) -> list[Token]:
    return engine_ratio(
        y, lambda change, _: (abs(change) > delta, abs(change) > delta), adv_scale, kl_coef
    )


def p3o(y: Response) -> list[Token]:
    """FeynRL: -sg[min(w, ESS)] A log pi + (1 - ESS) k3. `y.ess` is that of the whole batch."""
    tokens = []
    for pi, sg, old, adv in zip(y.pi, y.sg, y.old, y.adv, strict=True):
        w = sg / old
        weight = min(w, y.ess)
        d = math.log(pi / old)
        loss = (1 - y.ess) * (d + old / pi - 1) - weight * adv * math.log(pi)
        pull = (1 - y.ess) * (1 - old / pi)
        tokens.append(Token(loss, weight, False, w > y.ess, pull))
    return tokens


def effective_share(ratios: list[float]) -> float:
    """(sum w)^2 / (n sum w^2)."""
    return sum(ratios) ** 2 / (len(ratios) * sum(w * w for w in ratios))


FORMULAS = {
    "gspo_turn": gspo_turn, "vespo": vespo, "ctpo": ctpo, "ctpo_la": ctpo_la, "dro": dro,
    "prime_rl": prime_rl, "prime_rl_ipo": prime_rl_ipo, "p3o": p3o,
    "gspo": gspo, "gspo_all_tokens": gspo, "gspo_token": gspo_token, "luspo": luspo, "gmpo": gmpo, "grpo": grpo,
    "drgrpo": grpo, "dapo": grpo, "ppo": grpo, "reinforce": reinforce, "cispo": cispo, "minirl": minirl, "dppo": dppo,
    "sapo": sapo,
}  # fmt: skip


@dataclass
class Told:
    """The same as Token, as arrays [B, T]; 0 and False at tokens that do not count."""

    loss: np.ndarray
    weight: np.ndarray
    active: np.ndarray
    outside: np.ndarray
    pull: np.ndarray


def objective(name: str, batch: Batch, sg: np.ndarray | None = None, **settings) -> Told:
    """What the objective says of every token; `sg`, the log-probs held fixed, are batch.logp if not
    given.
    """
    shape = batch.mask.shape
    told = Told(
        np.zeros(shape), np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool),
        np.zeros(shape),
    )  # fmt: skip
    held = batch.logp if sg is None else sg
    ess = effective_share([math.exp(d) for d in (held - batch.old)[batch.mask]])
    for i in range(len(batch.mask)):
        places = [t for t in range(shape[1]) if batch.mask[i, t]]
        if not places:
            continue
        probabilities = [
            [math.exp(values[i, t]) for t in places]
            for values in (batch.logp, held, batch.old, batch.mu)
        ]
        starts = [k for k, t in enumerate(places) if k == 0 or places[k - 1] != t - 1]
        turns = list(zip(starts, [*starts[1:], len(places)], strict=True))
        advantages = [float(batch.adv[i, t]) for t in places]
        response = Response(*probabilities, advantages, turns, ess)
        for t, token in zip(places, FORMULAS[name](response, **settings), strict=True):
            told.loss[i, t], told.weight[i, t] = token.loss, token.weight
            told.active[i, t], told.outside[i, t] = token.active, token.outside
            told.pull[i, t] = token.pull
    return told


def aggregate(loss, mask, mode: str, rows: str = "nonempty", length: int = 0) -> float:
    """The four formulas of gspo.algorithm.aggregation's docstring; length 0 is the number of
    columns.
    """
    values = [
        [float(loss[i][t]) for t in range(len(mask[i])) if mask[i][t]] for i in range(len(mask))
    ]
    nonempty = [row for row in values if row]
    if mode == "token-mean":
        return sum(x for row in nonempty for x in row) / sum(len(row) for row in nonempty)
    count = {"nonempty": len(nonempty), "all": len(values), "one": 1}[rows]
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in nonempty) / count
    if mode == "seq-mean-token-sum":
        return sum(sum(row) for row in nonempty) / count
    if mode == "seq-mean-token-sum-norm":
        return sum(sum(row) / (length or len(mask[0])) for row in nonempty) / count
    raise ValueError(mode)


def slopes(name: str, batch: Batch, step: float = 1e-6, **settings) -> np.ndarray:
    """Difference quotients of the seq-mean-token-mean of the losses, token by token, the
    stop-gradients held.
    """
    found = np.zeros(batch.mask.shape)
    for i, t in np.argwhere(batch.mask):
        ends = []
        for sign in (1, -1):
            logp = batch.logp.copy()
            logp[i, t] += sign * step
            told = objective(name, replace(batch, logp=logp), sg=batch.logp, **settings)
            ends.append(aggregate(told.loss, batch.mask, "seq-mean-token-mean"))
        found[i, t] = (ends[0] - ends[1]) / (2 * step)
    return found
