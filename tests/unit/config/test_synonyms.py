"""Names of other frameworks, other cases and other options are answered with the setting that is
meant.
"""

import re
import sys
from dataclasses import fields, is_dataclass

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException

from gspo.cli.option_files import (
    CONF,
    composed_settings,
    options_first,
    refuse_dashes,
    refuse_folders,
)
from gspo.config.schema import GROUPS_BESIDE_SETTINGS
from gspo.config.settings import CHOICES, Settings
from gspo.config.synonyms import OPTIONS, OURS, THEIRS, our_name
from gspo.run.entry_point import explain


def refused(*words: str) -> str:
    kinds = (ValueError, ConfigCompositionException, HydraException, MissingConfigException)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gspo train", *words])
        with pytest.raises(kinds) as error:
            composed_settings(list(words))
        return explain(error.value)


@pytest.mark.parametrize("ours", OURS)
def test_every_answer_is_a_setting_or_an_option(ours):
    key, condition = re.fullmatch(r"([^ ]+)(?: \(with (.+)\))?", ours).groups()
    group, _, option = key.partition("=")
    if option:
        assert option in CHOICES[group] and (CONF / group / f"{option}.yaml").exists()
        return
    kind = Settings
    for name in key.split("."):
        if is_dataclass(kind):
            assert name in {field.name for field in fields(kind)}, ours
        if kind is Settings and name in CHOICES and "." in key:
            plain = {"objective": "gspo", "rollout": "local"}.get(name)
            kind = CHOICES[name][condition.partition("=")[2] if condition else plain]
        elif kind is not None:
            default = next(field for field in fields(kind) if field.name == name)
            kind = default.default_factory if is_dataclass(default.default_factory) else None


def test_no_name_has_two_answers_and_none_is_a_setting_at_the_top():
    names = [name for theirs in OURS.values() for name in theirs.split()]
    assert len(names) == len(set(names)) == len(THEIRS)
    top = {field.name for field in fields(Settings)} | set(GROUPS_BESIDE_SETTINGS)
    assert {name for name in names if "." not in name} & top == set(), (
        "such a name would never be looked up"
    )


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("learning_rate=1e-5", "learning_rate: there is no such setting; here it is optim.lr"),
        ("Learning_Rate=1e-5", "Learning_Rate: there is no such setting; here it is optim.lr"),
        ("+learning_rate=1e-5", "learning_rate: there is no such setting; here it is optim.lr"),
        (
            "num_generations=8",
            "num_generations: there is no such setting; here it is rollout.group_size",
        ),
        ("n=8", "n: there is no such setting; here it is rollout.group_size"),
        ("beta=0.04", "beta: there is no such setting; here it is kl.coef (with kl=loss)"),
        (
            "kl_loss_coef=0.04",
            "kl_loss_coef: there is no such setting; here it is kl.coef (with kl=loss)",
        ),
        ("epsilon=0.2", "epsilon: there is no such setting; here it is objective.clip_low"),
        (
            "max_completion_length=512",
            "max_completion_length: there is no such setting; here it is rollout.max_new_tokens",
        ),
        (
            "kl.coef=0.1",
            "kl.coef: there is no such setting; kl.coef is a setting of kl=loss, kl=reward",
        ),
        (
            "model.path=qwen3",
            "model.path: there is no such setting; model.path is a setting of model=hf, model=stand_in",
        ),
        ("optim.LR=1", "optim.LR: there is no such setting; here it is optim.lr"),
        (
            "trainer.total_epochs=3",
            "trainer.total_epochs: there is no such setting; here it is steps",
        ),
        (
            "trainer.save_freq=5",
            "trainer.save_freq: there is no such setting; here it is checkpoint.every",
        ),
        ("rollout.n=8", "rollout.n: there is no such setting; here it is rollout.group_size"),
        ("evaluation.n=8", "evaluation.n: there is no such setting; the nearest is evaluation."),
    ],
)
def test_a_name_that_people_know_is_answered_with_ours(word, answer):
    assert refused(word).startswith(answer)


