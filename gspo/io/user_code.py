"""Code from outside this package, which settings name by its place: `my_pkg.losses:Mine` is Mine of
my_pkg/losses.py.

The current folder is searched after the installed packages, so that a file beside the user is
found. What such a name stands for is known by its source: by the SHA-256 of the module's file, of
the packages around it, and of the modules that these import from the same place. Packages that are
installed beside it do not count.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from gspo.io.arguments import nearest

NAME = r"[A-Za-z_]\w*"
PATH = re.compile(rf"{NAME}(\.{NAME})*:{NAME}|{NAME}(\.{NAME})+")
INSTALLED = ("site-packages", "dist-packages")  # folders that many packages share
OURS = __name__.partition(".")[0]
EXAMPLE = "name it as MODULE:NAME, for example my_pkg.losses:Mine"


def is_path(text: str) -> bool:
    """Tell whether a text can be the place of outside code: my_pkg.losses:Mine, or
    my_pkg.losses.Mine.
    """
    return PATH.fullmatch(text) is not None


def module_and_name(path: str, key: str) -> tuple[str, str]:
    """Return module and name of a place. Raises ValueError, which begins with `key`, for any other
    text.
    """
    if not is_path(path):
        raise ValueError(f"{key}={path}: {EXAMPLE}")
    file, _, name = path.partition(":")
    if file.endswith(".py") and name:
        raise ValueError(
            f"{key}={path}: name the module and not its file, {key}={file.removesuffix('.py')}:{name}"
        )
    module, _, name = path.rpartition(":" if ":" in path else ".")
    return module, name


def import_object(path: str, key: str) -> Any:
    """Import what `my_pkg.losses:Mine` names. Raises ValueError in one line, which begins with
    `key`, if it is not there or cannot be imported."""
    module, name = module_and_name(path, key)
    search_current_folder()
    try:
        content = vars(importlib.import_module(module))
    except Exception as error:  # a module of the user's may raise anything
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            where = f"in {os.getcwd()} and among the installed packages"
            raise ValueError(f"{key}={path}: there is no module {error.name} ({where})") from None
        line = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({line.filename}, line {line.lineno})"
        raise ValueError(f"{key}={path}: importing {module} failed: {why}") from None
    if name not in content:
        public = [other for other in content if not other.startswith("_")]
        near = f"; the nearest is {nearest(name, public)}" if public else ""
        raise ValueError(f"{key}={path}: there is no {name} in {module}{near}")
    return content[name]


def search_current_folder() -> None:
    """Let imports find what lies in the current folder, after everything else."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def sources(path: str, key: str) -> dict[str, str]:
    """Return the SHA-256 of each source file of what a place names, by the file's path from the
    folder of its package.

    For example {"my_pkg/__init__.py": "e3b0...", "my_pkg/losses.py": "91af..."}. Raises ValueError,
    which begins with `key`, if the module is not there or has no source."""
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in source_files(path, key).items()
    }


def source_files(path: str, key: str) -> dict[str, Path]:
    """Return the source files of what a place names; see `sources`. The module itself is not
    imported.
    """
    module, _ = module_and_name(path, key)
    search_current_folder()
    spec = _spec(module)
    if spec is None or not _has_source(spec):
        raise ValueError(f"{key}={path}: there is no source file of the module {module}")
    top = module.partition(".")[0]
    depth = module.count(".") + (spec.submodule_search_locations is not None)
    root = Path(spec.origin).resolve().parents[depth]
    shared = any(name in root.parts for name in INSTALLED)
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        spec = (
            _spec(name)
            if _is_near(name, root) and (not shared or name.partition(".")[0] == top)
            else None
        )
        if spec is None or not _has_source(spec):
            continue
        file = Path(spec.origin).resolve()
        key_of_file = file.relative_to(root).as_posix()
        if key_of_file not in found:
            found[key_of_file] = file
            package = (
                name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
            )
            waiting += [*_parents(name), *_imported(file, package)]
    return dict(sorted(found.items()))


def _spec(module: str) -> ModuleSpec | None:
    """Return where a module is; None if it is nowhere. The packages around it are imported."""
    try:
        return importlib.util.find_spec(module)
    except Exception:  # a package of the user's may raise anything when it is imported; so may odd entries of sys.modules
        return None


def _has_source(spec: ModuleSpec) -> bool:
    return spec.origin is not None and spec.origin.endswith(".py")


def _is_near(module: str, root: Path) -> bool:
    """Tell whether a module's outermost package lies in the folder `root`. This package itself is
    never near.
    """
    top = module.partition(".")[0]
    spec = None if top == OURS else _spec(top)
    if spec is None or not _has_source(spec):
        return False
    folder = Path(spec.origin).resolve().parents[spec.submodule_search_locations is not None]
    return folder == root


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _imported(file: Path, package: str) -> list[str]:
    """Return the names of all modules that a file may import; of `from a import b`, a and a.b."""
    found = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in found if name]
