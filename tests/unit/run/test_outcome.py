"""What a job returns to Hydra: its score as a number, and why it did not finish."""

import errno
import json
import math
import pickle
import signal

import cloudpickle
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from composing import settings
from gspo.run import entry_point
from gspo.run.directory import RunDirectory
from gspo.run.entry_point import Broken, Failed, JobResult, explain, one_line
from gspo.run.lifecycle import ended_before
from gspo.run.sweeps import is_search


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_an_outcome_comes_through_the_pickles_of_launchers(library):
    for made in (JobResult(0.25), JobResult(reason="why")):
        back = pickle.loads(library.dumps(made))
        assert type(back) is JobResult and back.unfinished == made.unfinished
        assert back == made or (math.isnan(back) and math.isnan(made))
    assert float(JobResult(0.25)) == 0.25 and math.isnan(JobResult())


@pytest.fixture
def in_sweep(monkeypatch):
    monkeypatch.setattr(
        HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {"mode": RunMode.MULTIRUN}})
    )


def raising(error: Exception):
    def job(config):
        raise error

    return one_line(job)


def test_a_job_of_a_sweep_returns_its_score_or_why_it_has_none(in_sweep):
    whole = one_line(lambda config: 0.5)(OmegaConf.create({}))
    assert whole == 0.5 and whole.unfinished == {}
    wrong = raising(ValueError("seed=-1"))(OmegaConf.create({}))
    assert math.isnan(wrong) and wrong.unfinished == {"reason": "seed=-1"}
    broken = raising(Failed("it failed"))(OmegaConf.create({}))
    assert math.isnan(broken) and broken.unfinished == {"reason": "it failed"}


def test_only_a_failure_of_the_disk_ends_a_sweep(in_sweep, monkeypatch):
    monkeypatch.setattr(entry_point, "_disk_failures", [])
    missing = raising(FileNotFoundError(errno.ENOENT, "no such file"))(OmegaConf.create({}))
    assert "no such file" in missing.unfinished["reason"]
    for error in (OSError(errno.ENOSPC, "full"), Broken("full")):
        monkeypatch.setattr(entry_point, "_disk_failures", [])
        with pytest.raises(type(error)):
            raising(error)(OmegaConf.create({}))
        with pytest.raises(type(error)):  # the jobs that follow do not begin
            one_line(lambda config: 0.5)(OmegaConf.create({}))


def test_a_reason_that_the_error_repeats_is_said_once():
    error = Failed("runs/x failed after step 3: bad value")
    error.__cause__ = ValueError("bad value")
    assert explain(error) == "runs/x failed after step 3: bad value"
    error.__cause__ = ValueError("another word")
    assert explain(error) == "runs/x failed after step 3: bad value another word"


def test_the_score_of_a_directory_is_that_of_its_rows_if_the_run_has_ended(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/x/avg@2": 0.5}\n{"step": 9, "eval/x/avg@2": 0.1}\n'
    )
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("".join(f'{{"step": {step}, "reward/mean": 0.9}}\n' for step in range(10, 41)))
    directory = RunDirectory(tmp_path)
    assert directory.score("finished") == 0.1 and directory.score("collapsed") == 0.1
    assert math.isnan(directory.score("stopped")) and math.isnan(directory.score("failed"))


def test_a_sweeper_that_is_not_hydras_own_is_a_search():
    def config(target: str):
        return OmegaConf.create({"hydra": {"sweeper": {"_target_": target}}})

    assert not is_search(config("hydra._internal.core_plugins.basic_sweeper.BasicSweeper"))
    assert is_search(config("hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"))


def test_a_job_that_finished_after_a_stop_was_requested_keeps_its_score(in_sweep, monkeypatch):
    monkeypatch.setattr(entry_point._STOP, "number", signal.SIGINT)
    finished = one_line(lambda config: 0.5)(OmegaConf.create({}))
    assert finished == 0.5 and finished.unfinished == {}
    stopped = one_line(lambda config: math.nan)(OmegaConf.create({}))
    assert "SIGINT" in stopped.unfinished["stopped"]


@pytest.mark.parametrize("how", ["collapsed", "ended early", "finished"])
def test_a_run_that_ended_at_its_last_step_ends_the_same_way_again(tmp_path, how):
    checkpoint = tmp_path / "checkpoints" / "step_000300"
    checkpoint.mkdir(parents=True)
    state = {"step": 300, "settings": "0123456789", "rewards": {}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    directory = RunDirectory(tmp_path)
    directory.write_status(how, 300)
    assert ended_before(settings("steps=200"), directory, checkpoint, alone=True) == how
