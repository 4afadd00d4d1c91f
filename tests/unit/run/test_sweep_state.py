"""What `gspo sweep-status` says of runs that have collapsed, and what the names of a sweep's
folders show.
"""

import json
import time
from types import SimpleNamespace

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from composing import settings as composed
from gspo.config.settings import Settings, run_directory, settings_hash, vary
from gspo.run import sweeps
from gspo.run.directory import exclusive
from gspo.run.entry_point import StopSignal
from gspo.run.sweep_state import forecast, jobs, rewards_of, table
from gspo.tracking.collapse import collapse
from recorded_runs import COLLAPSED, HEALTHY, write


def study(folder):
    """A study of two runs of which one has collapsed, with its manifest."""
    runs = [write(folder, "gspo", HEALTHY), write(folder, "grpo", COLLAPSED)]
    planned = [
        {
            "run": run.name,
            "folder": str(folder / run.name),
            "steps": 90,
            "overrides": ["steps=90", f"objective={name}"],
        }
        for run, name in zip(runs, ("gspo", "grpo"), strict=True)
    ]
    (folder / "manifest.jsonl").write_text(json.dumps({"time": 1.0, "jobs": planned}) + "\n")
    return runs


def test_a_collapse_a_smoothed_reward_and_what_varies_are_shown(tmp_path):
    runs = study(tmp_path)
    lines = {line.split()[0]: line for line in table(jobs(tmp_path)).splitlines()}
    healthy, collapsed = lines[runs[0].name], lines[runs[1].name]
    assert healthy.split()[1:] == ["finished", "90/90", "reward", "0.500", "objective=gspo"], (
        "steps= is the same"
    )
    # .1 + .3 x (1 - .9^30) x .9^60 / (1 - .9^90): what is left of the first 30 batches
    assert collapsed.split()[1:5] == ["finished", "90/90", "reward", "0.101"]
    assert "COLLAPSED at step 3" in collapsed and collapsed.endswith("; objective=grpo")
    assert (
        lines["2"]
        == "2 runs (rewards are smoothed): 2 finished; 1 collapsed by the registered rule"
    )


def test_rewards_are_found_in_rows_of_any_form(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 0, "eval/x": 1}\n{"reward/mean": 1e-1, "step": 1}\n{"step": 2, "reward/mean": null}\nnoise\n'
    )
    assert rewards_of(file) == (pytest.approx(0.1), None)
    file.write_text("")
    assert rewards_of(file) == (None, None)
    file.write_text('{"step": 1, "reward/mean": 1.2.3}\n{"step": 2, "reward/mean": 0.5}\n')
    assert rewards_of(file) == (0.5, None)
    # a step without reward repeats the level before it
    rewards = [0.8] * 15 + [0.1] * 10 + [None] * 15
    file.write_text(
        "".join(json.dumps({"step": n, "reward/mean": r}) + "\n" for n, r in enumerate(rewards, 1))
    )
    assert rewards_of(file)[1] == collapse(rewards) + 1
    file.write_bytes(b'{"step": 1, "reward/mean": 0.5}\n' + b"\0" * (9 << 20))
    assert rewards_of(file) == (None, None), (
        "a damaged file is no reason to show nothing of a study"
    )


def test_a_refused_job_with_long_settings_hides_no_other_job(tmp_path):
    study(tmp_path)
    plan = json.loads((tmp_path / "manifest.jsonl").read_text())
    long = "prompt.system=" + "x" * 2000
    plan["jobs"].append({"run": long, "overrides": [long], "reason": "it is too long"})
    (tmp_path / "manifest.jsonl").write_text(json.dumps(plan) + "\n")
    assert [job.state for job in jobs(tmp_path)] == ["finished", "finished", "failed"]
    assert len(jobs(tmp_path)[2].run) == 1000


def test_refused_jobs_are_those_of_the_last_sweep(tmp_path):
    study(tmp_path)
    refused = [{"run": f"seed=-{n}", "overrides": [f"seed=-{n}"], "reason": "no"} for n in (1, 2)]
    with open(tmp_path / "manifest.jsonl", "a") as file:
        for number, job in enumerate(refused):
            sweep = {"time": 2.0 + number, "command": ["gspo train", "-m"], "jobs": [job]}
            file.write(json.dumps(sweep) + "\n")
    assert [job.run for job in jobs(tmp_path) if job.state == "failed"] == ["seed=-2"]
    assert len(jobs(tmp_path)) == 3


def test_a_dry_run_says_that_runs_under_way_are_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "settings.yaml").write_text("steps: 9")
    plan = {"run": "a", "folder": str(tmp_path / "a"), "steps": 9, "overrides": []}
    with exclusive(tmp_path / "a"):
        last_line = forecast([plan, plan | {"folder": str(tmp_path / "b")}]).splitlines()[-1]
    words = "2 jobs: 1 running, 1 missing; without dry_run=true those not running are started"
    assert last_line == words


