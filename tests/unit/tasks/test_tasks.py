"""Problems, demonstrations and scores of the two tasks and their mixture."""

import json
import random
import re
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest

from gspo.data.problems import Problem
from gspo.tasks.base import TRAINING_SPLITS, held_out
from gspo.tasks.mixture import Mixture
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.tasks.testbed.function_writing import FunctionWriting, submission
from gspo.tasks.testbed.operations import (
    CATALOGUE,
    FAMILIES,
    HELD_OUT_FAMILIES,
    draw_steps,
    hidden_inputs,
    reference,
)
from refusals import refuses

SEED = 3


@pytest.fixture(scope="module")
def mixture():
    mixture = Mixture()
    yield mixture
    mixture.close()


def problems(task, split, count):
    return [task.problem(SEED, split, index) for index in range(count)]


def rewards(task, some_problems, rate, seed=0):
    answers = [
        (p, task.demonstration(p, rate, random.Random(seed + i)), True)
        for i, p in enumerate(some_problems)
    ]
    return [score.reward for score in task.score(answers)]


def verdict(task, problem, text, ended=True):
    (score,) = task.score([(problem, text, ended)])
    assert score.reward == (score.verdict in ("correct", "pass"))  # no partial credit anywhere
    return score.verdict


# problems


def test_a_problem_is_a_pure_function_of_its_position(mixture):
    splits = [*TRAINING_SPLITS, *mixture.evaluation_sets()]
    here = [str(mixture.problem(SEED, split, index)) for split in splits for index in range(20)]
    assert here[::-1] == [
        str(mixture.problem(SEED, split, i)) for split in splits[::-1] for i in reversed(range(20))
    ]
    script = (
        "from gspo.tasks.mixture import Mixture; m = Mixture()\n"
        f"for s in {splits}:\n for i in range(20): print(m.problem({SEED}, s, i))"
    )
    there = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert there.splitlines() == here
    others = [
        str(mixture.problem(SEED + 1, split, index)) for split in splits for index in range(20)
    ]
    assert sum(a == b for a, b in zip(here, others, strict=True)) < 10


def test_evaluation_problems_never_occur_in_training(mixture):
    training = {
        mixture.problem(seed, split, i).prompt
        for seed, split in ((1, "train"), (2, "cold_start"))
        for i in range(2500)
    }
    assert len(training) > 2000
    for name in mixture.evaluation_sets():
        assert not training & {problem.prompt for problem in problems(mixture, name, 200)}


def test_held_out_families_are_new_compositions_of_known_operations(mixture):
    assert (
        len(FAMILIES) >= 24
        and len(HELD_OUT_FAMILIES) >= 6
        and len({*FAMILIES, *HELD_OUT_FAMILIES}) == len(FAMILIES + HELD_OUT_FAMILIES)
    )
    known = {(variable, word) for variable, words in FAMILIES for word in words}
    assert {(variable, word) for variable, words in HELD_OUT_FAMILIES for word in words} <= known
    training = {problem.family for problem in problems(mixture.code, "train", 2000)}
    held_out = {problem.family for problem in problems(mixture.code, "code_heldout", 500)}
    assert training == {f"{variable}: {' '.join(words)}" for variable, words in FAMILIES}
    assert held_out == {f"{variable}: {' '.join(words)}" for variable, words in HELD_OUT_FAMILIES}
    assert len({problem.family for problem in problems(mixture.code, "code", 1000)}) >= 24


def test_functions_of_numbers_alone_are_short(mixture):
    numbers = FunctionWriting(variables="x")
    rng = random.Random(1)
    for split in ("train", "code", "code_heldout"):
        drawn = problems(numbers, split, 300)
        assert {problem.family[0] for problem in drawn} == {"x"} and len(
            {problem.family for problem in drawn}
        ) >= 3
        assert max(len(numbers.demonstration(problem, 0.0, rng)) for problem in drawn) <= 40
    assert [p.prompt for p in problems(FunctionWriting(variables="xas"), "train", 50)] == [
        p.prompt for p in problems(mixture.code, "train", 50)
    ], "the default draws the problems that it drew before"
    for wrong in ("", "xy", "X"):
        with refuses("task.variables", problem="name one or more of xas"):
            FunctionWriting(variables=wrong)


