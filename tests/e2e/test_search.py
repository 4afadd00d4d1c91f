"""A search by Hydra's sweeper for Optuna, as users type it: scores, the same command again,
failures.
"""

import sys

import pytest
import yaml

import forked
from commands import SMALL, environment
from gspo.run.sweep_state import jobs
from gspo.tracking.score import score
from gspo.tracking.tracker import read_rows

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
SEARCH = [sys.executable, "-P", "-m", "gspo", "train", "-cn", "search_lr_optuna", "-m"]
OWN = [o for o in SMALL if not o.startswith(("optim.lr=", "steps=", "evaluation.every="))]
TYPED = [
    *SEARCH,
    *OWN,
    "steps=2",
    "hydra.sweeper.n_trials=3",
    "hydra/launcher=basic",
    "hydra.sweeper.n_jobs=1",
]
TYPED += ["tracking.wandb=disabled"]


@pytest.mark.slow
def test_a_search_reads_the_scores_and_goes_on_where_it_was(tmp_path):
    planned = forked.run([*TYPED, "dry_run=true"], cwd=tmp_path, env=environment())
    assert (
        planned.returncode == 0
        and "a search chooses" in planned.stdout
        and not (tmp_path / "runs").exists()
    )
    done = forked.run(TYPED, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    study = tmp_path / "runs" / "small"
    found = {job.run: job for job in jobs(study)}
    assert len(found) == 3 and {job.state for job in found.values()} == {"finished"}
    scores = {run: score(read_rows(study / run / "metrics.jsonl")) for run in found}
    best = yaml.safe_load((study / "optimization_results.yaml").read_text())
    assert best["best_value"] == max(scores.values())
    rates = {
        run: next(o for o in job.overrides if o.startswith("optim.lr="))
        for run, job in found.items()
    }
    assert len(set(rates.values())) == 3
    for run, rate in rates.items():
        assert f"{rate}: score {scores[run]:.4f}" in done.stdout
    again = forked.run(
        [o.replace("n_trials=3", "n_trials=4") for o in TYPED], cwd=tmp_path, env=environment()
    )
    assert again.returncode == 0 and again.stdout.count("has reached step 2 already") == 3, (
        again.stderr[-3000:]
    )
    for run, rate in rates.items():
        assert f"{rate}: score {scores[run]:.4f}" in again.stdout
    assert len(list(study.glob("*-seed*"))) == 4


@pytest.mark.slow
def test_a_job_without_a_score_ends_the_search_in_one_line(tmp_path):
    done = forked.run([*TYPED, "rollout.max_new_tokens=100000"], cwd=tmp_path, env=environment())
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "no room for a prompt" in done.stdout, "the reason, with the job's settings"
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
