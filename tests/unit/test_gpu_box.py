"""The commands of experiments/gpu/box.py: each is understood, and each ends within its limit with
its rows kept.
"""

import json
import re
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser

from composing import CONF, settings
from gpu import box
from gspo.cli import check
from gspo.config.conversion import to_dataclass
from gspo.config.settings import Settings, settings_hash
from gspo.io.arguments import parsed
from gspo.run.sweep_configs import expanded
from speed.workload import WORKLOADS

OUT = Path("/tmp/out")
small_or_not = pytest.mark.parametrize("miniature", [False, True], ids=["GPU", "miniature"])


def jobs(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The settings on the command line of every job that `gspo train` starts."""
    given = get_args_parser().parse_args(words[words.index("train") + 1 :])
    folder = box.ROOT / given.config_dir
    overrides = [f"hydra.searchpath=[file://{CONF}]", *given.overrides]
    parameters = compose_sweep(given.config_name, folder, overrides) if given.multirun else {}
    chosen = {word.split("=")[0] for word in given.overrides}
    swept = [f"{key}={value}" for key, value in parameters.items() if key not in chosen]
    return [tuple(job) for job in expanded([*overrides, *swept])]


@cache
def composed(job: tuple[str, ...]) -> Settings:
    return settings(*job, name=box.STUDY, folder=box.ROOT / "sweeps")


def compose_sweep(name: str, folder: Path, overrides: list[str]) -> dict[str, str]:
    plain = [word for word in overrides if "," not in word]
    with initialize_config_dir(str(folder), version_base="1.3"):
        return dict(compose(name, overrides=plain, return_hydra_config=True).hydra.sweeper.params)


@pytest.mark.slow
def test_the_study_is_27_different_runs_with_all_arms_of_a_seed_first():
    (command,) = box.commands("study", OUT, False)
    planned = jobs(command.words)
    assert len(set(planned)) == len(planned) == 3 * 3 * 3
    seeds = [next(word for word in job if word.startswith("seed=")) for job in planned]
    assert seeds == sorted(seeds)
    arms = [composed(job) for job in planned[:3]]
    assert [(one.objective.name, one.policy.routing_replay) for one in arms] == [
        ("gspo", "none"), ("grpo", "r2"), ("grpo", "none"),
    ]  # fmt: skip
    assert (
        len(
            {
                settings_hash(composed(job))
                for job in (planned[0], planned[1], planned[2], planned[-1])
            }
        )
        == 4
    )
    for one in arms:
        assert (one.policy.device, one.tracking.wandb, one.steps) == ("cuda", "disabled", 60)
        assert one.rollout.prompts_per_step * one.rollout.group_size == 1024
        assert one.rollout.prompts_per_step * one.rollout.group_size % one.trainer.minibatches == 0


def test_the_model_of_the_study_has_27_million_parameters_of_which_5_are_active():
    (command,) = box.commands("study", OUT, False)
    model = composed(jobs(command.words)[0]).model
    head_dim = model.hidden // model.heads
    attention = 4 * model.hidden * model.heads * head_dim
    expert = 3 * model.hidden * model.expert_width
    assert 26e6 < model.layers * (attention + model.experts * expert) < 28e6
    assert 5.0e6 < model.layers * (attention + model.experts_per_token * expert) < 5.5e6


@pytest.mark.slow
def test_the_miniature_of_the_study_and_its_further_settings_compose():
    (command,) = box.commands("study", OUT, True, ("steps=3",))
    planned = [composed(job) for job in jobs(command.words)]
    assert [one.steps for one in planned] == [3, 3]
    assert {one.policy.device for one in planned} == {"cpu"}


@small_or_not
def test_the_check_and_its_benchmarks_are_understood(miniature, tmp_path):
    first, *others = box.commands("check", tmp_path, miniature)
    assert first.words[2] == "check"
    assert parsed(check.Options, first.words[3:]).json == str(tmp_path / "check.json")
    peers = []
    for command in others:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            asked = to_dataclass(compose("benchmark", overrides=list(command.words[1:])))
        workload = WORKLOADS[asked.workload].resized(asked.size)
        peers.append(asked.peer)
        settings(*workload.overrides())
    assert peers == ["trl", "none"]


def test_the_commands_of_the_check_fit_into_the_part():
    assert (
        sum(command.seconds for command in box.commands("check", OUT, False))
        <= box.SECONDS["check"]
    )


def test_every_wheel_is_pinned():
    assert set(box.CARRIED) | set(box.PEER) | set(box.FROM_SOURCE) <= box.pinned_versions().keys()


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_ended_and_its_output_kept(tmp_path):
    script = "import time; print('begun', flush=True); time.sleep(600)"
    command = box.Command("slow", ("-c", script), 2.0)
    started = time.monotonic()
    outcome = box.run_one(command, tmp_path, time.monotonic() + 1000, lambda: None)
    assert outcome.cut_off and outcome.exit_code == -15
    assert time.monotonic() - started < 60
    assert (tmp_path / "slow.log").read_text() == "begun\n"


def test_a_command_for_which_no_time_is_left_is_not_started(tmp_path):
    command = box.Command("late", ("-c", "raise SystemExit(1)"), 60.0)
    outcome = box.run_one(command, tmp_path, time.monotonic() + box.GRACE, lambda: None)
    assert outcome.cut_off and outcome.exit_code is None and not list(tmp_path.iterdir())


def test_rows_are_kept_of_all_runs_and_a_line_of_those_that_have_finished(tmp_path):
    study = tmp_path / "runs" / "study"
    for name, steps in (("ended", [1, 2, 3, 4, 5]), ("on_its_way", [1, 2])):
        (study / name).mkdir(parents=True)
        (study / name / "settings.yaml").write_text("seed: 1\nsteps: 5\n")
        rows = [{"step": step, "reward/mean": step / 10, "kl/old_k3": None} for step in steps]
        (study / name / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "re'
        )
        (study / name / "checkpoint.bin").write_bytes(b"large")
    box.keep_rows(study, tmp_path / "out")
    (line,) = (tmp_path / "out" / "finished.jsonl").read_text().splitlines()
    finished = json.loads(line)
    assert (finished["run"], finished["steps"]) == ("ended", 5)
    assert finished["last_fifth"] == {
        "reward/mean": 0.5,
        "routing/consistency_after_step": None,
        "kl/old_k3": None,
    }
    kept = {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert kept == {
        "finished.jsonl",
        *(
            f"runs/study/{run}/{name}"
            for run in ("ended", "on_its_way")
            for name in ("settings.yaml", "metrics.jsonl")
        ),
    }


def test_what_cannot_run_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["box.py", "run", "--part", "check", "--out", str(tmp_path), "steps=3"]
    )
    assert box.main() == 2
    assert re.fullmatch("error: steps=3 with --part check.*\n", capsys.readouterr().err)
    monkeypatch.setattr(box, "PYTHON", (3, 99))
    assert box.run("check", tmp_path, False, None, ()) == 2
    assert re.fullmatch("error: this is Python .* for 3.99\n", capsys.readouterr().err)
    monkeypatch.setattr(box, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(box, "WHEELS", tmp_path / "none")
    assert box.run("check", tmp_path, False, None, ()) == 2
    assert "box.py collect" in capsys.readouterr().err
