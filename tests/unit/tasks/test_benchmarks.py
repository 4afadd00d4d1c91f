"""Benchmarks: records, order, prompts, what may be trained on, and scores from end to end."""

import gzip
import json
import os
import pickle
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from gspo.rollout.sources.problem_sampler import REPLACEMENT, TrainingProblems, Uniform
from gspo.tasks.benchmarks.base import text_digest
from gspo.tasks.benchmarks.code_sets import HumanEval, Mbpp, RatedPrograms
from gspo.tasks.benchmarks.math_sets import AIME24, AIME25, AMC23, GSM8K, Math500
from gspo.tasks.benchmarks.programs import answer_block, with_preamble
from gspo.tasks.benchmarks.records_file import Source, file_rows
from refusals import refuses

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("GSPO_DATA", ROOT.parent / "shared" / "data"))
real = pytest.mark.skipif(
    not DATA.is_dir(), reason="the benchmarks' files are not here (GSPO_DATA)"
)


def write(path: Path, records: list[dict], newline: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = newline.join(json.dumps(record) for record in records) + newline
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_bytes(text.encode())
    return path


def gsm(i: int, gold: str = "1,0%02d", text: str = "How many are %d apples?") -> dict:
    return {"question": text % i, "answer": f"It is <<{i}={i}>>{i}.\n#### {gold % i}"}


@pytest.fixture
def gsm8k(tmp_path):
    write(tmp_path / "gsm" / "test.jsonl", [gsm(i) for i in range(5)])
    # 3 and 4 are test problems
    write(tmp_path / "gsm" / "train.jsonl", [gsm(i) for i in range(3, 30)])
    return tmp_path / "gsm"


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\ndef twice(x):\n    return 2 * x\n\ndef area(r: float) -> float:\n    'Of a circle.'\n",
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n  assert abs(candidate(1) - math.pi) < 1e-9\n  assert twice(candidate(0)) == 0\n",
}


def mbpp(number: int, **more) -> dict:
    code = f"def plus(a):\r\n    return a + {number}"
    tests = [f"assert plus({i}) == {number + i}" for i in range(3)]
    return {
        "task_id": number,
        "text": f"Add {number}.",
        "code": code,
        "test_list": tests,
        "test_setup_code": "",
    } | more


# --- files


def test_every_format_gives_the_same_records(tmp_path):
    records = [{"a": 1, "t": "x\u2028y"}, {"a": None, "t": ["é", "z"]}]
    write(tmp_path / "x.jsonl", records, newline="\r\n")
    write(tmp_path / "x.jsonl.gz", records, newline="\n\n")
    (tmp_path / "x.json").write_text(json.dumps(records))
    for name in ("x.jsonl", "x.jsonl.gz", "x.json"):
        assert [row.values for row in file_rows(tmp_path / name)] == records
    assert next(file_rows(tmp_path / "x.jsonl")).where.endswith("x.jsonl, line 1")


def test_parquet(tmp_path):
    parquet.write_table(
        pyarrow.Table.from_pylist([gsm(i) for i in range(5)]),
        tmp_path / "test-00000-of-00001.parquet",
    )
    assert GSM8K(path=str(tmp_path)).problem(0, "gsm8k", 2).answer == "1002"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"bad\.parquet: cannot be read as Parquet"):
        list(file_rows(tmp_path / "bad.parquet"))


def test_a_folder_gives_the_files_of_the_split(tmp_path):
    for name in (
        "test.jsonl",
        "test2.jsonl",
        "main/test-00000-of-00001.jsonl.gz",
        "train.jsonl",
        "notes.txt",
    ):
        write(tmp_path / name, [{"name": name}])

    def names(split):
        return [row.values["name"] for row in Source("x.path", str(tmp_path), split).rows()]

    assert names("test") == ["main/test-00000-of-00001.jsonl.gz", "test.jsonl", "test2.jsonl"]
    assert names("train") == ["train.jsonl"]
    # the folder of a hub's data set: the subset alone, without hidden files and descriptions
    for name in (".cache/test.jsonl", "socratic/test.jsonl", "dataset_infos.json"):
        write(tmp_path / name, [{"name": name}])
    subset = Source("x.path", str(tmp_path), "test", hub_config="main")
    assert [row.values["name"] for row in subset.rows()] == ["main/test-00000-of-00001.jsonl.gz"]
    assert names("test")[1:] == ["socratic/test.jsonl", "test.jsonl", "test2.jsonl"]
    write(tmp_path / "one" / "dataset_infos.json", [{"name": "description"}])
    write(tmp_path / "one" / "math500.jsonl", [{"name": "one"}])
    assert len(list(Source("x.path", str(tmp_path / "one"), "test").rows())) == 1
    # a split may be a word in the name
    for name in ("gsm_train.jsonl", "gsm-test.jsonl", "contest.jsonl"):
        write(tmp_path / "words" / name, [{"name": name}])
    words = Source("x.path", str(tmp_path / "words"), "test")
    assert [file.name for file in words.files()] == ["gsm-test.jsonl"]
    with refuses("x.path", problem="no file for the split 'test'"):
        only_train = write(tmp_path / "two" / "train.jsonl", [{}])
        Source("x.path", str(only_train.parent), "test").files()