def test_a_whole_dotted_name_of_verl_is_answered(monkeypatch):
    word = "actor_rollout_ref.rollout.n=8"
    monkeypatch.setattr("sys.argv", ["gspo train", word])
    assert (
        refused(word)
        == "actor_rollout_ref.rollout.n: there is no such setting; here it is rollout.group_size"
    )


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("objective=GSPO", "the nearest is gspo ("),
        ("objective=GSPO-Token", "the nearest is gspo_token ("),
        ("task=GSM8K", "the nearest is gsm8k ("),
        ("advantage=grpo", "here it is advantage=group_normalized"),
        ("model=Qwen/Qwen3-0.6B", "model=Qwen/Qwen3-0.6B: there is no such option"),
        ("model=qwen3", "a folder or a model of the hub is model=hf model.path=qwen3"),
    ],
)
def test_an_option_is_found_whatever_its_case(word, answer):
    assert answer in refused(word)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("--learning_rate=1e-5", "optim.lr=1e-5"),
        ("--num-generations", "rollout.group_size=..."),
        ("--steps=3", "steps=3"),
        ("--beta=0.04", "kl=loss kl.coef=0.04"),
        ("--use_vllm=true", "rollout=vllm"),
    ],
)
def test_a_setting_with_dashes_is_refused_with_the_word_that_is_meant(word, answer):
    with pytest.raises(
        ValueError,
        match=f"^{word}: settings are written without dashes, with an equals sign: {answer}$",
    ):
        refuse_dashes([word])
    refuse_dashes(["-m", "--multirun", "--config-name=x", "--help", "-cn", "steps=3"])


@pytest.mark.parametrize(
    "word", ["hydra.run.dir=/tmp/x", "+hydra.sweep.dir=x", "hydra.sweep.subdir=y"]
)
def test_hydras_folders_are_refused_with_ours(word):
    with pytest.raises(
        ValueError, match=r"runs are written to RUNS/STUDY/NAME; set runs=FOLDER or study=NAME"
    ):
        refuse_folders([word])
    refuse_folders(["hydra/launcher=basic", "hydra.launcher.n_jobs=2", "runs=x"])


def test_multirun_may_stand_anywhere():
    words = ["seed=1", "--multirun", "-cd", "mine", "steps=2"]
    assert options_first(words) == ["--multirun", "-cd", "mine", "seed=1", "steps=2"]
    assert options_first(["k=2", "--cfg", "job", "-m"]) == ["--cfg", "job", "-m", "k=2"]
    assert options_first(["-cn", "seeds", "-m"]) == ["-cn", "seeds", "-m"]
    assert options_first(["seed=1"]) == ["seed=1"]


def test_a_name_that_nobody_has_is_not_answered():
    assert our_name("nonsense") == our_name("optimm") == ""


@pytest.mark.parametrize(
    "group, theirs, ours", [(g, t, o) for g, names in OPTIONS.items() for t, o in names.items()]
)
def test_every_option_that_is_answered_is_one(group, theirs, ours):
    assert (CONF / group / f"{ours}.yaml").exists() and not (
        CONF / group / f"{theirs}.yaml"
    ).exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optim.lr", "'optim.lr' is no setting: write KEY=VALUE, without blanks around the ="),
        (
            "optim.lr=1e-4,1e-3",
            "optim.lr=1e-4,1e-3: several values make a sweep, which is gspo train -m",
        ),
        ("optim.lr=abc", "optim.lr=abc: must be a number"),
        ("steps=1.5", "steps=1.5: must be a whole number"),
        ("optim={lr: abc}", "optim.lr=abc: must be a number"),
        ("dry_run=abc", "dry_run=abc: must be true or false"),
        ("seed:5", "'seed:5' is no setting: write KEY=VALUE, without blanks around the ="),
        ("", "'' is no setting: write KEY=VALUE, without blanks around the ="),
        ("experiment=null", "experiment=null: null is no option: leave the word out"),
        ("study=null", "study=null: null is no value of this setting"),
        ("rollout.stop=x", "rollout.stop=x: must be a list, as rollout.stop=[x]"),
        ("profile.steps=3", "profile.steps=3: must be a list, as profile.steps=[3]"),
        ("optim.lr.x=5", "optim.lr.x: there is no such setting: optim.lr has no parts"),
        ("resume=", "resume= has no value: name the run, as in resume=runs/STUDY/RUN"),
        ("-m", "-m is an option of gspo train: this command reads KEY=VALUE only"),
    ],
)
def test_hydras_own_words_are_not_shown(word, said):
    assert refused(word) == said


@pytest.mark.parametrize(
    ("words", "key", "chosen"),
    [
        (["task=rows"], "task.max_operands for task=math", "task=rows"),
        (["model=tiny_dense"], "model.experts for model=tiny_moe or model=stand_in", "tiny_dense"),
    ],
)
def test_an_experiment_that_does_not_fit_another_option_is_named(words, key, chosen):
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(Exception) as caught:
        compose("train", overrides=["experiment=micro_moe", *words])
    text = explain(caught.value)
    assert text.startswith(f"experiment=micro_moe sets {key} and does not fit ")
    assert text.endswith(f"{chosen}: leave experiment= out (cut=tiny for a trial)")


def test_a_name_of_no_file_is_answered_with_the_nearest():
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(Exception) as caught:
        compose("trian")
    assert explain(caught.value) == "-cn trian: there is no such file; the nearest is train"
