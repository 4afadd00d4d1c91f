"""Held-out evaluation: frozen numbers, ungraded responses, grading beside generation, and going on
after a stop.
"""

import hashlib
import json
import math
import threading
import time
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pytest

from builders import small_policy
from demonstrator import Demonstrator
from games import Echoes
from gspo.data.problems import Problem
from gspo.data.samples import Score, ScoredResponse
from gspo.evaluation.evaluate import (
    EvaluationSet,
    as_metrics,
    check_ratings,
    evaluate,
    load_evaluation_sets,
    rows,
    summarise,
)
from gspo.evaluation.resumable import (
    Folder,
    describe,
    evaluate_into,
    table,
    weights_digest,
    without_speed_settings,
)
from gspo.evaluation.settings import EvaluationSettings
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.episodes.episode import Seconds
from gspo.rollout.scoring import scored_chunks
from gspo.tasks.benchmarks.math_sets import GSM8K
from gspo.tasks.mixture import Mixture
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.tasks.testbed.function_writing import FunctionWriting
from gspo.tracking.metrics import lookup
from refusals import refuses


@dataclass
class Graded(ChainArithmetic):
    """The math task as a finite set with answers to vote for, whose verifier fails on some
    responses.
    """

    fails: tuple[tuple[int, str], ...] = ()  # (problem, a part of the response)

    def size(self, split):
        return 30

    def score(self, answers):
        scores = super().score(answers)
        return [
            Score(None, "sandbox-error")
            if any(p.index == i and part in text for i, part in self.fails)
            else Score(s.reward, s.verdict, text.partition("#")[2])
            for (p, text, _), s in zip(answers, scores, strict=True)
        ]


# avg@4, stderr and pass@4 of 24 problems a set, as the first version of this module computed them
FROZEN = {
    "math_easy": (0.6354166666666666, 0.05208333333333334, 1.0),
    "math_hard": (0.3020833333333333, 0.045092413830090695, 0.7916666666666666),
    "rated": (0.53125, 0.06782146345956494, 0.875),
    "code": (0.4479166666666667, 0.054213678038604156, 0.9166666666666666),
    "code_heldout": (0.4583333333333333, 0.044300794422599585, 1.0),
}


@pytest.mark.slow
def test_the_numbers_of_earlier_runs_have_not_changed():
    task = Mixture()
    try:
        metrics, groups = evaluate(
            Demonstrator(task), task, EvaluationSettings(problems=24, samples=4), 60, step=0
        )
    finally:
        task.close()
    for name, (average, stderr, solved) in FROZEN.items():
        got = [metrics[f"eval/{name}/{m}"] for m in ("avg@4", "stderr", "pass@4")]
        assert got == pytest.approx([average, stderr, solved], rel=1e-12), name
    assert metrics["eval/elo"] == pytest.approx(1663.8390976464234, abs=1e-5)
    assert metrics["eval/elo_stderr"] == pytest.approx(52.29146973800625, abs=1e-5)
    assert len(groups) == 5 * 24 and all(lookup(name) for name in metrics)


@pytest.mark.slow
def test_the_random_numbers_of_earlier_runs_have_not_changed():
    task, engine = Mixture(), LocalEngine(small_policy())
    settings = EvaluationSettings(problems=3, samples=2)
    try:
        first, groups = evaluate(engine, task, settings, 8, step=0)
        again, _ = evaluate(engine, task, settings, 8, step=5)
        one, _ = evaluate(
            engine, task, EvaluationSettings(problems=3, samples=2, sets=["code"]), 8, step=0
        )
    finally:
        task.close()
    text = "|".join(r.text for group in groups for r in group)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "6b678266d48752b4"
    assert first == again and one == {k: v for k, v in first.items() if k.startswith("eval/code/")}
    with refuses("evaluation.sets", ["x"]):
        evaluate(engine, task, EvaluationSettings(sets=["x"]), 8, step=0)


