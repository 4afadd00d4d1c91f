"""Two evaluations on disk: read, checked to have the same problems, compared; and a stream that was
cut anywhere.
"""

import json
import sys
from pathlib import Path

import pytest

from builders import small_policy
from demonstrator import Demonstrator
from drawing_engine import Drawn
from gspo.analysis.runs import RunsError
from gspo.cli import compare as command
from gspo.evaluation.comparison import (
    Finished,
    compared,
    comparison_table,
    numbered,
    read_finished,
)
from gspo.evaluation.evaluate import load_evaluation_sets
from gspo.evaluation.resumable import Folder, describe, evaluate_into
from gspo.rollout.engines.requests import Sampling
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic

TASK = ChainArithmetic()


def evaluated(
    path: Path,
    engine,
    problems: int = 12,
    samples: int = 4,
    sets=("math_easy", "rated"),
    task=TASK,
    **settings,
) -> Path:
    chosen = load_evaluation_sets(task, list(sets), problems)
    content = {
        "samples": samples,
        "temperature": 1.0,
        "sets": {s.name: describe(s) for s in chosen},
    } | settings
    folder = Folder(path, content)
    results = evaluate_into(
        folder,
        engine,
        chosen,
        [s.request(samples, Sampling(1.0, 16), step=0) for s in chosen],
        on_progress=lambda *_: None,
    )
    folder.finish(results, {})
    return path


@pytest.fixture
def base(tmp_path) -> Path:
    return evaluated(tmp_path / "base", Demonstrator(TASK, slips=0.4))


@pytest.fixture
def trained(tmp_path) -> Path:
    return evaluated(tmp_path / "trained", Demonstrator(TASK, slips=0.1), samples=3, top_p=0.9)


def test_two_evaluations_are_compared_set_by_set(base, trained):
    found = compared(read_finished(base), read_finished(trained))
    results = [json.loads((path / "result.json").read_text())["sets"] for path in (base, trained)]
    assert list(found["sets"]) == ["math_easy", "rated"]
    for name, r in found["sets"].items():
        assert r["accuracy"] == pytest.approx([side[name]["avg"]["value"] for side in results])
        assert r["gain"]["value"] > 0 and r["found"] == [1.0, 1.0], (
            "demonstrations always have an answer"
        )
        assert (
            r["correctness"]["value"] == pytest.approx(r["gain"]["value"])
            and r["format"]["value"] == 0
        )
    assert found["differences"] == ["samples: 4 against 3", "top_p: None against 0.9"]
    assert json.dumps(found, allow_nan=False)
    text = comparison_table(found)
    gain = found["sets"]["rated"]["gain"]
    assert (
        f"{gain['value']:+.3f} [{gain['interval_95'][0]:+.3f}, {gain['interval_95'][1]:+.3f}]"
        in text
    )
    assert (
        "note: they differ in samples: 4 against 3" in text
        and "an answer was found in 1.000 -> 1.000" in text
    )


def edited(path: Path, set_name: str, **entries) -> Finished:
    """Read an evaluation whose settings of a set have other entries."""
    settings = json.loads((path / "settings.json").read_text())
    settings["sets"][set_name] |= entries
    (path / "settings.json").write_text(json.dumps(settings))
    return read_finished(path)


def test_other_grading_of_the_same_problems_is_said(base, trained):
    other = {"outside": {"rewards:score": {"rewards.py": "12ab"}}, "reward.truncated": None}
    changed = edited(trained, "rated", **other)
    notes = compared(read_finished(base), changed)["differences"]
    assert notes[2:] == [
        f"rated.outside: None against {other['outside']}",
        "rated.reward.truncated: 0.0 against None",
    ]


def test_an_evaluation_against_itself_is_nothing(base):
    found = compared(read_finished(base), read_finished(base))
    for r in found["sets"].values():
        for part in ("gain", "format", "correctness"):
            assert r[part]["value"] == 0 and r[part]["interval_95"] == [0, 0]
    assert found["differences"] == [] and "+0.000 [+0.000, +0.000]  1.000" in comparison_table(
        found
    )


def test_other_problems_are_refused_by_name(tmp_path, base):
    one = read_finished(base)
    fewer = read_finished(evaluated(tmp_path / "fewer", Demonstrator(TASK), problems=7))
    with pytest.raises(
        ValueError, match=r"math_easy: problems 7, 8, 9 and 2 more in .*base and not in .*fewer"
    ):
        compared(one, fewer)
    with pytest.raises(
        ValueError, match=r"math_easy: problems 7, 8, 9 and 2 more in .*base and not in .*fewer"
    ):
        compared(fewer, one)
    part = read_finished(evaluated(tmp_path / "part", Demonstrator(TASK), sets=("rated",)))
    with pytest.raises(ValueError, match=r"the set math_easy is in .*base and not in .*part"):
        compared(part, one)
    other = ChainArithmetic(largest=7)
    changed = read_finished(evaluated(tmp_path / "changed", Demonstrator(other), task=other))
    with pytest.raises(
        ValueError, match=r"math_easy: other prompts in .*changed than in .*base: problem"
    ):
        compared(one, changed)
    answers = edited(tmp_path / "fewer", "math_easy", answers="0123456789")
    with pytest.raises(ValueError, match=r"math_easy: other answers to .*fewer"):
        compared(read_finished(evaluated(tmp_path / "seven", Demonstrator(TASK), 7)), answers)
    assert numbered([4]) == "problem 4" and numbered([1, 2]) == "problems 1, 2"


