"""The rooms of the house: which floor each is on, and what each may know. The map is in
gspo/__init__.py.
"""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import gspo

ROOT = Path(__file__).parents[2]
FLOORS = {
    "commands": 8,
    "checking": 7,
    "run": 6,
    "planning": 6,
    "config": 5,
    "train": 4,
    "evaluation": 4,
    "rollout": 3,
    "model": 2,
    "algorithm": 2,
    "tasks": 2,
    "tracking": 2,
    "verifiers": 1,
    "core": 0,
}
ONLY_IN = {
    "transformers": ("model", "planning", "rollout", "checking"),
    "tokenizers": ("model",),
    "peft": ("model",),
    "vllm": ("rollout",),
    "wandb": ("tracking",),
    "wandb_workspaces": ("tracking",),
    "hydra": ("config", "run", "commands"),
    "omegaconf": ("config", "run", "commands"),
    "analysis": ("commands",),
}
NO_TORCH = (
    "tasks",
    "tracking",
    "verifiers",
    "core",
    "evaluation/estimates.py",
    "evaluation/elo.py",
    "evaluation/paired.py",
)
TENSORS = (
    "core/batch.py",
    "core/lazy_torch.py",
    "core/masked.py",
    "core/ranks.py",
    "core/signed_objects.py",
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
    """Our own modules that a file imports: for `from gspo.core import files` the module, not its
    package.
    """
    names = {name for name in imports(path) if name in MODULES}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_a_floor_and_imports_only_downwards():
    for module, path in MODULES.items():
        if module == "gspo":
            continue
        assert room(module) in FLOORS, f"{path}: say in this test which floor {room(module)} is on"
        for other in imported_modules(path) - {"gspo"}:
            assert room(other) == room(module) or FLOORS[room(other)] < FLOORS[room(module)], (
                f"{path} imports {other}"
            )


def test_the_map_in_the_package_is_true():
    described = [
        line.split("/")[0].strip()
        for line in gspo.__doc__.splitlines()
        if line[:4] == "    " and line[4] != " "
    ]
    assert described == list(FLOORS), "gspo/__init__.py names the rooms from the top"
    assert {path.parent.name for path in (ROOT / "gspo").glob("*/__init__.py")} == set(FLOORS)


def test_no_module_imports_one_that_imports_it():
    needs = {name: imported_modules(path) - {name} for name, path in MODULES.items()}
    # raises CycleError, naming the modules
    assert set(TopologicalSorter(needs).static_order()) == MODULES.keys()


def test_no_module_of_analysis_imports_one_that_imports_it():
    modules = {f"analysis.{path.stem}": imports(path) for path in (ROOT / "analysis").glob("*.py")}
    order = TopologicalSorter(
        {name: modules.keys() & found - {name} for name, found in modules.items()}
    ).static_order()
    assert set(order) == modules.keys()


def test_heavy_packages_stay_in_their_rooms():
    for module, path in MODULES.items():
        place = path.relative_to(ROOT / "gspo").as_posix()
        packages = {name.split(".")[0] for name in imports(path)}
        for package, allowed in ONLY_IN.items():
            assert package not in packages or room(module) in allowed, f"{path} imports {package}"
        assert "torch" not in packages or not place.startswith(NO_TORCH) or place in TENSORS, (
            f"{path} imports torch"
        )


def test_analysis_needs_neither_torch_nor_the_trainer():
    allowed = {
        "gspo.tracking.metrics",
        "gspo.tracking.collapse",
        "gspo.core.files",
        "gspo.core.untrusted",
        "gspo.core.ownership",
    }
    allowed |= {"gspo.core.escaping", "gspo.core.arguments", "gspo.tracking.pages"}
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
