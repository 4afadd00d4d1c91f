"""Partial rollouts, and what a checkpoint keeps of responses that wait for later steps."""

import json

import numpy as np
import pytest

from builders import small_policy
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Response, ScoredResponse
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import PendingRollouts
from gspo.rollout.sources.behaviour_logprobs import BehaviourLogprobs
from gspo.rollout.sources.off_policy import PartialSource, make_source
from gspo.rollout.sources.pending import load_pending, save_pending
from gspo.rollout.sources.problem_sampler import Uniform
from trainers import FirstCharacter, flat, gap_trainer, steps

SIZES = {
    "prompts_per_step": 4,
    "group_size": 3,
    "max_new_tokens": 12,
    "token_budget": 4,
    "in_flight": 8,
}


def partial(policy, routes=True, **options) -> PartialSource:
    settings = RolloutSettings(**SIZES | {"routes": routes} | options)
    return make_source(
        LocalEngine(policy), FirstCharacter(), settings, Uniform(), 1, BehaviourLogprobs(policy, 8)
    )


def same(a: Response, b: Response) -> bool:
    arrays = all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("logprobs", "experts", "old_logprobs", "old_experts")
    )
    names = ["problem", "sample", "token_ids", "finish_reason", "text", "policy_step", "segments"]
    if isinstance(a, ScoredResponse):
        names.append("score")
    return (
        type(a) is type(b)
        and arrays
        and all(getattr(a, name) == getattr(b, name) for name in names)
    )


def test_under_the_same_weights_a_cut_response_is_the_whole_one():
    policy = small_policy()
    source, whole = partial(policy), LocalEngine(policy)
    seen = []
    for step in range(1, 7):
        rollout = source.next(step)
        assert len(rollout.groups) == 4
        problems = [group[0].problem for group in rollout.groups]
        expected = whole.generate(
            SamplingRequest(problems, 3, Sampling(1.0, 12), (1, "rollout"), 0, record_experts=True)
        )
        assert flat(rollout.groups) == flat(expected)
        for r, e in zip(rollout.responses, [r for g in expected for r in g], strict=True):
            assert (r.finish_reason, r.text, r.prompt_ids) == (
                e.finish_reason,
                e.text,
                e.prompt_ids,
            )
            assert np.allclose(r.logprobs, e.logprobs, atol=1e-5) and np.array_equal(
                r.experts, e.experts
            )
            assert np.allclose(r.old_logprobs, r.logprobs, atol=1e-5)
            assert np.array_equal(r.old_experts[:-1], r.experts)
            assert sum(tokens for _, tokens in r.segments or [(0, len(r.token_ids))]) == len(
                r.token_ids
            )
            steps = [policy_step for policy_step, _ in r.segments]
            assert steps == sorted(set(steps)), "a segment for each policy"
            assert r.score is not None
        seen += [problem.index for problem in problems]
        source.update(step)
    assert len(seen) == len(set(seen)) == 24, "no problem is lost or taken twice"
    assert set(seen) | {group[0].problem.index for _, group in source.under_way} >= set(range(24))


@pytest.mark.slow
def test_segments_keep_the_log_probs_and_the_step_of_the_weights_that_sampled_them():
    t = gap_trainer(lr=3e-2, old="behaviour", routes=True, **SIZES)
    before, cut = [], 0
    for step in range(1, 6):
        before.append(t.policy.copy())
        rollout = t.source.next(step)
        for r in rollout.responses:
            segments = r.segments or [(r.policy_step, len(r.token_ids))]
            cut += len(segments) > 1
            at = 0
            for policy_step, tokens in segments:
                scored = before[policy_step].score(pack([r], 0), 1).logp_BT[0].numpy()
                part = slice(at, at + tokens)
                assert np.allclose(scored[part], r.old_logprobs[part], atol=1e-5)
                assert np.allclose(scored[part], r.logprobs[part], atol=1e-5)
                at += tokens
            assert at == len(r.token_ids) and r.policy_step == segments[0][0]
        metrics = t.train_step(step, rollout)
        assert metrics["routing/engine_agreement"] > 0.999, (
            "both keep the experts of the pass that predicted a token"
        )
        assert metrics["mismatch/k3"] < 1e-9
    assert cut > 10 and metrics["staleness/max"] > 0 and metrics["staleness/segments"] > 1


def test_a_response_that_has_ended_is_not_continued(moe):
    engine = LocalEngine(moe)
    ended = [
        r
        for g in engine.generate(
            SamplingRequest([Problem("math", 1, "7+5=?", "")], 2, Sampling(1.0, 5), (1,))
        )
        for r in g
    ]
    with pytest.raises(ValueError, match="response 0 to problem 1 has ended"):
        engine.extend(ended, SamplingRequest([], 1, Sampling(1.0, 9), (1,)))


@pytest.mark.slow
def test_what_a_source_holds_comes_back_bit_by_bit(tmp_path):
    t = gap_trainer(lr=1e-2, old="behaviour", routes=True, staleness=2, **SIZES)
    steps(t, 2)
    pending = t.source.pending()
    assert len(pending.rollouts) == 2 and pending.groups
    save_pending(pending, tmp_path)
    back = load_pending(tmp_path, lambda index: t.source.task.problem(1, "train", index))
    assert list(back.rollouts) == list(pending.rollouts) == [3, 4]
    for step, rollout in pending.rollouts.items():
        other = back.rollouts[step]
        assert all(same(a, b) for a, b in zip(rollout.responses, other.responses, strict=True))
        assert (rollout.filtered, rollout.limit, rollout.num_unfinished) == (
            other.filtered,
            other.limit,
            other.num_unfinished,
        )
    for (draw, group), (other_draw, other) in zip(pending.groups, back.groups, strict=True):
        assert draw == other_draw and all(same(a, b) for a, b in zip(group, other, strict=True))
    empty = tmp_path / "empty"
    empty.mkdir()
    save_pending(PendingRollouts(), empty)
    assert not list(empty.iterdir()) and load_pending(empty, None) == PendingRollouts()
    content = json.loads((tmp_path / "held.json").read_text())
    content["rollouts"]["3"]["groups"][0][0]["score"] = None
    (tmp_path / "held.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"held\.json has a batch with a response without score"):
        load_pending(tmp_path, lambda index: t.source.task.problem(1, "train", index))


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", [pytest.param({}, marks=pytest.mark.slow), SIZES])
def test_a_resumed_source_goes_on_with_what_it_held(kind, overlap, tmp_path):
    options = {"prompts_per_step": 4, "group_size": 3, "max_new_tokens": 12} | kind
    whole = gap_trainer(lr=0.0, old="behaviour", staleness=2, overlap=overlap, **options)
    expected = [flat(whole.source.next(step).groups) for step in go(whole, 6)]
    before = gap_trainer(lr=0.0, old="behaviour", staleness=2, overlap=overlap, **options)
    for step in go(before, 3):
        before.source.next(step)
    state = json.loads(json.dumps(before.source.state()))
    save_pending(before.source.pending(), tmp_path)
    after = gap_trainer(lr=0.0, old="behaviour", staleness=2, overlap=overlap, **options)
    after.source.load_state(state, 3)
    after.source.restore_pending(
        load_pending(tmp_path, lambda index: after.source.task.problem(1, "train", index))
    )
    for t in (whole, before):
        t.source.close()
    assert [flat(after.source.next(step).groups) for step in go(after, 6, first=4)] == expected[3:]
    after.source.close()


def go(t, last: int, first: int = 1):
    """Steps, each followed by the hand-over of (unchanged) weights."""
    for step in range(first, last + 1):
        yield step
        t.source.update(step)
