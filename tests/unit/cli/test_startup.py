"""What a command imports before it answers: help, refusals and dry runs need neither PyTorch nor
transformers.
"""

import subprocess
import sys

import pytest

from daily import daily_but

HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pandas",
    "matplotlib",
    "scipy",
    "sympy",
    "wandb",
    "vllm",
}
WORDS = [
    "train --help",
    "train lr=1",
    "train experiment=mikro_moe",
    "train experiment=micro_moe optim.lr=fast",
    "train experiment=micro_moe objective=grpo policy.routing_replay=r4",
    "train experiment=micro_moe dry_run=true",
    "train -m experiment=micro_moe objective=gspo_tiny,grpo seed=1,2,3 dry_run=true",
    "train resume=nothing",
    "sample --help",
    "sample run=nothing",
    "evaluate --help",
    "evaluate benchmark=[gsm9k]",
    "plan --help",
    "plan lr=1",
    "serve --help",
    "serve experiment=micro_moe",
    "check --help",
    "check --second 3",
    "check-objective --help",
    "sweep-status nothing",
    "report nothing",
]
SCRIPT = f"""
import sys
from gspo.cli.main import main
try:
    main()
finally:
    loaded = sorted({HEAVY!r} & set(sys.modules))
    print("LOADED", *loaded, f"{{len(sys.modules)}} modules", file=sys.stderr)
"""
MOST_MODULES = 1000  # with Hydra and numpy 600 to 800 are loaded; with PyTorch some 2,500


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    daily_but(
        WORDS,
        "train --help",
        "train lr=1",
        "train -m experiment=micro_moe objective=gspo_tiny,grpo seed=1,2,3 dry_run=true",
        "evaluate benchmark=[gsm9k]",
        "report nothing",
    ),
)
def test_answers_that_need_no_tensors_import_no_tensor_library(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = done.stderr.splitlines()[-1].split()
    assert loaded[0] == "LOADED" and loaded[1:-2] == [], done.stderr
    assert int(loaded[-2]) <= MOST_MODULES
    assert done.returncode in (0, 2), done.stderr
