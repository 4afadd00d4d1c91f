"""The report page of a run: what it says, that it needs nothing else, and that damaged files do not
stop it.
"""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
import yaml

import forked
from gspo.io import files
from gspo.io.rows import read_rows
from gspo.tracking import run_report
from gspo.tracking.curves import curve
from gspo.tracking.metrics import lookup
from pages import Page
from recorded_runs import COLLAPSED, HEALTHY, write

GOOD = {
    "prompt": "1+1=?",
    "response": "<b>2</b>&#2",
    "reward": 1.0,
    "verdict": "correct",
    "finish_reason": "stop",
}
ODD = {
    "prompt": "2+2=?",
    "response": "5 \x00 \ud83d",
    "reward": 0.0,
    "verdict": "wrong",
    "finish_reason": "length",
}


def run(folder, rewards, **changes):
    folder = write(folder, "gspo", rewards, **changes)
    settings = yaml.safe_load((folder / "settings.yaml").read_text()) | {
        "model": {"name": "tiny_moe"}
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "status.json").write_text('{"how": "finished", "step": 90, "reason": ""}')
    (folder / "rollouts").mkdir()
    others = [response | {"prompt": f"problem {n}"} for n in range(3) for response in (GOOD, ODD)]
    lines = [json.dumps(r) for r in 6 * (GOOD, ODD) + (*others, *others)]
    (folder / "rollouts" / "step_000090.jsonl").write_text("\n".join(lines) + '\n{"prompt": "cut')
    return folder


def test_a_damaged_profile_is_named_and_a_whole_one_shown(tmp_path):
    folder = run(tmp_path, HEALTHY)
    (folder / "profile").mkdir()
    good = {"operation": "aten::<mm>", "share": 0.25, "cpu_s": 1.5, "gpu_s": 0.0, "calls": 12}
    (folder / "profile" / "step_000003.json").write_text(json.dumps([good]))
    for i, bad in enumerate(({}, good | {"share": "lots"}, ["x"], 3)):
        (folder / "profile" / f"step_00010{i}.json").write_text(json.dumps([bad]))
    words = " ".join(Page(run_report.write_page(folder).read_text()).words)
    assert "aten::<mm> 25% 1.500 0.000 12" in words
    assert all(f"step_00010{i}.json is damaged" in words for i in range(4))


def test_what_a_collapsed_run_says(tmp_path):
    folder = run(tmp_path, COLLAPSED)
    (folder / "monitor.jsonl").write_text(
        json.dumps({"step": 40, "kind": "warning", "text": "mismatch <high>"}) + "\n{"
    )
    (folder / "rollbacks.json").write_text('[{"from": 60, "to": 30, "moved": true}]')
    for n in ("1", "2", "3", "4"):
        (folder / "superseded" / n).mkdir(parents=True)
    (folder / "continued.jsonl").write_text(
        '{"step": 10, "time": 1.0}\n{"step": 20, "time": 2.0}\n'
    )
    text = run_report.write_page(folder).read_text()
    page = Page(text)
    words = " ".join(page.words)
    for part in (
        "The run finished at step 90 of 90.",
        "from 0.400 (first 5 batches) to 0.100 (last 10)",
        "It collapsed at step 3",
        "from step 60 to step 30",
        "continued 2 times, from the checkpoint of step 10, 20",
        "Does the reward keep rising? No: it collapsed",
        "mismatch <high>",
        "<b>2</b>&#2",
        r"5 \x00 \ud83d",
        "clip_low: 0.2",
        "eval/math/avg@2: 0.100 at step 0",
    ):
        assert part in words, part
    assert "<b>2</b>&#2" not in text, "what a model wrote is text, not markup"
    assert (
        text.count('class="good"') == text.count('class="bad"') == 3 and 'class="collapse"' in text
    )


