"""The pages of the documentation: what they name exists, their commands are understood, and marked
blocks run.

A block of commands runs where `<!-- run -->` stands on the line above it; the blocks of a page run
one after another in one shell, in a temporary folder, with few steps.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser

import audit_rewards
import forked
import parity
import times
from commands import environment
from composing import CONF, options, settings
from gpu import box
from gspo.analysis import script as figures
from gspo.cli import (
    check,
    check_objective,
    compare,
    dashboard,
    evaluate,
    main,
    option_files,
    plan,
    replay,
    replay_settings,
    report,
    serve,
    sweep_status,
    view,
)
from gspo.config.conversion import to_dataclass
from gspo.config.settings import CHOICES, changeable_on_resume
from gspo.io.arguments import parsed
from gspo.planning.hardware import hardware
from gspo.run.sweep_configs import expanded
from gspo.tracking.frameworks.known import TABLES
from gspo.tracking.metrics import FAMILIES, lookup

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(
    r"^(?P<mark><!-- run -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELL = ("sh", "bash")
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FIGURES = main.figure_files()
FILES = ("jsonl", "yaml", "py")  # what a name with a dot ends with that is no setting
PLACES = re.compile(r"(?:gspo|analysis|conf|sweeps|tests|experiments|docs)/[\w./-]*")


def page_id(page: Path) -> str:
    return page.stem


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def blocks(page: Path, marked: bool = False) -> list[str]:
    """The commands of a page, block by block; of the marked ones alone if asked for."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [b["text"] for b in found if b["language"] in SHELL and (b["mark"] or not marked)]


def spans(page: Path) -> list[str]:
    """What stands between backticks in the page's text and tables."""
    return SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))


def scripts(page: Path) -> list[tuple[str, list[str]]]:
    """The scripts that a page calls, with their arguments: in blocks of commands and between
    backticks. For `gspo train ...` that is gspo/cli/train.py; `gspo train` alone only names the
    command."""
    lines = [line for text in blocks(page) for line in text.replace("\\\n", " ").splitlines()]
    found = []
    for line in lines + [span for span in spans(page) if re.match("python |gspo .*[=/]", span)]:
        program, *words = shlex.split(line.replace("$RUN", "runs/STUDY/RUN"), comments=True) or [""]
        if (
            program.endswith("python")
            and words
            and words[0].startswith(("experiments/", "analysis/"))
        ):
            found.append((words[0], words[1:]))
        elif program == "gspo" and words[0] != "COMMAND" and "--help" not in words:
            found.append(called_by_gspo(*words))
    return found


def write_modules(folder: Path) -> list[str]:
    """Write the Python of the pages whose first line names a file, `# my_losses.py`; return the
    modules' names.
    """
    names = []
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if block["language"] == "python" and (
                name := re.match(r"# (\w+)\.py\b", block["text"])
            ):
                (folder / f"{name[1]}.py").write_text(block["text"])
                names.append(name[1])
    return names


def called_by_gspo(name: str, *words: str) -> tuple[str, list[str]]:
    """The script that does what a command of the console script does, and its arguments."""
    module = main.COMMANDS[name].module
    if name == "figure":
        module, words = f"gspo.analysis.{FIGURES[words[0]].stem}", words[1:]
    path = f"{module.replace('.', '/')}.py".replace("gspo/analysis/", "analysis/")
    return path, list(words)


CALLS = sorted({(script, *words) for page in PAGES for script, words in scripts(page)})

# the commands in docstrings of modules, in texts of help and in comments of option files
COMMENTED = re.compile(
    r"^[#\s]*(?:Command +|Read by +)?(?:\.venv-vllm/bin/)?"
    rf"((?:gspo (?:{'|'.join(main.COMMANDS)})|python (?:experiments|analysis)/\w+\.py)\b.*)$",
    re.MULTILINE,
)
SOURCES = [
    *sorted((ROOT / "gspo").rglob("*.py")),
    *sorted((ROOT / "analysis").glob("*.py")),
    *sorted((ROOT / "experiments").glob("*.py")),
    *sorted((ROOT / "conf").rglob("*.yaml")),
    *sorted((ROOT / "sweeps").rglob("*.yaml")),
]
# these stand for the user's own module, or for one of several option files: they cannot be composed
STAND_INS = re.compile(r"\bmy_pkg\.|=ARM\b")


