"""Rows of a user's own file: columns, what is held out, scores, and what is refused."""

import json
import pickle
import sys
from unittest.mock import ANY

import pytest

import user_code
from gspo.data.problems import ChatPrompt
from gspo.data.samples import Score
from gspo.model.chat.chat_formats import chat_format
from gspo.model.chat.prompts import PromptFormat
from gspo.model.stand_in import byte_tokenizer
from gspo.rollout.sources.problem_sampler import TrainingProblems, Uniform, check_chats
from gspo.tasks.base import held_out
from gspo.tasks.own_rows import OwnRows
from refusals import refuses

REWARD = "own_package.rewards:batch"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    user_code.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = [
        {"question": f"What is {i}+{i}?", "answer": str(2 * i), "level": f"l{i % 2}"}
        for i in range(100)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    yield
    user_code.forget()


def task(**changes) -> OwnRows:
    return OwnRows(
        **{"reward": REWARD, "train_path": "train.jsonl", "columns": {"prompt": "question"}}
        | changes
    )


def test_without_a_test_file_one_in_eight_problems_is_held_out_by_its_text():
    rows = task()
    evaluated = [rows.problem(0, "rows", i) for i in range(rows.size("rows"))]
    trained = [rows.problem(3, "train", i) for i in range(rows.size("train"))]
    assert len(evaluated) + len(trained) == 100 and 5 <= len(evaluated) <= 22
    assert all(held_out(p.prompt) for p in evaluated) and not any(
        held_out(p.prompt) for p in trained
    )
    assert len({p.prompt for p in trained}) == len(trained)
    assert evaluated[0].answer["answer"].isdigit() and evaluated[0].task == "rows"


def test_the_setting_that_names_the_training_problems_is_named():
    with refuses("task.path", "test.jsonl", "of 5 training problems none is left"):
        rows = task(train_path="", path="test.jsonl")
        rows.one_file = True  # as of a benchmark whose file holds both sets
        rows.size("train")


def test_the_hubs_training_split_alone_holds_out_one_in_eight(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "hub").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "hub" / "train.jsonl")
    hub = str(tmp_path / "hub")
    with refuses("task.hub_split", "test", "choose a split that"):
        task(train_path="", hub=hub).size("rows")
    rows = task(train_path="", hub=hub, hub_split="")
    assert rows.size("rows") + rows.size("train") == 100 and 5 <= rows.size("rows") <= 22


def test_the_names_of_rewards_are_compared_with_their_weights_before_the_first_step():
    rows = task(reward="own_package.rewards:named")
    for weights in ({}, {"correct": 1.0, "form": 1.0}):
        rows.reward_weights = weights
        with refuses("reward.weights", weights, "before the first step"):
            rows.ready()
    rows.reward_weights = {"correct": 1.0, "format": 0.5}
    rows.ready()
    rows.close()


def test_a_chat_whose_question_is_empty_is_refused(tmp_path):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": " "}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": chat, "answer": "2"}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: .*'question' is empty: its last message"):
        task().problem(0, "rows", 0)


def test_a_test_file_is_held_out_and_its_texts_do_not_come_in_training():
    rows = task(
        path="test.jsonl",
        columns={"prompt": "question", "family": "level"},
        suffix="\nAnswer:",
        name="sums",
    )
    assert (
        rows.size("sums") == 5 and rows.size("train") == 95 and rows.evaluation_sets() == ["sums"]
    )
    problem = rows.problem(0, "sums", 3)
    assert (problem.prompt, problem.family) == ("What is 3+3?\nAnswer:", "l1")


def test_a_chat_of_one_user_message_is_a_prompt_and_one_that_ends_with_an_answer_is_refused(
    tmp_path,
):
    chats = [[{"role": "user", "content": f"Say {i}"}] for i in range(20)]
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"prompt": chat}) + "\n" for chat in chats)
    )
    assert (
        task(train_path="chat.jsonl", columns={"prompt": "prompt"})
        .problem(0, "train", 0)
        .prompt.startswith("Say ")
    )
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"prompt": [*chats[0], {"role": "assistant", "content": "x"}]})
    )
    with pytest.raises(ValueError, match=r"line 1: .*prompt.*a chat that ends with the user"):
        task(train_path="chat.jsonl", columns={"prompt": "prompt"}).problem(0, "train", 0)


def test_responses_are_scored_by_the_function_and_cut_ones_are_not_asked_about():
    rows = task()
    problem = rows.problem(0, "rows", 0)
    assert rows.ready() == {}
    whole, cut = rows.score([(problem, "xyz", True), (problem, "xyz", False)])
    assert whole.reward == len(problem.answer["answer"]) + 3 and cut == Score(0.0, "truncated")
    assert rows.score([(problem, "xyz", False)]) == [Score(0.0, "truncated")]
    rows.close()


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"reward": ""}, ("task.reward", ANY, "is not given")),
        (
            {"columns": {"answer": "answer"}},
            ("task.columns.answer", ANY, "choose from prompt, family, rating"),
        ),
        ({"columns": {"family": "level"}}, ("task.columns.prompt", ANY, "is not given")),
        ({"name": "a/b"}, ("task.name", "a/b", "must be a plain name")),
        ({"seconds": 0}, ("task.seconds", 0)),
        ({"train_path": ""}, ("task.path", "", "is empty")),
    ],
)
def test_settings_that_are_wrong_are_refused_by_name(changes, refusal):
    with refuses(*refusal):
        task(**changes).problem(0, "rows", 0)


