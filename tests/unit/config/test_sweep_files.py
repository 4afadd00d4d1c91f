"""Every file under sweeps/: its head says what it is for, its figure exists, what W&B would start
composes.
"""

import random
import re
import shlex
from pathlib import Path

import pytest
import yaml

from composing import settings

ROOT = Path(__file__).parents[3]
HYDRA = sorted((ROOT / "sweeps").glob("*.yaml"))
WANDB = sorted((ROOT / "sweeps" / "agents").glob("*.yaml"))
HEAD = ("Question", "Command", "Cost")


@pytest.mark.parametrize("path", [*HYDRA, *WANDB], ids=lambda path: path.stem)
def test_the_head_says_question_command_cost_and_figure(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in HEAD:
        assert any(line.startswith(f"# {word} ") for line in head), word
    text = "\n".join(head)
    assert "Read by " in text or "Result " in text
    assert f"-cn {path.stem}" in text or f"agents/{path.name}" in text
    for script in re.findall(r"analysis/\w+\.py", text):
        assert (ROOT / script).exists(), script
    for key in re.findall(r"--(?:x|by) (\S+)", text):
        assert key in flat(settings("experiment=micro_moe")), key


def flat(tree: object, prefix: str = "") -> set[str]:
    fields = getattr(tree, "__dataclass_fields__", None)
    if fields is None:
        return {prefix.removesuffix(".")}
    return {key for name in fields for key in flat(getattr(tree, name), f"{prefix}{name}.")}


def drawn(parameter: dict, draw: random.Random) -> object:
    """A value as W&B would draw it."""
    if "distribution" in parameter:
        assert (
            parameter["distribution"] == "log_uniform_values"
            and 0 < parameter["min"] < parameter["max"]
        )
        return draw.uniform(parameter["min"], parameter["max"])
    return draw.choice(parameter["values"]) if "values" in parameter else parameter["value"]


@pytest.mark.parametrize("path", WANDB, ids=lambda path: path.stem)
def test_a_search_of_wandb_optimises_the_score_that_runs_send(path):
    """The keys and values that W&B's own schema of sweeps (the package sweeps) has."""
    sweep = yaml.safe_load(path.read_text())
    assert set(sweep) <= {"program", "method", "metric", "early_terminate", "parameters", "command"}
    assert sweep["method"] in ("grid", "bayes")
    if sweep["method"] == "bayes":
        assert sweep["metric"] == {"name": "score", "goal": "maximize"}
        assert (
            sweep["early_terminate"]["type"] == "hyperband"
            and sweep["early_terminate"]["min_iter"] >= 3
        )
        seeds = sweep["parameters"]["seed"]
        assert seeds["value"] > 100, "settings are never chosen on the seeds that are reported"


@pytest.mark.slow
@pytest.mark.parametrize("path", WANDB, ids=lambda path: path.stem)
def test_what_an_agent_of_wandb_would_start_composes(path):
    """The commands as W&B's own agent writes them, for values drawn from the file."""
    # takes seconds, in no other test
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep, draw = yaml.safe_load(path.read_text()), random.Random(0)
    assert sweep["program"] == "gspo"
    blocks = {
        name for name, value in vars(settings()).items() if hasattr(value, "__dataclass_fields__")
    }
    assert not blocks & set(sweep["parameters"]), "W&B locks the names of a sweep's parameters"
    folders = set()
    for _ in range(8):
        values = {name: drawn(parameter, draw) for name, parameter in sweep["parameters"].items()}
        arguments = create_sweep_command_args(
            {"args": {name: {"value": value} for name, value in values.items()}}
        )
        begin = ["${env}", "${interpreter}", "-m", "${program}", "train"]
        assert sweep["command"][: len(begin)] == begin
        command = [part for part in sweep["command"][len(begin) :] if not part.startswith("${")]
        run = settings(*command, *shlex.split(" ".join(arguments["args_no_hyphens"])))
        assert run.on_existing == "auto" and run.tracking.wandb == "online"
        folders.add(run.study)
        if "optim.lr" in values:
            assert run.optim.lr == pytest.approx(values["optim.lr"])
    assert folders == {f"wandb_{path.stem}"}
