"""Episodes sampled by vLLM on the CPU, against the engine in the trainer's process. `make
test-vllm` runs it.
"""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from builders import perturb, small_policy
from games import Echoes
from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.model.settings import TinyDense, TinyMoE
from gspo.rollout.engines import vllm_host
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Row, Sampling, SamplingRequest
from gspo.rollout.engines.route_checks import check_routes
from gspo.rollout.engines.vllm import VLLMEngine
from gspo.rollout.episodes.sampling import play
from gspo.rollout.vllm_settings import VLLMRollout
from vllm_engines import MODEL, STOPS, agreement, gap, letters_end_turns

pytestmark = pytest.mark.vllm

BLOCK = 128  # tokens in a block of vLLM's cache on the CPU
RARE = ("X", "|")  # with which turns are long
DENSE = TinyDense(hidden=64, layers=2, heads=2)
ENGINES: dict[str, tuple[TinyDense | TinyMoE, VLLMRollout]] = {
    "experts": (MODEL, VLLMRollout(routes=True, batch_rows=64)),
    "stop strings": (DENSE, VLLMRollout(stop=list(STOPS), batch_rows=64)),
    "first": (MODEL, VLLMRollout(own_process=False)),
    # where the test sees what vLLM returns
    "here": (DENSE, VLLMRollout(stop=list(RARE), own_process=False)),
}


class Long(Echoes):
    """Prompts of more tokens than a block of vLLM's cache holds."""

    def problem(self, seed: int, split: str, index: int) -> Problem:
        return Problem(
            self.name, index, "".join(f"{index + j}+{j * index}-" for j in range(40)) + "=?", None
        )


@pytest.fixture(scope="module")
def engines():
    """All engines, each with its policy, started when first asked for."""
    started = {}

    def start(name: str) -> VLLMEngine:
        if name == "here":
            # a process's first engine makes its groups of ranks, for experts only if it has any
            start("first")
        if name not in started:
            model, settings = ENGINES[name]
            started[name] = VLLMEngine(small_policy(model), settings)
        return started[name]

    yield start
    for engine in started.values():
        engine.close()


@pytest.fixture(params=["experts", "stop strings"])
def engine(request, engines) -> VLLMEngine:
    return engines(request.param)


def episodes(
    engine, temperature=1.0, task=None, count=3, samples=4, seed=1, limit=40, stop=STOPS
) -> list[Response]:
    """Episodes whose turns end with letters: by stop strings, or where experts are recorded by stop
    tokens.
    """
    task, routes = task or Echoes(), engine.policy.routing.layers > 0
    problems = [task.problem(0, "train", i) for i in range(count)]
    sampling = Sampling(temperature, limit, stop=() if routes else stop)
    with letters_end_turns(engine.policy) if routes else nullcontext():
        groups = play(
            engine,
            task,
            SamplingRequest(problems, samples, sampling, (seed, "rollout"), record_experts=routes),
        )
    return [r for group in groups for r in group]


def tokens(responses: list[Response]) -> list[list[int]]:
    return [r.token_ids for r in responses]


def assert_of(policy, played: list[Response]) -> None:
    """Log-probs, and experts if there are any, are those of the policy's pass over whole episodes."""
    assert gap(policy, played) < 1e-5
    if policy.routing.layers:
        check_routes(played, MODEL.layers, MODEL.experts_per_token, MODEL.experts)
        assert agreement(policy, played) > 0.999


@pytest.mark.parametrize("task", [Echoes(length=4), Long(length=4)], ids=["short", "long"])
def test_greedy_episodes_are_those_of_the_engine_in_the_trainers_process(engine, task):
    ours, theirs = (episodes(e, 0.0, task) for e in (engine, LocalEngine(engine.policy)))
    assert max(len(r.turns) for r in ours) >= 3
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt_ids, a.token_ids, a.turns, a.text) == (
            b.prompt_ids,
            b.token_ids,
            b.turns,
            b.text,
        )
        assert (a.finish_reason, a.score, a.measures) == (b.finish_reason, b.score, b.measures)
    assert_of(engine.policy, ours)


