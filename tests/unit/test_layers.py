"""The packages of gspo: the level of each, and what each may import. docs/architecture.md has the
map.
"""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEVELS = {
    "cli": 9,
    "checking": 8,
    "run": 7,
    "planning": 7,
    "config": 6,
    "probe": 6,
    "train": 5,
    "evaluation": 5,
    "rollout": 4,
    "model": 3,
    "algorithm": 3,
    "tasks": 3,
    "tracking": 3,
    "rewards": 2,
    "data": 1,
    "distributed": 1,
    "io": 0,
    "statistics": 0,  # a module, not a package
}
ONLY_IN = {
    "transformers": ("model", "planning", "rollout", "checking", "probe"),
    "trl": ("probe",),
    "tokenizers": ("model",),
    "peft": ("model",),
    "vllm": ("rollout",),
    "wandb": ("tracking",),
    "wandb_workspaces": ("tracking",),
    "hydra": ("config", "run", "cli"),
    "omegaconf": ("config", "run", "cli"),
    "gspo.analysis": ("cli",),
    "scipy": ("statistics",),
}
NO_TORCH = (
    "tasks",
    "tracking",
    "rewards",
    "data",
    "io",
    "statistics.py",
    "evaluation/estimates.py",
    "evaluation/elo.py",
    "evaluation/paired.py",
)
TENSORS = (
    "data/batch.py",
    "data/pack.py",
    "data/lazy_torch.py",
    "data/masked.py",
)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "gspo").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """What a file imports, wherever it stands in it: modules, and modules with the name that is
    taken from them.
    """
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(found)


def imported_modules(path: Path) -> set[str]:
    """Our own modules that a file imports: for `from gspo.io import files` the module, not its
    package.
    """
    names = {name for name in imports(path) if name in MODULES}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def package_of(module: str) -> str:
    return module.split(".")[-1] if module == "gspo" else module.split(".")[1]


def test_every_package_has_a_level_and_imports_only_lower_ones():
    for module, path in MODULES.items():
        package = package_of(module)
        if package in ("gspo", "__main__"):
            continue
        assert package in LEVELS, f"{path}: add the level of {package} to this test"
        for other in imported_modules(path) - {"gspo"}:
            lower = LEVELS[package_of(other)] < LEVELS[package]
            assert lower or package_of(other) == package, f"{path} imports {other}"


def test_the_map_in_the_documentation_is_true():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| `gspo/(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    assert {name: int(level) for level, name in rows} == LEVELS
    packages = {path.parent.name for path in (ROOT / "gspo").glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / "gspo").glob("*.py") if path.stem[:2] != "__"}
    assert packages | modules == set(LEVELS)


def test_no_module_imports_one_that_imports_it():
    needs = {name: imported_modules(path) - {name} for name, path in MODULES.items()}
    # raises CycleError, naming the modules
    assert set(TopologicalSorter(needs).static_order()) == MODULES.keys()


@pytest.mark.slow
def test_no_module_of_analysis_imports_one_that_imports_it():
    modules = {
        f"gspo.analysis.{path.stem}": imports(path) for path in (ROOT / "analysis").glob("*.py")
    }
    order = TopologicalSorter(
        {name: modules.keys() & found - {name} for name, found in modules.items()}
    ).static_order()
    assert set(order) == modules.keys()


def test_heavy_libraries_are_imported_only_where_they_belong():
    for module, path in MODULES.items():
        place = path.relative_to(ROOT / "gspo").as_posix()
        packages = {name.split(".")[0] for name in imports(path)}
        packages |= {"gspo.analysis" for name in imports(path) if name.startswith("gspo.analysis")}
        for package, allowed in ONLY_IN.items():
            assert package not in packages or package_of(module) in allowed, (
                f"{path} imports {package}"
            )
        assert "torch" not in packages or not place.startswith(NO_TORCH) or place in TENSORS, (
            f"{path} imports torch"
        )


def test_analysis_needs_neither_torch_nor_the_trainer():
    allowed = {
        "gspo.tracking.metrics",
        "gspo.tracking.wandb_choice",
        "gspo.tracking.collapse",
        "gspo.tracking.foreign_options",
        "gspo.tracking.frameworks.columns",
        "gspo.tracking.frameworks.known",
        "gspo.tracking.frameworks.own",
        "gspo.tracking.frameworks.table",
        "gspo.tracking.frameworks.translate",
        "gspo.io.files",
        "gspo.io.nested",
        "gspo.io.untrusted",
        "gspo.io.ownership",
        "gspo.io.rows",
        "gspo.io.tables",
        "gspo.statistics",
    }
    allowed |= {"gspo.io.escaping", "gspo.io.arguments", "gspo.tracking.pages"}
    for path in sorted((ROOT / "analysis").glob("*.py")):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, path
        assert imported_modules(path) <= allowed, (
            f"{path} imports {imported_modules(path) - allowed}"
        )


def test_only_the_loader_and_the_report_of_analysis_know_wandb():
    known = {"sources.py", "wandb_files.py", "wandb_report.py"}
    for path in (ROOT / "analysis").glob("*.py"):
        packages = {name.split(".")[0] for name in imports(path)}
        assert path.name in known or not packages & {"wandb", "wandb_workspaces"}, path