def test_missing_files_say_setting_path_and_what_to_do(tmp_path):
    with refuses("task.path", "/no/where", "task.path=FILE or FOLDER, or pip"):
        GSM8K(path="/no/where").size("gsm8k")
    with refuses("task.path", "", "is empty, and no hub dataset"):
        RatedPrograms().size("codeforces")
    with refuses("task.path", problem="must end in .jsonl"):
        GSM8K(path=str(ROOT / "README.md")).size("gsm8k")


def test_the_hub_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with refuses("task.path", "", "openai/gsm8k needs the package"):
        GSM8K().size("gsm8k")


def test_the_hub_is_read_through_datasets(gsm8k, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # a folder is a dataset too: the same call as for a name
    task = GSM8K(hub=str(gsm8k), hub_config="default")
    assert (task.size("gsm8k"), task.size("train")) == (5, 25)
    with refuses("task.path", "", "from the hub failed"):
        GSM8K(hub=str(tmp_path / "none")).size("gsm8k")


BAD = [
    (GSM8K, {"question": "q"}, r"line 2: the key 'answer' is missing; there are question"),
    (
        GSM8K,
        {"question": 3, "answer": "#### 1"},
        r"line 2: the key 'question' must be str, not int",
    ),
    (GSM8K, {"question": " ", "answer": "#### 1"}, r"line 2: the key 'question' is empty"),
    (GSM8K, {"question": "q", "answer": "no gold"}, r"line 2: the key 'answer' must end in ####"),
    (GSM8K, {"question": "q", "answer": "#### many"}, r"line 2: the key 'answer' must end in ####"),
    (GSM8K, [1], r"line 2: must be an object"),
    (
        AIME24,
        {"problem": "p", "answer": "1000"},
        r"line 2: the key 'answer' must be an integer from 0 to 999, not '1000'",
    ),
    (
        AIME24,
        {"problem": "p", "answer": -5},
        r"line 2: the key 'answer' must be an integer from 0 to 999, not '-5'",
    ),
    (AIME25, {"problem": "p", "answer": "x"}, r"line 2: the key 'answer' must be an integer"),
    (AMC23, {"problem": "p", "answer": float("nan")}, r"line 2: the key 'answer' is nan"),
    (
        AMC23,
        {"problem": "p", "answer": True},
        r"line 2: the key 'answer' must be str or int or float, not bool",
    ),
    (Math500, {"problem": "p"}, r"line 2: the key 'solution' is missing"),
    (Math500, {"problem": "p", "solution": "no box"}, r"line 2: the key 'solution' has no answer"),
    (
        Math500,
        {"prompt": "p", "reference_solution": "x"},
        r"line 2: the key 'reference_solution' must end in ####",
    ),
    (Math500, {"answer": "3"}, r"line 2: one of the keys problem, question is needed"),
    (
        HumanEval,
        HUMANEVAL | {"entry_point": "volume"},
        r"line 2: the key 'prompt' does not define volume",
    ),
    (
        Mbpp,
        mbpp(12, test_list="assert"),
        r"line 2: the key 'test_list' must be list or tuple, not str",
    ),
    (Mbpp, mbpp(12, test_list=[1]), r"line 2: the key 'test_list' must be a list of texts"),
    (
        Mbpp,
        mbpp(12, test_list=["assert minus(1)"]),
        r"line 2: the key 'test_list' calls no function",
    ),
    (
        Mbpp,
        mbpp(12, test_list=["assert ("]),
        r"line 2: the key 'code' or 'test_list' is not Python",
    ),
    (Mbpp, mbpp(12) | {"task_id": "12"}, r"line 2: the key 'task_id' must be int, not str"),
    (
        RatedPrograms,
        {"prompt": "p", "rating": 900, "tests": []},
        r"line 2: the key 'tests' is empty",
    ),
    (RatedPrograms, {"prompt": "p", "tests": [{}]}, r"line 2: the key 'rating' is missing"),
    (
        RatedPrograms,
        {"prompt": "p", "rating": 9, "tests": [{"stdin": ""}]},
        r"test 1: the key 'stdout' is missing",
    ),
    (
        RatedPrograms,
        {"prompt": "p", "rating": 9, "tests": ["x"]},
        r"line 2: the key 'tests' must hold objects",
    ),
]


@pytest.mark.parametrize("kind, record, message", BAD, ids=lambda x: getattr(x, "__name__", ""))
def test_bad_records_name_file_line_and_key(tmp_path, kind, record, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n" + json.dumps(record) + "\n")
    with pytest.raises(
        ValueError, match=r"bad\.jsonl, " + message if "line" in message else message
    ):
        task = kind(path=str(path))
        task.size(task.name)


@pytest.mark.parametrize(
    "data", [b'{"a": 1', b"\xff{}", b"[" * 200_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_lines_that_are_no_json_are_named(tmp_path, data):
    (tmp_path / "x.jsonl").write_bytes(b"{}\n" + data)
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: not JSON"):
        list(file_rows(tmp_path / "x.jsonl"))


def test_a_gzip_that_is_cut_off_or_none_is_named(tmp_path):
    whole = write(tmp_path / "x.jsonl.gz", [gsm(i) for i in range(99)]).read_bytes()
    for data in (whole[:-20], b"plain text"):
        (tmp_path / "x.jsonl.gz").write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.jsonl\.gz, after line \d+: cannot be read"):
            list(file_rows(tmp_path / "x.jsonl.gz"))


def test_bad_settings_are_refused_by_name():
    with refuses("task.form", "box"):
        GSM8K(form="box")
    with refuses("task.wording", "chat"):
        HumanEval(wording="chat")
    with refuses("task.shown_tests", 0):
        Mbpp(shown_tests=0)


# --- order, and what may be trained on


def test_the_evaluation_set_is_in_file_order_and_the_same_for_every_seed(gsm8k):
    task = GSM8K(path=str(gsm8k))
    assert task.evaluation_sets() == ["gsm8k"] and task.size("gsm8k") == 5
    assert [task.problem(seed, "gsm8k", i).answer for seed in (1, 2) for i in range(5)] == [
        f"100{i}" for i in range(5)
    ] * 2
    assert task.problem(1, "gsm8k", 3).index == 3
    for index in (-1, 5):
        with pytest.raises(IndexError, match="5 problems"):
            task.problem(1, "gsm8k", index)
    with refuses("split", "aime24"):
        task.problem(1, "aime24", 0)


def test_training_is_epochs_of_permutations_by_seed(gsm8k):
    task = GSM8K(path=str(gsm8k))
    n = task.size("train")

    def epoch(seed, number):
        return [task.problem(seed, "train", number * n + i).prompt for i in range(n)]

    assert n == 25 and len(set(epoch(1, 0))) == n
    assert sorted(epoch(1, 0)) == sorted(epoch(1, 1)) == sorted(epoch(2, 0))
    assert epoch(1, 0) != epoch(1, 1) and epoch(1, 0) != epoch(2, 0)
    assert epoch(1, 0) == [
        pickle.loads(pickle.dumps(GSM8K(path=str(gsm8k)))).problem(1, "train", i).prompt
        for i in range(n)
    ]
    assert task.problem(1, "train", 10 * n + 3).index == 10 * n + 3


def test_refill_rounds_of_a_step_meet_other_problems(gsm8k):
    task = GSM8K(path=str(gsm8k))
    problems = TrainingProblems(task, seed=5, sampler=Uniform(), prompts_per_step=4)
    # the epochs have 25 problems: the batches of steps 7 and 13 lie on a border
    for step in (1, 2, 5, 6, 7, 13):
        own, *more = [
            [problem.prompt for problem in problems.take(step, refill)] for refill in range(8)
        ]
        seen = [*set(own), *(prompt for prompts in more for prompt in prompts)]
        assert len(seen) == len(set(seen)) == 25 and more[-1] == []
    places = {
        task.problem(5, "train", 2 + far).prompt for far in range(0, 9 * REPLACEMENT, REPLACEMENT)
    }
    assert len(places) >= 3


def test_no_evaluation_problem_is_in_a_training_stream(gsm8k, tmp_path):
    task = GSM8K(path=str(gsm8k))
    test = {task.problem(0, "gsm8k", i).prompt for i in range(5)}
    assert not test & {task.problem(seed, "train", i).prompt for seed in (1, 2) for i in range(100)}
    shouted = [gsm(i, text="  HOW many\nare  %d apples ?") for i in range(5)]
    assert text_digest(shouted[0]["question"]) == text_digest(gsm(0)["question"])
    path = write(tmp_path / "mine.jsonl", [*shouted, gsm(77), gsm(77)])
    assert GSM8K(path=str(gsm8k / "test.jsonl"), train_path=str(path)).size("train") == 1
    path = write(tmp_path / "mine.jsonl", shouted)
    with refuses("task.train_path", problem="of 5 training problems none is"):
        GSM8K(path=str(gsm8k), train_path=str(path)).size("train")


def test_training_needs_a_training_set(gsm8k, tmp_path):
    path = write(tmp_path / "test.jsonl", [{"problem": "One?", "answer": "001"}])
    with refuses("task", "aime24", "is for evaluation and has no"):
        AIME24(path=str(path)).problem(1, "train", 0)
    with refuses("task.path", problem="give task.train_path=FILE to train"):
        GSM8K(path=str(gsm8k / "test.jsonl")).problem(1, "train", 0)
    mine = write(
        tmp_path / "mine.jsonl",
        [{"problem": "Two?", "solution": r"It is \boxed{\frac12}, or \boxed{x}"}],
    )
    assert AIME24(path=str(path), train_path=str(mine)).problem(1, "train", 5).answer == "x"


def test_a_split_may_be_a_folder(tmp_path):
    for split, number in (("train", 3), ("test", 1)):
        folder = tmp_path / "main" / split
        folder.mkdir(parents=True)
        rows = [json.dumps({"name": f"{split}{index}"}) for index in range(number)]
        (folder / "0000.jsonl").write_text("\n".join(rows))
    for split, names in (("train", ["train0", "train1", "train2"]), ("test", ["test0"])):
        rows = Source("x.path", str(tmp_path), split).rows()
        assert [row.values["name"] for row in rows] == names


def test_mbpp_splits_are_disjoint_and_the_examples_in_neither(tmp_path):
    path = write(
        tmp_path / "mbpp.jsonl", [mbpp(n) for n in (1, 2, 3, 4, 10, 11, 510, 511, 600, 601, 974)]
    )
    task = Mbpp(path=str(path))
    assert [
        task.problem(0, "mbpp", i).answer.cases[0].test.split("== ")[1][:3] for i in range(2)
    ] == ["11\n", "510"]
    assert {task.problem(0, "train", i).prompt[60:80] for i in range(2)} == {
        "Add 601. Your code s",
        "Add 974. Your code s",
    }
    assert (task.size("mbpp"), task.size("train")) == (2, 2)
    with refuses("task.path", problem="task_id 2 is missing; 2, 3 and 4"):
        path = write(tmp_path / "test.jsonl", [mbpp(11)])
        Mbpp(path=str(path), wording="completion").size("mbpp")


def test_there_are_no_demonstrations(gsm8k):
    task = GSM8K(path=str(gsm8k))
    with refuses("task", "gsm8k", "has no demonstrations"):
        task.demonstration(task.problem(0, "train", 0), 0.0, None)


# --- prompts and golds


def test_prompts_ask_for_the_form_that_is_read(gsm8k):
    prompts = {
        form: GSM8K(path=str(gsm8k), form=form).problem(0, "gsm8k", 1).prompt
        for form in ("boxed", "hash", "answer")
    }
    assert prompts["boxed"] == (
        "How many are 1 apples?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert prompts["hash"].endswith(
        '1 apples? Let\'s think step by step and output the final answer after "####".'
    )
    assert prompts["answer"].startswith(
        "Solve the following math problem step by step. The last line of your response"
    )
    assert prompts["answer"].endswith(
        '\n\nRemember to put your answer on its own line after "Answer:".'
    )


def test_golds_of_every_format(tmp_path):
    marked = "<｜begin▁of▁sentence｜>Reason.<｜User｜>Is {x} \\\\ 3?<｜Assistant｜>"
    path = write(tmp_path / "m.jsonl", [
        {"prompt": marked, "reference_solution": "So \\boxed{a}\n#### \\frac{1}{2}"},
        {"problem": "P", "answer": "(3, 4)", "subject": "Algebra", "level": 2},
        {"problem": "P2", "solution": "\\boxed{\\boxed 7}", "type": "Geometry", "level": "Level 5"},
    ])  # fmt: skip
    task = Math500(path=str(path))
    problems = [task.problem(0, "math500", i) for i in range(3)]
    assert [problem.answer for problem in problems][:2] == ["\\frac{1}{2}", "(3, 4)"]
    assert [problem.family for problem in problems] == ["", "Algebra 2", "Geometry Level 5"]
    assert problems[0].prompt.startswith("Is {x} \\\\ 3?\nPlease")
    path = write(
        tmp_path / "a.jsonl",
        [{"question": "Q", "answer": a} for a in ("025", 7, 27.0, "336^\\circ")],
    )
    assert [AIME25(path=str(path)).problem(0, "aime25", i).answer for i in range(4)] == [
        "25",
        "7",
        "27",
        "336",
    ]


def test_the_mbpp_prompts(tmp_path):
    path = write(tmp_path / "mbpp.jsonl", [mbpp(n) for n in (2, 3, 4, 11)])
    prompt = Mbpp(path=str(path)).problem(0, "mbpp", 0).prompt
    assert prompt.startswith(
        "You are an expert Python programmer, and here is your task: Add 11. Your code should pass"
    )
    assert prompt.count("assert") == 3 and "\r" not in prompt
    assert Mbpp(path=str(path), shown_tests=1).problem(0, "mbpp", 0).prompt.count("assert") == 1
    prompt = Mbpp(path=str(path), wording="completion").problem(0, "mbpp", 0).prompt
    assert (
        prompt.count("[BEGIN]") == 4
        and prompt.count("[DONE]") == 3
        and prompt.endswith("[BEGIN]\n")
    )
    assert "def plus(a):\n    return a + 2\n[DONE]" in prompt and "a + 11" not in prompt


# --- from a response to a program


@pytest.mark.parametrize(
    "text, code",
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nand\n```Python \nb\n\nc\n``` done", "b\n\nc\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```bash\nrun\n```", "a\n"),
        ("```bash\nrun\n```", ""),
        ("```text\nout\n```\n```\na\n```\n", "a\n"),
        ("```python\nnever_closed()", "never_closed()\n"),
        ("```python\na()\n```\n```python\nnever closed", "a()\n"),
        ("  ```python3 title=x\n  a\n  ```", "a\n"),
        ("1. So:\n   ```python\n   if x:\n       f()\n   ```", "if x:\n    f()\n"),
        ("~~~python\na()\n~~~", "a()\n"),
        ("~~~\n```\na()\n~~~", "```\na()\n"),
        ("```python\nprint(f(2))\n```\nIt prints\n```\n4\n```", "print(f(2))\n"),
        ("```python\nprint('YES')\n```\nOutput:\n```\nYES\n```", "print('YES')\n"),
        ("```python\nprint(1)\n```\n```\n$ python a.py\n1 2 3\n```", "print(1)\n"),
        ("def f(): pass", ""),
        ("", ""),
        ("`a` ``b``", ""),
        ("```print(1)``` is wrong\n```python\na\n```", "a\n"),
        ("```python\na```\nso ```b```", "a\n"),
        ("- ```python\n  if x:\n      f()\n  ```", "if x:\n    f()\n"),
        ("2) ```py3\n   a()\n   ```", "a()\n"),
        ("The answer: ```python\na()\n```", "a()\n"),
        ("```python3.11\na()\n```\n```pycon\n>>> 1\n```", "a()\n"),
        ("```{.python}\na()\n```", "a()\n"),
        ("<think>\n```python\nf(): ...\n</think>\n```python\na()\n```", "a()\n"),
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```\nDone.',
            'def f():\n    """\n    ```\n    f()\n    ```\n    """\n',
        ),
        ("```python\n    a()\n    ```\nIt calls a.", "    a()\n"),
        ("```python\n    a()\n    ```\nAs text:\n```text\nb\n```", "    a()\n"),
        ("```python\nif x:\n    a()\n    ```\nIt prints\n```\n4\n```", "if x:\n    a()\n"),
        ("```python\na()\n```Better: ```\nor\n```\nb()\n```", "b()\n"),
        ("```python\na()\n```Better:\n```\nb()\n```", "b()\n"),
        (
            '```python\ndef f():\n  """\n  ```\n  f()\n  ```\n  """\n```',
            'def f():\n  """\n  ```\n  f()\n  ```\n  """\n',
        ),
        (
            '```python\ndef f():\n\t"""\n\t```\n\tf()\n\t```\n\t"""\n\tg()\n\t```\nSo.',
            'def f():\n\t"""\n\t```\n\tf()\n\t```\n\t"""\n\tg()\n',
        ),
    ],
)
def test_the_last_block_that_is_no_plain_output_is_the_program(text, code):
    assert answer_block(text) == code


@pytest.mark.parametrize("nested", ["[" * 200_000 + "]" * 200_000, "-" * 200_000 + "1"])
def test_a_block_that_is_too_long_for_the_parser_is_not_parsed(nested):
    recursion_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)  # as torch._dynamo does
    try:
        started = time.process_time()
        answer = answer_block(f"```python\nprint(1)\n```\n```\n{nested}\n```")
    finally:
        sys.setrecursionlimit(recursion_limit)
    assert answer == f"{nested}\n", "it counts as a program, which then fails"
    assert time.process_time() - started < 1


def test_where_tests_call_a_function_the_last_block_that_defines_it_is_the_program():
    solution = "```python\ndef f(x):\n    return x\n```"
    usage = "\nUsage:\n```python\nprint(f(3))\n```"
    assert answer_block(solution + usage, "f") == "def f(x):\n    return x\n"
    assert answer_block(solution + usage) == "print(f(3))\n"
    method = "```python\nclass Solution:\n    def f(self, x):\n        return x\n```"
    assert answer_block(method + usage, "f").startswith("class Solution")
    better = solution.replace("return x", "return x + 1")
    assert "x + 1" in answer_block(solution + "\nBetter:\n" + better + usage, "f"), (
        "the last of them"
    )
    assert answer_block("```python\nf = lambda x: x\n```" + usage, "f").startswith("f = ")
    assert answer_block(usage, "f") == "print(f(3))\n", "if none defines it, the last one"


def test_future_imports_stay_first():
    code = with_preamble("import math\n", "from __future__ import annotations\nx = math.pi\n")
    assert code == "from __future__ import annotations\nimport math\nx = math.pi\n"
    compile(code, "", "exec")


# --- scores, end to end


def test_math_scores(tmp_path):
    path = write(
        tmp_path / "amc.jsonl", [{"problem": "P", "answer": 27.0}, {"problem": "Q", "answer": 5.0}]
    )
    task = AMC23(path=str(path))
    p, q = (task.problem(0, "amc23", i) for i in range(2))
    cases = [(p, r"\boxed{27}", True), (p, r"\boxed{27}", False), (q, r"so \boxed{5.0}.", True),
             (p, r"\boxed{5}", True), (q, "5", True)]  # fmt: skip
    scores = task.score(cases)
    assert [score.verdict for score in scores] == [
        "correct",
        "truncated",
        "correct",
        "wrong",
        "no-answer",
    ]
    assert [score.reward for score in scores] == [1, 0, 1, 0, 0]
    assert scores[0].answer == "27" and [score.answer for score in scores[1::3]] == ["", ""]
    task.close()


def test_a_math_gold_that_cannot_be_read_gives_no_reward_and_spoils_no_other(tmp_path):
    path = write(
        tmp_path / "math.jsonl", [{"problem": "P", "answer": "$$"}, {"problem": "Q", "answer": "5"}]
    )
    task = Math500(path=str(path))
    p, q = (task.problem(0, "math500", i) for i in range(2))
    scores = task.score(
        [(q, r"\boxed{5}", True), (p, r"\boxed{5}", True), (p, "", False), (q, r"\boxed{6}", True)]
    )
    assert [(score.reward, score.verdict) for score in scores] == [
        (1, "correct"), (None, "unreadable-gold"), (None, "unreadable-gold"), (0, "wrong")
    ]  # fmt: skip
    task.close()


@pytest.mark.slow
def test_code_scores(tmp_path):
    path = write(tmp_path / "HumanEval.jsonl.gz", [HUMANEVAL])
    task = HumanEval(path=str(path))
    problem = task.problem(0, "humaneval", 0)
    body = "def area(r):\n    return math.pi * r ** 2\n"
    answers = {
        f"Here:\n```python\n{body}```\n": "pass",
        f"```python\nfrom __future__ import annotations\n{body}```\n": "pass",
        f"```python\r\n{body}```\r\n".replace("\n", "\r\n"): "pass",
        "```python\ndef area(r):\n    return 3\n```": "wrong",
        "```python\ndef area(r:\n```": "compile-error",
        body: "no-answer",
        "```python\n\n```": "no-answer",
    }
    scores = task.score([(problem, text, True) for text in answers])
    assert [score.verdict for score in scores] == list(answers.values())
    assert [score.reward for score in scores] == [
        float(verdict == "pass") for verdict in answers.values()
    ]
    assert task.score([(problem, f"```python\n{body}```", False)])[0].verdict == "truncated"
    task.close()


def test_completions_are_cut_at_the_stop_sequences(tmp_path):
    task = HumanEval(path=str(write(tmp_path / "he.jsonl", [HUMANEVAL])), wording="completion")
    problem = task.problem(0, "humaneval", 0)
    assert problem.prompt == HUMANEVAL["prompt"]
    good = HUMANEVAL["canonical_solution"]
    answers = [
        (good, True, "pass"),
        (good, False, "truncated"),  # without a stop sequence nobody knows what would have come
        (good + "\ndef other(:\n  nonsense", False, "pass"),
        (good + "\nprint(undefined)", True, "pass"),
        ("    return 3\n\n# or\n    return math.pi", True, "wrong"),
        ("", True, "no-answer"),
        ("\ndef area(r):\n    return math.pi * r * r", True, "no-answer"),
    ]
    scores = task.score([(problem, text, ended) for text, ended, _ in answers])
    assert [score.verdict for score in scores] == [verdict for _, _, verdict in answers]
    task.close()


@pytest.mark.slow
def test_mbpp_scores_both_formats_and_both_wordings(tmp_path):
    sanitized = {"task_id": 12, "prompt": "Root.", "code": "def root(x): return x ** 0.5",
                 "test_imports": ["import math"], "test_list": ["assert math.isclose(root(4), 2)"]}  # fmt: skip
    path = write(tmp_path / "mbpp.jsonl", [mbpp(2), mbpp(3), mbpp(4), mbpp(11), sanitized])
    for wording, texts in (
        (
            "instruct",
            [
                "```\ndef plus(a):\n    return a + 11\n```",
                "```python\nroot = lambda x: x ** 0.5\n```",
            ],
        ),
        (
            "completion",
            [
                "def plus(a):\n    return a + 11\n[DONE]\n\nYou are",
                "def root(x): return x / 2\n[DONE]",
            ],
        ),
    ):
        task = Mbpp(path=str(path), wording=wording)
        plus, root = (task.problem(0, "mbpp", i) for i in range(2))
        cases = [
            (plus, texts[0], wording == "instruct"),
            (root, texts[1], True),
            (root, texts[0], True),
        ]
        assert [score.verdict for score in task.score(cases)] == ["pass", "pass", "missing"]
        task.close()


def test_rated_programs(tmp_path):
    tests = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5\n", "stdout": "10"}]
    path = write(
        tmp_path / "test.jsonl", [{"id": 1, "statement": "Add.", "rating": 800, "tests": tests}]
    )
    apps = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    called = json.dumps({"inputs": [[1]], "outputs": [[2]], "fn_name": "f"})
    mine = write(tmp_path / "mine.jsonl", [{"question": "Next.", "input_output": apps},
                                           {"question": "Call.", "input_output": called}])  # fmt: skip
    task = RatedPrograms(path=str(path), train_path=str(mine))
    problem = task.problem(0, "codeforces", 0)
    assert (
        problem.rating == 800.0
        and "### Question:\nAdd.\n" in problem.prompt
        and "stdin" in problem.prompt
    )
    texts = [
        "```python\nprint(sum(map(int, input().split())))\n```",
        "```python\nprint(3)\n```",
        "```python\n1 / 0\n```",
    ]
    verdicts = [score.verdict for score in task.score([(problem, text, True) for text in texts])]
    assert verdicts == ["pass", "wrong", "runtime-error"]
    assert task.size("train") == 1
    trained = task.problem(0, "train", 0)
    assert trained.rating is None
    assert task.score([(trained, "```python\nprint(int(input()) + 1)\n```", True)])[0].reward == 1
    task.close()


def test_what_could_not_be_run_has_no_reward(tmp_path, monkeypatch):
    from gspo.rewards.code.grader import Grade

    task = HumanEval(path=str(write(tmp_path / "he.jsonl", [HUMANEVAL])))
    monkeypatch.setattr(
        task._grader,
        "grade",
        lambda submissions: [Grade("sandbox-error", ("sandbox-error",))] * len(submissions),
    )
    (score,) = task.score([(task.problem(0, "humaneval", 0), "```\nx\n```", True)])
    assert score.reward is None and score.verdict == "sandbox-error"


# --- the real files


@pytest.mark.slow
@real
@pytest.mark.parametrize(
    "kind, folder, size, train",
    [
        (GSM8K, "gsm8k", 1319, 7473),
        (Math500, "math500", 500, None),
        (AIME24, "aime24", 30, None),
        (AIME25, "aime25", 30, None),
        (AMC23, "amc23", 40, None),
        (HumanEval, "humaneval", 164, None),
        (Mbpp, "mbpp", 500, 371),  # of 374; three have the text of a test problem
    ],
)
def test_every_real_record_is_read(kind, folder, size, train):
    task = kind(path=str(DATA / folder))
    assert task.size(task.name) == size
    problems = [task.problem(0, task.name, i) for i in range(size)]
    # some of MBPP share a text, not their tests
    assert len({problem.prompt for problem in problems}) >= size - 6
    assert all(problem.answer and "｜" not in problem.prompt for problem in problems)
    if train is None:
        with refuses("task", problem="has no training set"):
            task.size("train")
    else:
        assert task.size("train") == train
        assert not {text_digest(item.text) for item in task._items("train")} & {
            text_digest(item.text) for item in task._items(task.name)
        }


def records(path: Path) -> list[dict]:
    return [row.values for row in file_rows(path)]


@real
def test_worked_solutions_are_correct_and_the_neighbours_wrong():
    task = GSM8K(path=str(DATA / "gsm8k"), form="hash")
    solutions = [record["answer"] for record in records(DATA / "gsm8k" / "test.jsonl")]
    problems = [task.problem(0, "gsm8k", i) for i in range(len(solutions))]
    assert all(
        s.reward == 1
        for s in task.score([(p, t, True) for p, t in zip(problems, solutions, strict=True)])
    )
    others = solutions[1:] + solutions[:1]
    golds = [p.answer for p in problems[1:] + problems[:1]]
    wrong = task.score([(p, t, True) for p, t in zip(problems, others, strict=True)])
    same = [float(a) == float(p.answer) for a, p in zip(golds, problems, strict=True)]
    assert [s.reward for s in wrong] == [float(equal) for equal in same]
    task.close()


@pytest.mark.slow
@real
def test_math500_solutions_are_correct():
    task = Math500(path=str(DATA / "math500"))
    solutions = [
        record["reference_solution"] for record in records(DATA / "math500" / "math500.jsonl")
    ]
    problems = [task.problem(0, "math500", i) for i in range(500)]
    scores = task.score([(p, t, True) for p, t in zip(problems, solutions, strict=True)])
    assert sum(score.reward for score in scores) == 500
    wrong = task.score([(problems[i], solutions[i + 7], True) for i in range(0, 60, 3)])
    assert sum(score.reward for score in wrong) <= 1  # a few golds are alike
    task.close()


def of_programs(task, name, texts: dict[int, str]):
    return [
        (task.problem(0, name, i), f"```python\n{text}\n```", True) for i, text in texts.items()
    ]


@real
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_reference_programs_pass_and_empty_ones_fail(step):
    task = HumanEval(path=str(DATA / "humaneval"), slots=2)
    known = records(DATA / "humaneval" / "HumanEval.jsonl.gz")
    right = {i: known[i]["prompt"] + known[i]["canonical_solution"] for i in range(0, 164, step)}
    empty = {i: known[i]["prompt"] + "    pass" for i in range(0, 164, step)}
    assert {score.verdict for score in task.score(of_programs(task, "humaneval", right))} == {
        "pass"
    }
    assert sum(score.reward for score in task.score(of_programs(task, "humaneval", empty))) == 0
    task.close()
    task = Mbpp(path=str(DATA / "mbpp"), slots=2)
    known = records(DATA / "mbpp" / "mbpp.jsonl")
    right = {
        i: known[i + 10]["code"] for i in range(0, 500, 3 * step) if known[i + 10]["task_id"] != 367
    }
    assert {score.verdict for score in task.score(of_programs(task, "mbpp", right))} == {"pass"}
    wrong = {i: known[i + 11]["code"] for i in right}
    assert sum(score.reward for score in task.score(of_programs(task, "mbpp", wrong))) == 0
    task.close()


# --- files as people have them


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "ROWS.JSONL", "rows.json", "Rows.Json", "bom.jsonl", "bom.json"]
)
def test_one_record_per_line_is_read_whatever_the_ending_says(tmp_path, name):
    lines = "\n".join(json.dumps({"prompt": f"{i}+1", "answer": i + 1}) for i in range(30))
    path = tmp_path / name
    path.write_text(lines, encoding="utf-8-sig" if "bom" in name else "utf-8")
    assert len(list(file_rows(path))) == 30


def test_a_list_of_json_stays_a_list(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"a": 1}, {"a": 2}], indent=1))
    assert [row.values for row in file_rows(path)] == [{"a": 1}, {"a": 2}]
    path.write_text(json.dumps({"a": 1}, indent=1))
    with pytest.raises(ValueError, match="must hold a list of records, not dict"):
        list(file_rows(path))