def test_the_structure_of_sampled_episodes(engine):
    played = episodes(engine, count=5, limit=20)
    assert set(Counter(r.finish_reason for r in played)) == {"stop", "length"}
    for r in played:
        authors = [turn.author for turn in r.turns]
        assert authors == ["policy", "environment"] * (len(authors) // 2) + ["policy"]
        assert (
            len(r.token_ids)
            == len(r.logprobs)
            == len(r.policy_mask)
            == sum(turn.tokens for turn in r.turns)
        )
        assert np.array_equal(np.isnan(r.logprobs), ~r.policy_mask)
        assert r.length == sum(r.policy_mask) <= 20 and (
            r.length == 20 or r.finish_reason == "stop"
        )
        assert len(authors) == 5 or r.finish_reason == "length"
        place = 0
        for turn in r.turns:
            text = engine.policy.text(r.token_ids[place : place + turn.tokens])
            assert text == turn.text
            place += turn.tokens
    assert_of(engine.policy, played)


def test_the_same_seed_is_the_same_episode_whatever_is_beside_it_and_in_the_cache(engine):
    task = Long()
    once = episodes(engine, task=task, count=4)
    again = episodes(engine, task=task, count=4)
    assert tokens(again) == tokens(once) and [r.turns for r in again] == [r.turns for r in once]
    fewer = episodes(engine, task=task, count=2, samples=2)
    assert tokens(fewer) == tokens([r for r in once if r.problem.index < 2 and r.sample < 2])
    other = episodes(engine, task=task, count=4, seed=2)
    assert sum(a != b for a, b in zip(tokens(other), tokens(once), strict=True)) > 0.9 * len(once)


def test_vllm_itself_ends_a_turn_at_a_stop_string(engines, monkeypatch):
    """Without our cut; a stop string of an earlier turn or of the environment ends none."""
    monkeypatch.setattr(Row, "cut_at_stop", lambda *_: None)
    engine, ends = engines("stop strings"), Counter()
    played = episodes(engine, task=Echoes(length=4), count=5)
    for r in played:
        for i, turn in enumerate(r.turns):
            if turn.author == "policy":
                assert not set(turn.text[:-1]) & set(STOPS), "a token for every character"
                ends[i, turn.text[-1:] in STOPS] += 1
            else:
                ends["said"] += bool(set(turn.text) & set(STOPS))
    assert ends[0, True] > 5 and ends[2, True] > 5 and ends[4, True] > 5 and ends["said"] > 5


def test_new_weights_play_the_next_episodes(engine):
    before = episodes(engine, task=Long())
    perturb(engine.policy, 0.05)
    assert gap(engine.policy, before) > 0.01, "the update should make a difference"
    engine.load_weights(engine.policy.named_tensors())
    assert_of(engine.policy, episodes(engine, task=Long()))


def test_a_turn_finds_all_that_was_before_in_the_cache_and_nothing_after_new_weights(
    engines, monkeypatch
):
    """Whole blocks of what was fed: all of an episode so far but its last token and what the
    environment has said.
    """
    engine, seen, fed = engines("here"), [], vllm_host.to_completion

    def seeing(output, experts):
        seen.append(
            (
                list(output.prompt_token_ids),
                list(output.outputs[0].token_ids),
                output.num_cached_tokens,
            )
        )
        return fed(output, experts)

    monkeypatch.setattr(vllm_host, "to_completion", seeing)
    case = {"task": Long(length=6, turns=6), "count": 2, "samples": 2, "limit": 200, "stop": RARE}
    played = episodes(engine, **case)
    later = seen[4:]
    assert [bool(cached) for _, _, cached in seen[:4]] == [False, True, False, True], (
        "each prompt is computed once"
    )
    for prompt, _, cached in later:
        asked = [(*p, *own) for p, own, _ in seen]
        before = max(len(a) - 1 for a in asked if len(a) < len(prompt) and prompt[: len(a)] == [*a])
        assert cached == before // BLOCK * BLOCK
    beyond = [cached > len(played[0].prompt_ids) for _, _, cached in later]
    assert sum(beyond) > 3, "what the policy wrote in earlier turns is cached too"
    seen.clear()
    engine.load_weights(engine.policy.named_tensors())
    assert tokens(episodes(engine, **case)) == tokens(played)
    assert [bool(cached) for _, _, cached in seen[:4]] == [False, True, False, True]
    seen.clear()
    episodes(engine, **case)
    assert all(cached for _, _, cached in seen), "the measure should see what is not forgotten"
