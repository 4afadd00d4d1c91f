"""The door for outside code: options by the place of a class, typed fields, what is refused,
hashes, recorded runs.
"""

import hashlib
import shutil
import sys

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import open_dict

import user_code
from composing import CONF, composed_anew
from gspo.algorithm.objectives import GRPO
from gspo.cli.evaluate import with_benchmarks
from gspo.config.conversion import to_dataclass
from gspo.config.load import (
    read_settings,
    recorded_config,
    resumed_settings,
    source_change,
    to_settings,
    write_settings,
)
from gspo.config.settings import Settings, run_directory, same_result, settings_hash
from gspo.io import user_code as importing
from gspo.io.user_code import source_files
from gspo.run.entry_point import explain
from refusals import refuses

COPY, REWARD = "own_package.losses:Copy", "own_package.rewards:digits"


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield user_code.write(tmp_path)
    user_code.forget()


def settings(*overrides: str) -> Settings:
    return to_settings(composed_anew(*overrides))


def chosen(*overrides: str) -> Settings:
    """The settings, with Hydra's choices, as `gspo train` has them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return to_settings(config, choices)


def refusal(*overrides: str) -> str:
    with pytest.raises(Exception) as caught:
        chosen(*overrides)
    return explain(caught.value)


def test_a_class_of_ones_own_is_an_option_with_typed_fields():
    s = chosen(f"objective={COPY}", "objective.clip_high=0.4", "advantage=own_package.extras:Mean")
    assert type(s.objective).__name__ == "Copy" and s.objective.clip_high == 0.4
    assert type(s.advantage).__name__ == "Mean" and s.advantage.group_of_one == "zero"
    assert s.options["objective"] == s.objective.name == "Copy" and s.label() == "Copy seed 1"
    assert run_directory(s).name.startswith("Copy-seed1-")
    # all dots, as _target_ has
    assert type(settings("objective=own_package.losses.Copy").objective).__name__ == "Copy"
    assert settings(
        "task=own_package.extras:Letters", "cold_start.steps=0"
    ).task.evaluation_sets() == ["held"]


def test_a_task_of_ones_own_is_a_benchmark_of_the_command_that_evaluates():
    words = with_benchmarks(["model=tiny_dense", "benchmark=[math,own_package.extras:Letters]"])
    command = to_dataclass(composed_anew(*words, name="evaluate"))
    assert command.benchmark == ["math", "Letters"] and command.tasks[
        "Letters"
    ].evaluation_sets() == ["held"]


@pytest.mark.parametrize(
    ("benchmark", "words", "refused"),
    [
        ("openenv", [], ("tasks.openenv.url", "", "tasks.openenv.url=http://127.0.0.1:8000")),
        ("vf", [], ("tasks.vf.taskset",)),
        ("math", ["tasks.math.min_operands=9"], ("tasks.math.max_operands", 6)),
        ("mixed", ["tasks.mixed.math.min_operands=9"], ("tasks.mixed.math.max_operands", 6)),
        ("gsm8k", ["tasks.gsm8k.form=foo"], ("tasks.gsm8k.form", "foo")),
    ],
)
def test_a_benchmark_names_its_settings_by_their_paths(benchmark, words, refused):
    words = [*with_benchmarks(["model=tiny_dense", f"benchmark={benchmark}"]), *words]
    with refuses(*refused):
        to_dataclass(composed_anew(*words, name="evaluate"))


def test_later_messages_of_a_benchmark_name_its_path_too():
    words = with_benchmarks(["model=tiny_dense", "benchmark=[rows,mixed]"])
    words.append("tasks.rows.reward=nowhere:f")
    command = to_dataclass(composed_anew(*words, name="evaluate"))
    assert command.tasks["mixed"].math.key == "tasks.mixed.math"
    with pytest.raises(ValueError, match=r"^tasks.rows.reward=nowhere:f: there is no module"):
        command.tasks["rows"]._function.start()


def test_a_file_that_is_no_python_has_a_hash_and_importing_it_says_what_is_wrong():
    chosen_settings = chosen("task=rows", "task.reward=own_package.unclosed:f")
    assert "own_package/unclosed.py" in chosen_settings.outside["task.reward"]["sha256"]


def test_an_option_file_of_ones_own_may_begin_with_the_class(package, tmp_path):
    folder = tmp_path / "mine" / "objective"
    folder.mkdir(parents=True)
    (folder / "narrow.yaml").write_text(f'defaults: ["{COPY}"]\nclip_high: 0.01\n')
    s = chosen(f"hydra.searchpath=[file://{folder.parent}]", "objective=narrow")
    assert s.objective.clip_high == 0.01 and s.options["objective"] == "narrow"
    assert s.outside["objective"]["path"] == COPY


def test_metrics_and_callbacks_have_names_and_settings():
    s = settings(
        "metrics.long.path=own_package.extras:Long", "metrics.long.tokens=7", "metrics.short=own_package.extras:Long",
        "callbacks.stop=own_package.extras:StopAfter",
    )  # fmt: skip
    assert (s.metrics["long"].tokens, s.metrics["short"].tokens, s.callbacks["stop"].steps) == (
        7,
        4,
        2,
    )
    assert set(s.outside) == {"metrics.long", "metrics.short", "callbacks.stop"}


@pytest.mark.parametrize(
    "override, text",
    [
        (
            "objective=own_package.losses:Copi",
            "there is no Copi in own_package.losses; the nearest is Copy",
        ),
        ("objective=own_pakage.losses:Copy", "there is no module own_pakage (in "),
        ("objective=own_package.lossses:Copy", "there is no module own_package.lossses"),
        (
            "objective=own_package.broken:Copy",
            "importing own_package.broken failed: OSError: no network (",
        ),
        (
            "objective=own_package.unclosed:Copy",
            "importing own_package.unclosed failed: SyntaxError: invalid syntax (unclosed.py",
        ),
        (
            "objective=own_package.extras:Mean",
            "must be a class that derives from gspo.algorithm.objectives.base.Obj",
        ),
        ("objective=own_package.rewards:digits", "must be a class that derives from"),
        ("objective=own_package.losses:Bare", "write @dataclass above the class"),
        ("objective=own_package.losses:Empty", "Empty: must have a method __call__"),
        (
            "objective=own_package.losses:Wrong",
            "__call__(self, inputs, more) must be __call__(self, inputs)",
        ),
        (
            "objective=own_package.losses:Named",
            "its name='grpo' is that of a built-in option; give it another",
        ),
        ("objective=own_package.losses:Odd", "its fields cannot be settings: "),
        (
            "advantage=own_package.losses:Copy",
            "must be a class that derives from gspo.algorithm.advantages.Advantage",
        ),
        ("task=own_package.losses:Copy", "must be a class that derives from gspo.tasks.base.Task"),
        ("kl=own_package.losses:Copy", "kl=own_package.losses:Copy: there is no such option"),
        (
            f"objective={COPY} objective.clip_hihg=1",
            "objective.clip_hihg: there is no such setting; the nearest is objectiv",
        ),
        (f"objective={COPY} objective.clip_low=2", "objective.clip_low=2.0: must lie in (0, 1)"),
        (
            f"objective={COPY} objective.clip_low=wide",
            "objective.clip_low=wide: must be a number",
        ),
        (f"objective={COPY} objective.name=other", "objective.name=other: cannot be changed"),
        (
            "metrics.a=own_package.extras:StopAfter",
            "metrics.a=own_package.extras:StopAfter: must be a class that d",
        ),
        (
            "metrics.a.tokens=3",
            "metrics.a: no class is given; write metrics.a.path=my_pkg.extras:Gap beside metrics.a.t",
        ),
        ("metrics.a.path=3", "metrics.a.path=3: name it as MODULE:NAME"),
        ("metrics.a=3", "metrics.a=3: set its module and class, metrics.a=my_pkg.extras:Gap"),
        (
            "metrics.a.path=own_package.extras:Long metrics.a.tokens=many",
            "metrics.a.tokens=many: must be a whole number",
        ),
        (
            "metrics.a.path=own_package.extras:Long metrics.a.tokns=3",
            "metrics.a.tokns: there is no such setting; the nearest is m",
        ),
        (
            "metrics.a.path=own_package.extras:Long metrics.a.tokens=0",
            "metrics.a.tokens=0: must be a whole number",
        ),
        ("callbacks.a=own_package.extras:Idle", "must have a method before_step or after_step"),
        ("outside.objective.path=x:y", "is written by the program"),
        ("task=rows", "task.reward: is not given"),
        (
            f"task=rows task.reward={REWARD} task.columns.promt=q",
            "task.columns.promt: choose from prompt",
        ),
        ("task=rows task.reward=rewards", "task.reward=rewards: name it as MODULE:NAME"),
        (
            "task=rows task.reward=no.where:f",
            "task.reward=no.where:f: there is no source file of the module no.where",
        ),
        ("task=rows task.reward=my_reward:f", "module my_reward in "),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(override, text):
    said = refusal(*override.split())
    assert text in said and "\n" not in said and len(said) < 400


def test_a_file_that_an_installed_module_hides_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text("class Copy: pass\n")
    said = refusal("objective=code:Copy")
    assert said.endswith("the installed module code, which hides code.py; rename your file")


@pytest.mark.slow
def test_a_class_beside_its_settings_is_answered_with_the_form_that_works(monkeypatch):
    words = ["metrics.a=own_package.extras:Long", "metrics.a.tokens=3"]
    monkeypatch.setattr("sys.argv", ["gspo train", *words])
    for order in (words, words[::-1]):
        with refuses("metrics.a", problem="write metrics.a.path=own_package.extras:Long beside"):
            chosen(*order)
    words[0] = "metrics.a.path=own_package.extras:Long"
    monkeypatch.setattr("sys.argv", ["gspo train", *words])
    assert chosen(*words).metrics["a"].tokens == 3


# ---- the source is part of the settings
# ------------------------------------------------------------------------


def test_the_hash_changes_with_the_source_and_with_what_it_imports(package, tmp_path):
    before = settings(f"objective={COPY}")
    files = before.outside["objective"]["sha256"]
    assert set(files) == {f"own_package/{name}.py" for name in ("__init__", "helpers", "losses")}
    for name, digest in files.items():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    with (package / "extras.py").open("a") as file:
        file.write("# nothing that the loss imports\n")
    assert settings_hash(settings(f"objective={COPY}")) == settings_hash(before)
    with (package / "helpers.py").open("a") as file:
        file.write("# another word\n")
    after = settings(f"objective={COPY}")
    assert settings_hash(after) != settings_hash(before)
    assert "outside.objective.sha256." in same_result(before, after)


def test_runs_without_outside_code_keep_their_hash_and_a_metric_changes_none():
    plain = settings("objective=grpo")
    assert settings_hash(
        settings("objective=grpo", "metrics.a=own_package.extras:Long")
    ) == settings_hash(plain)
    assert settings_hash(
        settings("objective=grpo", "callbacks.a=own_package.extras:StopAfter")
    ) != settings_hash(plain)


def test_imports_of_every_form_are_followed_and_installed_packages_are_not(tmp_path):
    (tmp_path / "alone.py").write_text(
        "import beside\nimport numpy\nfrom own_package import helpers as h\n"
    )
    (tmp_path / "beside.py").write_text("from own_package.losses import *\n")
    (tmp_path / "own_package" / "inner").mkdir()
    (tmp_path / "own_package" / "inner" / "__init__.py").write_text(
        "from . import deep\nfrom .. import rewards\n"
    )
    (tmp_path / "own_package" / "inner" / "deep.py").write_text(
        "def f():\n    from ..extras import Long\n"
    )
    assert set(source_files("alone:x", "a")) == {
        "alone.py", "beside.py", "own_package/__init__.py", "own_package/helpers.py", "own_package/losses.py",
    }  # fmt: skip
    assert set(source_files("own_package.inner:x", "a")) == {
        f"own_package/{name}.py"
        for name in ("__init__", "inner/__init__", "inner/deep", "extras", "rewards")
    }
    assert set(source_files("yaml:x", "a")) >= {"yaml/__init__.py", "yaml/loader.py"}
    assert {name.partition("/")[0] for name in source_files("yaml:x", "a")} == {"yaml"}


def test_a_folder_of_installed_packages_is_not_one_program(tmp_path, monkeypatch):
    """`pip install --target` makes such folders: a package of one does not bring its neighbours."""
    for package, imported in (("games_of_a", "toolbox_of_b"), ("toolbox_of_b", "json")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"import {imported}\n")
    monkeypatch.syspath_prepend(tmp_path)
    both = {"games_of_a/__init__.py", "toolbox_of_b/__init__.py"}
    assert set(source_files("games_of_a:x", "a")) == both
    (tmp_path / "toolbox_of_b-1.0.dist-info").mkdir()
    assert set(source_files("games_of_a:x", "a")) == {"games_of_a/__init__.py"}


def test_this_package_is_never_a_part_of_code_that_lies_beside_it():
    assert not importing._is_in("gspo.data.samples", CONF.parent) and importing._is_in(
        "setup", CONF.parent
    )


# ---- recorded runs
# ----------------------------------------------------------------------------------------------

ALL = [
    f"objective={COPY}", "objective.clip_high=0.4", "advantage=own_package.extras:Mean", "task=rows", "model=hf",
    "model.path=x", "task.train_path=x.jsonl", f"task.reward={REWARD}", "metrics.a=own_package.extras:Long",
    "callbacks.b.path=own_package.extras:StopAfter", "callbacks.b.steps=3", "cold_start.steps=0",
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    write_settings(settings(*ALL), folder)
    return folder


@pytest.mark.slow
def test_recorded_settings_are_the_same_again_and_may_be_resumed(run):
    again = read_settings(run)
    assert (
        settings_hash(again) == settings_hash(settings(*ALL))
        and same_result(again, settings(*ALL)) is None
    )
    assert (again.objective.clip_high, again.callbacks["b"].steps) == (0.4, 3)
    resumed = resumed_settings(
        run, [f"resume={run}", "steps=200", "metrics.c=own_package.extras:Long"]
    )
    assert resumed.steps == 200 and set(resumed.metrics) == {"a", "c"}
    with refuses("callbacks.b.steps", "9", "with resume="):
        resumed_settings(run, [f"resume={run}", "callbacks.b.steps=9"])


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_source_and_says_which(run, package):
    (package / "helpers.py").write_text("def same(x):\n    return x  # changed\n")
    with pytest.raises(
        ValueError,
        match=r"source of objective=own_package.losses:Copy is not what it was .*helpers.py",
    ):
        resumed_settings(run, [f"resume={run}"])
    recorded = recorded_config(run)
    # evaluation says it and goes on
    assert "helpers.py" in source_change(run, recorded, read_settings(run))
    shutil.rmtree(package)
    user_code.forget()
    with refuses("objective", COPY, "there is no module own_package"):
        read_settings(run)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [ALL[:2], ALL[2:3], ALL[3:8], ALL[8:9], ALL[9:11]])
def test_code_that_another_users_run_names_is_not_imported_without_consent(
    package, tmp_path, monkeypatch, kept
):
    folder = tmp_path / "foreign"
    folder.mkdir()
    write_settings(settings(*kept), folder)
    (folder / "signed.json").unlink()
    for name in ("losses", "extras", "rewards"):
        path = package / f"{name}.py"
        path.write_text(f"import pathlib\npathlib.Path('imported').touch()\n{path.read_text()}")
    user_code.forget()
    with pytest.raises(
        ValueError, match=r"names code from outside this package .*set allow_outside_code=true"
    ):
        read_settings(folder)
    with pytest.raises(ValueError, match="allow_outside_code=true"):
        resumed_settings(folder, [f"resume={folder}"])
    assert not (tmp_path / "imported").exists()
    assert read_settings(folder, trust=True).outside
    # the record of what is outside can be cut from the file: what it would import is still seen
    text = (folder / "settings.yaml").read_text()
    start, end = text.index("\noutside:\n"), text.index("\nmonitor:")
    (folder / "settings.yaml").write_text(text[:start] + text[end:])
    with pytest.raises(ValueError, match=r"is unknown here|allow_outside_code=true"):
        read_settings(folder)


@pytest.mark.parametrize("name", ["outside", "metrics", "callbacks"])
def test_a_recorded_list_in_place_of_a_mapping_is_refused_in_a_line(run, name):
    content = yaml.safe_load((run / "settings.yaml").read_text())
    (run / "settings.yaml").write_text(yaml.safe_dump(content | {name: [1]}))
    with refuses(name, "[1]", "must be a mapping"):
        read_settings(run)


def test_a_built_in_objective_is_no_outside_code():
    s = settings("objective=grpo")
    assert type(s.objective) is GRPO and s.outside == {}
