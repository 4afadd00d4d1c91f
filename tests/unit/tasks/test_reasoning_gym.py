"""Problems of reasoning-gym: pure, apart from evaluation, and scored strictly. Skipped where the
library is not.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.tasks.base import held_out
from gspo.tasks.benchmarks.gym_problems import (
    EXACT,
    INSTRUCTIONS,
    NUMBERS,
    REFUSED,
    SHAPES,
    GymProblems,
    has_shape,
    normal_form,
    reaches,
)
from refusals import refuses

ROOT = Path(__file__).parents[3]
SLOW = {
    "ab",
    "arc_agi",
    "countdown",
    "puzzle24",
    "group_anagrams",
    "zebra_puzzles",
    "sudoku",
    "jugs",
    "sokoban",
}


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def tagged(answer: str) -> str:
    return f"I think it is 7.\n<answer>{answer}</answer>\n"


def rewards(task: GymProblems, problem, *answers: str) -> list[float]:
    return [
        score.reward
        for score in task.score([(problem, tagged(answer), True) for answer in answers])
    ]


# --- without the library


def test_every_family_is_in_one_list():
    kinds = [EXACT, NUMBERS, set(SHAPES), set(REFUSED)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))


@pytest.mark.parametrize("family", [*REFUSED, "unknown"])
def test_unsound_families_are_refused_with_the_reason(family):
    with refuses("task.dataset", family, REFUSED.get(family, "is unknown")):
        GymProblems(dataset=family)


def test_bad_settings_are_refused_by_name():
    with refuses("task.form", "box"):
        GymProblems(form="box")
    with refuses("task.evaluation_size", 0):
        GymProblems(evaluation_size=0)
    with refuses("task.config.seed", 3):
        GymProblems(config={"seed": 3})


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with refuses("task", "reasoning_gym", "needs the package reasoning-gym"):
        GymProblems().problem(1, "train", 0)


@pytest.mark.parametrize(
    "expression, right",
    [
        ("(1 + 5) * 4 * 1", True),
        ("1*4*(5+1)", True),
        ("-(-1*4*(5+1))", True),
        ("4 / (1 - 5/6)", False),  # 24, of other numbers
        ("24", False),
        ("1*4*(5+1) + 0", False),
        ("(1 + 5) * 4", False),
        ("4*5+4*1/1", False),
        ("1*4*(5+1", False),
        ("1**4*(5+1)", False),
        ("1*4*(5+1) == 24", False),
        ("__import__('os').system('x')", False),
        ("1//1", False),
        ("1/0+4+5", False),
        ("(" * 99 + "1" + ")" * 99, False),
        ("9" * 201, False),
        ("01", False),
        ("", False),
    ],
)
def test_expressions_are_computed_exactly(expression, right):
    assert reaches(expression, [1, 1, 4, 5], 24) is right


def test_expressions_are_not_rounded():
    assert reaches("1/3*3", [1, 3, 3], 1)
    assert not reaches("100000 + 1/3", [100000, 1, 3], 100000)


def test_the_normal_form_drops_only_what_has_no_meaning():
    for a, b in (("5.0", "5"), (" 12 ", "12"), ("a,  b", "A, b"), ("-5.0 + 20.0i", "-5+20i"),
                 ('["x", "y"]', "['x','y']"), ("1 2\n3 4", " 1  2 \n3 4 "), ("1.50", "1.5"), ("100", "100.00"),
                 ("[1,2]", "[ 1, 2 ]")):  # fmt: skip
        assert normal_form(a) == normal_form(b)
    for a, b in (("12", "1 2"), ("1 2\n3 4", "1 2 3 4"), ("10", "1"), ("1.05", "1.5"), ("5", "-5"), ("1.0.0", "1"),
                 ("100", "1"), ("01:04", "1:4"), ("12 x", "12")):  # fmt: skip
        assert normal_form(a) != normal_form(b)


@pytest.mark.parametrize(
    "family, answer, right",
    [
        ("cryptarithm", "A=1,B=2", True),
        ("cryptarithm", "A=1,B=2,A=3", False),
        ("cryptarithm", "A=1,B=2 or so", False),
        ("graph_color", '{"0": 1, "1": 2}', True),
        ("graph_color", '{"0": 1, "0": 2}', False),
        ("n_queens", "_ Q\nQ _", True),
        ("n_queens", "__import__('os')", False),
        ("sokoban", "UDLR\n", False),
        ("jugs", '["fill A", "pour A->B"]', True),
        ("jugs", "[" * 9999, False),
        ("quantum_lock", "A → B", True),
        ("quantum_lock", "A B C, I guess", False),
        ("tower_of_hanoi", "Move disk 1 from Peg 1 to Peg 3", True),
        ("tower_of_hanoi", "First, Move disk 1 from Peg 1 to Peg 3", False),
    ],
)
def test_an_answer_has_the_form_of_its_family_whole(family, answer, right):
    assert has_shape(family, answer) is right


# --- with the library


def test_problems_are_pure_and_apart_from_evaluation(gym):
    task, again = GymProblems(), GymProblems()
    train = [task.problem(seed, "train", i) for seed in (1, 2) for i in range(60)]
    test = [task.problem(0, "reasoning_gym", i) for i in range(60)]
    assert task.problem(2, "train", 59).prompt == again.problem(2, "train", 59).prompt
    assert (
        task.problem(0, "reasoning_gym", 5).answer.answer
        == again.problem(0, "reasoning_gym", 5).answer.answer
    )
    assert (
        not {p.prompt for p in train} & {p.prompt for p in test}
        and len({p.prompt for p in train}) > 110
    )
    question = test[0].prompt.removesuffix(INSTRUCTIONS["tags"]).rstrip("\n")
    assert held_out(question) and test[7].index == 7 and test[7].family == "chain_sum"
    assert task.size("train") is None and task.size("reasoning_gym") == 200
    with refuses("split", "other"):
        task.problem(0, "other", 0)


def test_problems_are_the_same_in_every_process(gym):
    script = (
        "from gspo.tasks.benchmarks.gym_problems import GymProblems\n"
        "for f in ('chain_sum', 'letter_jumble', 'course_schedule', 'shortest_path', 'family_relationships'):\n"
        "    problems = [GymProblems(dataset=f).problem(1, 'train', i) for i in range(5)]\n"
        "    print([(p.prompt, p.answer.answer) for p in problems])"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True,
                       text=True, check=True).stdout for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1 and len(outputs.pop()) > 1000


def test_the_librarys_settings_are_passed_on_and_checked(gym):
    task = GymProblems(config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert all(
        len(task.problem(1, "train", i).answer.metadata["expression"].split()) == 3
        for i in range(5)
    )
    for config in ({"terms": 3}, {"min_terms": -1}):
        with refuses("task.config", config, "does not fit chain_sum"):
            GymProblems(config=config).problem(1, "train", 0)


JUNK = (
    "{0} x",
    "x {0}",
    "{0}\n{0}",
    "{0}, or 7",
    "not {0}",
    "({0}) or 1",
    "The answer is {0}",
    "{0} {0}",
    "",
    "x",
)


def known_answer(problem) -> str:
    answer = problem.answer
    if answer.answer is not None:
        return answer.answer
    colours = answer.metadata["possible_answer"]  # graph_color
    return "{" + ", ".join(f'"{vertex}": {colour}' for vertex, colour in colours.items()) + "}"


def check_family(family: str, count: int) -> None:
    task = GymProblems(dataset=family)
    for i in range(count):
        problem = task.problem(1, "train", i)
        answer = known_answer(problem)
        assert rewards(task, problem, answer, f" {answer}\n") == [1, 1], (family, answer)
        assert sum(rewards(task, problem, *[junk.format(answer) for junk in JUNK])) == 0, (
            family,
            answer,
        )
        assert task.score([(problem, answer, True)])[0].verdict == "no-answer"  # no tags
        assert task.score([(problem, tagged(answer), False)])[0].verdict == "truncated"


@pytest.mark.parametrize("family", sorted((EXACT | NUMBERS | SHAPES.keys()) - SLOW))
def test_right_answers_score_1_and_the_same_with_junk_0(gym, family):
    check_family(family, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(SLOW))
def test_the_same_for_families_that_are_slow_to_make(gym, family):
    check_family(family, 2)


def test_other_right_answers_count_where_there_are_several(gym):
    task = GymProblems(dataset="shortest_path")
    problem = next(
        p
        for p in (task.problem(1, "train", i) for i in range(50))
        if "infeasible" not in p.answer.answer
    )
    moves = problem.answer.answer.split()
    assert (
        rewards(task, problem, " ".join(moves), " ".join([*moves, moves[-1]]), "infeasible")[0] == 1
    )
    task = GymProblems(dataset="palindrome_partitioning")
    problem = task.problem(1, "train", 0)
    parts = json.loads(problem.answer.answer)
    assert rewards(task, problem, json.dumps(parts[::-1]), json.dumps(parts[:-1])) == [
        1,
        float(len(parts) == 0),
    ]
    task = GymProblems(dataset="tower_of_hanoi", config={"min_disks": 2, "max_disks": 2})
    problem = task.problem(1, "train", 0)
    moves = problem.answer.answer.split("\n")
    assert rewards(
        task, problem, "\n".join(moves), "\n".join(moves[:-1]), "\n".join([*moves, moves[-1]])
    ) == [1, 0, 0]


def test_the_librarys_partial_credit_is_no_reward(gym):
    task = GymProblems()
    problem = task.problem(1, "train", 3)
    gold = problem.answer.answer
    scorer = task._make(0)
    entry = {"answer": gold, "metadata": problem.answer.metadata}
    hack = f"{gold}\n{int(gold) + 1}"
    assert scorer.score_answer(hack, entry) > 0.3 and rewards(task, problem, hack) == [0]


def test_a_scorer_that_fails_is_no_reward_and_no_crash(gym):
    task = GymProblems(dataset="jugs")
    problem = task.problem(1, "train", 0)
    assert (
        rewards(
            task, problem, '["pour Z->Q"]', '["fill A"]', "[]", "\ud800", '["fill A", "fill A"]' * 9
        )
        == [0] * 5
    )


def test_boxed_answers(gym):
    task = GymProblems(form="boxed")
    problem = task.problem(1, "train", 0)
    gold = problem.answer.answer
    texts = [
        rf"\boxed{{{gold}}}",
        rf"\boxed{{1}} no, \boxed{{{gold}.0}}",
        rf"\boxed{{{gold}}} no, \boxed{{1}}",
        gold,
    ]
    scores = task.score([(problem, text, True) for text in texts])
    assert [score.verdict for score in scores] == ["correct", "correct", "wrong", "no-answer"]
    assert scores[0].answer == scores[1].answer == gold
