"""Sources of scored groups: the plain one is as it was, the dynamic one replaces groups without signal and counts."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from conftest import small_policy

from gspo.records import Problem, Response, Score
from gspo.rollout.ahead import make_source
from gspo.rollout.engine import LocalEngine
from gspo.rollout.rows import Sampling
from gspo.rollout.sampler import REFILL, REPLACEMENT, Grouped, Uniform
from gspo.rollout.scoring import Seconds, sample_and_score, score
from gspo.rollout.settings import RolloutSettings, check_sampler
from gspo.rollout.source import DynamicSource, OnPolicySource, has_signal
from gspo.seeding import seed_for
from gspo.tasks.chain_arithmetic import ChainArithmetic


@dataclass
class Scripted:
    """Problems in `flat` give all their responses the same reward; of others every second sample is right."""

    flat: set[int] = field(default_factory=set)
    broken: set[tuple[int, int]] = field(default_factory=set)  # (problem, sample) that its verifier fails on
    name: str = "scripted"

    def problem(self, seed: int, split: str, index: int) -> Problem:
        return Problem(self.name, index, "x" * (3 + index % 4), None)

    def score(self, answers) -> list[Score]:
        return [self.judge(problem.index, int(text)) for problem, text, _ in answers]

    def judge(self, index: int, sample: int) -> Score:
        if (index, sample) in self.broken:
            return Score(None, "sandbox-error")
        return Score(float(index in self.flat or sample % 2), "")


class Recorder:
    """An engine without a model: a response's text is its sample, its token a function of its position."""

    shares_weights = True

    def __init__(self):
        self.calls, self.policy, self.batch_rows = [], self, 512

    def encode_prompt(self, text: str) -> list[int]:
        return [1] * len(text)

    def rest(self) -> None:
        pass

    def generate(
        self, problems, group_size, sampling, seed, policy_step=0, record_experts=False, finished=None
    ) -> list[list[Response]]:
        self.calls.append((sampling.max_new_tokens, policy_step, [problem.index for problem in problems]))
        groups = [[self.response(p, i, seed, policy_step) for i in range(group_size)] for p in problems]
        if finished:
            finished([r for group in groups for r in group])
        return groups

    def response(self, problem, sample, seed, policy_step) -> Response:
        token = seed_for(*seed, problem.task, problem.index, sample)
        return Response(problem, sample, [1], [token], np.zeros(1), "stop", str(sample), policy_step)


def scripted(flat=(), kind=DynamicSource, sampler=None, **options) -> OnPolicySource:
    settings = RolloutSettings(**{"prompts_per_step": 4, "group_size": 4} | options)
    return kind(Recorder(), Scripted(set(flat)), settings, 5, sampler)


def places(groups) -> list[int]:
    return [group[0].problem.index for group in groups]


def tokens(groups) -> list[list[list[int]]]:
    return [[r.token_ids for r in group] for group in groups]


@pytest.fixture(scope="module")
def policy():
    return small_policy()


class Parity(ChainArithmetic):
    """The math problems, scored by whether a response's characters sum to an odd number: as often as not."""

    def score(self, answers):
        return [Score(float(sum(map(ord, text)) % 2), "") for _, text, _ in answers]


def test_the_plain_source_takes_the_stream_as_it_was(policy):
    settings = RolloutSettings(prompts_per_step=3, group_size=2, max_new_tokens=8)
    task, engine = ChainArithmetic(), LocalEngine(policy)
    source = make_source(engine, task, settings, Uniform(), 4)
    source.update(2)
    rollout = source.next(3)
    problems = [task.problem(4, "train", index) for index in (6, 7, 8)]
    expected = engine.generate(problems, 2, Sampling(1.0, 8), (4, "rollout"), policy_step=2)
    assert tokens(rollout.groups) == tokens(expected) and places(rollout.groups) == [6, 7, 8]
    assert all(r.policy_step == 2 and r.score for r in rollout.responses)
    assert rollout.dropped == [] and rollout.filtered == {"ungraded": 0} and rollout.limit == 8
    assert rollout.rollout_s > 0 and rollout.score_s > 0


