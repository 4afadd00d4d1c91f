"""The door for notebooks: `from analysis import load_runs`, from anywhere; its tables against
hand-made runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from gspo.analysis.load import GRPO_R2, GSPO, RunsError
from gspo.analysis.notebooks import load_runs
from two_arms import write

ROOT = Path(__file__).parents[3]


@pytest.fixture
def recorded(tmp_path) -> Path:
    """Two seeds of GSPO with one evaluation in every row, one finished run of GRPO with R2, the
    same but without.
    """
    write(tmp_path, GSPO, 1, [0.1 * t for t in range(1, 13)], **{"eval/math/avg@2": 0.25})
    stopped = write(tmp_path, GSPO, 2, [0.5] * 4, steps=12, **{"eval/math/avg@2": 0.5})
    (stopped / "status.json").write_text(json.dumps({"how": "stopped"}))
    write(tmp_path, GRPO_R2, 1, [0.6] * 10 + [0.9] + [0.1] * 25)
    return tmp_path


def test_a_row_per_run(recorded):
    runs = load_runs(recorded).runs.set_index(["arm", "seed"])
    assert runs.index.tolist() == [(GSPO, 1), (GSPO, 2), (GRPO_R2, 1)]
    assert runs["status"].tolist() == ["finished", "stopped", "finished"]
    assert runs["batches"].tolist() == [12, 4, 36] and runs["planned"].tolist() == [12, 12, 36]
    assert runs["reward/mean, last 10"].tolist() == pytest.approx([0.75, 0.5, 0.1])
    # smoothed: (0.9^10 0.6 + ... + 0.9 0.6 + 0.9) / (0.9^10 + ... + 1) at step 11
    best = 0.6 + 0.3 / sum(0.9**k for k in range(11))
    assert runs["reward/mean, best smoothed"].iloc[2] == pytest.approx(best)
    assert runs["collapsed at"].isna().tolist() == [True, True, False]
    assert runs["eval/math/avg@2, last"].tolist()[:2] == [0.25, 0.5]
    assert pd.isna(runs["eval/math/avg@2, best"].iloc[2]), "it evaluated nothing"
    assert (
        runs["objective.name"].tolist() == ["gspo", "gspo", "grpo"]
        and runs["model.name"].eq("tiny_moe").all()
    )


def test_a_table_per_metric(recorded):
    runs = load_runs(
        recorded / "gspo-none-seed1", recorded / "gspo-none-seed2", recorded / "grpo-r2-seed1"
    )
    rewards = runs.metric("reward/mean")
    assert rewards.columns.tolist() == [
        (GSPO, 1),
        (GSPO, 2),
        (GRPO_R2, 1),
    ] and rewards.index.tolist() == list(range(1, 37))
    assert rewards.loc[4].tolist() == pytest.approx([0.4, 0.5, 0.6])
    pd.testing.assert_frame_equal(
        runs.metric("reward/mean", arm=GSPO), rewards[GSPO].loc[:12], check_names=False
    )
    assert runs.metric("eval/math/avg@2")[GRPO_R2].isna().all(axis=None)
    assert runs.metrics == ["compute/flops", "eval/math/avg@2", "reward/mean"]
    assert any(note.startswith("unfinished") for note in runs.notes)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda runs: runs.metric("reward/maen"),
            "no run has recorded a metric 'reward/maen'; did you mean reward/mean?",
        ),
        (
            lambda runs: runs.metric("kl/ref_k3"),
            "no run has recorded a metric 'kl/ref_k3'; there are compute/flops, ",
        ),
        (
            lambda runs: runs.metric("reward/mean", arm="GSP0"),
            "no arm 'GSP0' in these runs; did you mean GSPO?",
        ),
        (lambda runs: load_runs(runs.runs["run"][0] + "x"), "-seed1x does not exist"),
        (lambda runs: load_runs(), "load_runs(): name folders with runs"),
        (lambda runs: load_runs("wandb:team"), "wandb:team: write wandb:ENTITY/PROJECT"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_the_nearest(recorded, ask, said):
    with pytest.raises(RunsError) as stop:
        ask(load_runs(recorded))
    assert (
        said in str(stop.value)
        and "\n" not in str(stop.value)
        and isinstance(stop.value, ValueError)
    )


def test_a_table_of_an_arm_or_metric_that_nobody_knows_is_no_table_of_nan(recorded):
    data = load_runs(recorded)._data
    with pytest.raises(RunsError, match="no metric 'rewards/mean'; did you mean reward/mean"):
        data.table(GSPO, "rewards/mean")
    assert data.table(GSPO, "clip/token_active").isna().all(axis=None), (
        "known to the registry, but not recorded"
    )


@pytest.mark.slow
def test_it_is_imported_from_anywhere_and_needs_no_torch(recorded, tmp_path):
    (tmp_path / "load.py").write_text("raise RuntimeError('a module of the user')")
    code = f"""
import sys, gspo
assert "pandas" not in sys.modules
from gspo.analysis import load_runs, RunsError
before = list(sys.path)
runs = load_runs({str(recorded)!r})
assert len(runs.runs) == 3 and sys.path == before and not any("analysis" in p for p in sys.path), sys.path
assert not {{"torch", "wandb", "hydra", "matplotlib"}} & set(sys.modules)
try:
    runs.metric("reward/maen")
except RunsError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # as an editable installation does
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no run has recorded a metric 'reward/maen'; did you mean reward/mean?\n"