def commented(path: Path) -> list[tuple[str, ...]]:
    """The scripts that the comments and docstrings of a file call, with their arguments."""
    text = re.sub(r" *\\{1,2}\n[#\s]*", " ", path.read_text(encoding="utf-8"))
    calls = []
    for line in COMMENTED.findall(text):
        command = re.split(r" {2,}", line.replace(" ... ", " "))[0]
        program, *words = shlex.split(command.removesuffix(" ..."), comments=True)
        if not STAND_INS.search(command):
            calls.append(called_by_gspo(*words) if program == "gspo" else (words[0], words[1:]))
    return [(script, *words) for script, words in calls]


COMMENTED_CALLS = sorted({call for path in SOURCES for call in commented(path)} - set(CALLS))


# ---- commands
# ----------------------------------------------------------------------------------------------------


def understood_by_figure(script: str, words: list[str], folder: Path) -> None:
    module = importlib.import_module(f"gspo.analysis.{Path(script).stem}")
    kind = getattr(module, "Options", figures.Options)
    parsed(kind, [*words, f"out={folder}"], getattr(module, "REFUSED", {}))


def composes_for_training(words: list[str]) -> None:
    """The first and the last job of what is typed after `gspo train`."""
    given = get_args_parser().parse_args(words)
    if any(word.startswith("resume=") for word in given.overrides):
        keys = {word.split("=")[0] for word in given.overrides} - {"resume"}
        assert all({key, key.split(".")[0]} & set(changeable_on_resume()) for key in keys), keys
    folder = ROOT / (given.config_dir or "sweeps") if given.config_name else CONF
    search = [f"hydra.searchpath=[file://{CONF if given.config_name else ROOT / 'sweeps'}]"]
    jobs = expanded(given.overrides) if given.multirun else [given.overrides]
    assert given.multirun or len(jobs) == 1
    for job in {tuple(jobs[0]), tuple(jobs[-1])}:
        settings(*search, *job, name=given.config_name or "train", folder=folder)


def composes(name: str, words: list[str]) -> None:
    if name in option_files.RUN_COMMANDS:
        words = [word if "=" in word else f"run={word}" for word in words]
        assert sum(word.startswith("run=") for word in words) <= 1, words
    with initialize_config_dir(str(CONF), version_base="1.3"):
        to_dataclass(compose(name, overrides=words))


def is_planned(words: list[str]) -> None:
    options, others = plan.with_options(words)
    hardware(options.hardware)
    plan.composed_settings(plan.with_counts(others)[0])


def can_be_replayed(words: list[str]) -> None:
    _, overrides = replay.with_options(words)
    for word in overrides:
        replay_settings.refuse_unless_changeable(word)
    replay_settings.train_config(overrides)


OTHERS = {
    "replay": can_be_replayed,
    "evaluate": lambda words: composes("evaluate", evaluate.with_benchmarks(words)),
    "sample": lambda words: composes("sample", words),
    "benchmark": lambda words: composes("benchmark", words),
    "audit_rewards": lambda words: parsed(audit_rewards.Options, words),
    "parity": lambda words: parsed(parity.Options, words),
    "plan": is_planned,
    "serve": lambda words: plan.composed_settings(serve.split_words(words)[0]),
    "check": lambda words: parsed(check.Options, words),
    "check_objective": lambda words: check_objective.chosen(words[0], words[1:]),
    "dashboard": lambda words: parsed(dashboard.Options, words),
    "times": lambda words: parsed(times.Options, words),
    "view": lambda words: parsed(view.Options, words),
    "report": lambda words: parsed(report.Options, words),
    "compare": lambda words: parsed(compare.Options, words),
    "sweep_status": lambda words: parsed(sweep_status.Options, words),
    "box": lambda words: box.parser().parse_args(words),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS + COMMENTED_CALLS, ids=lambda call: " ".join(call)[:80])
def test_a_command_of_the_pages_is_understood(call, tmp_path, monkeypatch):
    script, *words = call
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in write_modules(tmp_path):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert (ROOT / script).is_file(), script
    if script.startswith("analysis/"):
        understood_by_figure(script, words, tmp_path)
    elif script == "gspo/cli/train.py":
        composes_for_training(words)
    else:
        OTHERS[Path(script).stem](words)


