"""`gspo evaluate` and `gspo sample` with vLLM as the engine: the tokens of the engine of this
process, a real SIGKILL, a real Ctrl-C. In an environment with vLLM: `make test-vllm`."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from commands import SMALL, environment, only_run, train

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytestmark = pytest.mark.vllm
VLLM = [
    "rollout=vllm",
    "rollout.kv_cache_gib=0.25",
    "rollout.max_model_len=128",
    "rollout.batch_rows=8",
]
ENDED_EVALUATION = str(Path(__file__).parents[1] / "support" / "ended_evaluation.py")
SECONDS = 300  # of a busy machine


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose heads have 32 dimensions, which vLLM's attention takes."""
    folder = tmp_path_factory.mktemp("trained")
    options = [o for o in SMALL if not o.startswith(("steps", "model.hidden", "cold_start.steps"))]
    done = train(
        folder,
        *options,
        "model.hidden=64",
        "steps=2",
        "cold_start.steps=30",
        "optim.lr=1e-2",
        "tracking.wandb=disabled",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return only_run(folder)


def call(command: str, folder: Path, *words: str) -> subprocess.CompletedProcess:
    return forked.run(
        [sys.executable, "-P", "-m", "gspo", command, *words],
        cwd=folder,
        env=environment(),
        seconds=SECONDS,
    )


def rows(folder: Path) -> dict[tuple[str, int, int], dict]:
    """Every response of an evaluation by set, problem and sample; none is there twice."""
    found = {}
    for file in (folder / "responses").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            key = (file.stem, row["problem"], row["sample"])
            assert key not in found
            found[key] = row
    return found


def words(run: Path, *more: str) -> list[str]:
    return [f"run={run}", "sets=[math_easy,rated]", "problems=20", "max_new_tokens=16", *more]


def test_greedy_tokens_are_those_of_the_engine_of_this_process(run, tmp_path):
    greedy = words(run, "k=1", "temperature=0")
    local = call("evaluate", tmp_path, *greedy, "out=local")
    vllm = call("evaluate", tmp_path, *greedy, *VLLM, "against=local", "out=vllm")
    assert (local.returncode, vllm.returncode) == (0, 0), local.stderr[-2000:] + vllm.stderr[-3000:]
    assert (
        rows(tmp_path / "vllm") == rows(tmp_path / "local") and len(rows(tmp_path / "vllm")) == 40
    )
    results = [
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("local", "vllm")
    ]
    assert results[0]["sets"] == results[1]["sets"]
    assert results[1]["settings"]["engine"] == {
        "name": "vllm", "dtype": "float32", "quantization": "none", "positions": 128
    }  # fmt: skip
    assert results[1]["code"]["versions"]["vllm"].startswith("0.")
    for r in results[1]["against"]["sets"].values():
        assert r["gain"]["value"] == r["format"]["value"] == r["correctness"]["value"] == 0
    assert (
        "computed in float32 by vllm" in vllm.stdout
        and "note: they differ in engine" in vllm.stdout
    )


@pytest.mark.daily
def test_samples_are_printed_as_by_the_engine_of_this_process(run, tmp_path):
    greedy = [f"run={run}", "set=rated", "samples=1", "temperature=0"]
    local, vllm = (call("sample", tmp_path, *greedy, *more) for more in ([], VLLM))
    assert (local.returncode, vllm.returncode) == (0, 0), local.stderr[-2000:] + vllm.stderr[-3000:]
    assert vllm.stdout == local.stdout and "mean log-prob" in vllm.stdout
    likeliest = [f"run={run}", "set=rated", "samples=1", "problems=1", "top_k=1"]
    local, vllm = (call("sample", tmp_path, *likeliest, *more) for more in ([], VLLM))
    assert "mean log-prob among the tokens that were left in 0.00]" in vllm.stdout, (
        "of one token a place"
    )
    assert re.search(r"mean log-prob -\d", local.stdout)


def test_killed_and_stopped_it_goes_on_and_ends_the_same(run, tmp_path):
    """On the CPU in float32 rounding changes no token here, so even the responses that were sampled
    again are equal.
    """
    evaluate = words(run, "k=3", *VLLM)
    whole = call("evaluate", tmp_path, *evaluate, "out=whole")
    assert whole.returncode == 0, whole.stderr[-3000:]
    for number, code, responses in (
        (signal.SIGKILL, -signal.SIGKILL, 20),
        (signal.SIGINT, 130, 20),
    ):
        ending = [str(int(number)), str(responses), *evaluate, "out=stopped"]
        before = len(rows(tmp_path / "stopped")) if (tmp_path / "stopped").exists() else 0
        ended = forked.run(
            [sys.executable, ENDED_EVALUATION, *ending],
            cwd=tmp_path,
            env=environment(),
            seconds=SECONDS,
        )
        assert ended.returncode == code, ended.stderr[-3000:]
        assert before + responses <= len(rows(tmp_path / "stopped")) < 120, (
            "what had ended was kept"
        )
        assert not (tmp_path / "stopped" / "result.json").exists()
    assert "the same command goes on" in ended.stderr and "Traceback" not in ended.stderr
    done = call("evaluate", tmp_path, *evaluate, "out=stopped")
    assert done.returncode == 0 and "problems were there already" in done.stdout + done.stderr, (
        done.stderr[-3000:]
    )
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    same = [
        json.loads((tmp_path / name / "result.json").read_text())["sets"]
        for name in ("stopped", "whole")
    ]
    assert same[0] == same[1]
    other = call("evaluate", tmp_path, *words(run, "k=3"), "out=stopped")
    assert (
        other.returncode == 2 and "holds an evaluation with other settings: engine" in other.stderr
    )