def test_finite_sets_are_taken_whole_and_made_ones_by_number():
    made, finite = ChainArithmetic(), Graded()
    assert [len(s.problems) for s in load_evaluation_sets(made, ["math_easy"], None)] == [256]
    assert [len(s.problems) for s in load_evaluation_sets(finite, [], None)] == [30, 30, 30]
    some, more = load_evaluation_sets(finite, ["rated"], 7) + load_evaluation_sets(
        finite, ["rated"], 99
    )
    assert some.problems == more.problems[:7] and len(more.problems) == 30


def groups_of(task, problems, samples):
    chosen = load_evaluation_sets(task, ["rated"], problems)[0].problems
    position = (0, "evaluation", "rated")
    return list(
        chain(
            *scored_chunks(
                Demonstrator(task), task, SamplingRequest(chosen, samples, Sampling(), position)
            )
        )
    )


def test_ungraded_responses_are_in_no_denominator():
    whole, broken = Graded(), Graded(fails=((0, "#"), (3, "#3")))
    complete = groups_of(whole, 8, 4)
    groups = groups_of(broken, 8, 4)
    lost = [r for group in groups for r in group if r.score.reward is None]
    assert len(lost) == 4 + 3 and {r.problem.index for r in lost} == {0, 3}
    result = summarise([rows(group) for group in groups], [1, 4])
    rewards = [[r.score.reward for r in group if r.score.reward is not None] for group in groups]
    assert result["avg"]["value"] == pytest.approx(np.mean([np.mean(r) for r in rewards if r]))
    assert result["ungraded"] == len(lost) and result["problems_left_out"] == 1
    assert result["elo"]["attempts"] == 32 - len(lost) and "sandbox-error" not in result["verdicts"]
    assert sum(result["verdicts"].values()) == pytest.approx(1)
    assert as_metrics("rated", result)["eval/rated/ungraded"] == len(lost)
    # the same as if the lost problem had never been there
    rest = [rows(group) for group in complete[1:]]
    alone = summarise([rows(group) for group in groups_of(Graded(fails=((0, "#"),)), 8, 4)], [1, 4])
    assert {
        k: v
        for k, v in alone.items()
        if k not in ("problems", "problems_left_out", "ungraded", "ungraded_because")
    } == {
        k: v
        for k, v in summarise(rest, [1, 4]).items()
        if k not in ("problems", "problems_left_out", "ungraded", "ungraded_because")
    }


def test_a_set_without_any_grade_has_counts_alone():
    result = summarise(
        [rows(group) for group in groups_of(Graded(fails=tuple((i, "") for i in range(3))), 3, 2)],
        [2],
    )
    metrics = as_metrics("rated", result)
    assert metrics == {"eval/rated/ungraded": 6.0}
    assert result["avg"]["value"] is None and json.dumps(result, allow_nan=False)
    assert "6 responses could not be graded; 3 problems left out" in table({"rated": result}, 2)
    score = Score(None, "error", reason="it raised KeyError: 'x'")
    groups = [[replace(r, score=score) for r in group] for group in groups_of(Graded(), 3, 2)]
    result = summarise([rows(group) for group in groups], [2])
    text = "6 responses could not be graded (most often: it raised KeyError: 'x'); 3 problems"
    assert text in table({"rated": result}, 2)


def test_the_majority_is_reported_where_there_are_answers():
    with_answers = summarise([rows(group) for group in groups_of(Graded(), 12, 8)], [1, 8])
    assert with_answers["maj"]["8"]["value"] > with_answers["avg"]["value"]
    assert abs(with_answers["maj"]["1"]["value"] - with_answers["avg"]["value"]) < 0.03
    nothing = [
        [row | {"answer": ""} for row in rows(group)]
        for group in groups_of(ChainArithmetic(), 4, 2)
    ]
    without = summarise(nothing, [2])
    assert without["maj"] is None and "eval/rated/maj@2" not in as_metrics("rated", without)


# episodes