def test_a_plan_prints_overrides_as_they_were_typed(tmp_path):
    plans = [
        {"run": name, "folder": str(tmp_path / name), "steps": 9, "overrides": [override]}
        for name, override in (("a", r"objective=losses\:Soft"), ("b", r"looks=\[1\,2\]"))
    ]
    lines = forecast(plans).splitlines()
    assert lines[0].endswith("objective=losses:Soft")
    assert lines[1].endswith("looks=[1,2]")


def test_a_folder_is_named_by_what_a_sweep_varies_and_found_again_by_its_hash(tmp_path):
    chosen: Settings = composed("experiment=micro_moe", "optim.lr=2e-4", f"runs={tmp_path}")
    digest = settings_hash(chosen)
    assert run_directory(chosen).name == f"gspo-seed1-{digest}"
    vary(chosen, ["optim.lr=2e-4", "policy.routing_replay=r2", "seed=1", "objective=gspo_tiny"])
    named = run_directory(chosen)
    assert named.name == f"gspo-lr2e-4-routing_replay_r2-seed1-{digest}"
    assert chosen.label() == "gspo seed 1 lr=2e-4 routing_replay=r2"
    named.mkdir(parents=True)
    (named / "settings.yaml").write_text("")
    alone: Settings = composed("experiment=micro_moe", "optim.lr=2e-4", f"runs={tmp_path}")
    assert run_directory(alone) == named, "the same run, made alone, is the one that is there"


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("task.path=/data/a b/c.jsonl", "path__data_a_b_c.jsonl"),
        ("rollout.extend={100: 160}", "extend__100_160"),
        ("model.path=" + "x" * 200, "path_" + "x" * 55),
        ("+optim.lr=1e-3", "lr1e-3"),
    ],
)
def test_any_value_gives_the_name_of_a_folder(tmp_path, override, name):
    chosen: Settings = composed("experiment=micro_moe", f"runs={tmp_path}")
    vary(chosen, [override])
    assert chosen.varied_name == name


def test_a_run_that_a_sweep_has_planned_has_that_name_before_it_begins(tmp_path):
    chosen: Settings = composed("experiment=micro_moe", "optim.lr=2e-4", f"runs={tmp_path}")
    planned = f"gspo-lr2e-4-seed1-{settings_hash(chosen)}"
    (tmp_path / "micro_moe").mkdir()
    (tmp_path / "micro_moe" / "manifest.jsonl").write_text(
        json.dumps({"jobs": [{"run": planned}]}) + "\n"
    )
    assert run_directory(chosen).name == planned


def test_of_two_equal_command_lines_each_job_finds_the_plan_of_its_own_sweep(tmp_path, monkeypatch):
    """The sweeps differ in their files alone, so their plans have the same overrides."""
    chosen: Settings = composed("experiment=micro_moe", f"runs={tmp_path}")
    own = f"gspo-seed1-{settings_hash(chosen)}"
    (tmp_path / "micro_moe").mkdir()
    for sweep, run in (("a" * 16, own), ("b" * 16, "gspo-seed1-0123456789")):
        plan = [{"run": run, "overrides": ["seed=1"]}]
        sweeps.append_entry(tmp_path / "micro_moe", {"sweep": sweep, "jobs": plan})
    hydra = SimpleNamespace(
        mode=RunMode.MULTIRUN,
        job=SimpleNamespace(num=0),
        overrides=SimpleNamespace(task=["seed=1"]),
    )
    monkeypatch.setattr(sweeps.HydraConfig, "get", lambda: hydra)
    monkeypatch.setenv(sweeps.SWEEP, "a" * 16)
    assert sweeps.taken_by_another_job(chosen) == "" and chosen.planned_name == own
    monkeypatch.setenv(sweeps.SWEEP, "b" * 16)
    with pytest.raises(ValueError, match="job 0 was planned as gspo-seed1-0123456789 and is now"):
        sweeps.taken_by_another_job(chosen)


def test_failures_of_another_sweep_of_the_study_are_not_this_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "UNFINISHED_JOBS", unfinished := {})
    sweep = sweeps.WriteManifest()
    sweep.sweep = "a" * 16
    sweep.studies = [tmp_path / "f", tmp_path / "g"]
    # equal settings in two studies have equal names
    sweep.planned = [
        {"run": "gspo-seed1-x", "folder": str(study / "gspo-seed1-x"), "overrides": [f"study={n}"]}
        for n, study in enumerate(sweep.studies)
    ]
    for study in sweep.studies:
        sweeps.append_entry(study, {"sweep": "a" * 16, "run": "gspo-seed1-x", "reason": "ours"})
        sweeps.append_entry(study, {"sweep": "b" * 16, "run": "gspo-seed2-x", "reason": "theirs"})
    sweep.collect_reasons()
    assert unfinished == {"f/gspo-seed1-x": "ours", "g/gspo-seed1-x": "ours"}