def test_there_are_commands_of_every_kind():
    """The patterns above find what they are to find."""
    called = {call[0] for call in CALLS + COMMENTED_CALLS}
    assert {"train", *OTHERS} <= {
        Path(script).stem for script in called if script.startswith(("experiments/", "gspo/cli/"))
    }
    assert {f"analysis/{path.name}" for path in (ROOT / "analysis").glob("fig*.py")} - called <= {
        "analysis/fig_scaling.py"  # the benchmark calls it
    }
    assert sum(len(blocks(page, marked=True)) for page in PAGES) >= 5


# options with dashes that a page may name: --help, Hydra's, those of experiments/gpu/box.py, torchrun's
DASHES = {
    *("--help", "--cfg", "--config-dir", "--miniature"),
    *("--master-addr", "--master-port", "--rdzv-backend", "--standalone"),
}


@every_page
def test_our_options_have_no_dashes(page):
    options = {re.split("[ =]", span)[0] for span in spans(page) if re.match(r"--\w", span)}
    assert options <= DASHES


@every_page
def test_targets_of_make_are_in_the_makefile(page):
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    code = "\n".join([*blocks(page), *spans(page)])
    assert set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)) <= targets


# ---- names
# -------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The ends of links that lead to the page's headings."""
    headings = re.findall(
        r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_id)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@every_page
def test_files_and_modules_that_are_named_exist(page):
    for span in spans(page):
        if PLACES.fullmatch(span):
            assert (ROOT / span).exists(), span
    for name in re.findall(r"(?<![\w/])gspo(?:\.\w+)+", page.read_text(encoding="utf-8")):
        path = ROOT.joinpath(*name.split("."))
        if not (path.is_dir() or path.with_suffix(".py").is_file()):
            assert hasattr(
                importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]
            ), name


@every_page
def test_metrics_that_are_named_are_in_the_registry(page):
    for span in spans(page):
        theirs = any(table.entry(table.bare(span))[0] for table in TABLES.values())
        if theirs and page.stem.startswith("other_frameworks"):
            continue
        if re.fullmatch(rf"(?:{'|'.join(FAMILIES)})/[\w@]+(?:/[\w@]+)?", span):
            assert lookup(span).meaning, span


def known_settings() -> set[str]:
    """group.key for every setting there is, whichever option of a group has it."""
    defaults = settings()
    kinds = {field.name: [getattr(defaults, field.name)] for field in fields(defaults)} | {
        group: list(options.values()) for group, options in CHOICES.items()
    }
    return {
        f"{group}.{field.name}"
        for group, those in kinds.items()
        for k in those
        if is_dataclass(k)
        for field in fields(k)
    }


def test_settings_that_are_named_exist():
    known = known_settings()
    groups = {key.split(".")[0] for key in known}
    for page in PAGES:
        for span in spans(page):
            found = re.match(r"(\w+)\.(\w+)", span)
            if found and found[1] in groups and found[2] not in FILES:
                assert found[0] in known, f"{page.name}: {span}"


@pytest.mark.parametrize(
    "page, group",
    [
        ("algorithms", "objective"),
        ("algorithms", "preset"),
        ("rewards", "task"),
        ("settings", "arm"),
    ],
)
def test_a_page_names_every_option(page, group):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for option in options(group):
        assert re.search(rf"`(?:{group}=)?{option}`", text), option


def test_the_page_of_sweeps_names_every_sweep():
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    for path in (ROOT / "sweeps").glob("*.yaml"):
        assert f"`{path.stem}`" in text, path.stem


# ---- blocks that run
# ---------------------------------------------------------------------------------------------

FEW_STEPS = (
    "steps=3 cold_start.steps=4 rollout.prompts_per_step=4 rollout.group_size=4 rollout.max_new_tokens=12 "
    "evaluation.problems=4 evaluation.every=3 checkpoint.every=3"
)
SHORTER = f"""
shortened() {{
    local few=()
    case "$*" in
        *"gspo train"*resume=*) few=(steps=5) ;;
        *"gspo train"*) few=({FEW_STEPS}) ;;
        *"gspo evaluate"*) few=(problems=2 k=1) ;;
    esac
    command python "$@" "${{few[@]}}"
}}
python() {{ shortened "$@"; }}
gspo() {{ shortened {forked.__file__} -P -m gspo "$@"; }}
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, marked=True)], ids=page_id)
def test_the_marked_blocks_of_a_page_run(page, tmp_path):
    for name in ("experiments", "analysis", "conf", "sweeps"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_modules(tmp_path)
    there = {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    script = "\n".join(["set -euo pipefail", SHORTER, *blocks(page, marked=True)])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment() | there | {forked.ADDRESS: forked.server()[1:]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
