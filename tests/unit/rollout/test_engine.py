"""The in-process engine against transformers' own generate, and its independence of neighbours."""

import numpy as np
import pytest
import torch

from builders import perturb, problems, sample, small_policy
from gspo.data.problems import Problem
from gspo.model.settings import TinyDense
from gspo.rollout.engines import local
from gspo.rollout.engines.local import LocalEngine, draw
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from refusals import refuses


@pytest.mark.parametrize("model", [None, TinyDense(hidden=32, layers=3, heads=2, width=48)])
def test_greedy_equals_one_by_one_generate(model):
    policy = small_policy(model)
    groups = LocalEngine(policy).generate(
        SamplingRequest(problems(), 2, Sampling(0.0, 20), (1, "greedy"))
    )
    for problem, group in zip(problems(), groups, strict=True):
        ids = policy.tokenizer(problem.prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            reference = policy.model.generate(
                ids,
                max_new_tokens=20,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = reference.sequences[0, ids.shape[1] :].tolist()
        logp = (
            torch.stack(reference.logits, 1)
            .float()
            .log_softmax(-1)[0]
            .gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        )
        for response in group:
            assert response.token_ids == tokens
            np.testing.assert_allclose(response.logprobs, logp, atol=2e-5)


def test_sampled_log_probs_are_the_policys_own(moe):
    responses = sample(moe, group_size=4, tokens=30)
    assert len({r.finish_reason for r in responses}) == 2, (
        "the case should hold ended and cut responses"
    )
    for r in responses:
        ids = torch.tensor([r.prompt_ids + r.token_ids])
        with torch.no_grad():
            logp = moe.model(ids).logits.log_softmax(-1)[0, len(r.prompt_ids) - 1 : -1]
        expected = logp.gather(-1, torch.tensor(r.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(r.logprobs, expected, atol=2e-5)
        ended = r.token_ids[-1] == moe.tokenizer.eos_token_id
        assert r.finish_reason == ("stop" if ended else "length") and (
            ended or len(r.token_ids) == 30
        )
        assert moe.tokenizer.eos_token_id not in r.token_ids[:-1]


def test_a_response_does_not_depend_on_its_neighbours(moe):
    together = sample(moe, group_size=4, tokens=25)
    engine = LocalEngine(moe, batch_rows=4)  # one group at a time
    alone = [
        r
        for p in reversed(problems())
        for r in engine.generate(SamplingRequest([p], 4, Sampling(1.0, 25), (1, "test")))[0]
    ]
    alone.sort(key=lambda r: (r.problem.index, r.sample))
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    fewer = [g[:2] for g in (together[i : i + 4] for i in range(0, len(together), 4))]
    pairs = LocalEngine(moe).generate(
        SamplingRequest(problems(), 2, Sampling(1.0, 25), (1, "test"))
    )
    assert [[r.token_ids for r in g] for g in pairs] == [[r.token_ids for r in g] for g in fewer]
    shorter = LocalEngine(moe).generate(
        SamplingRequest(problems(), 4, Sampling(1.0, 5), (1, "test"))
    )
    assert [r.token_ids for g in shorter for r in g] == [r.token_ids[:5] for r in together]


def test_samples_seeds_and_weights_make_a_difference(moe):
    first = [tuple(r.token_ids) for r in sample(moe, group_size=4)]
    assert len(set(first)) > len(first) // 2
    other_seed = LocalEngine(moe).generate(
        SamplingRequest(problems(), 4, Sampling(1.0, 12), (2, "test"))
    )
    assert first != [tuple(r.token_ids) for g in other_seed for r in g]
    perturb(moe, 0.3)
    assert first != [tuple(r.token_ids) for r in sample(moe, group_size=4)]


def test_draw_follows_the_distribution():
    logits = torch.tensor([2.0, 0.0, -1.0, -torch.inf, 1.0])
    u = torch.from_numpy(np.random.default_rng(0).random(40_000))
    tokens, logp = draw(logits.expand(len(u), -1), u, 1.0)
    expected = logits.softmax(-1)
    shares = torch.bincount(tokens, minlength=5) / len(u)
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)
    assert shares[3] == 0
    torch.testing.assert_close(logp, expected.log()[tokens])
    cold, _ = draw(logits.expand(len(u), -1), u, 0.5)
    torch.testing.assert_close(
        torch.bincount(cold, minlength=5) / len(u), (logits / 0.5).softmax(-1), atol=0.01, rtol=0
    )
    edge, _ = draw(
        torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]),
        torch.tensor([1 - 2**-53, 0.0], dtype=torch.float64),
        1.0,
    )
    assert edge.tolist() == [0, 1]


def test_recorded_experts_are_those_of_the_full_forward(moe):
    for r in sample(moe, record_experts=True):
        ids = torch.tensor([r.prompt_ids + r.token_ids])[:, :-1]
        with torch.no_grad(), moe.routing.recording():
            moe.model(ids)
            expected = moe.routing.recorded(1)[0]
        assert r.experts.shape == (ids.shape[1], 3, 2)
        assert (np.sort(r.experts) == np.sort(expected.numpy())).all()


def test_bad_requests_are_refused(moe):
    with pytest.raises(ValueError, match="empty prompt"):
        LocalEngine(moe).generate(
            SamplingRequest([Problem("math", 3, "", "")], 1, Sampling(), (1,))
        )
    with refuses("temperature", -1):
        Sampling(temperature=-1)


@pytest.mark.slow
def test_responses_are_handed_over_as_they_end(moe):
    """Each once, most of them before the last has ended, and the same ones as without."""
    handed = []
    engine, sampling = LocalEngine(moe), Sampling(1.0, 200)
    groups = engine.generate(
        SamplingRequest(problems(), 8, sampling, (1, "early")),
        on_finished=lambda some: handed.append(list(some)),
    )
    plain = engine.generate(SamplingRequest(problems(), 8, sampling, (1, "early")))
    assert len(handed) > 3 and len(handed[-1]) <= 20
    assert sorted(id(r) for some in handed for r in some) == sorted(
        id(r) for group in groups for r in group
    )
    longest = [max(len(r.token_ids) for r in some) for some in handed]
    assert longest == sorted(longest)
    for a, b in zip((r for g in groups for r in g), (r for g in plain for r in g), strict=True):
        assert a.token_ids == b.token_ids and (a.logprobs == b.logprobs).all()


@pytest.mark.parametrize("every", [2, 8, 1000])
def test_asking_less_often_which_rows_have_ended_changes_no_response(moe, monkeypatch, every):
    """As on a GPU, which must finish its work to answer."""
    found = []
    monkeypatch.setattr(local, "runs_ahead", lambda device: True)
    for number in (1, every):
        monkeypatch.setattr(local, "TOKENS_PER_CHECK", number)
        rows = LocalEngine(moe).generate(
            SamplingRequest(problems(), 4, Sampling(1.0, 30), (1, "ask"), record_experts=True)
        )
        found.append([response for group in rows for response in group])
    assert len({r.length for r in found[0]}) > 3, "rows end at different tokens"
    for a, b in zip(*found, strict=True):
        assert (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert (a.experts == b.experts).mean() > 0.99


def by_sums_in_float64(
    p_RV: torch.Tensor, uniform_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that one sum over the whole vocabulary draws, and how far each row's number is
    from a token's edge.
    """
    ends_RV = p_RV.double().cumsum(-1)
    threshold_R1 = (uniform_R * ends_RV[:, -1]).unsqueeze(-1)
    tokens_R = torch.searchsorted(ends_RV, threshold_R1, right=True).squeeze(-1)
    return tokens_R, (ends_RV - threshold_R1).abs().amin(-1) / ends_RV[:, -1]


@pytest.mark.parametrize("vocabulary", [7, 64, 1000, 1024, 4096, 151_936])
def test_drawing_by_blocks_draws_the_same_tokens(vocabulary):
    """As on a GPU. Where a number lies on the edge between two tokens, both answers are right."""
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 20_000_000 // max(vocabulary, 20_000)
    p_RV = torch.randn(rows, vocabulary, generator=generator).mul(3).softmax(-1)
    # as rules of truncation leave tokens out
    p_RV[torch.rand(p_RV.shape, generator=generator) < 0.4] = 0
    p_RV[:, 0] += 1e-3
    uniform_R = torch.rand(rows, generator=generator, dtype=torch.float64)
    uniform_R[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens_R = local.draw_by_blocks(p_RV, uniform_R)
    expected_R, edge_R = by_sums_in_float64(p_RV, uniform_R)
    assert ((tokens_R == expected_R) | (edge_R < 1e-15)).all()
    assert (p_RV.gather(-1, tokens_R[:, None]) > 0).all()
    assert len(tokens_R.unique()) > min(vocabulary, rows) // 10


def test_a_token_without_probability_is_never_draw_by_blocks():
    """Not even where the number asks for the very end of the last block, or of any block before
    empty ones.
    """
    for size, at in ((64, 0), (200, 63), (200, 64), (5000, 1024), (5000, 4999)):
        p_RV = torch.zeros(3, size)
        p_RV[:, at] = torch.tensor([1.0, 1e-30, 0.3])
        for number in (0.0, 0.5, 1 - 2.0**-53):
            uniform_R = torch.full((3,), number, dtype=torch.float64)
            assert local.draw_by_blocks(p_RV, uniform_R).tolist() == [at] * 3


def test_sampling_with_blocks_gives_the_same_responses(moe, monkeypatch):
    plain = [
        r
        for g in LocalEngine(moe).generate(
            SamplingRequest(problems(), 4, Sampling(1.0, 20), (1, "d"))
        )
        for r in g
    ]
    monkeypatch.setattr(local, "runs_ahead", lambda device: True)
    blocks = [
        r
        for g in LocalEngine(moe).generate(
            SamplingRequest(problems(), 4, Sampling(1.0, 20), (1, "d"))
        )
        for r in g
    ]
    assert [r.token_ids for r in plain] == [r.token_ids for r in blocks]