def test_dynamic_sampling_of_a_real_policy(policy):
    settings = RolloutSettings(prompts_per_step=6, group_size=2, max_new_tokens=8, refill_rounds=3)
    engine, task = LocalEngine(policy), Parity()
    plain = OnPolicySource(engine, task, settings, 2)
    dynamic = make_source(engine, task, settings, Uniform(), 2)
    assert isinstance(dynamic, DynamicSource)
    first, rollout = plain.next(2), dynamic.next(2)
    kept = [i for i, group in enumerate(first.groups) if has_signal(group)]
    assert 0 < len(kept) < 6, "the case should hold both kinds"
    assert all(has_signal(group) for group in rollout.groups) and len(rollout.groups) == 6
    assert [tokens(rollout.groups)[i] for i in kept] == [tokens(first.groups)[i] for i in kept]
    assert len(rollout.sampled) == 6 * (1 + rollout.filtered["refill_rounds"])
    for group in rollout.sampled:  # whatever else was sampled in its round, and in which order
        alone = engine.generate([group[0].problem], 2, settings.sampling(2), (2, "rollout"))
        score(task, alone[0])
        assert tokens(alone) == tokens([group]) and alone[0][0].score == group[0].score
    again = DynamicSource(engine, task, settings, 2).next(2)
    assert tokens(again.groups) == tokens(rollout.groups) and tokens(again.dropped) == tokens(rollout.dropped)


@pytest.mark.parametrize("query_set", [0, 16])
def test_dynamic_is_plain_where_nothing_is_to_be_replaced(query_set):
    for flat, rounds in (((), 3), (range(100), 0), ((0, 2, 5, 7, 9), 0)):
        options = dict(query_set=query_set, refill_rounds=rounds)
        dynamic, plain = scripted(flat, **options), scripted(flat, OnPolicySource, **options)
        for step in (1, 2, 5):
            ours, theirs = dynamic.next(step), plain.next(step)
            assert tokens(ours.groups) == tokens(theirs.groups) and places(ours.groups) == places(theirs.groups)
            assert ours.dropped == [] and len(dynamic.engine.calls) == len(plain.engine.calls)
            assert ours.filtered["filled"] == sum(not has_signal(group) for group in theirs.groups)


def test_responses_that_could_not_be_graded_leave_their_group_and_are_counted():
    source = scripted(kind=OnPolicySource)
    source.task.broken = {(0, 1), (0, 3), (2, 0), *((3, sample) for sample in range(4))}
    rollout = source.next(1)
    assert [[r.sample for r in group] for group in rollout.groups] == [[0, 2], [0, 1, 2, 3], [1, 2, 3]]
    assert len(rollout.ungraded) == rollout.filtered["ungraded"] == 7 and rollout.sampled == rollout.groups
    assert [has_signal(group) for group in rollout.groups] == [False, True, True]
    source.task.broken = {(index, sample) for index in range(99) for sample in range(4)}
    with pytest.raises(RuntimeError, match=r"no response of the batch could be graded .sandbox-error"):
        source.next(2)


def test_dynamic_sampling_replaces_a_group_that_lost_its_signal_with_its_ungraded_responses():
    source = scripted(refill_rounds=1)
    source.task.broken = {(1, 1), (1, 3), (REFILL + 0, 2)}
    rollout = source.next(1)
    assert places(rollout.groups) == [0, REFILL + 0, 2, 3] and len(rollout.groups[1]) == 3
    assert rollout.filtered["ungraded"] == len(rollout.ungraded) == 3


