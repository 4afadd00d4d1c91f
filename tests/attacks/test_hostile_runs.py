"""Every tool that reads runs, on a study in which all runs but one are spoiled: none hangs, none
stops, none is led.
"""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record

import forked
from gspo.analysis import load
from gspo.io.escaping import UNSAFE_CHARACTERS
from gspo.run.sweep_state import jobs
from gspo.tracking import run_report
from spoiled_runs import MARKUP, READABLE, ROOT, UNREADABLE, study, tiny_run

SECONDS = 120  # in which any tool reads these runs; on a busy machine it is done in a tenth of that


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def spoiled(real, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger") / "runs" / "small"
    folder.mkdir(parents=True)
    return study(real, folder)


@pytest.fixture(scope="module")
def known_jobs(spoiled) -> set[str]:
    return {job.run for job in jobs(spoiled["whole"].parent)}


def call(command: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """A tool, on runs that nothing was kept of; what it prints is checked for what acts on a
    terminal.
    """
    command = [sys.executable, "-P", "-m", "gspo", command, *map(str, arguments)]
    there = os.environ | {
        "XDG_CACHE_HOME": str(cwd / "cache"),
        "PYTHONPATH": str(ROOT),
        "NETRC": "/nonexistent",
    }
    done = forked.run(command, cwd, there, seconds=SECONDS)
    assert done.returncode != -signal.SIGALRM, "it hangs"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert not UNSAFE_CHARACTERS.search(done.stdout + done.stderr), UNSAFE_CHARACTERS.search(
        done.stdout + done.stderr
    )
    return done


def assert_left_out(spoiled: dict[str, Path], said: str) -> None:
    missing = [name for name in UNREADABLE if spoiled[name].name not in said]
    assert not missing, f"{missing} are not named in: {said}"


@pytest.mark.slow
def test_compare(spoiled):
    folder = spoiled["whole"].parents[2]
    done = call("compare", *spoiled.values(), "all=true", cwd=folder)
    assert done.returncode == 0, done.stderr
    legend = [line for line in done.stdout.splitlines() if re.match(r"\[\d+\] ", line)]
    assert [line.split("/")[-1] for line in legend] == [
        spoiled[name].name for name in ("whole", *READABLE)
    ]
    assert_left_out(spoiled, done.stdout)


@pytest.mark.slow
def test_sweep_status(spoiled):
    done = call("sweep-status", spoiled["whole"].parent, cwd=spoiled["whole"].parents[2])
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert " finished " in lines[spoiled["whole"].name] and "../../etc" not in done.stdout
    assert all(spoiled[name].name in lines for name in (*UNREADABLE, *READABLE))
    assert "is no plain file" in lines[spoiled["rows are a pipe"].name]
    assert "has an alias" in lines[spoiled["alias bomb"].name]


@pytest.mark.slow
def test_report_of_every_run(spoiled):
    done = call("report", *map(str, spoiled.values()), cwd=spoiled["whole"].parents[2])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    written = {Path(line).parent.name for line in done.stdout.splitlines()}
    for name in ("whole", *READABLE):
        assert spoiled[name].name in written, name
        page = (spoiled[name] / "report.html").read_text()
        assert (
            "<script" not in page and "<img" not in page and not UNSAFE_CHARACTERS.search(page)
        ), name
        assert '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';' in page
    bad = [name for name in UNREADABLE if spoiled[name].name not in written]
    assert (
        all(spoiled[name].name in done.stderr for name in bad)
        and "alias bomb" in bad
        and "settings are a pipe" in bad
    )
    page = (spoiled["rollouts are a pipe"] / "report.html").read_text()
    assert "A file is left out: " in page and "is no plain file" in page


@pytest.mark.slow
def test_study_report_and_its_markdown(spoiled, tmp_path):
    folder = spoiled["whole"].parents[2]
    done = call("study-report", "runs", f"out={tmp_path}", cwd=folder)
    assert done.returncode == 0, done.stderr
    html, markdown = (Path(line) for line in done.stdout.split())
    text, words = html.read_text(), markdown.read_text()
    assert_left_out(spoiled, words)
    assert spoiled["whole"].name in text and not UNSAFE_CHARACTERS.search(text + words)
    assert "<script" not in text and text.count("<img") == len(
        re.findall('<img alt="[^"]*" src="data:', text)
    )
    assert_inert(words)


@pytest.mark.slow
def test_reproduce_and_its_summary(spoiled, tmp_path):
    done = call("figures", "runs", f"out={tmp_path}", cwd=spoiled["whole"].parents[2])
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "summary.md").read_text()
    assert_left_out(spoiled, words)
    assert not UNSAFE_CHARACTERS.search(words)
    assert_inert(words)


def assert_inert(markdown: str) -> None:
    """What a reader of Markdown makes of it: no picture but our own, no link but to a run, no raw
    HTML but ours.
    """
    from markdown_it import MarkdownIt

    assert "evil.example" in markdown, "the attack is not in this page: the test would say nothing"
    for block in MarkdownIt("commonmark").enable("table").parse(markdown):
        ours = block.content.strip().startswith(
            ("<details><summary>settings that all runs share", "</details>")
        )
        assert block.type != "html_block" or ours, block.content
        assert block.type != "heading_open" or block.tag in ("h1", "h2")
        for token in block.children or ():
            address = str(token.attrs.get("href", "") or token.attrs.get("src", ""))
            assert "evil" not in address and token.type != "html_inline", token


@pytest.mark.slow
def test_curves(spoiled, tmp_path):
    done = call(
        "figure",
        "curves",
        "runs",
        f"out={tmp_path}",
        "formats=svg",
        cwd=spoiled["whole"].parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert_left_out(spoiled, done.stdout)


@pytest.mark.slow
def test_dashboard(spoiled, tmp_path):
    arguments = ["project=p", "publish=false", f"out={tmp_path}", "runs=runs"]
    done = call("dashboard", *arguments, cwd=spoiled["whole"].parents[2])
    assert done.returncode == 0, done.stderr
    assert (
        f"{spoiled['words for numbers'].name} has recorded eval/avg@2, which is on no panel"
        in done.stdout
    )
    assert (tmp_path / "stability.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*UNREADABLE, *READABLE])
def test_one_bad_run_beside_a_good_one(spoiled, known_jobs, name, tmp_path, monkeypatch):
    """In this process, so that it is seen which file does the harm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = load.load([spoiled["whole"], spoiled[name]])
    assert [run.path for run in data.runs] == [spoiled["whole"]] + [spoiled[name]] * (
        name in READABLE
    )
    assert name in READABLE or any(spoiled[name].name in note for note in data.notes)
    assert all(run.ended for run in data.runs)
    if name in READABLE:
        assert MARKUP not in run_report.page(spoiled[name])
    assert known_jobs >= {spoiled["whole"].name, spoiled[name].name}


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 9000])
def test_a_name_that_no_folder_can_have_stands_in_a_file_of_wandb(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"seed": 1, "steps": 2, "objective": {"name": "gspo"}, "record": {"run": name}}
    records = [Record(), Record()]
    for key, value in settings.items():
        records[0].run.config.update.add(key=key, value_json=json.dumps(value))
    for key in ("step", "reward/mean"):
        records[1].history.item.add(nested_key=[key], value_json="1")
    file = tmp_path / "offline-run-1-ab" / "run-ab.wandb"
    file.parent.mkdir()
    content = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
    for body in (record.SerializeToString() for record in records):
        content += struct.pack("<IHB", zlib.crc32(b"\1" + body), len(body), 1) + body
    file.write_bytes(content)
    (run,) = load.load([file.parent]).runs
    assert run.ended == "unfinished" and run.path == file
