"""top_p, top_k and min_p: which tokens are drawn, with which log-probs, and what stays as it was
without them.
"""

import numpy as np
import pytest
import torch

from builders import problems, small_policy
from gspo.evaluation.settings import EvaluationSettings
from gspo.rollout.engines.local import LocalEngine, draw
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.truncation import Truncation, kept_tokens
from gspo.rollout.settings import RolloutSettings
from refusals import refuses

P = torch.tensor([0.05, 0.5, 0.15, 0.3])  # in the order of the vocabulary


def kept(p=P, **rules) -> list[int]:
    return kept_tokens(p.log()[None], Truncation(**rules))[0].nonzero().flatten().tolist()


def test_the_rules_by_hand():
    assert kept() == [0, 1, 2, 3]
    assert kept(top_p=0.4) == [1], "at least one"
    assert kept(top_p=0.6) == [1, 3], "the token that reaches top_p is kept"
    assert kept(top_p=0.81) == [1, 2, 3]
    assert kept(top_k=1) == [1] and kept(top_k=3) == [1, 2, 3] and kept(top_k=9) == [0, 1, 2, 3]
    assert kept(min_p=0.31) == [1, 3], "0.15 < 0.31 * 0.5"
    assert kept(min_p=0.29) == [1, 2, 3]
    even = torch.tensor([0.2, 0.3, 0.3, 0.2])
    assert kept(even, top_k=1) == [1, 2], "as likely as the first"
    assert kept(even, top_p=0.29) == [1], "the smaller number of two that are equally likely"


def test_each_rule_measures_what_the_ones_before_have_left():
    assert kept(top_p=0.6) == [1, 3]
    assert kept(top_k=2, top_p=0.6) == [1], ".5 of .8 is .625 already"
    assert kept(min_p=0.5, top_p=0.6) == [1], "the same two are left by min_p"


def test_tokens_are_drawn_by_hand_and_their_log_probs_are_of_the_whole_distribution():
    """Token 1 and 3 are kept, .5 and .3 of .8: the border lies at .625."""
    u = torch.tensor([0.0, 0.6249, 0.6251, 1 - 2**-53], dtype=torch.float64)
    tokens, logp = draw(P.log().expand(4, -1), u, 1.0, Truncation(top_p=0.6))
    assert tokens.tolist() == [1, 1, 3, 3]
    torch.testing.assert_close(logp, P.log()[tokens])
    squared = P**2 / (P**2).sum()  # temperature 0.5: .0069 .685 .0616 .247
    tokens, logp = draw(P.log().expand(4, -1), u, 0.5, Truncation(top_p=0.6))
    assert tokens.tolist() == [1, 1, 1, 1], (
        "the truncation sees the distribution at the temperature"
    )
    torch.testing.assert_close(logp, squared.log()[tokens])


@pytest.mark.parametrize(
    "rules", [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 4}]
)
def test_draw_follows_the_truncated_distribution(rules):
    logits = torch.tensor([2.0, 0.0, -1.0, -torch.inf, 1.0, 1.5, 0.5])
    p = logits.softmax(-1)
    p = torch.where(kept_tokens(p.log()[None], Truncation(**rules))[0], p, 0.0)
    u = torch.from_numpy(np.random.default_rng(0).random(40_000))
    tokens, _ = draw(logits.expand(len(u), -1), u, 1.0, Truncation(**rules))
    counts, expected = torch.bincount(tokens, minlength=7).double(), (p / p.sum()).double() * len(u)
    assert (counts[expected == 0] == 0).all() and 1 < (expected > 0).sum() < 6
    seen = expected > 0
    chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    assert chi_square < 22.5, "p = .0002 at 4 degrees of freedom, less at fewer"


def test_without_rules_the_same_bits(moe):
    """Also where a rule is there that leaves nothing out."""
    engine = LocalEngine(moe)
    plain, none, all_of_them = (
        [
            (r.token_ids, r.logprobs.tolist())
            for g in engine.generate(SamplingRequest(problems(), 3, s, (1, "t")))
            for r in g
        ]
        for s in (
            Sampling(1.0, 25),
            Sampling(1.0, 25, top_p=1.0, top_k=0, min_p=0.0),
            Sampling(1.0, 25, top_k=len(moe.tokenizer)),
        )
    )
    assert plain == none == all_of_them


@pytest.mark.parametrize("rules", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_truncated_response_depends_on_no_neighbour_and_has_the_policys_log_probs(rules):
    policy = small_policy()
    policy.temperature = 0.7
    sampling = Sampling(0.7, 25, **rules)
    together = LocalEngine(policy).generate(SamplingRequest(problems(), 4, sampling, (1, "t")))
    engine = LocalEngine(policy, batch_rows=4)
    alone = [engine.generate(SamplingRequest([p], 4, sampling, (1, "t")))[0] for p in problems()]
    assert [[r.token_ids for r in g] for g in together] == [[r.token_ids for r in g] for g in alone]
    for r in (r for group in together for r in group):
        ids = torch.tensor([r.prompt_ids + r.token_ids])
        with torch.no_grad():
            logp_TV = (policy.model(ids).logits / 0.7).log_softmax(-1)[
                0, len(r.prompt_ids) - 1 : -1
            ]
        chosen_T1 = torch.tensor(r.token_ids)[:, None]
        np.testing.assert_allclose(r.logprobs, logp_TV.gather(-1, chosen_T1)[:, 0], atol=2e-5)
        assert kept_tokens(logp_TV, sampling).gather(-1, chosen_T1).all()


def test_settings_reach_the_sampling():
    rollout = RolloutSettings(top_p=0.9, top_k=20, min_p=0.01, token_budget=8, in_flight=64)
    assert rollout.sampling(1) == Sampling(1.0, 80, 8, top_p=0.9, top_k=20, min_p=0.01)
    evaluation = EvaluationSettings(temperature=0.6, top_p=0.95, top_k=20)
    assert evaluation.sampling(9) == Sampling(0.6, 9, top_p=0.95, top_k=20)
    assert evaluation.rules == {"top_p": 0.95, "top_k": 20} and EvaluationSettings().rules == {}


def test_what_greedy_would_not_read_is_refused():
    with refuses("top_p", 0.9, "is not read with temperature=0"):
        Sampling(0.0, 5, top_p=0.9)
    with refuses("evaluation.min_p", 0.1, "is not read with"):
        EvaluationSettings(temperature=0, samples=1, min_p=0.1)
    with refuses("top_p", float("nan")):
        Sampling(top_p=float("nan"))