def test_groups_without_signal_are_replaced_and_the_surplus_is_dropped():
    source = scripted({1, 3, REFILL + 0}, refill_rounds=3)
    rollout = source.next(1)
    assert places(rollout.groups) == [0, REFILL + 1, 2, REFILL + 2]
    assert places(rollout.dropped) == [REFILL + 0, 1, 3, REFILL + 3]
    assert rollout.filtered == {"ungraded": 0, "zero_variance": 3, "surplus": 1, "filled": 0, "refill_rounds": 1}
    assert source.engine.calls == [(80, 0, [0, 1, 2, 3]), (80, 0, [REFILL + i for i in range(4)])]
    assert len(rollout.responses) == 16 and len(rollout.sampled) == 8
    assert places(source.next(2).groups) == [4, 5, 6, 7], "refills do not move the stream"


def test_refilling_takes_several_rounds_and_ends_at_the_bound():
    flat = {0, 1, 2, 3, *(REFILL + i for i in range(3)), *(2 * REFILL + i for i in range(4))}
    rollout = scripted(flat, refill_rounds=3).next(1)
    assert places(rollout.groups) == [REFILL + 3, *(3 * REFILL + i for i in range(3))]
    assert rollout.filtered == {"ungraded": 0, "zero_variance": 11, "surplus": 1, "filled": 0, "refill_rounds": 3}
    rollout = scripted(flat, refill_rounds=2).next(1)
    assert places(rollout.groups) == [REFILL + 3, 1, 2, 3]
    assert rollout.filtered == {"ungraded": 0, "zero_variance": 8, "surplus": 0, "filled": 3, "refill_rounds": 2}
    assert len(rollout.sampled) == 12
    nothing = scripted({r * REFILL + i for r in range(3) for i in range(4)}, refill_rounds=2).next(1)
    assert places(nothing.groups) == [0, 1, 2, 3] and nothing.filtered["filled"] == 4


def test_seconds_are_summed_over_rounds(monkeypatch):
    def timed(*arguments, **keywords):
        return sample_and_score(*arguments, **keywords)[0], Seconds(sampling=1.0, scoring=5.0, waited=0.5)

    monkeypatch.setattr("gspo.rollout.source.sample_and_score", timed)
    rollout = scripted({0, 1, 2, 3, *(REFILL + i for i in range(4))}, refill_rounds=2).next(1)
    assert (rollout.rollout_s, rollout.score_s) == (3.0, 1.5), "what sampling hid costs nothing"


def test_query_sets_refill_from_the_following_batches_and_epochs_draw_anew():
    plain = scripted(kind=OnPolicySource, query_set=16)
    batches = [places(plain.next(step).groups) for step in range(1, 5)]
    source = scripted(batches[2], query_set=16, refill_rounds=2)
    rollout = source.next(3)
    assert places(rollout.groups) == batches[3] and places(rollout.dropped) == batches[2]
    firsts, seconds = (
        {r.problem.index: r.token_ids for step in steps for r in plain.next(step).responses if r.sample == 0}
        for steps in (range(1, 5), range(5, 9))
    )
    assert sorted(firsts) == sorted(seconds) == list(range(16))
    assert all(firsts[place] != seconds[place] for place in firsts)