def test_what_is_no_finished_evaluation_is_refused(tmp_path, base):
    with pytest.raises(ValueError, match="holds no evaluation: give the folder"):
        read_finished(tmp_path)
    file = base / "responses" / "rated.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for wrong in (
        "nonsense\n",
        '{"problem": 0}\n',
        lines[2].replace('"reward": ', '"reward": "1", "was": '),
        lines[2].replace('"reward": ', '"reward": 1e999, "was": '),
        lines[2][:30],
    ):
        file.write_text("".join([*lines[:2], wrong]))
        with pytest.raises(ValueError, match=r"rated\.jsonl is damaged in line 3"):
            read_finished(base)
    # the rewards of a user's function or of an environment are not damaged, and no accuracies
    file.write_text("".join([*lines[:2], lines[2].replace('"reward": ', '"reward": -1, "was": ')]))
    with pytest.raises(ValueError, match=r"a response has the reward -1; only rewards from 0 to 1"):
        read_finished(base)
    episode = lines[2].replace('"reward": ', '"turns": [], "reward": -2, "was": ')
    file.write_text("".join([*lines[:2], episode]))
    with pytest.raises(
        ValueError, match=r"rated\.jsonl: an episode has the reward -2; only rewards from 0 to 1"
    ):
        read_finished(base)
    named = lines[2].replace('"reward": ', '"rewards": {"a": 1, "b": 1}, "reward": 1.2, "was": ')
    file.write_text("".join([*lines[:2], named]))
    with pytest.raises(ValueError, match=r"rated\.jsonl: a response has the reward 1\.2; only"):
        read_finished(base)
    file.unlink()
    file.symlink_to(base / "responses" / "math_easy.jsonl")
    with pytest.raises(ValueError, match="is a link"):
        read_finished(base)
    file.unlink()
    (base / "result.json").unlink()
    with pytest.raises(ValueError, match="has not finished: give its command again"):
        read_finished(base)
    (base / "result.json").write_text("{}")
    (base / "settings.json").write_text('{"sets": 3}')
    with pytest.raises(ValueError, match="names no sets"):
        read_finished(base)


def test_the_command_compares_evaluations(base, trained, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare", str(base), str(trained)])
    command.compare()
    assert "gain: format" in capsys.readouterr().out
    for paths in ([base], [base, trained, base], [base, base.parent]):
        with pytest.raises(RunsError, match="is an evaluation: name two"):
            monkeypatch.setattr(sys, "argv", ["compare", *map(str, paths)])
            command.compare()


# --------------------------------------------------------------------------------------------------
# streams on disk


@pytest.mark.slow
def test_a_stream_that_was_cut_anywhere_ends_with_the_same_numbers(tmp_path):
    policy = small_policy()
    whole = evaluated(tmp_path / "whole", Drawn(policy, 8), samples=3)
    expected, content = (
        (whole / "result.json").read_bytes(),
        (whole / "responses" / "rated.jsonl").read_bytes(),
    )
    problems = [json.loads(line)["problem"] for line in content.splitlines()]
    assert sorted(problems) != problems, "they stand in the order in which they ended"
    for cut in range(0, len(content) + 1, len(content) // 9):
        path = tmp_path / str(cut)
        Folder(path, json.loads((whole / "settings.json").read_text()))
        (path / "responses" / "rated.jsonl").write_bytes(content[:cut])
        kept = content[:cut].count(b"\n") // 3
        assert (
            evaluated(path, Drawn(policy, 4), samples=3) / "result.json"
        ).read_bytes() == expected
        rows = (path / "responses" / "rated.jsonl").read_bytes().splitlines()
        assert rows[: 3 * kept] == content.splitlines()[: 3 * kept], "what was whole was kept"
        assert sorted(rows) == sorted(content.splitlines())


def test_a_stream_with_a_problem_twice_is_damaged(tmp_path):
    path = evaluated(tmp_path / "x", Drawn(small_policy(), 8), samples=2, sets=("rated",))
    file = path / "responses" / "rated.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for rows in ([*lines[:4], *lines[:2]], [lines[0], lines[3]], [lines[1]]):
        file.write_text("".join(rows))
        with pytest.raises(
            ValueError, match=r"is damaged at problem .*another problem or sample was expected"
        ):
            evaluated(path, Drawn(small_policy(), 8), samples=2, sets=("rated",))
