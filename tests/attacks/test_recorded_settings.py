"""A stranger's settings.yaml is data: nothing in it is resolved, consents, or says where one's own
runs are shown.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import forked
from commands import SMALL, environment, only_run, train
from composing import settings
from gspo.config.load import read_settings, resumed_settings, write_settings
from gspo.config.settings import same_result, settings_hash
from gspo.io import ownership
from gspo.run.entry_point import explain
from refusals import refuses
from wandb_server import serving

SECRET = "token-that-nobody-may-see"
FEW = [
    "steps=1",
    "cold_start.steps=0",
    "evaluation.problems=2",
    "evaluation.every=1",
    "checkpoint.every=1",
]
TEXTS = [
    "${oc.env:SECRET_OF_THIS_TEST}", "${seed}", "${b}", "\\${b}", "\\\\${b}", "${seen:1}", "a ${oc.env:X} b", "${", "$",
    "${oc.decode:'${seed}'}", "${a:\n", "{}", "\\",
]  # fmt: skip


def rewritten(folder: Path, **changes: object) -> None:
    """settings.yaml with other values, by dotted key: what anybody can do to a directory that is
    handed on.
    """
    path = folder / "settings.yaml"
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *groups, last = key.split("__")
        block = content
        for group in groups:
            block = block[group]
        block[last] = value
    path.write_text(yaml.safe_dump(content))


@pytest.fixture
def resolved(monkeypatch):
    """What OmegaConf resolved since."""
    asked = []
    OmegaConf.register_new_resolver(
        "seen", lambda *words: asked.append(words) or "seen", replace=True
    )
    monkeypatch.setenv("SECRET_OF_THIS_TEST", SECRET)
    yield asked
    OmegaConf.clear_resolver("seen")


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_what_looks_like_an_interpolation_survives_unchanged(text, tmp_path, resolved):
    run = settings("task=reasoning_gym", "task.dataset=chain_sum", "tracking.wandb=offline")
    write_settings(run, tmp_path)
    deep = {f"${{seen:key}}{text}": {"inner": [text, {"x": text}]}, "plain": text}
    rewritten(
        tmp_path,
        study=f"s{text}",
        tracking__tags=[text, "plain"],
        task__config=deep,
        options={"arm": text},
    )
    read = read_settings(tmp_path)
    resumed = resumed_settings(tmp_path, ["steps=7", f"resume={tmp_path}"])
    assert same_result(read, resumed) is None and settings_hash(read) == settings_hash(resumed)
    for found in (read, resumed):
        assert (found.study, found.tracking.tags, found.task.config) == (
            f"s{text}",
            [text, "plain"],
            deep,
        )
        assert found.options == {"arm": text}
    write_settings(resumed, tmp_path)
    assert asdict(read_settings(tmp_path)) == asdict(resumed) and resumed.steps == 7
    assert resolved == [] and SECRET not in (tmp_path / "settings.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": "${oc.env:SECRET_OF_THIS_TEST}"}, {"seed": "???"}, {"study": "???"}, {"tracking__tags": ["???"]},
        {"objective": "${oc.env:SECRET_OF_THIS_TEST}"}, {"objective__name": ["gspo"]}, {"task": None},
        {"objective": {"name": "${oc.env:SECRET_OF_THIS_TEST}"}}, {"task": {"name": {}}},
    ],
)  # fmt: skip
def test_where_no_text_can_stand_it_is_refused_unresolved(changes, tmp_path, resolved):
    write_settings(settings(), tmp_path)
    rewritten(tmp_path, **changes)
    for read in (read_settings, lambda folder: resumed_settings(folder, ["steps=7"])):
        with pytest.raises(ValueError) as refused:
            read(tmp_path)
        assert SECRET not in explain(refused.value)


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "text", "a: [", "\x00", "- &a [*a]", "&a {objective: *a}", "{" * 5000]
)
def test_a_file_that_holds_no_settings_is_refused_in_a_line(text, tmp_path):
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(ValueError) as refused:
        read_settings(tmp_path)
    assert "\n" not in explain(refused.value)


@pytest.mark.parametrize(
    "changes", [{"tags": [""]}, {"tags": ["x" * 65]}, {"project": "a/b"}, {"project": "x" * 129}]
)
def test_what_wandb_would_refuse_once_the_run_has_begun_is_refused_before(changes, tmp_path):
    write_settings(settings(), tmp_path)
    rewritten(tmp_path, **{f"tracking__{key}": value for key, value in changes.items()})
    ((key, value),) = changes.items()
    with refuses(f"tracking.{key}", value, "W&B takes"):
        read_settings(tmp_path)


def test_this_command_line_may_still_refer_to_settings(tmp_path):
    write_settings(settings("study=mine"), tmp_path)
    assert (
        resumed_settings(tmp_path, ["tracking.project=${study}-${seed}"]).tracking.project
        == "mine-1"
    )


# -------------------------------------------------------------------------------------------------------
# whose run
PLACE = {"tracking__wandb": "online", "tracking__entity": "stranger", "tracking__project": "theirs"}


def place(found) -> tuple[str, str, str]:
    return found.tracking.wandb, found.tracking.entity, found.tracking.project


def test_ones_own_run_keeps_its_place_also_after_a_move_and_a_kill(tmp_path):
    folder = tmp_path / "study" / "gspo-seed1-abc"
    folder.mkdir(parents=True)
    given = [
        "tracking.wandb=online",
        "tracking.entity=mine",
        "tracking.project=own",
        "runs=elsewhere",
    ]
    write_settings(settings(*given), folder)
    before = (folder / "settings.yaml").read_text()
    write_settings(settings(*given, "steps=7"), folder)
    (folder / "settings.yaml").write_text(before)  # killed between the signature and the file
    moved = tmp_path / "archive" / folder.name
    moved.parent.mkdir()
    shutil.move(folder, moved)
    for found in (resumed_settings(moved, []), resumed_settings(moved, ["tracking.tags=[x]"])):
        assert place(found) == ("online", "mine", "own") and found.runs == "elsewhere"


def forged(folder: Path, how: str) -> None:
    """What somebody who can write every file of the directory may try."""
    signatures = json.loads((folder / "signed.json").read_text())
    rewritten(folder, **PLACE, runs="/somewhere")
    if how == "no signature":
        (folder / "signed.json").unlink()
    elif how == "own key":
        mark = ownership._signature(
            b"", folder / "settings.yaml", (folder / "settings.yaml").read_bytes()
        )
        (folder / "signed.json").write_text(
            json.dumps({"settings.yaml": [mark, *signatures["settings.yaml"]]})
        )
    elif how != "edited":
        (folder / "signed.json").write_text(how)


FORGERIES = [
    "edited",
    "no signature",
    "own key",
    "{",
    "[" * 100_000,
    "[]",
    '{"settings.yaml": null}',
    '{"settings.yaml": [null]}',
]


@pytest.mark.slow
@pytest.mark.parametrize("how", FORGERIES)
def test_of_a_run_that_is_not_ones_own_no_place_is_taken_over(how, tmp_path):
    write_settings(settings(), tmp_path)
    forged(tmp_path, how)
    found = resumed_settings(tmp_path, [])
    assert place(found) == ("offline", "", "") and found.runs == "runs"
    given = resumed_settings(tmp_path, ["tracking.wandb=online", "tracking.project=chosen"])
    assert place(given) == ("online", "", "chosen")


def test_a_signature_counts_for_its_own_directory_and_file_alone(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ownership.write_signed(tmp_path / name / "wandb_id", name)
    shutil.copy(tmp_path / "one" / "wandb_id", tmp_path / "two" / "wandb_id")
    shutil.copy(tmp_path / "one" / "signed.json", tmp_path / "two" / "signed.json")
    assert not ownership.is_own_file(tmp_path / "two" / "wandb_id") and ownership.is_own_file(
        tmp_path / "one" / "wandb_id"
    )
    shutil.copy(tmp_path / "one" / "wandb_id", tmp_path / "one" / "wandb_online")
    assert not ownership.is_own_file(tmp_path / "one" / "wandb_online")


@pytest.mark.parametrize("home", [None, "/dev/null/home", "/nonexistent"])
def test_without_a_home_directory_nothing_is_ones_own_and_nothing_crashes(
    home, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", home) if home else monkeypatch.setattr(Path, "home", no_home)
    write_settings(settings("tracking.wandb=online"), tmp_path)
    assert (
        not ownership.is_own_file(tmp_path / "settings.yaml")
        and not (tmp_path / "signed.json").exists()
    )
    assert (
        resumed_settings(tmp_path, []).tracking.wandb == "offline"
        and not Path("/nonexistent").exists()
    )


def no_home():
    # as Path.home() of a user whom the system does not know
    raise RuntimeError("Could not determine home directory.")


KEY = "import sys; from gspo.io.ownership import _key; print(_key().hex())"


def test_processes_that_start_at_a_time_have_one_key(tmp_path):
    where = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", KEY], env=where, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    assert len({process.communicate(timeout=60)[0] for process in started}) == 1
    assert (tmp_path / "gspo" / "key").stat().st_mode & 0o077 == 0 and len(
        list((tmp_path / "gspo").iterdir())
    ) == 1


# ------------------------------------------------------------------------------------------------------
# whole runs
@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    done = train(folder, *SMALL, *FEW, "tracking.wandb=offline")
    assert done.returncode == 0, done.stderr[-3000:]
    return only_run(folder)


def contents(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


@pytest.mark.slow
def test_a_token_does_not_leave_by_a_strangers_run(made, tmp_path):
    run = tmp_path / made.name
    shutil.copytree(made, run)
    asked = "${oc.env:HF_TOKEN}"
    rewritten(run, **PLACE, tracking__tags=[asked])
    (run / "wandb_online").write_text("stranger/theirs/abc")
    with serving() as server:
        account = server.environment | {"HF_TOKEN": SECRET}
        done = train(tmp_path, f"resume={run}", "steps=2", account=account)
        assert done.returncode == 0, done.stderr[-3000:]
        assert server.runs == {}, "online, because the file said so"
    said = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("warning: ") and "this user" in line
    ]
    assert len(said) == 2 and "so wandb=offline" in said[0] and "wandb_online" in said[1]
    assert SECRET.encode() not in contents(run) and SECRET not in done.stdout + done.stderr
    assert yaml.safe_load((run / "settings.yaml").read_text())["tracking"]["tags"] == [asked]
    assert asked.encode() in b"".join(
        file.read_bytes() for file in run.glob("wandb/offline-run-*/*.wandb")
    )


@pytest.mark.slow
def test_ones_own_run_is_resumed_without_a_word(made, tmp_path):
    run = tmp_path / made.name
    shutil.copytree(made, run)
    done = train(tmp_path, f"resume={run}", "steps=2")
    assert done.returncode == 0 and "this user" not in done.stderr, done.stderr[-3000:]
    assert (run / "wandb_id").read_text() == (made / "wandb_id").read_text()
    assert yaml.safe_load((run / "settings.yaml").read_text())["tracking"]["wandb"] == "offline"


@pytest.mark.slow
def test_a_strangers_run_goes_where_this_command_line_says(made, tmp_path):
    run = tmp_path / made.name
    shutil.copytree(made, run)
    rewritten(run, **PLACE)
    (run / "wandb_id").write_text("a-run-of-mine")
    with serving() as server:
        given = ["tracking.wandb=online", "tracking.project=chosen"]
        done = train(tmp_path, f"resume={run}", "steps=2", *given, account=server.environment)
        assert done.returncode == 0, done.stderr[-3000:]
        (saved,) = server.runs.values()
        assert saved.name != "a-run-of-mine" and saved.about["project"] == "chosen"
        assert saved.about.get("entity") in (None, "", "team")


# ------------------------------------------------------------------------------------------------ a
# weak sandbox
WEAK = """
import ctypes, runpy, struct, sys  # the kernel offers no landlock: its first call fails with ENOSYS, as in old kernels
number = 444
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *f) for f in filters))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(filters), ctypes.cast(code, ctypes.c_void_p))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
sys.argv[0] = "gspo"
sys.path.pop(0)  # the current folder, as with python -P
runpy.run_module("gspo", run_name="__main__")
"""


def unconfined(script: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    """An entry point on a machine that cannot confine programs."""
    command = [sys.executable, "-c", WEAK, script, *words]
    variables = environment() | {"PATH": "/nonexistent"}  # no bubblewrap either, and no git
    return forked.run(command, cwd=cwd, env=variables, seconds=300)


@pytest.fixture(scope="module")
def consented(tmp_path_factory) -> Path:
    """A run of programs that was made with consent, and is handed on."""
    folder = tmp_path_factory.mktemp("consented")
    words = [*SMALL, *FEW, "tracking.wandb=disabled", "task=code", "task.allow_weak_sandbox=true"]
    done = unconfined("train", *words, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    run = only_run(folder)
    assert yaml.safe_load((run / "settings.yaml").read_text())["task"]["allow_weak_sandbox"] is True
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "key"), [("code", "task"), ("mixed", "task.code"), ("humaneval", "task")]
)
def test_consent_is_not_read_from_a_directory(task, key, tmp_path):
    write_settings(settings(f"task={task}", f"{key}.allow_weak_sandbox=true"), tmp_path)
    given = resumed_settings(tmp_path, [f"++{key}.allow_weak_sandbox=true"])
    for found, consent in ((read_settings(tmp_path), False), (resumed_settings(tmp_path, ["steps=7"]), False),
                           (given, True), (read_settings(tmp_path, consent=True), True)):  # fmt: skip
        coder = getattr(found.task, "code", found.task)
        assert (
            coder.allow_weak_sandbox is consent
            and coder._grader._runner.allow_weak_sandbox is consent
        )
    assert (
        settings_hash(given) == settings_hash(read_settings(tmp_path))
        and same_result(given, found) is None
    )


def test_consent_is_no_part_of_the_name_of_a_run():
    assert settings_hash(settings("task=code")) == settings_hash(
        settings("task=code", "task.allow_weak_sandbox=true")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "consent"),
    [
        ("train", ["resume={run}", "steps=2"], "++task.allow_weak_sandbox=true"),
        ("evaluate", ["run={run}", "problems=1", "k=1"], "allow_weak_sandbox=true"),
        ("sample", ["run={run}", "problems=1", "samples=1"], "allow_weak_sandbox=true"),
    ],
)
def test_only_this_command_line_consents_to_a_weak_sandbox(
    consented, tmp_path, script, words, consent
):
    run = tmp_path / consented.name
    shutil.copytree(consented, run)
    words = [word.format(run=run) for word in words]
    refused = unconfined(script, *words, cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1
    assert "landlock" in refused.stderr and "only the command line can allow" in refused.stderr
    done = unconfined(script, *words, consent, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["wandb_id", ownership.SIGNATURES])
def test_signatures_and_what_is_signed_are_read_within_bounds(tmp_path, name):
    ownership.write_signed(tmp_path / "wandb_id", "abc")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    assert not ownership.is_own_file(tmp_path / "wandb_id")
