"""A run with W&B off needs no W&B: it is not imported, and the package may be missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ["experiment=micro_moe", "cold_start.steps=0", "steps=1", "rollout.prompts_per_step=4",
       "rollout.max_new_tokens=4", "evaluation.every=0"]  # fmt: skip
# A process whose interpreter has no W&B, as far as Python can tell.
MISSING = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("wandb", "wandb_workspaces", "wandb_gql", "wandb_graphql"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from importlib import util
find_spec = util.find_spec
util.find_spec = lambda name, *rest: None if name.startswith("wandb") else find_spec(name, *rest)
"""
LEFT = """
import atexit, sys
atexit.register(lambda: print("W&B IMPORTED" if "wandb" in sys.modules else "W&B not imported"))
"""


def gspo(tmp_path: Path, before: str, *words: str) -> subprocess.CompletedProcess:
    """`gspo` with these words, in a process that first runs `before`."""
    (tmp_path / "sitecustomize.py").write_text(before)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "gspo.cli.main", *words]
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )


@pytest.mark.slow
def test_a_run_trains_where_wandb_is_missing_and_another_mode_is_refused_in_one_line(tmp_path):
    done = gspo(
        tmp_path,
        MISSING + LEFT,
        "train",
        *RUN,
        "tracking.wandb=disabled",
        f"runs={tmp_path / 'runs'}",
    )
    assert done.returncode == 0, done.stderr
    assert "W&B not imported" in done.stdout
    (rows,) = tmp_path.glob("runs/*/*/metrics.jsonl")
    assert json.loads(rows.read_text().splitlines()[-1])["step"] == 1
    refused = gspo(
        tmp_path, MISSING, "train", *RUN, "tracking.wandb=offline", f"runs={tmp_path / 'more'}"
    )
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "tracking.wandb=offline: W&B is not installed: `pip install wandb`" in refused.stderr
    assert not list(tmp_path.glob("more/*/*/metrics.jsonl")), "before anything is written"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["dashboard", "publish=false"]])
def test_a_command_that_needs_it_says_so(tmp_path, words):
    refused = gspo(tmp_path, MISSING, *words)
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: gspo dashboard: W&B is not installed: `pip install wandb` (tracking.wandb=disabled needs none)\n"
    )


@pytest.mark.slow
def test_neither_a_run_nor_an_evaluation_imports_it_before_it_is_used():
    script = "import sys, gspo.run.loop, gspo.run.lifecycle, gspo.cli.evaluation_job; print('wandb' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "False\n"
