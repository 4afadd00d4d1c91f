"""`gspo evaluate`: how its command line is composed and refused, and a real SIGKILL in the middle."""

import json
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import ANY

import pytest
from hydra import compose, initialize_config_dir

import forked
from commands import SMALL, only_run, train
from gspo.cli import evaluate, evaluation_job
from gspo.config.commands import EvaluateCommand, PromptChanges
from gspo.config.load import register_schemas
from gspo.config.settings import CHOICES
from gspo.evaluation.evaluate import EvaluationSet
from gspo.model.chat.prompts import PromptFormat
from gspo.model.loading import save
from gspo.model.settings import TinyDense
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.settings import ENGINE_FIELDS, RolloutSettings
from gspo.rollout.vllm_settings import VLLMRollout, VLLMServerRollout
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.tasks.testbed.function_writing import FunctionWriting
from refusals import refuses

ROOT = Path(__file__).parents[2]
EVALUATE = ["-P", "-m", "gspo", "evaluate"]
MBPP = json.dumps({
    "task_id": 11, "text": "Add one.", "code": "def f(x):\n    return x + 1",
    "test_list": ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4"],
})  # fmt: skip


def command(*arguments: str) -> EvaluateCommand:
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return evaluate.command_of(compose("evaluate", evaluate.with_benchmarks(list(arguments))))


def test_benchmarks_are_option_files_with_their_own_settings():
    got = command(
        "model=tiny_dense", "benchmark=[math,code]", "tasks.math.largest=7", "tasks.code.slots=2"
    )
    assert got.benchmark == ["math", "code"]
    assert got.tasks == {"math": ChainArithmetic(largest=7), "code": FunctionWriting(slots=2)}
    assert got.model == TinyDense() and (got.k, got.temperature, got.problems) == (4, 1.0, 0)
    for spelling in ("benchmark=math", "benchmark=math,code", "benchmark=[]"):
        names = (
            spelling.removeprefix("benchmark=").strip("[]").split(",") if "math" in spelling else []
        )
        assert list(command("run=x", spelling).tasks) == names


def test_what_is_given_of_the_prompt_changes_that_alone():
    names = [field.name for field in fields(PromptFormat)]
    assert [field.name for field in fields(PromptChanges)] == names
    of_run = PromptFormat(system="Be brief.", thinking=True)
    assert command("run=x").prompt.applied_to(of_run) == of_run
    changed = command("run=x", "prompt.date=2025-01-01", "prompt.thinking=false").prompt
    assert changed.applied_to(of_run) == PromptFormat(
        system="Be brief.", thinking=False, date="2025-01-01"
    )
    assert command("run=x", "prompt.system=''").prompt.applied_to(of_run).system == ""
    with refuses("prompt.format", "plane"):
        command("run=x", "prompt.format=plane").prompt.applied_to(of_run)


