"""`gspo evaluate` and `gspo sample` on a stranger's run: one line that names the file, exit code 2; no wait
without end.
"""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import forked
from gspo.io.escaping import UNSAFE_CHARACTERS
from gspo.rollout.sources.pending import load_pending
from gspo.run.directory import has_reached, settings_and_checkpoint
from gspo.run.rollback import Rollbacks
from gspo.run.sweep_state import jobs, table
from gspo.train.checkpoint import load_optimizer
from gspo.train.checkpoint_files import damage, latest_checkpoint, read_state, seal
from spoiled_runs import DEEP, ESCAPE, NUMBER_400, ROOT, UNREADABLE, endless, pipe, text, tiny_run

STEP = "checkpoints/step_000004"
OF_SETTINGS = [name for name in UNREADABLE if "rows" not in name and "metrics" not in name]


def listed(name: str):
    """A file that the checksums name, put there by a stranger."""

    def spoil(run: Path) -> None:
        file = run / STEP / "checksums.json"
        file.write_text(json.dumps({name: "0" * 64} | json.loads(file.read_text())))

    return spoil


def sealed_again(spoil):
    """A file that a stranger spoiled before computing the checksums anew: nothing but its content
    betrays it.
    """

    def spoiled(run: Path) -> None:
        (run / STEP / "checksums.json").unlink()
        spoil(run)
        seal(run / STEP)

    return spoiled


CHECKPOINTS = {
    "checksums name a device": listed("/dev/zero"),
    "checksums name what lies outside": listed("../../../../../etc/passwd"),
    "checksums name nothing": listed("a\0b"),
    "checksums are deep": text(f"{STEP}/checksums.json", DEEP),
    "checksums are a list": text(f"{STEP}/checksums.json", "[1]"),
    "checksums are a pipe": pipe(f"{STEP}/checksums.json"),
    "weights are a pipe": pipe(f"{STEP}/model.safetensors"),
    "weights never end": endless(f"{STEP}/model.safetensors"),
    "the pointer never ends": endless("checkpoints/latest"),
    "state is a list": sealed_again(text(f"{STEP}/state.json", "[1]")),
    "state is of 400 digits": sealed_again(text(f"{STEP}/state.json", f'{{"step": {NUMBER_400}}}')),
    "state is deep": sealed_again(text(f"{STEP}/state.json", DEEP)),
    "state says words": sealed_again(
        text(f"{STEP}/state.json", json.dumps({"step": ESCAPE, "settings": 1}))
    ),
    "the model's configuration is deep": sealed_again(text(f"{STEP}/config.json", DEEP)),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("real"))


def copied(real: Path, folder: Path, spoil) -> Path:
    run = folder / real.name
    shutil.copytree(real, run)
    # which one would go back to
    shutil.rmtree(run / "checkpoints" / "step_000002", ignore_errors=True)
    spoil(run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_SETTINGS, *CHECKPOINTS])
def test_what_is_recorded_is_refused_in_one_line(real, tmp_path, name):
    run = copied(real, tmp_path, (UNREADABLE | CHECKPOINTS)[name])
    started = time.process_time()
    with pytest.raises(ValueError, match=re.escape(run.name)):
        settings, checkpoint = settings_and_checkpoint(str(run), -1, consent=False, trust=False)
        if "state" in name:
            has_reached(checkpoint, settings.steps)
    assert time.process_time() - started < 5


@pytest.mark.slow
def test_odd_states_are_no_states(real, tmp_path):
    run = copied(real, tmp_path, CHECKPOINTS["state says words"])
    with pytest.raises(ValueError, match=r"state\.json is damaged: step="):
        load_optimizer(run / STEP, None, None)


@pytest.mark.parametrize("step", [10**12, -1])
def test_a_step_that_no_run_reaches_is_refused_before_anything_is_counted_up_to_it(tmp_path, step):
    state = {"step": step, "settings": "0123456789", "rewards": {}}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=rf"state\.json is damaged: step={step}"):
        read_state(tmp_path)
    (tmp_path / "rollbacks.json").write_text(json.dumps([{"from": 5, "to": step, "moved": False}]))
    with pytest.raises(ValueError, match=r"rollbacks\.json is damaged"):
        Rollbacks(tmp_path)


def test_held_responses_that_are_compressed_are_not_unpacked(tmp_path):
    (tmp_path / "held.json").write_text('{"rollouts": {}, "groups": []}')
    np.savez_compressed(tmp_path / "held.npz", logprobs=np.zeros(10_000_000))
    with pytest.raises(ValueError, match=r"held\.npz is compressed"):
        load_pending(tmp_path, lambda _: None)


def test_a_name_of_megabytes_in_a_manifest_is_no_job(tmp_path):
    names = ["x" * 3_000_000, *(f"gspo-seed{i}" for i in range(300))]
    lines = [json.dumps({"jobs": [{"run": name, "steps": 4, "overrides": []}]}) for name in names]
    (tmp_path / "manifest.jsonl").write_text("\n".join(lines))
    assert len(table(jobs(tmp_path))) < 1_000_000


@pytest.mark.slow
def test_a_whole_checkpoint_is_whole(real, tmp_path):
    run = copied(real, tmp_path, lambda _: None)
    assert damage(run / STEP) is None and latest_checkpoint(run) == run / STEP
    (run / STEP / "tokenizer.json").unlink()
    assert damage(run / STEP) == "tokenizer.json is missing"
    (run / STEP / "checksums.json").unlink()
    assert damage(run / STEP) == "checksums.json is missing"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["evaluate", "sample"])
def test_in_a_process(real, tmp_path, script):
    """One spoiled file of each kind; the message itself does nothing on a terminal."""
    for name in ("alias bomb", "checksums name a device", "state says words"):
        if script == "sample" and "state" in name:
            continue  # it does not ask for the step
        run = copied(real, tmp_path / name, (UNREADABLE | CHECKPOINTS)[name])
        there = os.environ | {"PYTHONPATH": str(ROOT)}
        program = [
            sys.executable,
            "-P",
            "-m",
            "gspo",
            script,
            f"run={run.name}",
            "problems=1",
        ]
        done = forked.run(program, cwd=run.parent, env=there)
        said = done.stderr.splitlines()
        assert (
            done.returncode == 2
            and said[-1].startswith("error: ")
            and "Traceback" not in done.stderr
        ), done.stderr
        assert run.name in said[-1] and "\x1b" not in done.stderr and "\u202e" not in done.stderr


@pytest.mark.slow
def test_a_row_that_is_sampled_is_printed_as_text(real, tmp_path):
    """The issue's own attack: a row of data set the clipboard and the title, and cleared the
    screen.
    """
    rows = tmp_path / "test.jsonl"
    subject = f"{ESCAPE}\x1b]52;c;ZXZpbA==\x07"
    rows.write_text(
        json.dumps({"problem": "1+1=?", "answer": "2", "subject": subject, "level": 1}) + "\n"
    )
    run = copied(real, tmp_path, lambda _: None)
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    settings["task"], settings["cold_start"]["steps"] = {"name": "math500", "path": str(rows)}, 0
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    program = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "sample",
        f"run={run}",
        "set=math500",
        "problems=1",
    ]
    there = os.environ | {"PYTHONPATH": str(ROOT)}
    done = forked.run(program, env=there)
    assert done.returncode == 0, done.stderr
    assert not UNSAFE_CHARACTERS.search(done.stdout) and r"\x1b]52;c;ZXZpbA==\x07" in done.stdout
