"""Runs whose problems are played in environments of other libraries: trained, resumed, evaluated by
name.
"""

import json
import re
import shutil
import string
import sys
from pathlib import Path

import pytest
import transformers

import forked
from commands import SMALL, environment, train
from gspo.model.tiny import random_model
from gspo.model.tokenizer import character_tokenizer

SUPPORT = Path(__file__).parents[1] / "support"
# an untrained model ends its turns so
STOP = "rollout.stop=[" + ",".join(f'"{digit}"' for digit in range(10)) + "]"
SIZES = [word for word in SMALL if not word.startswith(("task=", "cold_start", "steps="))]
SIZES += ["cold_start.steps=0", "rollout.max_new_tokens=40", "tracking.wandb=disabled"]
TINY = [*SIZES, STOP]


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs" / "small").glob("*-seed*")
    return run


def trained(folder: Path, *task: str, sizes: list[str] = TINY) -> Path:
    """Train for two steps, resume to four, and check that the episodes are those of four at once."""
    for place, steps in ((folder / "once", 4), (folder / "twice", 2)):
        place.mkdir()
        for module in ("vf_games", "text_games"):
            shutil.copy(SUPPORT / f"{module}.py", place)
        done = train(place, *sizes, *task, f"steps={steps}")
        assert done.returncode == 0, done.stderr
    run = run_of(folder / "twice")
    done = train(folder / "twice", f"resume={run}", "steps=4")
    assert done.returncode == 0, done.stderr
    assert episodes(run) == episodes(run_of(folder / "once")) and len(episodes(run)) == 4 * 16
    return run


def evaluated(run: Path, *command: str) -> dict:
    out = run / "evaluated"
    script = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "evaluate",
        *command,
        f"out={out}",
        "problems=3",
        "k=2",
    ]
    done = forked.run(script, cwd=run.parents[2], env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads((out / "result.json").read_text())


def episodes(run: Path) -> list[dict]:
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_text_game_is_trained_on_resumed_and_evaluated(tmp_path):
    run = trained(
        tmp_path, "task=text_game", "task.env=text_games:Doors", "task.arguments={doors: 3}"
    )
    assert (run / "outside" / "text_games.py").read_text() == (
        SUPPORT / "text_games.py"
    ).read_text()
    played = episodes(run)
    assert {row["verdict"] for row in played} & {"terminated", "time-limit"}
    assert any(turn["text"] == "A wall." for row in played for turn in row["turns"])
    assert all(
        row["measures"]["replay_differs"] == 0
        for row in played
        if "replay_differs" in row["measures"]
    )
    assert set(evaluated(run, f"run={run}")["sets"]) == {"text_game"}

    (tmp_path / "twice" / "text_games.py").write_text("# another game\n")
    done = train(tmp_path / "twice", f"resume={run}", "steps=6")
    assert (
        done.returncode == 2
        and "the source of task.env=text_games:Doors is not what it was" in done.stderr
    )


@pytest.mark.environments
@pytest.mark.verifiers
def test_a_taskset_of_verifiers_is_trained_on_resumed_and_evaluated_by_name(tmp_path):
    run = trained(
        tmp_path, "task=vf", "task.taskset=vf-games", "task.arguments={rounds: 3}",
        "advantage=gdpo", "reward.weights={found: 1, quick: 0.25}",
    )  # fmt: skip
    played = episodes(run)
    ended = [row for row in played if row["measures"].get("guesses") == 3]
    # not found, and 0.25 x quick, whose weight in the taskset is 0.5
    assert ended and all(row["reward"] == pytest.approx(0.25 / 3) for row in ended)
    assert all(row["rewards"] == {"found": 0.0, "quick": pytest.approx(1 / 3)} for row in ended)
    assert {row["verdict"] for row in played} <= {"user_closed", "truncated"}
    assert {turn["text"] for row in played for turn in row["turns"] if turn["author"] == "environment"} <= {
        "higher", "lower"
    }  # fmt: skip
    assert all(
        row["measures"]["replay_differs"] == 0
        for row in played
        if "replay_differs" in row["measures"]
    )
    # by name, with all samples of a problem in one episode of the library
    by_name = ["benchmark=vf", "tasks.vf.taskset=vf_games", "tasks.vf.group=players"]
    assert set(evaluated(run, f"run={run}", *by_name)["sets"]) == {"vf"}


def guesser(folder: Path) -> Path:
    """Save an untrained model that often guesses a letter: [a] to [z] are tokens of it."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([f"[{letter}]" for letter in string.ascii_lowercase])
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    for part in (random_model(transformers.Qwen3ForCausalLM, config, 0), tokenizer):
        part.save_pretrained(folder)
    return folder


def guessed_letter(text: str) -> str:
    """The letter that a turn of Hangman guesses, "" if there is none. TextArena puts a turn without
    brackets into brackets.
    """
    if "[" not in text and "]" not in text:
        text = f"[{text}]"
    guess = re.search(r"\[([a-zA-Z]+)\]", text)
    return guess[1].lower() if guess and len(guess[1]) == 1 else ""


@pytest.mark.environments
@pytest.mark.verifiers
def test_the_librarys_own_hangman_is_trained_on_resumed_and_evaluated_offline(
    tmp_path, monkeypatch
):
    words = tmp_path / "nltk_data" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("lemon\nmelon\n")  # each letter once, and the same in both
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    # NLTK refuses to download through a proxy
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    model = ["model=hf", f"model.path={guesser(tmp_path / 'guesser')}", 'rollout.stop=["]"]']
    sizes = [*(word for word in SIZES if not word.startswith("model.")), *model]
    game = "arguments={game: Hangman-v0}"
    run = trained(tmp_path, "task=vf", "task.taskset=textarena", f"task.{game}", sizes=sizes)

    played = episodes(run)
    assert {row["verdict"] for row in played} <= {"user_closed", "truncated"}
    ended = [row for row in played if row["verdict"] == "user_closed"]
    for row in ended:
        said = [turn["text"] for turn in row["turns"] if turn["author"] == "policy"]
        found = set(map(guessed_letter, said)) & set("lemon")
        assert row["reward"] == pytest.approx(len(found) / 5), said
    assert len({row["reward"] for row in ended}) > 1
    turns = [turn for row in played for turn in row["turns"] if turn["author"] == "environment"]
    boards = [turn["text"] for turn in turns]
    assert any("C00 C01 C02 C03 C04" in board and " E " in board for board in boards)
    measures = [row["measures"] for row in played]
    differ = [values["replay_differs"] for values in measures if "replay_differs" in values]
    assert differ == [0.0] * 4
    by_name = ["benchmark=vf", "tasks.vf.taskset=textarena", f"tasks.vf.{game}"]
    assert set(evaluated(run, f"run={run}", *by_name)["sets"]) == {"vf"}


@pytest.mark.environments
def test_a_game_behind_a_server_of_openenv_is_trained_on(tmp_path):
    from openenv_server import serving

    with serving() as url:
        fields = ["task.text=prompt", "task.action=message", "task.options={most: 3}"]
        run = trained(tmp_path, "task=openenv", f"task.url={url}", *fields)
    played = episodes(run)
    assert any(turn["text"] == "wrong" for row in played for turn in row["turns"])