@pytest.mark.parametrize(
    "columns, text",
    [
        (
            {"prompt": "quest"},
            r"train.jsonl, line 1: the key 'quest' is missing; there are question",
        ),
        ({"prompt": "question", "rating": "level"}, "key 'level' must be int or float, not str"),
    ],
)
def test_columns_that_the_rows_do_not_have_are_said_with_the_line(columns, text):
    with pytest.raises(ValueError, match=text):
        task(columns=columns).problem(0, "rows", 0)


CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}]


def test_a_chat_of_several_messages_is_written_by_the_template(tmp_path):
    """As the data sets of verl have it, a system turn before the question."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": CHAT, "n": i}) + "\n" for i in range(3)))
    task = OwnRows(path=str(path), train_path=str(path), reward="json:dumps", suffix=" Think.")
    prompt = task.problem(0, "rows", 0).prompt
    assert (
        prompt == "Be short.\n\n1+1? Think."
        and pickle.loads(pickle.dumps(prompt)).messages == prompt.messages
    )
    tokenizer = byte_tokenizer(chat_format("Qwen/Qwen3-0.6B"))
    written = tokenizer.decode(PromptFormat().encode(tokenizer, prompt))
    assert written.startswith(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n1+1? Think.<|im_end|>"
    )
    own = tokenizer.decode(PromptFormat(system="Be long.").encode(tokenizer, prompt))
    assert own == written, "the row's own system turn counts"
    assert (
        tokenizer.decode(PromptFormat("plain").encode(tokenizer, prompt))
        == "Be short.\n\n1+1? Think."
    )


def test_a_chat_that_the_template_refuses_is_one_line():
    tokenizer = byte_tokenizer(chat_format("Qwen/Qwen3-0.6B"))
    tokenizer.chat_template = (
        "{{ raise_exception('only users') if messages[0].role == 'system' }}" + "x"
    )
    with pytest.raises(
        ValueError, match="chat template refuses a chat of system, user: only users"
    ):
        PromptFormat().encode(tokenizer, ChatPrompt(CHAT))


def test_a_template_that_drops_an_earlier_turn_is_refused():
    tokenizer = byte_tokenizer(chat_format("Qwen/Qwen3-0.6B"))
    tokenizer.chat_template = "{{ messages[-1].content }}"
    turns = [CHAT[1], {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2?"}]
    with pytest.raises(ValueError, match="leaves out what a user turn says"):
        PromptFormat().encode(tokenizer, ChatPrompt(turns))


def test_a_template_that_edits_a_text_is_not_refused():
    """Templates of Nemotron remove the switch /no_think from the texts of turns."""
    tokenizer = byte_tokenizer(chat_format("Qwen/Qwen3-0.6B"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content.replace('/no_think', '') }} {% endfor %}"
    )
    turns = [
        {"role": "system", "content": "Be brief. /no_think"},
        {"role": "user", "content": "Where is /no_think/x?"},
    ]
    written = tokenizer.decode(PromptFormat().encode(tokenizer, ChatPrompt(turns)))
    assert written == "Be brief.  Where is /x? "


def test_a_dropped_turn_is_found_also_if_a_later_turn_holds_its_text():
    tokenizer = byte_tokenizer(chat_format("Qwen/Qwen3-0.6B"))
    tokenizer.chat_template = "{{ messages[-1].content }}"
    turns = [
        {"role": "user", "content": "4"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+4=?"},
    ]
    with pytest.raises(ValueError, match="leaves out what a user turn says"):
        PromptFormat().encode(tokenizer, ChatPrompt(turns))


def test_one_row_that_the_template_refuses_is_found_before_the_first_step(tmp_path):
    rows = [{"prompt": f"{i}+{i}?"} for i in range(30)]
    rows[17] = {"prompt": CHAT, "source": "odd"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer(chat_format("Qwen/Qwen3-0.6B"))
    tokenizer.chat_template = (
        "{{ raise_exception('only users') if messages[0].role == 'system' }}" + "x"
    )
    held_out_rows = tmp_path / "held_out.jsonl"
    held_out_rows.write_text(json.dumps({"prompt": "9+9?"}) + "\n")
    task = OwnRows(path=str(held_out_rows), train_path=str(path), reward="json:dumps")

    def encode(prompt):
        return PromptFormat().encode(tokenizer, prompt)

    with refuses("task", "rows", '"source": "odd"}: this model\'s chat template refuses'):
        check_chats(task, 1, encode)
    problems = TrainingProblems(task, 1, Uniform(), 30, 0, 0, 100, lambda text: len(encode(text)))
    with refuses("task", "rows", "only users"):
        problems.take(1)


@pytest.mark.parametrize(
    "chat",
    [
        [],
        CHAT[:1],
        [*CHAT, {"role": "assistant", "content": "2"}],
        [{"role": "user"}],
        [*CHAT, 5],
        ["1+1?"],
    ],
)
def test_other_lists_are_refused(tmp_path, chat):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": chat}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: .*prompt.*a chat that ends with the user"):
        OwnRows(path=str(path), train_path=str(path), reward="json:dumps").size("rows")