@pytest.mark.slow
def test_texts_are_short_and_spelled_in_printable_ascii(mixture):
    rng = random.Random(0)
    lengths = {"math": [], "code": []}
    for split in ("train", *mixture.evaluation_sets()):
        for problem in problems(mixture, split, 2000):
            response = mixture.demonstration(problem, 0.12, rng)
            assert all(c == "\n" or " " <= c <= "~" for c in problem.prompt + response)
            assert len(problem.prompt) <= 45
            assert len(response) <= (100 if problem.task == "code" else 75)
            if split == "train":
                lengths[problem.task].append(len(response))
    assert max(lengths["math"]) <= 55
    code = sorted(lengths["code"])
    assert (
        code[len(code) // 20] >= 20
        and code[len(code) * 95 // 100] <= 75
        and 30 <= statistics.mean(code) <= 50
    )


def test_rated_problems_cover_easier_and_harder_than_training():
    rated = problems(ChainArithmetic(), "rated", 300)
    assert {(problem.family, problem.rating) for problem in rated} == {
        (f"{operands} operands", 600.0 + 200.0 * operands) for operands in range(2, 9)
    }
    assert {problem.family for problem in problems(ChainArithmetic(), "math_hard", 20)} == {
        "6 operands"
    }
    assert {problem.family for problem in problems(ChainArithmetic(), "math_easy", 99)} == {
        f"{operands} operands" for operands in (2, 3, 4)
    }
    assert all(problem.rating is None for problem in problems(ChainArithmetic(), "train", 20))


# demonstrations


@pytest.mark.slow
def test_demonstrations_without_wrong_steps_score_one(mixture):
    for split in ("cold_start", *mixture.evaluation_sets()):
        assert set(rewards(mixture, problems(mixture, split, 150), 0.0)) == {1.0}


@pytest.mark.slow
def test_demonstrations_of_wrong_steps_score_zero(mixture):
    for split in ("cold_start", "code_heldout"):
        assert set(rewards(mixture, problems(mixture, split, 300), 1.0)) == {0.0}


@pytest.mark.slow
def test_one_wrong_step_scores_zero():
    """At a rate of 0.12 most wrong demonstrations have a single wrong step: all that differ from
    the right one fail.
    """
    task = FunctionWriting()
    chosen = problems(task, "train", 300)
    right = [task.demonstration(p, 0.0, random.Random(0)) for p in chosen]
    tried = [task.demonstration(p, 0.12, random.Random(i)) for i, p in enumerate(chosen)]
    scores = task.score([(p, text, True) for p, text in zip(chosen, tried, strict=True)])
    task.close()
    assert [score.reward for score in scores] == [
        float(a == b) for a, b in zip(right, tried, strict=True)
    ]
    assert 50 < sum(a != b for a, b in zip(right, tried, strict=True)) < 150
    assert {score.verdict for score in scores} == {"pass", "wrong"}


@pytest.mark.slow
def test_the_share_of_right_demonstrations_follows_from_the_rate(mixture):
    """(1 - rate)^steps; for math, 1 to 5 steps at 0.12: mean 0.694, standard error 0.007 over
    4,000.
    """
    chosen = problems(mixture.math, "cold_start", 4000)
    assert statistics.mean(rewards(mixture.math, chosen, 0.12)) == pytest.approx(0.694, abs=0.03)
    chosen = problems(mixture.code, "cold_start", 400)
    expected = statistics.mean(0.88 ** (len(problem.family.split()) - 1) for problem in chosen)
    assert statistics.mean(rewards(mixture.code, chosen, 0.12)) == pytest.approx(expected, abs=0.08)


def test_steps_after_a_wrong_one_are_right_sums_of_the_wrong_value():
    task = ChainArithmetic(min_operands=6)
    wrong = 0
    for i, problem in enumerate(problems(task, "train", 200)):
        *steps, answer = task.demonstration(problem, 0.2, random.Random(i)).split(";")
        for left, right in zip(steps, [*steps[1:], "=" + answer[1:]], strict=True):
            result = left.partition("=")[2]
            assert right.startswith(result) or right == "=" + result
        wrong += sum(eval(step.replace("=", "!=")) for step in steps)
    assert 0.15 < wrong / 1000 < 0.25


def test_nearly_every_changed_operation_is_caught_by_the_hidden_tests():
    """Each operation of a program replaced by each other one: what differs on 60 more inputs
    differs on the tests.
    """
    differ = missed = 0
    for i, (variable, words) in enumerate(FAMILIES + HELD_OUT_FAMILIES):
        rng = random.Random(i)
        steps = draw_steps((variable, words), rng)
        tests, probes = (
            hidden_inputs(variable, rng),
            [v for _ in range(8) for v in hidden_inputs(variable, rng)],
        )
        for position, (old, _) in enumerate(steps):
            for other in CATALOGUE[variable].values():
                if other.ends != old.ends:
                    continue
                for parameter in other.parameters:
                    changed = [*steps[:position], (other, parameter), *steps[position + 1 :]]
                    if any(
                        reference(changed, value) != reference(steps, value) for value in probes
                    ):
                        differ += 1
                        missed += all(
                            reference(changed, value) == reference(steps, value) for value in tests
                        )
    assert differ > 1000 and missed / differ < 0.02


# scores


def test_answers_are_judged_strictly():
    task = ChainArithmetic()
    problem = Problem("math", 0, "7+5-3+8=?", 17)
    negative = replace(problem, prompt="1-9=?", answer=-8)
    zero = replace(problem, prompt="9-9=?", answer=0)
    assert (
        verdict(task, problem, "7+5=12;12-3=9;9+8=17;#17")
        == verdict(task, problem, "#17")
        == "correct"
    )
    assert verdict(task, negative, "#-8") == verdict(task, zero, "#0") == "correct"
    assert (
        verdict(task, problem, "#16")
        == verdict(task, problem, "#-17")
        == verdict(task, negative, "#8")
        == "wrong"
    )
    assert verdict(task, problem, "#" + "9" * 1_000_000) == "wrong"
    votes = [
        score.answer
        for score in task.score([(problem, text, True) for text in ("7+5=12;#16", "#x", "16")])
    ]
    assert votes == ["16", "", ""]
    assert verdict(task, problem, "7+5=12;17") == verdict(task, problem, "") == "no-answer"
    hedges = [
        "#17#17",
        "#16#17",
        "##17",
        "#17;",
        "#17 ",
        "# 17",
        "#17\n",
        "#17.0",
        "#17 or 16",
        "#17,16",
        "#",
    ]
    spellings = ["#017", "#+17", "#１７", "#1_7", "#1e1", "#0x11", "#17\0", "#--17", "#٠"]
    for text in hedges + spellings:
        assert verdict(task, problem, text) == "malformed", text
    assert verdict(task, zero, "#-0") == verdict(task, zero, "#00") == "malformed"
    assert verdict(task, problem, "#17", ended=False) == "truncated"


@pytest.mark.slow
def test_programs_are_judged_by_what_they_return(mixture):
    problem = Problem(
        "code", 0, "#times 2\ndef f(x):\n", [((value,), 2 * value) for value in range(4)]
    )
    judged = {
        "pass": [
            " return x*2",
            " return x+x",
            " print(x)\n return sum([x, x])",
            " def g(y):\n  return y\n return g(x)*2",
            " return x*2.0",  # a number is what it counts
        ],
        "wrong": [
            " return x",
            " return 0",
            " return str(x*2)",
            " return [x*2]",
            " return {x*2}",
            " pass",
            " return",
            " return x==1",
        ],
        "no-answer": ["", " \n "],
        "compile-error": ["return x*2", " return x*2)", " return x*2\n\treturn"],
        "runtime-error": [
            " return y",
            " raise SystemExit",
            " return x*2//x",
            " import os\n os._exit(0)",
        ],
        "unserialisable": [
            " return iter([x*2])",
            " class I(int):\n  __eq__=lambda *a:True\n return I(x)",
        ],
        "missing": [" pass\ndel f"],
        "timeout": [" while 1: pass"],
    }
    for expected, texts in judged.items():
        assert [(text, verdict(mixture, problem, text)) for text in texts] == [
            (text, expected) for text in texts
        ]
    assert verdict(mixture, problem, " return x*2", ended=False) == "truncated"
    booleans = replace(problem, answer=[((0,), 0), ((1,), 1)])
    assert (
        verdict(mixture, booleans, " return x==1") == "wrong"
        and verdict(mixture, booleans, " return x") == "pass"
    )
    pairs = replace(problem, answer=[((0,), [0, 0]), ((1,), [1, 1])])
    assert verdict(mixture, pairs, " return x,x") == "pass"


@pytest.mark.slow
def test_no_constant_and_no_copy_of_the_input_passes(mixture):
    chosen = problems(mixture.code, "train", 200)
    for problem in chosen:
        assert (
            len({json.dumps(expected) for _, expected in problem.answer}) > 1
            and len(problem.answer) >= 6
        )
    bodies = [" return 0", " return []", " return ''", " return 1"]
    scores = mixture.score([(problem, body, True) for problem in chosen for body in bodies])
    assert not any(score.reward for score in scores)


def test_what_is_run_is_the_signature_and_the_response(mixture):
    problem = mixture.code.problem(SEED, "train", 0)
    made = submission(problem, " return 1")
    assert made.code == problem.prompt.split("\n")[1] + "\n return 1" and made.entry_point == "f"
    assert [(case.arguments, case.expected) for case in made.tests] == problem.answer


def test_code_problems_are_made_without_end(mixture):
    assert mixture.code.size("train") is None and mixture.code.size("code") is None
    with refuses("split", "test"):
        mixture.code.size("test")


@pytest.mark.slow
def test_a_mixture_keeps_order_index_and_share(mixture):
    chosen = problems(mixture, "train", 2000)
    assert [problem.index for problem in chosen] == list(range(2000))
    assert 0.45 < statistics.mean(problem.task == "code" for problem in chosen) < 0.55
    few = problems(Mixture(code_share=0.1), "train", 1000)
    assert 0.07 < statistics.mean(problem.task == "code" for problem in few) < 0.13
    answers = [
        (p, mixture.demonstration(p, float(i % 3 == 0), random.Random(i)), True)
        for i, p in enumerate(chosen[:90])
    ]
    assert [score.reward for score in mixture.score(answers)] == [
        float(i % 3 != 0) for i in range(90)
    ]
    assert mixture.evaluation_sets() == ["math_easy", "math_hard", "rated", "code", "code_heldout"]
    for name in mixture.evaluation_sets():
        owner = "code" if name.startswith("code") else "math"
        assert {problem.task for problem in problems(mixture, name, 10)} == {owner}


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: ChainArithmetic(min_operands=1), ("task.min_operands", 1)),
        (lambda: ChainArithmetic(min_operands=5, max_operands=4), ("task.max_operands", 4)),
        (lambda: ChainArithmetic(largest=1), ("task.largest", 1)),
        (lambda: FunctionWriting(slots=0), ("task.slots", 0)),
        (lambda: FunctionWriting(cpu_seconds=0.0), ("task.cpu_seconds", 0.0)),
        (lambda: FunctionWriting(cpu_seconds=3.0), ("task.wall_seconds", 2.0)),
        (lambda: Mixture(code_share=1.5), ("task.code_share", 1.5)),
        (lambda: ChainArithmetic().problem(0, "test", 0), ("split", "test")),
        (lambda: Mixture().problem(0, "test", 0), ("split", "test")),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(make, refusal):
    with refuses(*refusal):
        make()


def test_settings_serve_as_a_schema():
    from omegaconf import OmegaConf

    settings = OmegaConf.merge(
        OmegaConf.structured(Mixture), {"math": {"max_operands": 4}, "code": {"slots": 2}}
    )
    task = OmegaConf.to_object(settings)
    assert task == Mixture(math=ChainArithmetic(max_operands=4), code=FunctionWriting(slots=2))


def test_easy_sums_are_shorter_than_hard_ones_and_none_is_held_out_twice():
    short = ChainArithmetic(max_operands=3)
    easy = [short.problem(0, "math_easy", i).prompt for i in range(short.size("math_easy"))]
    assert len(set(easy)) == len(easy) > 10 and all(
        len(re.findall(r"\d+", prompt)) == 2 for prompt in easy
    )
    assert all(held_out(prompt) for prompt in easy)
    assert len(re.findall(r"\d+", short.problem(0, "math_hard", 0).prompt)) == 3
    assert ChainArithmetic().size("math_easy") is None and Mixture(math=short).size(
        "math_easy"
    ) == len(easy)
    assert Mixture(math=short).size("code") == Mixture().size("code")
