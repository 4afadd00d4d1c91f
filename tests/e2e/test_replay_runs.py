"""`gspo replay` on the directory of a real run: its own objective, others, with the model, and files
that cannot be replayed.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from commands import SMALL, only_run, train
from gspo.cli import main
from gspo.data.step_record_files import (
    METADATA_KEY,
    read_record,
    record_file,
    recorded_steps,
    write_record,
)
from gspo.io.nested import finite_or_none, mapped
from gspo.tracking.tracker import read_rows

pytestmark = pytest.mark.slow
# rewards of a model that is so small are all 0, so KL and entropy give the gradient
GRADIENT = ["kl=loss", "kl.coef=0.1", "trainer.entropy_coef=0.05", "trainer.entropy_target=2"]
RECORDING = ["tracking.record_every=4", "tracking.record_last=3", "tracking.wandb=disabled"]
MINE = """
from dataclasses import dataclass
from gspo.algorithm.objectives import GRPO

@dataclass
class Mine(GRPO):
    name: str = "mine"
    clip_low: float = 0.5
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    done = train(folder, *SMALL, *GRADIENT, *RECORDING, "steps=9", "checkpoint.keep=0")
    assert done.returncode == 0, done.stderr[-3000:]
    return only_run(folder)


@pytest.fixture
def replay(monkeypatch, capsys):
    """Call `gspo replay` in this process: its exit code, output and errors."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gspo", "replay", *map(str, words)])
        code = 0
        try:
            main.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def test_due_and_last_steps_are_there(run):
    assert recorded_steps(run) == [4, 7, 8, 9]
    rows = read_rows(run / "metrics.jsonl")
    assert all("time/record_s" in row for row in rows[1:])


def test_the_runs_own_objective_gives_its_metrics(run, replay):
    for step in (4, 9):
        code, text, errors = replay(run, f"step={step}")
        assert code == 0 and not errors
        assert f"step {step} of {run}, 16 responses" in text
        assert "the replay from the record alone equals the run in all " in text
        assert int(text.split("equals the run in all ")[1].split()[0]) > 60


def test_the_last_record_is_replayed_without_a_step(run, replay):
    assert "step 9 of" in replay(run)[1]


def test_with_the_model_the_gradient_norm_is_the_runs(run, replay):
    code, text, _ = replay(run, "step=8", "objective=cispo", "model=true")
    assert code == 0
    (line,) = [line for line in text.splitlines() if line.startswith("optim/grad_norm ")]
    mine, _, recorded = map(float, line.split()[1:])
    assert recorded > 0 and mine == pytest.approx(recorded, rel=1e-3)
    assert "cosine between the parameter gradients of the first update: " in text


def test_steps_after_a_checkpoint_are_replayed_on_the_way(run, replay, tmp_path):
    copied = tmp_path / run.name
    shutil.copytree(run, copied)
    shutil.rmtree(copied / "checkpoints" / "step_000008")
    code, text, _ = replay(copied, "step=9", "model=true")
    assert code == 0
    (line,) = [line for line in text.splitlines() if line.startswith("optim/grad_norm ")]
    mine, recorded = map(float, line.split()[1:])
    assert mine == pytest.approx(recorded, rel=1e-2)
    record_file(copied, 7).unlink()
    code, text, errors = replay(copied, "step=9", "model=true")
    assert code == 2 and "step 7 has neither" in errors and errors.count("\n") == 1
    assert text == "", "it is refused before the table"


LOWER = """
from dataclasses import dataclass
from gspo.train.extensions import Callback

@dataclass
class Lower(Callback):
    def before_step(self, step, trainer):
        trainer.optim.lr = 1e-6
