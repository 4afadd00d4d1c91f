"""What a run is made from: counted, recorded, and compared when it is resumed."""

import json

import pytest

from builders import small_policy
from composing import settings
from gspo.evaluation.resumable import weights_digest
from gspo.run.inputs import check_inputs, inputs_of, left_out_in_words
from gspo.tasks.benchmarks.base import text_digest as same_problem

ROWS = ("task=rows", "task.reward=daily:daily_but", "cold_start.steps=0")


def rows_file(folder, prompts):
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": prompt, "answer": i}) + "\n" for i, prompt in enumerate(prompts)
        )
    )
    return path


def test_problems_that_differ_in_signs_are_different_problems(tmp_path):
    """1,600 problems of arithmetic, of which letters and digits alone would leave 230."""
    prompts = [f"{a}{sign}{b}" for a in range(20) for b in range(20) for sign in "+-*/"]
    chosen = settings(*ROWS, f"task.train_path={rows_file(tmp_path, prompts)}")
    data = chosen.task.data()
    assert data["train"]["problems"] + data["rows"]["problems"] == 1600
    assert data["train"]["left_out"] == {"held out": data["rows"]["problems"], "repeated": 0}
    assert 150 < data["rows"]["problems"] < 250, "1 in 8"


def test_case_and_white_space_alone_make_no_other_problem():
    assert same_problem(" What is\n3 + 5 ?") == same_problem("what IS 3+5?")
    for a, b in (
        ("3+5", "3-5"),
        ("1 + 12", "11 + 2"),
        ("1 2", "12"),
        ("f(x)", "f[x]"),
        ("x.", "x"),
    ):
        assert same_problem(a) != same_problem(b)


def test_what_was_left_out_is_counted_in_words(tmp_path):
    prompts = [f"{a}+1" for a in range(80)] + ["7 + 1", "7+1 "]
    chosen = settings(*ROWS, f"task.train_path={rows_file(tmp_path, prompts)}")
    check_inputs(chosen, inputs_of(chosen))
    data = chosen.inputs["data"]
    repeated, held_out = (
        data["train"]["left_out"]["repeated"],
        data["train"]["left_out"]["held out"],
    )
    assert data["train"]["problems"] + repeated + held_out == 82
    words = left_out_in_words(chosen.inputs)
    assert words.startswith(
        f"of 82 training problems {data['train']['problems']} are trained on, because {held_out} are"
    )
    assert (
        left_out_in_words({})
        == left_out_in_words({"data": {"train": {"problems": 5, "left_out": {}}}})
        == ""
    )


@pytest.mark.parametrize("change", ["one more row", "another answer", "another order"])
def test_other_rows_are_refused_when_a_run_is_resumed(tmp_path, change):
    prompts = [f"{a}+1" for a in range(40)]
    path = rows_file(tmp_path, prompts)
    first = settings(*ROWS, f"task.train_path={path}")
    check_inputs(first, inputs_of(first))
    again = settings(*ROWS, f"task.train_path={path}")
    again.inputs = first.inputs
    check_inputs(again, inputs_of(again))
    lines = path.read_text().splitlines()
    if change == "one more row":
        lines.append('{"prompt": "5-4", "answer": 1}')
    elif change == "another answer":
        lines = [line.replace('"answer": 3}', '"answer": 4}') for line in lines]
    else:
        lines.reverse()
    path.write_text("\n".join(lines) + "\n")
    other = settings(*ROWS, f"task.train_path={path}")
    other.inputs = first.inputs
    words = r"problems of task=rows are not those that the run started with \(data\..* then\); put the files back, or begi"
    with pytest.raises(ValueError, match=words):
        check_inputs(other, inputs_of(other))


def test_other_weights_are_refused_and_those_that_nobody_read_again_stay_recorded():
    chosen = settings("task=math", "cold_start.steps=0")
    policy = small_policy()
    policy.initial_weights_digest = weights_digest(policy.model)
    check_inputs(chosen, inputs_of(chosen, policy, None))
    recorded = dict(chosen.inputs)
    assert recorded == {"model": policy.initial_weights_digest}
    check_inputs(chosen, inputs_of(chosen, small_policy(), None))
    assert chosen.inputs == recorded
    policy.model.lm_head.weight.data[0] += 1
    policy.initial_weights_digest = weights_digest(policy.model)
    with pytest.raises(ValueError, match="are not those that the run started from"):
        check_inputs(chosen, inputs_of(chosen, small_policy(), policy))
