"""The softmax over the kept tokens: by hand, its gradient, its limits, and on both forward paths."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from builders import batch_of, sample, small_policy
from gspo.data.batch import KeptSets
from gspo.data.kept_tokens import KeptTokens
from gspo.model.forward import kernels
from gspo.model.forward.kept_softmax import KeptColumns, all_columns
from gspo.model.forward.kernels import TokenLogProbs

LOGITS = torch.tensor([[1.0, 2.0, 0.0, -1.0, 3.0]]).log_softmax(-1)


def columns(lists: list[list[int]]) -> KeptColumns:
    counts = torch.tensor([len(ids) for ids in lists])
    ids = np.array([token for ids in lists for token in ids], np.uint16)
    return all_columns(KeptSets(ids, counts[None].cumsum(1) - counts, counts[None]))


def by_identity(logits, targets, lists, temperature=1.0, entropy=True):
    """TokenLogProbs of given logits: the head is the identity."""
    return TokenLogProbs.apply(
        logits, torch.eye(logits.shape[1]), targets, temperature, entropy, False, columns(lists)
    )


def test_by_hand():
    """Of the logits 1 2 0 -1 3 the tokens 1 and 2 are kept: 1 / (1 + e^-2) = .8808 and .1192."""
    targets = torch.tensor([1, 2])
    logp, entropy = by_identity(LOGITS.repeat(2, 1), targets, [[1, 2], [2, 1]])
    p, q = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))
    torch.testing.assert_close(logp, torch.tensor([math.log(p), math.log(q)]))
    spread = -p * math.log(p) - q * math.log(q)
    torch.testing.assert_close(entropy, torch.tensor([spread, spread]))
    # the temperature comes before the softmax: the difference of 2 becomes 4
    logp, _ = by_identity(LOGITS, torch.tensor([2]), [[1, 2]], temperature=0.5)
    torch.testing.assert_close(logp, torch.tensor([-math.log(1 + math.exp(4))]))


def test_the_sum_of_squares_by_hand(monkeypatch):
    """Of the tokens 1 and 2 it is .8808^2 + .1192^2, of a single token 1. In chunks of two tokens.

    Without list it is that of the whole vocabulary."""
    monkeypatch.setattr(kernels, "CHUNK", {"cpu": 10})
    p = 1 / (1 + math.exp(-2))
    kept = columns([[], [2, 1], [3], [], [1, 2]])
    ours = kernels.sums_of_squares(LOGITS.repeat(5, 1), torch.eye(5), 1.0, kept=kept)
    pair = p**2 + (1 - p) ** 2
    whole = LOGITS.exp().square().sum().item()
    torch.testing.assert_close(ours, torch.tensor([whole, pair, 1.0, whole, pair]))


def test_the_gradient_is_that_of_the_kept_logits_and_exactly_zero_elsewhere():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    lists = [[0, 3, 5], [], [8], [1, 2, 3, 4, 5, 6, 7], [4, 0], list(range(9))]
    targets = torch.tensor([3, 2, 8, 7, 0, 1])
    kept = torch.zeros(6, 9, dtype=torch.bool)
    for row, ids in enumerate(lists):
        kept[row, ids or slice(None)] = True
    leaf = logits.clone().requires_grad_()
    logp, entropy = by_identity(leaf, targets, lists, temperature=0.7)
    slope, steep = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad((slope * logp + steep * entropy).sum(), leaf)
    assert (grad[~kept] == 0).all() and (grad[kept & (kept.sum(-1) > 1)[:, None]] != 0).all()
    plain = logits.double().requires_grad_()
    expected_logp = []
    expected_entropy = []
    for row in range(6):
        inside = (plain[row][kept[row]] / 0.7).log_softmax(-1)
        index = int(kept[row][: targets[row]].sum())
        expected_logp.append(inside[index])
        expected_entropy.append(-(inside.exp() * inside).sum())
    loss = (slope * torch.stack(expected_logp) + steep * torch.stack(expected_entropy)).sum()
    (expected,) = torch.autograd.grad(loss, plain)
    torch.testing.assert_close(logp.double(), torch.stack(expected_logp), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grad.double(), expected, atol=1e-5, rtol=1e-4)


def test_a_single_kept_token_has_log_prob_0_and_no_gradient():
    leaf = LOGITS.repeat(2, 1).requires_grad_()
    logp, entropy = by_identity(leaf, torch.tensor([3, 4]), [[3], [4]])
    assert logp.tolist() == [0.0, 0.0] and entropy.tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad((logp + entropy).sum(), leaf)
    assert (grad == 0).all(), "also for an unlikely token"


def test_the_whole_vocabulary_gives_the_same_bits(monkeypatch):
    """In chunks of two tokens. As a list of all tokens it gives the same sums in another order."""
    monkeypatch.setattr(kernels, "CHUNK", {"cpu": 30})
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (7, 13))
    targets = torch.arange(7)
    results = []
    for kept in (None, columns([[]] * 7), columns([list(range(13))[::-1]] * 7)):
        logp, entropy = TokenLogProbs.apply(x, weight, targets, 0.7, True, False, kept)
        grads = torch.autograd.grad((logp + 0.3 * entropy).sum(), (x, weight))
        results.append([logp, entropy, *grads])
    plain, empty, every = results
    assert all(torch.equal(a, b) for a, b in zip(plain, empty, strict=True))
    for a, b in zip(plain, every, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_normalizers_of_the_whole_vocabulary_in_float64():
    logits = torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[3] += 700  # exp would overflow
    norm, logp = logits.logsumexp(-1), logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    zeros = torch.zeros_like(norm)
    lists = [list(range(40)), list(range(40)), [], list(range(40))[::-1], [7]]
    ours, our_entropy = columns(lists).normalizers(logits, 0, zeros, zeros)
    for row in (0, 1, 3):
        torch.testing.assert_close(ours[row], norm[row], atol=1e-12, rtol=1e-14)
        torch.testing.assert_close(our_entropy[row], entropy[row], atol=1e-10, rtol=0)
    assert (ours[2], our_entropy[2]) == (0, 0), "those that are given, where nothing is excluded"
    assert (ours[4], our_entropy[4]) == (logits[4, 7], 0)


def test_chunks_find_their_own_lists(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (7, 13))
    lists = [[row, 12, 2 * row] if row % 3 else [] for row in range(7)]
    kept, targets = columns(lists), torch.arange(7)
    results = []
    for logits in (1000, 26):
        monkeypatch.setattr(kernels, "CHUNK", {"cpu": logits})
        logp, entropy = TokenLogProbs.apply(x, weight, targets, 1.0, True, False, kept)
        results.append([logp, entropy, *torch.autograd.grad((logp + entropy).sum(), (x, weight))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def with_random_lists(policy, responses):
    """Responses with lists that hold the sampled token, of one token to the whole vocabulary."""
    rng = np.random.default_rng(0)
    vocabulary = policy.model.config.vocab_size
    for r in responses:
        lists = []
        for token in r.token_ids:
            others = rng.permutation([i for i in range(vocabulary) if i != token])
            count = rng.choice([0, 0, 1, 3, vocabulary - 1])
            lists.append([token, *others[:count].tolist()] if rng.random() < 0.8 else [])
        r.kept = KeptTokens.of_lists(lists, vocabulary)
    return responses


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_forwards_and_the_plain_softmax_agree(temperature):
    policy = small_policy()
    policy.temperature = temperature
    responses = with_random_lists(policy, sample(policy, group_size=2))
    batch = batch_of(policy, responses)
    policy.enable_entropy_gradient()
    plain = policy.forward(replace(batch, kept=None))
    outputs = []
    grads = []
    for network in (policy.network, None):
        policy.network = network
        output = policy.forward(batch, sum_pi_squared=True)
        policy.model.zero_grad()
        (output.logp_BT + 0.1 * output.entropy_BT)[batch.mask_BT].sum().backward()
        grads.append(policy.model.lm_head.weight.grad.clone())
        outputs.append(output)
    ours, own = outputs
    mask_BT = batch.mask_BT
    for name in ("logp_BT", "entropy_BT", "sum_pi_squared_BT"):
        a, b = getattr(ours, name)[mask_BT], getattr(own, name)[mask_BT]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-3)
    is_whole = mask_BT & (batch.kept.counts_BT == 0)
    torch.testing.assert_close(ours.logp_BT[is_whole], plain.logp_BT[is_whole])
    # fewer tokens share the probability, so each has more
    assert (ours.logp_BT >= plain.logp_BT - 1e-5)[mask_BT].all()
    is_single = batch.kept.counts_BT == 1
    assert (ours.logp_BT[is_single] == 0).all() and (ours.sum_pi_squared_BT[is_single] == 1).all()


def test_the_exact_gradient_of_the_truncated_policy():
    """E_K[r grad log pi_K] is the gradient of E_K[r]; with log-probs of the whole distribution it
    is not, which is what the kept tokens are for."""
    logits = torch.tensor([1.0, 0.2, -0.5, 0.7], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.3], dtype=torch.float64)
    kept = torch.tensor([0, 1, 3])
    p_K = logits[kept].softmax(-1)
    (exact,) = torch.autograd.grad((p_K * rewards[kept]).sum(), logits, retain_graph=True)
    weight = (p_K * rewards[kept]).detach()
    (of_kept,) = torch.autograd.grad(
        (weight * logits[kept].log_softmax(-1)).sum(), logits, retain_graph=True
    )
    (of_whole,) = torch.autograd.grad((weight * logits.log_softmax(-1)[kept]).sum(), logits)
    torch.testing.assert_close(of_kept, exact, atol=1e-12, rtol=0)
    assert (of_whole - exact).abs().max() > 0.05