"""


def test_a_learning_rate_that_a_callback_set_is_replayed(replay, tmp_path, monkeypatch):
    (tmp_path / "lower.py").write_text(LOWER)
    options = ["optim.lr=1e-2", "optim.warmup_updates=0", "callbacks.lower=lower:Lower"]
    options += ["tracking.record_every=1", "tracking.wandb=disabled", "steps=3"]
    done = train(tmp_path, *SMALL, *GRADIENT, *options, "checkpoint.every=10")
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    code, text, errors = replay(only_run(tmp_path), "step=3", "model=true")
    assert code == 0, errors
    (line,) = [line for line in text.splitlines() if line.startswith("optim/grad_norm ")]
    mine, recorded = map(float, line.split()[1:])
    assert mine == pytest.approx(recorded, rel=1e-3)


def test_old_log_probs_of_older_weights_are_replayed_without_experts_too(replay, tmp_path):
    options = ["model=tiny_moe", "policy.old_logprobs=behaviour", "rollout.staleness=1"]
    options += ["tracking.record_experts=false", "tracking.record_every=1", "steps=3"]
    done = train(tmp_path, *SMALL, *GRADIENT, "optim.lr=3e-3", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    run = only_run(tmp_path)
    code, text, _ = replay(run, "step=3", "model=true")
    assert code == 0
    # the last two depend on the old policy
    for name in ("optim/grad_norm", "ratio/token_max", "kl/ref_k3"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        mine, recorded = map(float, line.split()[1:])
        assert mine == pytest.approx(recorded, rel=1e-4)
    # Routing Replay needs the experts
    settings = run / "settings.yaml"
    for kind in ("r2", "r3"):
        text = settings.read_text().replace("routing_replay: none", f"routing_replay: {kind}")
        settings.write_text(text)
        code, _, errors = replay(run, "step=3", "model=true")
        assert code == 2 and errors.count("\n") == 1
        assert f"with policy.routing_replay={kind} the tokens go through recorded experts" in errors
        settings.write_text(text.replace(f"routing_replay: {kind}", "routing_replay: none"))


def test_tokens_that_the_model_does_not_have_are_refused(run, replay, tmp_path):
    copied = tmp_path / run.name
    shutil.copytree(run, copied)
    path = record_file(copied, 9)
    record = read_record(path)
    record.token_ids[3] = 10**6
    write_record(path, record)
    code, _, errors = replay(copied, "step=9", "model=true")
    assert code == 2 and "has the token ID 1000000" in errors and errors.count("\n") == 1


def test_a_changed_entropy_bonus_acts_also_with_the_model(run, replay):
    code, text, _ = replay(run, "step=9", "trainer.entropy_coef=0.5", "model=true")
    assert code == 0
    (line,) = [line for line in text.splitlines() if line.startswith("policy/entropy_coef ")]
    mine, other, recorded = map(float, line.split()[1:])
    assert mine == pytest.approx(recorded) and other > mine


def test_numbers_that_are_not_finite_are_null_in_json():
    assert mapped({"a": [1, float("nan"), {"b": float("inf")}]}, finite_or_none) == {
        "a": [1, None, {"b": None}]
    }


def test_one_can_bring_ones_own_loss(run, replay, tmp_path, monkeypatch):
    (tmp_path / "replayed_losses.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    code, text, _ = replay(
        run, "step=9", "objective=replayed_losses:Mine", f"out={tmp_path}/out.json"
    )
    assert code == 0 and "objective=replayed_losses:Mine" in text
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert set(numbers["replays"]) == {"gspo (recorded)", "objective=replayed_losses:Mine"}
    assert sum(numbers["replays"]["gspo (recorded)"]["response_share"]) == pytest.approx(1)


def test_a_preset_says_what_it_cannot_change(run, replay):
    code, text, _ = replay(run, "step=9", "preset=minirl")
    assert code == 0 and "seq-mean-token-sum" in text
    assert "the preset also sets rollout.prompts_per_step, " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step=5"], "no record of step 5; the nearest recorded steps are 4, 7, 8, 9"),
        (["trainer.minibatches=8"], "trainer.minibatches=8: a record holds the responses"),
        (["objectve=grpo"], "objectve=grpo: there is no such option; the nearest is objective="),
        (["advantage=gae", "objective=ppo"], "advantage=gae: needs the values of a critic"),
        (["objective.clip_low=2"], "objective.clip_low=2"),
        (["preset=none_such"], "preset=none_such: there is no such preset"),
        (["objective=none_such"], "none_such"),
        (["step=-2"], "step=-2: must be a whole number of at least -1"),
        (["page=maybe"], "page=maybe: choose true or false"),
        (["model=yes"], "model=yes: only a dump of texts is scored with a model; set model=true"),
        (["old_model=x", "model=true"], "old_model=x: only a dump of texts is scored"),
        (["policy.old_logprobs=behaviour"], "of policy.old_logprobs=step_start"),
        (["more"], "name one run directory or one record"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(words, message, run, replay):
    code, _, errors = replay(run, *words)
    assert code == 2 and message in errors and errors.count("\n") == 1


def test_the_pages_of_a_step(run, replay, tmp_path, monkeypatch):
    assert replay(run, "step=9", "page=true")[1].endswith(f"{run}/steps/step_000009.html\n")
    _, text, _ = replay(run, "step=9", "objective=grpo", "page=true")
    page = run / "steps" / "step_000009-objective_grpo.html"
    assert text.endswith(f"{page}\n")
    assert "gspo (recorded) and objective=grpo" in page.read_text()
    assert recorded_steps(run) == [4, 7, 8, 9]
    # the run's own page has links to the pages of its last records
    assert "steps/step_000009.html" in (run / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    assert replay(record_file(run, 8), "page=true")[1].endswith("\nstep_000008-step_000008.html\n")


def test_a_record_by_itself(run, replay, tmp_path):
    path = tmp_path / "step.safetensors"
    shutil.copy(record_file(run, 9), path)
    code, text, _ = replay(path, "objective=grpo")
    assert code == 0 and "the replay from the record alone equals the run in all " in text
    assert "name its run" in replay(path, "model=true")[2]
    assert "is the record of a single step" in replay(path, "step=9")[2]
    header = json.loads(json.dumps(vars(read_record(path).header)))
    for group, content, message in (
        ("objective", {"name": "new"}, "objective.name=new: is unknown here"),
        ("objective", {"name": "x", "class_path": "evil:Loss"}, "allow_outside_code=true"),
        ("metrics", {"gap": "evil:Metric"}, "the record has settings besides objective, "),
        ("objective", "gspo", "must be a mapping"),
        ("objective", {"name": "gspo", "clip_low": "${oc.env:HOME}"}, "settings are unknown"),
        ("kl", {"name": "loss", "coef": 1, "more": 2}, "more"),
    ):
        changed = header | {"settings": header["settings"] | {group: content}}
        save_file(load_file(path), tmp_path / "x.safetensors", {METADATA_KEY: json.dumps(changed)})
        code, _, errors = replay(tmp_path / "x.safetensors")
        assert code == 2 and message in errors and "Traceback" not in errors
    path.write_bytes(path.read_bytes()[:-10])
    code, _, errors = replay(path)
    assert code == 2 and "is no record of a step" in errors and errors.count("\n") == 1


def test_a_resumed_run_records_again(run, tmp_path):
    folder = tmp_path / "again"
    done = train(folder.parent, *SMALL, *GRADIENT, *RECORDING, "steps=4")
    assert done.returncode == 0, done.stderr[-3000:]
    again = only_run(folder.parent)
    record_file(again, 4).rename(record_file(again, 6))  # of a step that no row has
    done = train(folder.parent, f"resume={again}", "steps=5")
    assert done.returncode == 0, done.stderr[-3000:]
    assert recorded_steps(again) == [2, 3, 5] or recorded_steps(again) == [3, 5]
    assert list((again / "superseded").glob("*/steps_step_000006.safetensors"))