@pytest.fixture
def echoed(tmp_path) -> dict[str, dict]:
    """The results of problems that are played in an environment, from the command line's
    evaluation.
    """
    engine, sets = LocalEngine(small_policy()), load_evaluation_sets(Echoes(length=2), [], 6)
    sampling = Sampling(1.0, max_new_tokens=60, stop=("e", "3", "+"))
    folder = Folder(tmp_path / "evaluation", {"a": 1})
    requests = [s.request(2, sampling, step=0) for s in sets]
    results = [
        evaluate_into(folder, engine, sets, requests, on_progress=lambda *_: None) for _ in range(2)
    ]
    assert results[0] == results[1], "the second was read from the folder"
    return results[0]


def test_episodes_have_numbers_metrics_and_a_line(echoed):
    found = echoed["echo"]["episodes"]
    assert found["finish_stop"] > 0 and found["turns_max"] == 2 and 1 <= found["turns"] <= 2
    assert 0 < found["environment_tokens"] < 1 and found["told"] > 0
    metrics = as_metrics("echo", echoed["echo"] | {"samples": 2})
    assert (
        metrics["eval/echo/episode_turns"] == found["turns"]
        and metrics["eval/echo/episode_told"] == found["told"]
    )
    assert {lookup(name).name for name in metrics if "/episode_" in name} == {"eval/*/episode_*"}
    assert f"echo: episodes: cut {found['cut']:.3g}, " in table(
        echoed, 2
    ) and "turns_max 2" in table(echoed, 2)


def test_no_other_set_has_numbers_of_episodes():
    result = summarise([rows(group) for group in groups_of(Graded(), 4, 2)], [2])
    assert "episodes" not in result and not any(
        "episode" in name for name in as_metrics("rated", result)
    )
    assert "episodes" not in table({"rated": result | {"maj": None}}, 2)


# grading beside generation


def test_chunks_and_the_thread_change_nothing():
    task, engine = ChainArithmetic(), LocalEngine(small_policy(), batch_rows=6)
    problems, sampling = load_evaluation_sets(task, ["rated"], 7)[0].problems, Sampling(1.0, 6)
    serial = engine.generate(SamplingRequest(problems, 3, sampling, (1, "x")))
    scores = task.score(
        [(r.problem, r.text, r.finish_reason == "stop") for group in serial for r in group]
    )
    seconds = Seconds()
    beside = list(
        chain(
            *scored_chunks(
                engine, task, SamplingRequest(problems, 3, sampling, (1, "x")), seconds=seconds
            )
        )
    )
    flat, expected = ([r for group in groups for r in group] for groups in (beside, serial))
    assert [r.token_ids for r in flat] == [r.token_ids for r in expected]
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(flat, expected, strict=True)), (
        "the same batches"
    )
    assert [r.score for r in flat] == scores and seconds.sampling > seconds.waited >= 0
    larger = LocalEngine(engine.policy, batch_rows=9)
    in_threes = list(scored_chunks(larger, task, SamplingRequest(problems, 3, sampling, (1, "x"))))
    assert [len(chunk) for chunk in in_threes] == [3, 3, 1]
    assert [r.score for chunk in in_threes for group in chunk for r in group] == scores


def test_a_chunk_is_graded_while_the_next_is_sampled():
    sampling_second = threading.Event()

    class Announcing(Demonstrator):
        def generate(self, request, on_finished=None):
            if request.problems[0].index:
                sampling_second.set()
                time.sleep(0.05)  # the verifier goes on meanwhile
            return super().generate(request, on_finished)

    class Waiting(ChainArithmetic):
        def score(self, answers):
            assert sampling_second.wait(10), (
                "the second chunk is not begun before the first is graded"
            )
            return super().score(answers)

    task, seconds = Waiting(), Seconds()
    problems = load_evaluation_sets(task, ["rated"], 4)[0].problems
    groups = list(
        chain(
            *scored_chunks(
                Announcing(task, batch_rows=2),
                task,
                SamplingRequest(problems, 2, Sampling(), (0,)),
                seconds,
            )
        )
    )
    assert [group[0].problem.index for group in groups] == [0, 1, 2, 3] and seconds.waited < 5