def test_batches_without_a_reward_do_not_move_the_collapse(tmp_path):
    def collapsed_at(rewards: list) -> int:
        folder = run(tmp_path / str(len(rewards)), rewards)
        text = " ".join(Page(run_report.write_page(folder).read_text()).words)
        return int(text.partition("It collapsed at step ")[2].split()[0])

    assert collapsed_at([None, None, None, *COLLAPSED]) == collapsed_at(COLLAPSED) + 3


def test_negative_scores_have_whole_intervals():
    def lengths(*values: float) -> list[float]:
        rows = [
            {"step": step, "eval/game/avg@2": value, "eval/game/stderr": 0.1}
            for step, value in enumerate(values, start=1)
        ]
        metric = replace(lookup("eval/game/avg@2"), name="eval/game/avg@2")
        return [bottom - top for _, bottom, top in curve(rows, metric, log=False).errors]

    below, across = lengths(-0.5, 0.1)
    assert below == pytest.approx(across, abs=0.2) and below > 0
    at_zero, above = lengths(0.0, 0.5)
    assert at_zero == pytest.approx(above / 2, abs=0.2), "a share is not below 0"


def test_a_score_stands_with_its_95_percent_interval(tmp_path):
    folder = run(tmp_path, HEALTHY)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps({"step": 91, "eval/math/avg@2": 0.7, "eval/math/stderr": 0.05}) + "\n"
        )
    words = " ".join(Page(run_report.page(folder)).words)
    assert (
        "eval/math/avg@2: 0.100 at step 0, 0.700 ± 0.098 (95 % over its problems) at step 91."
        in words
    )  # 1.96 x 0.05


def test_a_run_that_was_rolled_back_and_never_interrupted_was_not_continued(tmp_path):
    folder = run(tmp_path, HEALTHY)
    (folder / "rollbacks.json").write_text(
        json.dumps([{"from": n, "to": n - 9, "moved": True} for n in (60, 80)])
    )
    for n in ("1", "2"):
        (folder / "superseded" / n).mkdir(parents=True)
    words = " ".join(Page(run_report.page(folder)).words)
    assert "continued" not in words and words.count("The monitor took it back from step") == 2


def test_a_continuation_is_counted_where_another_process_was_before(tmp_path):
    noted = tmp_path / files.CONTINUATIONS_FILE
    for pid, checkpoint, expected in (
        (0, None, []),
        (0, 4, [4]),
        (os.getpid(), 2, [4]),
        (0, 8, [4, 8]),
        (0, None, []),
    ):
        (tmp_path / "status.json").write_text(json.dumps({"how": "rolled back", "pid": pid}))
        files.note_start(tmp_path, checkpoint)
        assert [row["step"] for row in read_rows(noted)] == expected


def test_responses_of_different_problems_are_shown(tmp_path):
    folder = run(tmp_path, HEALTHY)
    text = run_report.page(folder)
    prompts = [
        text.split(f">{prompt}<")[0].count("<pre")
        for prompt in ("1+1=?", "problem 0", "problem 1", "2+2=?")
    ]
    assert prompts == sorted(prompts) and len(set(prompts)) == 4
    cut_off = GOOD | {"prompt": "other", "reward": 0.0, "verdict": "truncated"}
    paid = GOOD | {"prompt": "paid", "reward": 0.5, "verdict": "truncated"}
    for lines, kinds in (
        ([GOOD] * 5, {"equal": 1}),
        ([cut_off] * 5, {"equal": 1}),
        ([GOOD, cut_off], {"good": 1, "bad": 1}),
        ([GOOD, cut_off, paid], {"good": 1, "bad": 2}),
        ([{}] * 5, {}),
    ):
        saved = folder / "rollouts" / "step_000090.jsonl"
        saved.write_text("".join(json.dumps(line) + "\n" for line in lines))
        text = run_report.page(folder)
        assert {
            kind: n for kind in ("good", "bad", "equal") if (n := text.count(f'class="{kind}"'))
        } == kinds