def test_consent_to_a_weak_sandbox_reaches_every_benchmark():
    words = ["model=tiny_dense", "benchmark=[code,mixed]"]
    tasks = command(*words, "allow_weak_sandbox=true").tasks
    assert tasks["code"].allow_weak_sandbox and tasks["mixed"].code.allow_weak_sandbox
    tasks = command(*words).tasks
    assert not tasks["code"].allow_weak_sandbox and not tasks["mixed"].code.allow_weak_sandbox


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (
            ["model=tiny_dense", "benchmark=math", "step=40"],
            ("step", 40, "is read of a run, and this is a model"),
        ),
        (
            ["model=tiny_dense", "benchmark=math", "addresses=[http://x]"],
            ("addresses", ["http://x"], "is read of a run"),
        ),
        ([], ("run", ANY, "name a run directory, such as runs/STUDY/RUN, or model=hf")),
        (["run=x", "model=hf"], ("run", "x", "a model is given too")),
        (["model=hf"], ("benchmark", [], "benchmark=[...]")),
        (["run=x", "temperature=0"], ("k", 4, "with temperature=0")),
        (["run=x", "k=0"], ("k", 0)),
        (["run=x", "temperature=-1"], ("temperature", -1.0)),
        (["run=x", "problems=-1"], ("problems", -1)),
        (
            ["run=x", "benchmark=nope"],
            ("benchmark", "nope", "there is no such benchmark; there"),
        ),
        (["run=x", "benchmark=math", "data=x"], ("data", "x", "is read by none of")),
        (
            ["run=x", "rollout=vllm", "rollout.group_size=4"],
            ("rollout.group_size", 4, "is read in training alone; set k="),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.prompts_per_step=4"],
            ("rollout.prompts_per_step", 4, "is read in training alone; set"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.max_new_tokens=9"],
            ("rollout.max_new_tokens", 9, "is read in training alone; set"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.temperature=0.5"],
            ("rollout.temperature", 0.5, "is read in training alone; set"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.staleness=1"],
            ("rollout.staleness", 1, "is read in training alone; leave"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.sleep=true"],
            ("rollout.sleep", True, "is read in training alone; set rollout.sleep=false"),
        ),
        (
            ["run=x", "rollout=local", "rollout.cuda_graphs=false", "rollout.staleness=1"],
            ("rollout.staleness", 1, "is read in training alone; leave"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.extend={5: 90}"],
            ("rollout.extend", {5: 90}, "is read in training alone; leave"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.routes=true"],
            ("rollout.routes", True, "is read in training alone; set rollout.routes=false"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.name=local"],
            ("rollout.name", "local", "cannot be changed"),
        ),
        (
            ["run=x", "rollout=vllm", "rollout.kv_cache_gib=0"],
            ("rollout.kv_cache_gib", 0.0),
        ),
        (
            ["run=x", "rollout=vllm", "batch_rows=8"],
            ("batch_rows", 8, "set rollout.batch_rows="),
        ),
    ],
)
def test_refusals(arguments, refusal):
    with refuses(*refusal):
        command(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["benchmark=math", "tasks.math.larg=7"], r"Could not override 'tasks\.math\.larg'"),
        (["rollout=nope"], "rollout/nope"),
    ],
)
def test_hydra_refuses_unknown_keys_and_options(arguments, message):
    with pytest.raises(Exception, match=message):
        command("run=x", *arguments)


def test_an_engine_is_chosen_with_its_own_settings():
    assert command("run=x").rollout is None
    own = [
        "rollout.max_model_len=64",
        "rollout.dtype=bfloat16",
        "rollout.batch_rows=8",
        "rollout.own_process=false",
    ]
    got = command("run=x", "rollout=vllm", *own).rollout
    assert got == VLLMRollout(max_model_len=64, dtype="bfloat16", batch_rows=8, own_process=False)
    assert (
        command("run=x", "rollout=vllm_server", "rollout.url=http://h:1").rollout.url
        == "http://h:1"
    )
    assert command("run=x", "rollout=vllm_server", "rollout.routes=true").rollout.routes, (
        "as the server was started"
    )
    assert (
        command("run=x", "rollout=local", "rollout.quantization=int4").rollout.quantization
        == "int4"
    )
    kinds = (RolloutSettings, VLLMRollout, VLLMServerRollout)
    assert {field.name for kind in kinds for field in fields(kind)} >= ENGINE_FIELDS, (
        "none of these is mistyped"
    )


def test_the_engine_is_told_of_the_stop_strings(monkeypatch):
    """Else vLLM would sample every response to its limit, and what follows the string would be
    thrown away.
    """
    told = []

    def started(policy, rollout):
        told.append(rollout.stop)
        return LocalEngine(policy)

    monkeypatch.setattr(evaluation_job, "make_engine", started)
    monkeypatch.setattr(evaluation_job, "check_engine_start", lambda *_: None)
    evaluation_job.subject_of_model(
        command("model=tiny_dense", "benchmark=math", "rollout=vllm", "stop=['7']"), "cpu"
    )
    assert told == [["7"]]


def test_sets_are_chosen_by_name_and_never_mixed_up():
    got = command("run=x", "benchmark=[math,code]", "sets=[rated,code]", "problems=3", "seed=5")
    sets = evaluation_job.all_sets(got, got.tasks)
    assert [(s.name, len(s.problems)) for s in sets] == [("rated", 3), ("code", 3)]
    assert sets[0].problems == [got.tasks["math"].problem(5, "rated", i) for i in range(3)]
    with refuses("sets", ["x"], "there are math_easy, math_hard, rated"):
        evaluation_job.all_sets(command("run=x", "benchmark=math", "sets=[x]"), got.tasks)
    both = command("run=x", "benchmark=[math,mixed]")
    with refuses("benchmark", ["math", "mixed"], "more than one of them has the set"):
        evaluation_job.all_sets(both, both.tasks)


@pytest.mark.skipif("gsm8k" not in CHOICES["task"], reason="no published benchmarks here")
def test_a_folder_of_data_finds_each_benchmark(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(
        json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n"
    )
    (tmp_path / "aime24.jsonl").write_text(json.dumps({"problem": "1+2?", "answer": "3"}) + "\n")
    got = command("model=tiny_dense", "benchmark=[gsm8k,aime24]", f"data={tmp_path}")
    assert [task.path for task in got.tasks.values()] == [
        str(tmp_path / "gsm8k"),
        str(tmp_path / "aime24.jsonl"),
    ]
    assert [(s.name, len(s.problems)) for s in evaluation_job.all_sets(got, got.tasks)] == [
        ("gsm8k", 1),
        ("aime24", 1),
    ]
    own = command(
        "run=x", "benchmark=[gsm8k,aime24]", f"data={tmp_path}", "tasks.gsm8k.path=mine.jsonl"
    )
    assert own.tasks["gsm8k"].path == "mine.jsonl" and own.tasks["aime24"].path == str(
        tmp_path / "aime24.jsonl"
    )


def own_limits(*arguments: str) -> dict[str, int]:
    got = command("model=tiny_dense", "problems=1", *arguments)
    return {s.name: s.limit for s in evaluation_job.all_sets(got, got.tasks)}


def test_an_evaluation_takes_each_benchmarks_own_length(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    (tmp_path / "aime24.jsonl").write_text('{"problem": "1+2?", "answer": "3"}\n')
    (tmp_path / "mbpp.jsonl").write_text(MBPP)
    wanted = [
        "benchmark=[gsm8k,aime24,mbpp,math]",
        f"data={tmp_path}",
        "sets=[gsm8k,aime24,mbpp,rated]",
    ]
    assert own_limits(*wanted) == {"gsm8k": 2048, "aime24": 32768, "mbpp": 768, "rated": 2048}
    assert set(own_limits(*wanted, "max_new_tokens=9").values()) == {9}
    got = command("run=x", *wanted)
    assert [s.limit for s in evaluation_job.all_sets(got, got.tasks, 80)] == [
        2048,
        32768,
        768,
        80,
    ], "a run's own task: its limit"


def test_an_evaluation_says_where_the_limit_decided():
    sets = [
        EvaluationSet("gsm8k", ChainArithmetic(), [], limit=2048),
        EvaluationSet("aime24", ChainArithmetic(), [], limit=100),
    ]
    results = {
        "gsm8k": {"verdicts": {"truncated": 0.2}},
        "aime24": {"verdicts": {"truncated": 0.43, "wrong": 0.57}},
    }
    (line,) = evaluation_job.cut_short(results, sets, positions=2048)
    assert (
        line.startswith("aime24: 43.0% of the responses were cut off at 100 tokens")
        and "and count as wrong; set max_new_tokens=200" in line
    )
    sets[1].task.truncated_reward = None
    (line,) = evaluation_job.cut_short(results, sets, positions=None)
    assert "and are graded with reward.truncated=None; " in line
    episodes = results | {"aime24": results["aime24"] | {"episodes": {"turns": 2.0}}}
    (line,) = evaluation_job.cut_short(episodes, sets, positions=None)
    assert "and keep the rewards of their turns; " in line
    (line,) = evaluation_job.cut_short(results, sets, positions=150)
    assert line.endswith("; the model has 150 positions for a prompt and its response")
    assert evaluation_job.cut_short({"gsm8k": {"verdicts": {}}}, sets[:1], None) == []


def run(cwd: Path, *overrides: str) -> list[str]:
    return [sys.executable, *EVALUATE, "model=hf", "model.path=model", "k=3", "problems=48", "batch_rows=12",
            "benchmark=[math]", "sets=[math_easy,rated]", "max_new_tokens=16", *overrides]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_bfloat16_run_is_evaluated_as_it_evaluated_itself(tmp_path, overlap):
    """The same samples by position, in the precision of the rollouts: the same numbers, to the last
    digit.
    """
    options = [o for o in SMALL if not o.startswith(("steps", "evaluation.problems"))]
    options += [
        "steps=2",
        "rollout.dtype=bfloat16",
        "optim.lr=1e-2",
        "evaluation.problems=24",
        "tracking.wandb=disabled",
    ]
    done = train(
        tmp_path, *options, "rollout.staleness=1", f"rollout.overlap={str(overlap).lower()}"
    )
    assert done.returncode == 0 and "held-out responses are sampled in bfloat16" in done.stdout, (
        done.stderr[-2000:]
    )
    recorded = json.loads((only_run(tmp_path) / "metrics.jsonl").read_text().splitlines()[-1])
    call = [
        sys.executable,
        *EVALUATE,
        f"run={only_run(tmp_path)}",
        "k=2",
        "problems=24",
        "out=result",
    ]
    done = forked.run(call, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "step 2: 2 samples a problem at temperature 1, computed in bfloat16 as during training"
        in done.stdout
    )
    for name, result in json.loads((tmp_path / "result" / "result.json").read_text())[
        "sets"
    ].items():
        assert result["avg"]["value"] == recorded[f"eval/{name}/avg@2"]
        assert result["tokens"] == recorded[f"eval/{name}/tokens"]


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_ends_the_same(tmp_path):
    """SIGKILL, then Ctrl-C, then the end: byte for byte what one go gives."""
    save(*TinyDense(hidden=16, layers=2, heads=2).make(), tmp_path / "model")
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # model.path=gone could be a name on the hub
    options = {"cwd": tmp_path, "env": offline}
    whole = forked.run(run(tmp_path, "out=whole"), **options)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert "math_easy" in whole.stdout and "95 % interval" in whole.stdout and "Elo" in whole.stdout
    for number, code, responses in (
        (signal.SIGKILL, -signal.SIGKILL, 30),
        (signal.SIGINT, 130, 60),
    ):
        ending = [
            sys.executable,
            str(ROOT / "tests/support/ended_evaluation.py"),
            str(int(number)),
            str(responses),
        ]
        words = run(tmp_path, "out=stopped")[1 + len(EVALUATE) :]
        ended = forked.run([*ending, *words], **options)
        assert ended.returncode == code, ended.stderr
        assert not (tmp_path / "stopped" / "result.json").exists(), (
            "the signal came too late to show anything"
        )
    assert "the same command goes on" in ended.stderr and "Traceback" not in ended.stderr
    done = forked.run(run(tmp_path, "out=stopped"), **options)
    assert done.returncode == 0 and "problems were there already" in done.stdout + done.stderr
    for name in (
        "result.json",
        "settings.json",
        "responses/math_easy.jsonl",
        "responses/rated.jsonl",
    ):
        assert (tmp_path / "stopped" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name
    other = forked.run(run(tmp_path, "out=stopped", "temperature=0.5"), **options)
    assert (
        other.returncode == 2
        and other.stderr.count("\n") == 1
        and "temperature: 1.0 against 0.5" in other.stderr
    )
    missing = forked.run(run(tmp_path, "model.path=gone"), **options)
    assert missing.returncode == 2 and "model.path=gone" in missing.stderr
    assert not os.path.exists(tmp_path / "runs" / "evaluations")


@pytest.mark.slow
def test_a_run_is_compared_with_what_it_started_from(tmp_path):
    """step=0 is the start; against=BASE and `gspo compare` print the same; rollout=local gives the
    same numbers.
    """
    done = train(
        tmp_path,
        *[o for o in SMALL if not o.startswith("steps")],
        "steps=4",
        "tracking.wandb=disabled",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    call = [
        sys.executable,
        *EVALUATE,
        f"run={only_run(tmp_path)}",
        "k=2",
        "problems=8",
        "sets=[math_easy,rated]",
    ]
    base = forked.run([*call, "step=0", "out=base"], cwd=tmp_path)
    assert base.returncode == 0 and ", step 0: 2 samples a problem" in base.stdout, base.stderr[
        -2000:
    ]
    settings = json.loads((tmp_path / "base" / "settings.json").read_text())
    assert settings["step"] == 0 and "engine" not in settings
    trained = forked.run([*call, "against=base", "out=trained"], cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr[-2000:]
    result = json.loads((tmp_path / "trained" / "result.json").read_text())
    for name, r in result["against"]["sets"].items():
        assert r["accuracy"][1] == pytest.approx(result["sets"][name]["avg"]["value"])
        assert r["format"]["value"] + r["correctness"]["value"] == pytest.approx(r["gain"]["value"])
    again = forked.run(
        [sys.executable, "-P", "-m", "gspo", "compare", "base", "trained"], cwd=tmp_path
    )
    assert (
        again.returncode == 0 and again.stdout in trained.stdout and "gain: format" in again.stdout
    )
    fewer = forked.run([*call, "against=base", "problems=5", "out=fewer"], cwd=tmp_path)
    assert (
        fewer.returncode == 2 and "math_easy: problems 5, 6, 7 in base and not in" in fewer.stderr
    )
    assert not (tmp_path / "fewer").exists(), "refused before anything is sampled"

    local = forked.run(
        [*call, "rollout=local", "rollout.batch_rows=512", "out=local"], cwd=tmp_path
    )
    assert local.returncode == 0 and "computed in float32 by local" in local.stdout, local.stderr[
        -2000:
    ]
    same = json.loads((tmp_path / "local" / "result.json").read_text())
    assert same["sets"] == result["sets"]
    assert (
        same["settings"]["engine"]["name"] == "local"
        and same["settings"]["engine"]["quantization"] == "none"
    )
    other = forked.run(
        [*call, "rollout=local", "rollout.dtype=bfloat16", "out=local"], cwd=tmp_path
    )
    assert (
        other.returncode == 2
        and "dtype: float32 against bfloat16; choose another out=" in other.stderr
    )
    script = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "sample",
        f"run={only_run(tmp_path)}",
        "set=rated",
    ]
    shown = [
        forked.run([*script, *more], cwd=tmp_path) for more in ([], ["rollout=local"], ["step=0"])
    ]
    assert [one.returncode for one in shown] == [0, 0, 0], [one.stderr[-1000:] for one in shown]
    assert shown[0].stdout == shown[1].stdout and shown[0].stdout != shown[2].stdout
    refused = forked.run([*script, "rollout=local", "rollout.group_size=4"], cwd=tmp_path)
    assert (
        refused.returncode == 2
        and "rollout.group_size=4: is read in training alone; set samples=" in refused.stderr
    )