def test_an_exception_of_the_verifier_surfaces_and_earlier_chunks_are_whole():
    class Broken(ChainArithmetic):
        def score(self, answers):
            if answers[0][0].index >= 4:
                raise RuntimeError("the verifier is gone")
            return super().score(answers)

    task, seen = Broken(), []
    with pytest.raises(RuntimeError, match="the verifier is gone"):
        for chunk in scored_chunks(
            Demonstrator(task, batch_rows=4),
            task,
            SamplingRequest(
                load_evaluation_sets(task, ["rated"], 9)[0].problems, 2, Sampling(), (0,)
            ),
        ):
            seen += chunk
    assert [group[0].problem.index for group in seen] == [0, 1, 2, 3]
    assert all(r.score is not None for group in seen for r in group)


# going on after a stop


def evaluated(path, engine, settings=None, problems=10, samples=4):
    told = []
    folder = Folder(path, settings or {"samples": samples})
    sets = load_evaluation_sets(engine.task, ["math_easy", "rated"], problems)
    results = evaluate_into(
        folder,
        engine,
        sets,
        [s.request(samples, Sampling(), step=7) for s in sets],
        on_progress=lambda name, groups, sampled: told.append((name, len(groups), sampled)),
    )
    return folder.finish(results, {}).read_bytes(), told


@pytest.mark.slow
def test_stopped_anywhere_it_ends_the_same(tmp_path):
    task = Graded(fails=((3, "#3"),))
    engine = Demonstrator(task, batch_rows=12)  # chunks of 3 problems
    expected, told = evaluated(tmp_path / "whole", engine)
    assert told[:3] == [("math_easy", 0, False), ("math_easy", 3, True), ("math_easy", 3, True)]
    easy, rated = (
        (tmp_path / "whole" / "responses" / f"{name}.jsonl").read_bytes()
        for name in ("math_easy", "rated")
    )
    assert json.loads(easy.splitlines()[0]).keys() >= {
        "prompt", "response", "verdict", "reward", "answer", "length", "finish_reason"
    }  # fmt: skip
    rng = np.random.default_rng(0)
    for cut in [0, 1, len(rated) - 1, len(rated), *rng.integers(0, len(rated), 12).tolist()]:
        path = tmp_path / str(cut)
        Folder(path, {"samples": 4})
        (path / "responses" / "math_easy.jsonl").write_bytes(easy)
        (path / "responses" / "rated.jsonl").write_bytes(rated[:cut])
        got, told = evaluated(path, engine)
        assert got == expected and (path / "responses" / "rated.jsonl").read_bytes() == rated
        whole = rated[:cut].count(b"\n") // 4
        assert told[0] == ("math_easy", 10, False) and told[1] == (
            "rated",
            whole - whole % 3 if whole < 10 else 10,
            False,
        )
    # other chunks on the way: more memory now
    (path / "responses" / "rated.jsonl").write_bytes(rated[: rated.index(b'"problem": 7')])
    assert evaluated(path, Demonstrator(task, batch_rows=20))[0] == expected


def test_a_folder_with_other_settings_or_damage_is_refused(tmp_path):
    engine = Demonstrator(Graded())
    evaluated(tmp_path, engine, {"samples": 4, "sets": {"rated": {"task": {"largest": 9}}}})
    with pytest.raises(
        ValueError,
        match=r"other settings: sets\.rated\.task\.largest: 9 against 7; choose another out=",
    ):
        Folder(tmp_path, {"samples": 4, "sets": {"rated": {"task": {"largest": 7}}}})
    path = tmp_path / "responses" / "rated.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    with pytest.raises(
        ValueError,
        match=r"rated\.jsonl is damaged at problem 1, sample 1 .*another problem or sample",
    ):
        evaluated(tmp_path, engine, {"samples": 4, "sets": {"rated": {"task": {"largest": 9}}}})
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="damaged at problem 0, sample 0"):
        evaluated(tmp_path, engine, {"samples": 4, "sets": {"rated": {"task": {"largest": 9}}}})


