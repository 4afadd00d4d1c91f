"""Files that a user names with -cn: what they say counts, or is refused."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import open_dict

import composing
from composing import CONF
from gspo.config.load import to_settings
from gspo.config.own_file import check_own_file
from gspo.run.entry_point import explain
from gspo.run.sweep_configs import expanded


def check(folder: Path, content: str, *overrides: str) -> str:
    """The refusal of a file, or of its settings, "" if there is none."""
    (folder / "mine.yaml").write_text(content)
    # as `gspo train -cd FOLDER -cn mine` searches: the user's folder first
    searched = f"hydra.searchpath=[file://{CONF}]"
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose("mine", overrides=[searched, *overrides], return_hydra_config=True)
        check_own_file(config.hydra)
        choices = config.hydra.runtime.choices
        with open_dict(config):
            config.pop("hydra")
        to_settings(config, choices)
    except Exception as error:
        return explain(error)
    return ""


SWEEP = "defaults: [train, _self_]\nhydra: {sweeper: {params: {seed: '1,2'}}}\n"


@pytest.mark.parametrize(
    ("content", "overrides", "refusal"),
    [
        ("defaults: [train, _self_]\nsteps: 7\n", [], ""),
        (SWEEP, ["hydra.mode=MULTIRUN"], ""),
        (
            SWEEP,
            ["hydra.mode=RUN"],
            "-cn mine describes a sweep over seed (hydra.sweeper.params): add -m",
        ),
        (
            "defaults: [_self_, train]\nsteps: 7\n",
            [],
            "mine.yaml: under defaults: _self_ stands before train",
        ),
        (
            "defaults: [train, _self_]\nresume: runs/a/b\nsteps: 7\n",
            [],
            "resume=runs/a/b: in mine.yaml, the other settings of the file would not count",
        ),
        (
            "defaults: [train, _self_]\nsteps: 7\n",
            ["resume=runs/a/b"],
            "resume: a resumed run has its own settings, and those of -cn mine would not count",
        ),
        ("defaults: [train, _self_]\nexperiment: micro_moe\n", [], "this is a group of options"),
        (
            "defaults: [train, _self_]\noptim.lr: 0.5\n",
            [],
            "a key of a file has no dot; write optim: {lr: ...}",
        ),
        (
            "defaults: [train, _self_]\nobjective: grpo\n",
            [],
            "objective: grpo: it has settings of its own",
        ),
        ("defaults: [train, _self_]\nsteps: 7\nsteps: 8\n", [], "mine.yaml, line 3: found dup"),
        ("defaults: [train, _self_]\nsteps:\t7\n", [], "mine.yaml, line 2: found character"),
        ("steps: 7\n", ["dry_run=true"], "begin your file with `defaults: [train, _self_]`"),
    ],
)
def test_what_a_file_says_counts_or_is_refused(tmp_path, content, overrides, refusal):
    said = check(tmp_path, content, *overrides)
    assert refusal in said and bool(refusal) == bool(said), said


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        (["objective=_ctpo"], "objective=_ctpo: is a schema; leave out the _"),
        (["+inputs.model=abc"], "is written by the program; leave it out"),
        (["prompt_used=chat"], "is written by the program; set prompt.format=..."),
        (["~optim.lr"], "~optim.lr: a setting cannot be taken away"),
        (["objective=plain"], "its option file does not say which settings it has; begin it with"),
        (["objective=wide/deep"], ""),
    ],
)
def test_options_without_a_schema_and_what_the_program_writes(tmp_path, overrides, refusal):
    (tmp_path / "objective" / "wide").mkdir(parents=True)
    (tmp_path / "objective" / "plain.yaml").write_text("clip_low: 0.1\n")
    deep = "defaults: [/objective/_gspo@_here_]\nclip_low: 0.1\n"
    (tmp_path / "objective" / "wide" / "deep.yaml").write_text(deep)
    said = check(tmp_path, "defaults: [train, _self_]\n", *overrides)
    assert refusal in said and bool(refusal) == bool(said), said


def test_a_glob_of_options_leaves_the_schemas_out():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        jobs = expanded(["objective=glob(*)", "seed=1"])
    assert ["objective=gspo", "seed=1"] in jobs
    chosen = {job[0].partition("=")[2] for job in jobs}
    assert chosen >= set(composing.options("objective"))
    assert not any(option.startswith("_") for option in chosen)


def test_a_file_that_is_not_utf8_is_named_by_its_text(tmp_path):
    (tmp_path / "mine.yaml").write_bytes("defaults: [train]\nname: café\n".encode("latin-1"))
    initialized = initialize_config_dir(str(tmp_path), version_base="1.3")
    with initialized, pytest.raises(UnicodeDecodeError) as error:
        compose("mine")
    assert explain(error.value) == "a file is not UTF-8 after 'name: caf': save it as UTF-8"
