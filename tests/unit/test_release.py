"""The release: the workflow attaches what .ci/release writes, for the tag of the version."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
SCRIPT = ROOT / ".ci" / "release"
NEEDED_FILES = (".ci/release", "pyproject.toml", "CITATION.cff")
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
# stand-ins for make and uv, which write what the real ones write and record how they were called
MAKE = """#!/bin/sh
echo "make $*" >>calls
if [ "$1" = paper ]; then mkdir -p build/paper && touch build/paper/gspo.pdf; fi
"""
UV = """#!/bin/sh
echo "uv $*" >>calls
mkdir -p build/dist && touch build/dist/gspo-1-py3-none-any.whl build/dist/gspo-1.tar.gz
"""


def workflow(name: str) -> dict:
    content = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    content["on"] = content.pop(True)  # YAML 1.1 reads "on" as a truth value
    return content


def actions(name: str) -> set[str]:
    jobs = workflow(name)["jobs"].values()
    return {step["uses"] for job in jobs for step in job["steps"] if "uses" in step}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def repository(tmp_path):
    """The files that the script reads, with stand-ins for make and uv."""
    for name in NEEDED_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION}\n")
    program(tmp_path / "programs" / "make", MAKE)
    program(tmp_path / ".venv" / "bin" / "uv", UV)
    return tmp_path


def release(repository: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [repository / ".ci" / "release", *words],
        env={"PATH": f"{repository / 'programs'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_tag_starts_it_and_it_may_write_releases_alone():
    content = workflow("release.yml")
    assert content["on"] == {"push": {"tags": ["v*"]}}
    assert content["permissions"] == {}
    assert content["jobs"]["release"]["permissions"] == {"contents": "write"}


def test_its_actions_are_pinned_like_those_of_the_tests():
    assert actions("release.yml") == actions("ci.yml")


def test_it_attaches_the_files_that_the_script_writes(repository):
    done = release(repository, f"v{VERSION}")
    assert done.returncode == 0, done.stderr
    steps = [step["run"] for step in workflow("release.yml")["jobs"]["release"]["steps"][2:]]
    assert steps[0] == '.ci/release "$GITHUB_REF_NAME"'
    patterns = re.findall(r"(?<= )build/\S+", steps[1])
    written = {path for path in (repository / "build").rglob("*") if path.is_file()}
    attached = [list(repository.glob(pattern)) for pattern in patterns]
    assert all(len(paths) == 1 for paths in attached)
    assert {paths[0] for paths in attached} == written
    calls = (repository / "calls").read_text().splitlines()
    assert [call.split(" --")[0] for call in calls] == ["make setup", "uv build", "make paper"]


def test_make_paper_writes_the_pdf_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    article = (ROOT / "analysis" / "article.py").read_text(encoding="utf-8")
    assert "-m gspo.analysis.article out=build/paper\n" in makefile
    assert 'out / "gspo.pdf"' in article


@pytest.mark.parametrize("tag", [(), ("v0.0.9",), (VERSION,), (f"v{VERSION}\n",)])
def test_another_tag_than_the_version_is_refused(repository, tag):
    done = release(repository, *tag)
    assert done.returncode == 2
    assert f"the tag must be v{VERSION}" in done.stderr
    assert not (repository / "calls").exists()


def test_an_unreleased_version_and_another_citation_are_refused(repository):
    (repository / "CHANGELOG.md").write_text(f"## {VERSION} (unreleased)\n")
    done = release(repository, f"v{VERSION}")
    assert (done.returncode, "remove '(unreleased)'" in done.stderr) == (2, True)
    (repository / "CITATION.cff").write_text("version: 0.0.1\n")
    done = release(repository, f"v{VERSION}")
    assert (done.returncode, "CITATION.cff has another version" in done.stderr) == (2, True)
    assert not (repository / "calls").exists()


@pytest.mark.slow
def test_wheel_and_source_distribution_are_built_without_the_network(tmp_path):
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        pytest.skip("uv is not installed here")
    source = tmp_path / "source"
    kept_out = shutil.ignore_patterns(".*", "build", "runs", "tests", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=kept_out, symlinks=True)
    line = next(line for line in SCRIPT.read_text().splitlines() if "uv build" in line)
    words = line.split()[1:]
    words = [word.replace(".venv/bin/python", sys.executable) for word in words]
    subprocess.run([uv, "--offline", *words], cwd=source, check=True, capture_output=True)
    names = sorted(path.name for path in (source / "build" / "dist").glob("gspo-*"))
    assert names == [f"gspo-{VERSION}-py3-none-any.whl", f"gspo-{VERSION}.tar.gz"]