@pytest.mark.parametrize(("later", "expected"), [(10, {}), (-10, {"gspo-seed1-x": "refused"})])
def test_a_failure_counts_unless_another_sweep_has_made_the_run_since(
    tmp_path, monkeypatch, later, expected
):
    """A run that finished before, with fewer steps, does not hide the refusal of this sweep."""
    monkeypatch.setattr(sweeps, "UNFINISHED_JOBS", unfinished := {})
    sweep = sweeps.WriteManifest()
    sweep.sweep = "a" * 16
    sweep.studies = [tmp_path]
    folder = tmp_path / "gspo-seed1-x"
    sweep.planned = [{"run": folder.name, "folder": str(folder), "overrides": ["seed=1"]}]
    folder.mkdir()
    status = {"how": "finished", "step": 4, "time": time.time() + later}
    (folder / "status.json").write_text(json.dumps(status))
    sweeps.append_entry(tmp_path, {"sweep": "a" * 16, "run": folder.name, "reason": "refused"})
    sweep.collect_reasons()
    assert unfinished == expected


def test_the_start_of_a_sweep_lets_signals_wait_for_its_workers(monkeypatch):
    """Also of a sweep by `mode: MULTIRUN` in a file, without -m on the command line."""
    stop = StopSignal()
    stop.ends_at_once = True
    monkeypatch.setattr(sweeps, "stop_signal", lambda: stop)
    monkeypatch.setattr(sweeps.WriteManifest, "_begin", lambda self, config: None)
    sweeps.WriteManifest().on_multirun_start(OmegaConf.create())
    assert not stop.ends_at_once


def test_a_shuffled_job_is_found_in_the_plan_by_its_overrides():
    plan = [{"overrides": ["a=1"]}, {"overrides": ["a=2"]}, {"overrides": ["a=2"]}]
    assert sweeps.number_in(plan, 0, ["a=2"]) == 1 and sweeps.number_in(plan, 2, ["a=2"]) == 2
    assert sweeps.number_in(plan, 9, ["a=1"]) == 0 and sweeps.number_in(plan, 0, ["a=3"]) is None


def test_a_copy_of_a_run_beside_it_does_not_stand_in_for_it(tmp_path):
    chosen: Settings = composed("experiment=micro_moe", f"runs={tmp_path}")
    run = run_directory(chosen)
    for folder in (run, run.with_name(f"backup-{run.name}")):
        folder.mkdir(parents=True)
        (folder / "settings.yaml").write_text("")
    assert run_directory(chosen) == run
    run.rename(run.with_name(f"moved-{run.name}"))
    with pytest.raises(ValueError, match="hold the same run: leave one of them"):
        run_directory(chosen)


def test_an_option_in_a_folder_names_a_run_of_the_study_itself(tmp_path):
    chosen: Settings = composed("experiment=micro_moe", f"runs={tmp_path}")
    chosen.options["objective"] = "wide/gspo"
    assert run_directory(chosen).parent == tmp_path / "micro_moe"
    assert run_directory(chosen).name.startswith("wide_gspo-seed1-")


def test_of_two_sweeps_of_a_study_each_job_finds_the_plan_of_its_own(tmp_path, monkeypatch):
    """Job 0 of the first sweep begins after the second sweep has written its plan."""
    chosen: Settings = composed("experiment=micro_moe", "optim.lr=2e-4", f"runs={tmp_path}")
    own = f"gspo-lr2e-4-seed1-{settings_hash(chosen)}"
    plans = [
        [("optim.lr=2e-4", own), ("optim.lr=1e-4", "gspo-lr1e-4-seed1-0123456789")],
        [
            ("optim.lr=9e-4", "gspo-lr9e-4-seed1-9876543210"),
            ("optim.lr=8e-4", "gspo-lr8e-4-seed1-9876543211"),
        ],
    ]
    lines = [
        {"time": 1.0, "jobs": [{"run": run, "overrides": [word]} for word, run in plan]}
        for plan in plans
    ]
    (tmp_path / "micro_moe").mkdir()
    (tmp_path / "micro_moe" / "manifest.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    hydra = SimpleNamespace(
        mode=RunMode.MULTIRUN,
        job=SimpleNamespace(num=0),
        overrides=SimpleNamespace(task=["optim.lr=2e-4"]),
    )
    monkeypatch.setattr(sweeps.HydraConfig, "get", lambda: hydra)
    monkeypatch.delenv(sweeps.SWEEP, raising=False)
    assert sweeps.taken_by_another_job(chosen) == ""
    assert run_directory(chosen).name == own and chosen.varied == "lr=2e-4"
    chosen.optim.lr = 3e-4  # an option file was edited
    with pytest.raises(
        ValueError, match=f"job 0 was planned as {own} and is now .*: its option files were edited"
    ):
        sweeps.taken_by_another_job(chosen)
