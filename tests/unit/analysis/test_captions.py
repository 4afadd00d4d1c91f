"""What a caption says of runs whose settings are known in part, and metrics that no run has."""

from pathlib import Path

import pandas as pd
import pytest

from gspo.analysis import fig_curves, load
from gspo.analysis.runs import Data, Run, RunsError
from recorded_runs import HEALTHY, write

OURS = {
    "seed": 1,
    "steps": 3,
    "study": "s",
    "objective.name": "gspo",
    "model.name": "tiny_moe",
    "model.layers": 3,
    "model.hidden": 48,
    "advantage.eps": 1e-4,
    "trainer.router_aux_loss_coef": 0.0,
    "optim.lr": 1e-4,
}
THEIRS = {
    "seed": 1,
    "steps": 3,
    "study": "s",
    "objective.name": "grpo",
    "framework": "trl",
    "optim.lr": 2e-4,
}


def run(name: str, settings: dict) -> Run:
    rows = pd.DataFrame({"step": [1, 2, 3], "reward/mean": [0.4, 0.5, 0.6]})
    return Run(Path(name), settings, rows, arm=settings["objective.name"])


def test_settings_that_a_log_does_not_state_do_not_differ():
    data = Data([run("a", OURS), run("b", THEIRS)])
    text = load.describe(data, data.arms)
    assert "The runs differ also in optim.lr. " in text
    assert "advantage.eps" not in text
    assert text.endswith("Not all of the logs state 5 other settings.")
    other = OURS | {"advantage.eps": 1e-3, "seed": 2}
    mixed = Data([run("a", OURS), run("d", other), run("b", THEIRS)])
    text = load.describe(mixed, mixed.arms)
    assert "The runs differ also in advantage.eps, optim.lr. " in text
    ours = Data([run("a", OURS), run("c", OURS | {"objective.name": "grpo", "optim.lr": 2e-4})])
    text = load.describe(ours, ours.arms)
    assert text.startswith("Run: tiny_moe (3 layers of width 48), rollout batches of ")
    assert text.endswith("The runs differ also in optim.lr.")


def test_a_metric_that_only_begins_another_is_not_drawn(tmp_path):
    write(tmp_path, "gspo", HEALTHY)
    data = load.load([tmp_path])
    assert fig_curves.recorded(data, ["reward/mean", "length/mean"]) == [
        "reward/mean",
        "length/mean",
    ]
    for run_of_data in data.runs:
        run_of_data.rows["custom/long"] = 1.0
    data = Data(data.runs)
    with pytest.raises(RunsError, match=r"custom/lon\b"):
        fig_curves.recorded(data, ["custom/lon"])
