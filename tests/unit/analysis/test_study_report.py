"""The report of a study: the same content as HTML, as Markdown, as a W&B Report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

import forked
from commands import ROOT
from gspo.analysis import blocks, study_parts
from gspo.analysis.blocks import Figure, Folded, Heading, Items, Link, Table, Text
from pages import Page
from recorded_runs import COLLAPSED, HEALTHY, write
from recorded_wandb import log, rows
from wandb_server import serving

PARTS = [
    Heading("A < B"), Text("x & y"), Items(("one", "two")), Folded("more", "a: 1\nb: <2>"),
    Table(("run", "value"), ((Link("r|1", "runs/r1"), "0.5"), ("r2", "a|b"))),
]  # fmt: skip


def call(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "analysis" / "study_report.py"), *arguments]
    return forked.run(command, cwd=cwd, env=os.environ | environment)


def test_parts_in_both_forms(tmp_path):
    png = tmp_path / "figures" / "a.png"
    png.parent.mkdir()
    png.write_bytes(b"\x89PNG")
    text = blocks.to_html("T", [*PARTS, Figure(png, "a <curve>")])
    words = " ".join(Page(text.replace("<img ", "<meta ")).words)
    for part in ("A < B", "x & y", "one", "b: <2>", "r|1", "a|b"):
        assert part in words
    assert (
        'href="runs/r1"' in text
        and 'src="data:image/png;base64,iVBORw=="' in text
        and "a &lt;curve&gt;" in text
    )
    text = blocks.to_markdown("T", [*PARTS, Figure(png, "a curve")], tmp_path / "figures")
    assert "| [r\\|1](runs/r1) | 0.5 |\n| r2 | a\\|b |" in text and "![a curve](a.png)" in text
    assert (
        text.startswith("# T\n\n## A \\< B\n\nx & y\n\n- one\n- two\n\n")
        and "```\na: 1\nb: <2>\n```" in text
    )
    assert "````\n```\n````" in blocks.to_markdown("T", [Folded("code", "```")], tmp_path)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two objectives at two learning rates, three seeds; one arm collapses."""
    folder = tmp_path_factory.mktemp("study")
    for lr in (1e-4, 2e-4):
        for seed in (1, 2, 3):
            for objective in ("gspo", "grpo"):
                falls = objective == "grpo" and lr > 1e-4
                write(
                    folder / "runs", objective, COLLAPSED if falls else HEALTHY, seed, optim__lr=lr
                )
    return folder


@pytest.mark.slow
def test_what_a_study_says(study):
    done = call("runs", cwd=study)
    assert done.returncode == 0, done.stderr
    html, markdown = (study / line for line in done.stdout.split())
    text, words = html.read_text(), markdown.read_text()
    assert (
        not re.search(r"https?:|@import|<script", text)
        and text.count("<img") == words.count("![") >= 1
    )
    high = "[optim.lr=0.0002"
    differences = re.findall(r"^\| GSPO \[(.*?)\] \| GRPO \[(.*?)\] \| (\S+) \[", words, re.M)
    assert len(differences) == 2 and all(a == b for a, b, _ in differences), (
        "each with GRPO at its learning rate"
    )
    assert sorted(float(d) for _, _, d in differences) == [0.0, 0.4]
    for part in ("2 comparisons", "finished; collapsed at step", "optim.lr", high, "seeds"):
        assert part in words and part in text
    links = re.findall(r'href="([^"]+)"', text)
    assert len(links) == 12 and all((html.parent / link).exists() for link in links)
    cells = [
        cell.strip()
        for line in words.splitlines()
        if line.startswith("|")
        for cell in line.strip("|").split("|")
    ]
    page = " ".join(Page(text.replace("<img ", "<meta ")).words)
    assert all(cell in page for cell in cells if cell not in ("", "---") and "](" not in cell), (
        "the same tables"
    )


