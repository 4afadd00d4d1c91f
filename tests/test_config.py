"""Settings: every option file composes, experiments do not leak into objectives, bad input is one clear line."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from gspo.config import (
    CHOICES,
    check,
    read_settings,
    register_schemas,
    resumed_settings,
    run_directory,
    settings_hash,
    to_settings,
    write_settings,
)

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
register_schemas()


def settings(*overrides: str, name: str = "train", folder: Path = CONF):
    with initialize_config_dir(str(folder), version_base="1.3"):
        return to_settings(compose(name, overrides=list(overrides)))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("group", ["objective", "advantage", "model", "task", "experiment", "arm"])
def test_every_option_file_composes(group):
    for option in options(group):
        sign = "+" if group in ("experiment", "arm") else ""
        extra = ["model.path=some/folder"] if option == "hf" else []
        result = settings(f"{sign}{group}={option}", *extra)
        if group in CHOICES:
            assert type(getattr(result, group)) is CHOICES[group].get(option, type(getattr(result, group)))


def test_paper_clip_ranges_are_what_the_option_files_say():
    ranges = {o: settings(f"objective={o}").objective for o in options("objective")}
    assert (ranges["gspo"].clip_low, ranges["gspo"].clip_high) == (3e-4, 4e-4)
    assert (ranges["gspo_token"].clip_low, ranges["gspo_token"].clip_high) == (3e-4, 4e-4)
    assert (ranges["grpo"].clip_low, ranges["grpo"].clip_high) == (0.2, 0.27)


def test_every_experiment_keeps_every_objectives_own_values():
    for experiment in options("experiment"):
        for objective in options("objective"):
            alone = settings(f"objective={objective}").objective
            assert settings(f"+experiment={experiment}", f"objective={objective}").objective == alone


def test_no_experiment_or_sweep_carries_an_objective_or_advantage_block():
    for path in [
        *(CONF / "experiment").glob("*.yaml"),
        *(CONF / "arm").glob("*.yaml"),
        *(ROOT / "sweeps").glob("*.yaml"),
    ]:
        content = yaml.safe_load(path.read_text())
        assert not {"objective", "advantage"} & set(content), f"{path} would leak onto whichever objective is chosen"


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_sweep_composes_and_says_what_it_is_for(path):
    head = path.read_text().split("defaults:")[0]
    assert all(word in head for word in ("# Question", "# Command", "# Cost")) and f"-cn {path.stem}" in head
    searchpath = f"hydra.searchpath=[file://{CONF}]"
    assert settings(searchpath, name=path.stem, folder=path.parent).on_existing == "resume"


def test_precedence_is_defaults_experiment_command_line():
    assert settings().optim.lr == 1e-6
    experiment = settings("+experiment=tiny_moe")
    assert experiment.optim.lr != 1e-6
    assert settings("+experiment=tiny_moe", "optim.lr=0.5").optim.lr == 0.5


BAD = [
    ("rollout.group_size=1", "rollout.group_size=1"),
    ("trainer.minibatches=5", "trainer.minibatches=5"),
    ("trainer.minibatches=1", "trainer.minibatches=1"),
    ("trainer.minibatches=0", "trainer.minibatches=0"),
    ("trainer.aggregation=sum", "trainer.aggregation='sum'"),
    ("model=tiny_dense policy.routing_replay=r2", "policy.routing_replay=r2"),
    ("policy.routing_replay=r3", "policy.routing_replay='r3'"),
    ("policy.old_logprobs=now", "policy.old_logprobs='now'"),
    ("objective.clip_low=2", "objective.clip_low=2"),
    ("objective.clip_high=-1", "objective.clip_high=-1"),
    ("optim.lr=-1", "optim.lr=-1"),
    ("rollout.temperature=0", "rollout.temperature=0"),
    ("rollout.max_new_tokens=0", "rollout.max_new_tokens=0"),
    ("evaluation.sets=[nothing]", "evaluation.sets=.*nothing"),
    ("cold_start.wrong_step_rate=1", "cold_start.wrong_step_rate=1"),
    ("steps=0", "steps=0"),
    ("optim.beta1=2", "optim.beta1=2"),
    ("optim.lr=nan", "optim.lr=nan"),
    ("cold_start.micro_batch_size=0", "cold_start.micro_batch_size=0"),
    ("evaluation.temperature=-1", "evaluation.temperature=-1"),
    ("objective.name=other", "objective.name='other'"),
    ("threads=-2", "threads=-2"),
    ("study=../elsewhere", "study='../elsewhere'"),
    ("on_existing=delete", "on_existing='delete'"),
    ("tracking.wandb=maybe", "tracking.wandb='maybe'"),
    ("model.experts_per_token=99", "model.experts_per_token=99"),
    ("task.math.max_operands=1", "max_operands=1"),
]


@pytest.mark.parametrize("overrides, message", BAD, ids=[b[0] for b in BAD])
def test_what_cannot_work_is_refused_naming_key_and_value(overrides, message):
    with pytest.raises(ValueError, match=message):
        settings(*overrides.split())


def test_one_update_per_rollout_is_allowed_when_asked_for():
    assert settings("trainer.minibatches=1", "allow_on_policy=true").allow_on_policy
    assert settings("trainer.minibatches=1", "trainer.epochs=2").trainer.epochs == 2
    assert settings("trainer.minibatches=1", "policy.old_logprobs=engine").trainer.minibatches == 1


def test_the_directory_name_holds_what_results_depend_on_and_nothing_else():
    base = settings("+experiment=tiny_moe")
    for same in ("steps=7", "tracking.wandb=offline", "runs=elsewhere", "threads=2", "on_existing=resume"):
        assert settings_hash(settings("+experiment=tiny_moe", same)) == settings_hash(base), same
    for other in ("optim.lr=1e-3", "seed=2", "policy.routing_replay=r2", "objective=grpo", "task.code_share=0.1"):
        assert settings_hash(settings("+experiment=tiny_moe", other)) != settings_hash(base), other
    assert run_directory(base).match(f"runs/tiny_moe/gspo-seed1-{settings_hash(base)}")


def test_settings_survive_the_file(tmp_path):
    for overrides in (("objective=grpo", "model=tiny_dense", "task=math"), ("+experiment=tiny_moe", "+arm=grpo_r2")):
        written = settings(*overrides)
        write_settings(written, tmp_path)
        assert read_settings(tmp_path) == written


def test_resume_changes_only_steps_and_tracking(tmp_path):
    write_settings(settings("+experiment=tiny_moe", "seed=5"), tmp_path)
    changed = resumed_settings(tmp_path, [f"resume={tmp_path}", "steps=500", "tracking.wandb=disabled"])
    assert (changed.steps, changed.tracking.wandb, changed.seed) == (500, "disabled", 5)
    for override in ("seed=6", "optim.lr=1", "objective=grpo", "+experiment=tiny_moe"):
        with pytest.raises(ValueError, match="only steps and tracking"):
            resumed_settings(tmp_path, [override])
    with pytest.raises(ValueError, match=r"no settings.yaml"):
        resumed_settings(tmp_path / "nowhere", [])


def test_settings_of_another_version_are_refused_by_name(tmp_path):
    content = OmegaConf.to_container(OmegaConf.create(asdict(settings())))
    content["objective"]["name"] = "ppo9"
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"objective.name='ppo9'"):
        read_settings(tmp_path)


CLI = [
    ("optim.learning=1", "learning"),
    ("rollout.group_size=1", "rollout.group_size=1"),
    ("resume=no/such/run", "no/such/run"),
]


@pytest.mark.parametrize("override, named", CLI, ids=[c[0] for c in CLI])
def test_the_command_line_says_it_in_one_line_and_writes_nothing(override, named, tmp_path):
    command = [sys.executable, str(ROOT / "experiments" / "train.py"), override]
    if not override.startswith("resume"):
        command.append(f"runs={tmp_path / 'runs'}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.startswith("error: ") and named in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_check_runs_on_plain_dataclasses_too():
    good = settings()
    good.rollout.group_size = 1
    with pytest.raises(ValueError, match=r"rollout.group_size=1"):
        check(good)
