"""Code from outside this package, which settings name by its import path.

For example `my_pkg.losses:Mine` is the object Mine of my_pkg/losses.py. The current folder is
searched after the installed packages, so a file in the user's folder is found.

Such code is identified by its sources: the SHA-256 of the module's file, of the packages around it,
and of the modules that these import from the same folder. Other installed packages do not count.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from gspo.io.arguments import nearest
from gspo.io.errors import SettingError

NAME = r"[A-Za-z_]\w*"
PATH = re.compile(rf"{NAME}(\.{NAME})*:{NAME}|{NAME}(\.{NAME})+")
SHARED_FOLDERS = ("site-packages", "dist-packages")  # many packages lie there
THIS_PACKAGE = __name__.partition(".")[0]
EXAMPLE = "name it as MODULE:NAME, for example my_pkg.losses:Mine"


def is_path(text: str) -> bool:
    """Return whether a text can be an import path: my_pkg.losses:Mine or my_pkg.losses.Mine."""
    return PATH.fullmatch(text) is not None


def module_and_name(path: str, key: str) -> tuple[str, str]:
    """Return the module and the name of an import path.

    Raises ValueError, with a message that begins with `key`, for any other text.
    """
    if not is_path(path):
        raise SettingError(key, path, remedy=EXAMPLE)
    file, _, name = path.partition(":")
    if file.endswith(".py") and name:
        raise SettingError(
            key,
            path,
            remedy=f"name the module and not its file, {key}={file.removesuffix('.py')}:{name}",
        )
    module, _, name = path.rpartition(":" if ":" in path else ".")
    return module, name


def import_object(path: str, key: str) -> Any:
    """Import the object of an import path such as `my_pkg.losses:Mine`.

    Raises ValueError, with a single line that begins with `key`, if there is no such object or if
    its module cannot be imported.
    """
    module, name = module_and_name(path, key)
    search_current_folder()
    try:
        content = vars(importlib.import_module(module))
    except Exception as error:  # a module of the user may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # the module itself or a package around it, not a module that it imports
        if missing and f"{module}.".startswith(f"{missing}."):
            raise SettingError(
                key,
                path,
                f"there is no module {missing} (in {os.getcwd()} and among the installed packages)",
            ) from None
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, SyntaxError):  # its message has the file and the line
            line = traceback.extract_tb(error.__traceback__)[-1]
            reason += f" ({line.filename}, line {line.lineno})"
        raise SettingError(key, path, f"importing {module} failed: {reason}") from None
    if name not in content:
        own_file = Path(f"{module.replace('.', '/')}.py")
        imported_file = content.get("__file__") or ""
        is_hidden = own_file.is_file()
        if is_hidden and os.path.exists(imported_file):
            is_hidden = not own_file.samefile(imported_file)
        if is_hidden:
            problem = f"there is no {name} in the installed module {module}, which hides {own_file}"
            raise SettingError(key, path, problem, remedy="rename your file")
        public = [public_name for public_name in content if not public_name.startswith("_")]
        suggestion = f"; the nearest is {nearest(name, public)}" if public else ""
        raise SettingError(key, path, f"there is no {name} in {module}{suggestion}")
    return content[name]


def search_current_folder() -> None:
    """Let imports search the current folder, after all other folders."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def sources(path: str, key: str) -> dict[str, str]:
    """Return the SHA-256 of each source file of an import path, by the file's path.

    The paths are relative to the folder of the outermost package. For example
    {"my_pkg/__init__.py": "e3b0...", "my_pkg/losses.py": "91af..."}. Raises ValueError, with a
    message that begins with `key`, if there is no such module or if it has no source.
    """
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in source_files(path, key).items()
    }


def source_files(path: str, key: str) -> dict[str, Path]:
    """Return the source files of an import path (see `sources`). Its module is not imported."""
    module, _ = module_and_name(path, key)
    search_current_folder()
    source = _source(module)
    if source is None:
        folder = Path.cwd()
        files = [file.name for file in folder.glob("*.py")]
        raise SettingError(
            key,
            path,
            f"there is no source file of the module {module} in {folder}",
            f"the nearest file is {nearest(f'{module}.py', files)}" if files else "",
        )
    outermost = module.partition(".")[0]
    depth = module.count(".") + (1 if source.is_package else 0)
    root = source.file.parents[depth]
    in_shared_folder = _is_shared(root)
    files: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if in_shared_folder and name.partition(".")[0] != outermost:
            continue
        source = _source(name) if _is_in(name, root) else None
        if source is None:
            continue
        relative_path = source.file.relative_to(root).as_posix()
        if relative_path not in files:
            files[relative_path] = source.file
            package = name if source.is_package else name.rpartition(".")[0]
            pending += [*_parents(name), *_imports(source.file, package)]
    return dict(sorted(files.items()))


def _is_shared(root: Path) -> bool:
    """Return whether a folder holds installed packages, as one of `pip install --target` does."""
    is_known = any(folder in root.parts for folder in SHARED_FOLDERS)
    return is_known or any(root.glob("*.dist-info"))


class _Source(NamedTuple):
    """The source file of a module, of a package its __init__.py."""

    file: Path
    is_package: bool


def _source(module: str) -> _Source | None:
    """Return a module's source, or None if there is no such module or it has no source.

    The packages around the module are imported.
    """
    try:
        spec = importlib.util.find_spec(module)
    # packages of the user may raise anything on import, and so may odd entries of sys.modules
    except Exception:
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    is_package = spec.submodule_search_locations is not None
    return _Source(Path(spec.origin).resolve(), is_package)


def _is_in(module: str, root: Path) -> bool:
    """Return whether a module's outermost package lies in the folder `root`.

    The answer is False for this package itself.
    """
    outermost = module.partition(".")[0]
    if outermost == THIS_PACKAGE:
        return False
    source = _source(outermost)
    if source is None:
        return False
    folder = source.file.parents[1] if source.is_package else source.file.parent
    return folder == root


def _parents(module: str) -> list[str]:
    """Return the packages around a module: of a.b.c, a and a.b."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _imports(file: Path, package: str) -> list[str]:
    """Return the names of all modules that a file may import: of `from a import b`, a and a.b.

    A file that is no Python has none here. Importing it says where its error is."""
    modules = []
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # ValueError: null bytes
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # a relative import
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            modules += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in modules if name]