def test_whom_an_arm_is_compared_with():
    arms = ["GSPO [x=1]", "GSPO [x=2]", "GRPO [x=1]", "SAPO [x=1]"]
    pairs = {"GSPO [x=1]": "GRPO [x=1]", "SAPO [x=1]": "GRPO [x=1]"}
    assert study_parts.rivals(arms, "") == pairs
    assert study_parts.rivals(["GSPO [x=1]", "GSPO [x=2]"], "") == {"GSPO [x=2]": "GSPO [x=1]"}
    assert study_parts.rivals(arms, "SAPO [x=1]") == dict.fromkeys(arms[:3], "SAPO [x=1]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--baseline", "PPO"), "--baseline 'PPO' is no arm of these runs: "),
        (("--figures", "no.png"), "--figures no.png: no PNG file"),
        (("--publish", "team"), "--publish team: write ENTITY/PROJECT"),
        (("--publish", "team/gspo"), "no W&B account is configured on this machine: wandb login"),
        (("--out", "/proc/nowhere"), "/proc/nowhere cannot be made: "),
    ],
)
def test_wrong_arguments_end_in_one_line(study, arguments, said, tmp_path):
    done = call(
        "runs", "--out", str(tmp_path), *arguments, cwd=study, WANDB_API_KEY="", NETRC="/nowhere"
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_published_and_published_again(tmp_path):
    with serving() as server:
        folder = tmp_path / "runs" / "gspo-seed1-abc"
        log(folder, rows(0, 40), **server.environment)
        (identity,) = server.runs
        for _ in range(2):
            done = call("runs", "--publish", "team/gspo", cwd=tmp_path, **server.environment)
            assert done.returncode == 0, done.stderr
        (saved,) = server.views.values()
        assert saved["displayName"] == "Study known" and saved["type"] == "runs"
        assert f"{server.address}/team/gspo/reports/Study-known--{saved['id']}" in done.stdout
        (pictures,) = (run for name, run in server.runs.items() if name != identity)
        assert pictures.about["jobType"] == "report" and any(
            "fig_curves_known" in name for name in pictures.files
        )
        parts = json.loads(saved["spec"])["blocks"]
        text = json.dumps(parts)
        assert f"[gspo-seed1-abc]({server.address}/team/gspo/runs/{identity})" in text, (
            "a link to the run"
        )
        for words in (
            "What was run",
            "clip_low: 0.0003",
            "reward, start",
            "figures/fig_curves_known",
            "reward/mean",
        ):
            assert words in text
        live = [part for part in parts if part["type"] == "panel-grid"][1]["metadata"]["runSets"][0]
        assert [each["value"] for each in live["filters"]["filters"]] == [["known"], "train"]
        server.refuses = True
        refused = call("runs", "--publish", "team/gspo", cwd=tmp_path, **server.environment)
        assert (
            refused.returncode == 2
            and "permission denied" in refused.stderr
            and "Traceback" not in refused.stderr
        )


@pytest.mark.slow
def test_one_seed_and_runs_without_rewards_are_said_to_be_so(tmp_path):
    write(tmp_path / "runs" / "s", "gspo", HEALTHY)
    other = write(tmp_path / "runs" / "s", "grpo", HEALTHY)
    none = write(tmp_path / "runs" / "s", "cispo", HEALTHY) / "metrics.jsonl"
    none.write_text(
        "".join(json.dumps({"step": n, "length/mean": 3.0}) + "\n" for n in range(1, 90))
    )
    done = call("runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "figures" / "report_known.md").read_text()
    assert "+0.000 [+0.000, +0.000] within the single run, not over seeds | - | 46-90 |" in words
    assert (
        "CISPO is not compared with GRPO: needs reward/mean of every run" in words
        and other.name in words
    )


@pytest.mark.slow
def test_odd_names_of_studies(tmp_path):
    study = "a|b <i>&'x #1"
    folder = write(tmp_path / "runs (1)" / "h#1", "gspo", HEALTHY)
    settings = yaml.safe_load((folder / "settings.yaml").read_text()) | {"study": study}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    with serving() as server:
        done = call("runs (1)", "--publish", "team/gspo", cwd=tmp_path, **server.environment)
    assert done.returncode == 2 and "W&B's filters take letters" in done.stderr and not server.runs
    done = call("runs (1)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "figures" / f"report_{study}.html").read_text()
    (link,) = re.findall(r'href="([^"]+)"', text)
    assert (
        (tmp_path / "figures" / unquote(link)).resolve() == folder
        and "#" not in link
        and " " not in link
    )