@pytest.mark.parametrize("query_set", [0, 16])
def test_too_long_prompts_are_counted_over_rounds(query_set):
    source = scripted({0, 4, 8, 12, REFILL}, refill_rounds=1, max_prompt_tokens=5, query_set=query_set)
    rollout = source.next(1)
    asked = [i for _, _, indices in source.engine.calls for i in indices]
    assert all(len(group[0].problem.prompt) <= 5 for group in rollout.sampled)
    assert rollout.filtered["prompt_too_long"] == sum(i // REPLACEMENT for i in asked)
    assert query_set or len(asked) == 8
    within = scripted(kind=OnPolicySource, max_prompt_tokens=9).next(1)
    assert within.filtered == {"ungraded": 0, "prompt_too_long": 0}


def test_the_response_limit_grows_on_schedule():
    source = scripted(kind=OnPolicySource, max_new_tokens=10, extend={7: 40, 3: 20})
    rollouts = [source.next(step) for step in (1, 2, 3, 6, 7, 100)]
    assert [rollout.limit for rollout in rollouts] == [10, 10, 20, 20, 40, 40]
    assert [call[0] for call in source.engine.calls] == [10, 10, 20, 20, 40, 40]
    assert source.settings.longest_limit == 40 and RolloutSettings().longest_limit == 80


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_resumed_source_takes_the_same_groups(rounds):
    def fresh():
        settings = RolloutSettings(prompts_per_step=4, group_size=4, query_set=16, refill_rounds=rounds)
        return make_source(Recorder(), Scripted({1, 2, 6, 11}), settings, Grouped(order="easy_first"), 5)

    whole = fresh()
    expected = [tokens(whole.next(step).groups) for step in range(1, 15)]
    for stop in (2, 4, 7):
        before, after = fresh(), fresh()
        for step in range(1, stop + 1):
            before.next(step)
        after.load_state(json.loads(json.dumps(before.state())), stop)
        assert [tokens(after.next(step).groups) for step in range(stop + 1, 15)] == expected[stop:]
    whole.update(16)
    whole.next(17)
    first = next(indices for _, policy_step, indices in whole.engine.calls if policy_step == 16)
    assert set(first) == {1, 2, 6, 11}, "an epoch begins with the four that always succeed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompts_per_step=0), r"rollout\.prompts_per_step=0"),
        (dict(query_set=-1), r"rollout\.query_set=-1"),
        (dict(query_set=2), r"rollout\.query_set=2 is not a multiple of rollout\.prompts_per_step=4"),
        (dict(query_set=10), r"rollout\.query_set=10 is not a multiple of rollout\.prompts_per_step=4"),
        (dict(refresh_every=5), r"rollout\.refresh_every=5 with rollout\.query_set=0"),
        (dict(max_prompt_tokens=0), r"rollout\.max_prompt_tokens=0"),
        (dict(refill_rounds=-2), r"rollout\.refill_rounds=-2"),
        (dict(refill_rounds=1024), r"rollout\.refill_rounds=1024"),
        (dict(refill_rounds=1, group_size=1), r"rollout\.refill_rounds=1 with rollout\.group_size=1"),
        (dict(refill_rounds=2, query_set=8), r"rollout\.refill_rounds=2 with rollout\.query_set=8, which is 2 batches"),
        (dict(extend={1: 90}), r"rollout\.extend=\{1: 90\}: step 1"),
        (dict(extend={4: 80}), r"rollout\.extend=\{4: 80\}: the limit 80 .* \(rollout\.max_new_tokens=80\)"),
        (dict(extend={9: 90, 4: 100}), r"rollout\.extend=.*: the limit 90 from step 9 on must exceed the 100"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutSettings(**{"prompts_per_step": 4, "group_size": 4} | options)


@pytest.mark.parametrize(
    ("options", "sampler", "message"),
    [
        (dict(), Grouped(), r"sampler=grouped with rollout\.query_set=0"),
        (dict(query_set=4), Grouped(by="task"), r"sampler=grouped with rollout\.query_set=4"),
        (dict(query_set=16, refresh_every=4), Grouped(), r"rollout\.refresh_every=4 replaces rollout\.query_set=16"),
    ],
)
def test_samplers_without_anything_to_do_are_refused(options, sampler, message):
    settings = RolloutSettings(prompts_per_step=4, **options)
    for refuse in (check_sampler, lambda s, c: make_source(Recorder(), Scripted(), s, c, 1)):
        with pytest.raises(ValueError, match=message):
            refuse(settings, sampler)


def test_settings_are_a_schema_for_hydra():
    from omegaconf import OmegaConf

    given = OmegaConf.create("{extend: {5: 100}, max_prompt_tokens: 3, query_set: 64}")
    settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RolloutSettings), given))
    assert settings == RolloutSettings(extend={5: 100}, max_prompt_tokens=3, query_set=64)
    for sampler in (Uniform(), Grouped(by="length", order="easy_first")):
        assert OmegaConf.to_object(OmegaConf.structured(sampler)) == sampler