def turn(author: str, text: str, reward: float = 0.0) -> dict:
    return {"author": author, "tokens": 7, "text": text, "reward": reward}


def test_an_episode_is_shown_as_a_conversation(tmp_path):
    folder = run(tmp_path, HEALTHY)
    turns = [
        turn("policy", "<py>1"),
        turn("environment", "</pre><b>1\x1b\u202e"),
        turn("policy", "so 1", 0.5),
    ]
    damaged = [*turns, turn('policy"><b>', "x")]
    lines = [GOOD | {"turns": turns}, ODD | {"response": "one text", "turns": damaged}]
    (folder / "rollouts" / "step_000090.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    text = run_report.page(folder)
    page = Page(text)
    assert [value for name, value in page.attributes if name == "class" and value in ("policy", "environment")] == [
        "policy", "environment", "policy",
    ]  # fmt: skip
    words = " ".join(" ".join(page.words).split())
    said = r"policy, 7 tokens <py>1 environment, 7 tokens </pre><b>1\x1b\u202e policy (reward 0.5), 7 tokens so 1"
    assert said in words and "<b>2</b>&#2" not in words, (
        "the turns stand in place of the text of all of them"
    )
    assert "one text" in words and "<b>" not in text.replace("<b>1.0</b>", "").replace(
        "<b>0.0</b>", ""
    )


def test_the_numbers_of_episodes_are_a_table(tmp_path):
    folder = run(tmp_path, HEALTHY)
    assert "Episodes" not in Page(run_report.page(folder)).words
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row |= {
            "episode/turns": float(row["step"]),
            "episode/tool_errors": None if row["step"] > 1 else 0.25,
        }
    rows[-1]["time/environment_s"] = 1.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = " ".join(" ".join(Page(run_report.page(folder)).words).split())
    assert (
        f"Episodes first 5 batches last 10 tool_errors 0.25 0.25 turns 3 {sum(range(81, 91)) / 10:.3g}"
        in words
    )
    assert "environments, a part of sampling 1.5 s" in words


def test_metrics_of_ones_own_have_curves_with_their_unit_and_meaning(tmp_path):
    folder = run(tmp_path, HEALTHY)
    rows = [
        json.loads(line) | {"custom/a<b": 1.0, "custom/c": 2.0}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "custom_metrics.json").write_text(
        '{"custom/a<b": {"unit": "<i>", "meaning": "mine"}}'
    )
    words = Page(run_report.page(folder)).words
    assert "custom/a<b: mine [<i>]" in words
    assert any(word.startswith("custom/c: a metric of the user's own") for word in words)
    (folder / "custom_metrics.json").write_text("[")
    assert "A file is left out" in " ".join(Page(run_report.page(folder)).words)


def test_it_needs_nothing_but_itself(tmp_path):
    text = run_report.page(run(tmp_path, HEALTHY))
    assert not re.search(r"https?:|src=|href=|@import|<script|url\(", text)
    assert 'class="collapse"' not in text and text.count("<svg") == 5 and len(text) < 100_000


def test_a_run_without_rows_or_files_has_a_page_too(tmp_path):
    folder = write(tmp_path, "gspo", HEALTHY)
    settings = yaml.safe_load((folder / "settings.yaml").read_text()) | {
        "model": {"name": "tiny_moe"}
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    for rows in (
        '{"step": 0, "eval/math/avg@2": 0.1}\n',
        '{"step": 1, "reward/mean": null}\n{"st',
        "",
    ):
        (folder / "metrics.jsonl").write_text(rows)
        words = " ".join(Page(run_report.page(folder)).words)
        assert "has no end yet" in words and "none was saved" in words


@pytest.mark.parametrize("argument", ["nowhere", "run=nowhere"])
def test_no_run_is_one_line(tmp_path, argument):
    command = [sys.executable, "-P", "-m", "gspo", "report", argument]
    done = forked.run(command, cwd=tmp_path)
    assert (
        done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    )