def test_what_makes_an_evaluation_another_one():
    mixture = without_speed_settings(Mixture(code=FunctionWriting(slots=3)))
    assert (
        "slots" not in mixture["code"]
        and mixture["code"]["cpu_seconds"] == 0.5
        and mixture["code_share"] == 0.5
    )
    assert (
        mixture
        == without_speed_settings(Mixture())
        != without_speed_settings(Mixture(code_share=0.4))
    )
    assert "workers" not in without_speed_settings(GSM8K(workers=2))
    one, other, seeded = (
        describe(load_evaluation_sets(task, ["rated"], 5, seed)[0])
        for task, seed in ((Graded(), 0), (Graded(largest=7), 0), (Graded(), 1))
    )
    assert one["task"] != other["task"] and one["prompts"] != seeded["prompts"]
    evaluation_set = load_evaluation_sets(Graded(), ["rated"], 5, 0)[0]
    first, *others = evaluation_set.problems
    corrected = [replace(first, answer="another"), *others]
    again = describe(replace(evaluation_set, problems=corrected))
    assert again["prompts"] == one["prompts"] and again["answers"] != one["answers"]
    a, b = small_policy().model, small_policy().model
    assert weights_digest(a) == weights_digest(b)
    b.get_input_embeddings().weight.data += 1e-6
    assert weights_digest(a) != weights_digest(b)


def test_the_table_says_what_the_ratings_rest_on():
    result = summarise([rows(group) for group in groups_of(Graded(), 20, 4)], [1, 2, 4])
    text = table({"rated": result}, 4)
    assert "95 % interval" in text and f"{result['avg']['stderr']:.3f}" not in text, (
        "one convention: 95 %"
    )
    assert (
        f"{result['avg']['value']:.3f}" in text
        and "20 problems rated 1000 to 2200, 80 attempts" in text
    )
    low, high = result["avg"]["interval_95"]
    assert low < result["avg"]["value"] < high and f"{low:.3f} .. {high:.3f}" in text
    parts = [result["avg"][key] for key in ("stderr_sampling", "stderr_problems")]
    assert math.hypot(*parts) == pytest.approx(result["avg"]["stderr"])
    nothing = summarise(
        [[row | {"reward": 0.0} for row in rows(group)] for group in groups_of(Graded(), 4, 2)], [2]
    )
    # equal results of all problems have no spread, so the bootstrap would promise a point
    assert nothing["elo"]["bootstrap_interval_95"] is nothing["elo"]["bootstrap_stderr"] is None
    error = f"standard error {nothing['elo']['map_stderr']:.0f} (of the posterior)"
    assert f"{error}, maximum likelihood -inf" in table({"rated": nothing}, 2)


def test_problems_without_rating_have_no_elo():
    response = groups_of(Graded(), 1, 1)[0][0]
    unrated = Problem("math", 1, "1+1=?", 2)
    group = rows(
        [ScoredResponse(unrated, 0, [1], [2], np.zeros(1), "stop", "#2", 0, score=response.score)]
    )
    assert summarise([rows([response]), group], [1])["elo"] is None


def test_a_response_with_named_rewards_is_right_if_each_of_them_is_1():
    """Of four samples two earn 1, and one 1.25, which alone is right."""
    row = {"verdict": "partial", "answer": "", "rating": None, "finish_reason": "stop", "length": 3}
    named = [(1.25, 1, 1), (1.0, 1, 0), (0.25, 0, 1), (1.0, 1, 0)]
    group = [
        row | {"reward": reward, "rewards": {"correct": correct, "format": form}}
        for reward, correct, form in named
    ]
    result = summarise([group], [1, 4])
    assert result["avg"]["value"] == 3.5 / 4
    assert (result["pass"]["1"]["value"], result["pass"]["4"]["value"]) == (0.25, 1.0)


def test_two_sets_with_ratings_are_refused():
    def evaluation_set(name: str, rating: float | None) -> EvaluationSet:
        return EvaluationSet(
            name, ChainArithmetic(), [Problem("math", 0, "1+1=?", "2", rating=rating)]
        )

    rated = [evaluation_set("a", 1500.0), evaluation_set("b", 1600.0)]
    check_ratings([rated[0], evaluation_set("c", None)])
    with refuses("evaluation.sets", ["a", "b"], "eval/elo is of one set"):
        check_ratings(rated)
