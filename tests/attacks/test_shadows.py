"""A folder full of files with the names of modules: none of the processes that a run starts imports
one of them.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from commands import SMALL, environment, train

INSTALLED = (
    "numpy",
    "torch",
    "transformers",
    "yaml",
    "omegaconf",
    "hydra",
    "joblib",
    "pandas",
    "wandb",
    "tqdm",
    "gspo",
)
SHADOW = """
import sys
open({mark!r} + "/" + __name__, "w").close()
raise ImportError(__name__ + " was imported from the current folder")
"""


@pytest.fixture
def shadowed(tmp_path):
    """A folder with such files, and where they leave their names if they are imported."""
    mark = tmp_path / "imported"
    mark.mkdir()
    folder = tmp_path / "shadowed"
    folder.mkdir()
    # What this system lacks, such as winreg, is looked for in the folder in the end, where one's
    # own modules may lie.
    names = {
        name
        for name in sys.stdlib_module_names
        if name not in sys.builtin_module_names and find_spec(name)
    }
    for name in {*names, *INSTALLED}:
        (folder / f"{name}.py").write_text(SHADOW.format(mark=str(mark)))
    return folder, mark


def imported(mark: Path) -> list[str]:
    return sorted(path.name for path in mark.iterdir())


@pytest.mark.slow
def test_a_runs_processes_import_nothing_from_the_current_folder(shadowed):
    """The sandbox's, the math verifier's, and that of a reward function which lies in the folder
    itself.
    """
    folder, mark = shadowed
    (folder / "my_rewards.py").write_text(
        "def score(prompt, response, row):\n    return len(response) / 100\n"
    )
    for name in ("train", "test"):
        rows = "".join(f'{{"prompt": "{i}+{len(name)}=", "answer": "1"}}\n' for i in range(8))
        (folder / f"{name}.jsonl").write_text(rows)
    few = ["steps=2", "evaluation.every=0"]
    done = train(folder, *SMALL, *few, "task=mixed")
    assert done.returncode == 0, done.stderr[-3000:]
    own = [
        "study=own",
        "task=rows",
        "task.train_path=train.jsonl",
        "task.path=test.jsonl",
        "task.reward=my_rewards:score",
        "cold_start.steps=0",
    ]
    done = train(folder, *SMALL, *few, *own)
    assert done.returncode == 0, done.stderr[-3000:]
    assert imported(mark) == []


@pytest.mark.slow
def test_the_workers_of_a_sweep_import_nothing_from_the_current_folder(shadowed):
    folder, mark = shadowed
    words = [*SMALL, "steps=1", "cold_start.steps=1", "evaluation.every=0", "seed=1,2"]
    command = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "train",
        "-m",
        *words,
        "hydra/launcher=joblib",
    ]
    done = subprocess.run(
        [*command, "hydra.launcher.n_jobs=2"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert imported(mark) == []
