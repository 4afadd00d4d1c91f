"""Streams of groups: whole, each once, with an engine that is never short of requests; scored, also
after Ctrl-C.
"""

import pytest

from builders import small_policy
from drawing_engine import Drawn
from gspo.evaluation.evaluate import load_evaluation_sets
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.vllm_base import QUEUED_BATCHES
from gspo.rollout.scoring import scored_stream
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic

SAMPLING = Sampling(1.0, 12)


@pytest.fixture(scope="module")
def policy():
    return small_policy()


def problems(count: int):
    return load_evaluation_sets(ChainArithmetic(), ["rated"], count)[0].problems


def tokens(groups) -> dict[int, list[list[int]]]:
    return {group[0].problem.index: [r.token_ids for r in group] for group in groups}


def test_groups_come_whole_and_once_while_the_engine_stays_full(policy):
    engine, told, groups, under_way_at_first = Drawn(policy, batch_rows=8), [], [], 0
    for new in engine.stream(
        SamplingRequest(problems(40), 4, SAMPLING, (1, "x"), 3), on_finished=told.extend
    ):
        under_way_at_first = under_way_at_first or len(engine.waiting) + len(engine.running)
        groups += new
    assert sorted(group[0].problem.index for group in groups) == list(range(40))
    assert [group[0].problem.index for group in groups] != list(range(40)), (
        "in the order in which they ended"
    )
    assert all([r.sample for r in group] == [0, 1, 2, 3] for group in groups)
    assert all(r.policy_step == 3 for group in groups for r in group)
    assert len(told) == 160 and len({(r.problem.index, r.sample) for r in told}) == 160
    assert 0 < under_way_at_first < 160, (
        "the first group is there long before the last one was given"
    )
    assert engine.most < QUEUED_BATCHES * 8 + 4, (
        "and memory holds a few groups, however many problems there are"
    )
    assert engine.idle_places <= 8 * SAMPLING.max_new_tokens, "only at the end are places empty"


def test_what_is_sampled_depends_on_neither_batch_nor_order(policy):
    expected = tokens(
        group
        for new in Drawn(policy, 64).stream(SamplingRequest(problems(9), 2, SAMPLING, (1,)))
        for group in new
    )
    for rows, chosen in ((1, problems(9)), (4, problems(9)[::-1])):
        found = tokens(
            group
            for new in Drawn(policy, rows).stream(SamplingRequest(chosen, 2, SAMPLING, (1,)))
            for group in new
        )
        assert found == expected
    other = tokens(
        group
        for new in Drawn(policy, 64).stream(SamplingRequest(problems(9), 2, SAMPLING, (2,)))
        for group in new
    )
    assert other != expected


def test_the_engine_of_this_process_streams_what_it_generates(policy):
    engine = LocalEngine(policy, batch_rows=6)
    whole = engine.generate(SamplingRequest(problems(7), 2, SAMPLING, (1, "x")))
    streamed = list(engine.stream(SamplingRequest(problems(7), 2, SAMPLING, (1, "x"))))
    assert [len(groups) for groups in streamed] == [3, 3, 1]
    assert [r.token_ids for groups in streamed for group in groups for r in group] == [
        r.token_ids for group in whole for r in group
    ]
    assert [r.logprobs.tolist() for groups in streamed for group in groups for r in group] == [
        r.logprobs.tolist() for group in whole for r in group
    ]


def test_a_prompt_without_room_is_refused(policy):
    engine = Drawn(policy, 8)
    with pytest.raises(ValueError, match=r"exceed the .* positions"):
        list(engine.stream(SamplingRequest(problems(2), 2, Sampling(1.0, policy.positions), (1,))))


@pytest.mark.parametrize("rows", [4, 64])
def test_every_streamed_group_is_scored(policy, rows):
    task = ChainArithmetic()
    for engine in (Drawn(policy, rows), LocalEngine(policy, rows)):
        groups = [
            g
            for new in scored_stream(engine, task, SamplingRequest(problems(11), 2, SAMPLING, (1,)))
            for g in new
        ]
        assert sorted(group[0].problem.index for group in groups) == list(range(11))
        for r in (r for group in groups for r in group):
            assert [r.score] == task.score([(r.problem, r.text, r.finish_reason == "stop")])


@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineEnded])
def test_what_is_whole_is_kept_when_sampling_ends(policy, error):
    class Ending(LocalEngine):
        def generate(self, request, on_finished=None):
            if request.problems[0].index == 4:
                raise error
            return super().generate(request, on_finished)

    seen = []
    with pytest.raises(error):
        for new in scored_stream(
            Ending(policy, batch_rows=4),
            ChainArithmetic(),
            SamplingRequest(problems(9), 2, SAMPLING, (1,)),
        ):
            seen += new
    assert [group[0].problem.index for group in seen] == [0, 1, 2, 3]
    assert all(r.score for group in seen for r in group)


def test_a_verifier_that_fails_ends_the_stream(policy):
    class Broken(ChainArithmetic):
        def score(self, answers):
            if any(problem.index >= 4 for problem, _, _ in answers):
                raise RuntimeError("the verifier is gone")
            return super().score(answers)

    seen = []
    with pytest.raises(RuntimeError, match="the verifier is gone"):
        for new in scored_stream(
            LocalEngine(policy, 4), Broken(), SamplingRequest(problems(9), 2, SAMPLING, (1,))
        ):
            seen += new
    assert [group[0].problem.index for group in seen] == [0, 1, 2, 3]
