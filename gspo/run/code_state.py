"""Record the code and the machine that a run was made with: the files code.json and code.diff."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gspo.data.lazy_torch import torch

MAX_DIFF_CHARS = 1_000_000  # of a longer diff, code.diff has the statistics alone
MAX_CHANGED_BYTES = 32 << 20  # of larger changed files, code.diff has the names alone


def git(*words: str) -> str:
    """Return the output of a git command in this code's repository, or "" if that fails."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        return done.stdout
    except OSError:
        return ""


def uncommitted() -> str:
    """Return the diff of this code's tracked files to its commit, as `git apply` takes it.

    It is "" if they are equal, or if this code is in no repository. Of very large changes it has
    the names of the files alone."""
    if not git("ls-files", "--", Path(__file__).name):
        return ""
    root = Path(git("rev-parse", "--show-toplevel").strip())
    changed = [root / name for name in git("diff", "HEAD", "--name-only", "-z").split("\0") if name]
    if sum(path.stat().st_size for path in changed if path.is_file()) > MAX_CHANGED_BYTES:
        # git would take minutes
        return "".join(f"# changed: {path.relative_to(root)}\n" for path in changed)
    diff = git("diff", "HEAD", "--no-color", "--no-ext-diff")
    if len(diff) > MAX_DIFF_CHARS:
        return git("diff", "HEAD", "--no-color", "--no-ext-diff", "--stat")
    return diff


def versions(*names: str) -> dict[str, str]:
    """Return the versions of the packages among these that are installed."""
    installed = {}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def code_state() -> dict:
    """Return the code and the machine: commit, changes, versions, threads, GPUs, command line.

    An installed copy of this code may lie inside another repository, whose commit says nothing
    about it."""
    commit = None
    changes = []
    if git("ls-files", "--", Path(__file__).name):
        commit = git("rev-parse", "HEAD").strip() or None
        changes = [line[3:] for line in git("status", "--porcelain").splitlines()]
    return {
        "commit": commit,
        "changed_files": changes,
        "python": platform.python_version(),
        "versions": versions("torch", "transformers", "numpy", "wandb", "hydra-core"),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "command": sys.argv,
    }
