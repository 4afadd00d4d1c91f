"""Runs of a W&B sweep: the agent's id, project and entity stay the run's, whoever continues it. The
real client and the real `wandb agent`, against a stand-in for W&B's server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from commands import ROOT, SMALL, command, environment, only_run, train
from gspo.config.load import WRITTEN
from gspo.run.rollback import Rollbacks
from gspo.tracking.wandb_choice import own_arguments
from recorded_wandb import log, pause, rows, steps
from wandb_server import SavedRun, serving

AGENT = {
    "WANDB_SWEEP_ID": "sweep1",
    "WANDB_RUN_ID": "agent001",
    "WANDB_PROJECT": "sweeps",
    "WANDB_ENTITY": "team",
}


def test_the_whole_configuration_as_arguments_is_the_first_command_again():
    first = [
        "experiment=micro_moe",
        "tracking.wandb=online",
        "seed=1",
        "optim.lr=0.0004",
        "+rollout.extend={5: 90}",
    ]
    whole = [
        *first,
        "study=small",
        "optim={'lr': 0.0004}",
        "options={}",
        "_wandb={'t': {'1': [1]}}",
        "threads=0",
    ]
    assert own_arguments([*whole, "resume=", "prompt_used=plain"], WRITTEN) == [
        *first,
        "study=small",
        "threads=0",
    ]


@pytest.mark.slow
def test_a_run_that_an_agent_named_is_continued_as_that_run(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    with serving() as server:
        log(folder, rows(0, 25), **server.environment, **AGENT)
        assert (
            list(server.runs) == ["agent001"]
            and server.runs["agent001"].about["project"] == "sweeps"
        )
        assert (folder / "wandb_id").read_text() == "agent001"
        pause()
        # resume= at a terminal: no agent, no project
        log(folder, rows(26, 30), **server.environment)
        pause()
        log(folder, rows(31, 35), **server.environment, **AGENT)  # the sweep again
        pause()
        other = AGENT | {"WANDB_SWEEP_ID": "sweep2", "WANDB_RUN_ID": "agent002"}
        # another sweep that plans the same run
        log(folder, rows(36, 40), **server.environment, **other)
        (run,) = server.runs.values()
        assert steps(run) == list(range(41)) and run.about["project"] == "sweeps"


@pytest.mark.slow
def test_an_agents_run_that_is_rolled_back_goes_on_as_a_run_of_its_own(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    with serving() as server:
        log(folder, rows(0, 25), **server.environment, **AGENT)
        (folder / "rollbacks.json").write_text(json.dumps([{"from": 25, "to": 20, "moved": False}]))
        Rollbacks(folder).move()
        pause()
        log(folder, rows(21, 40), **server.environment, **AGENT)
        first, second = server.runs.values()
        assert first.name == "agent001" and steps(first) == list(range(26))
        assert steps(second) == list(range(41)) and second.about["project"] == "sweeps"


@pytest.mark.slow
def test_a_run_that_early_termination_stops_ends_its_step_and_is_not_taken_up_again(tmp_path):
    """W&B's client asks the server every 15 s whether to stop."""
    with serving() as server:
        server.stops = True
        fixed = [o for o in SMALL if not o.startswith(("steps=", "evaluation.every="))]
        call = command(*fixed, "steps=100000", "evaluation.every=0")
        done = forked.run(call, tmp_path, environment() | server.environment | AGENT, seconds=150)
        run, folder = server.runs["agent001"], only_run(tmp_path)
        assert (
            done.returncode == 0
            and json.loads((folder / "status.json").read_text())["how"] == "stopped"
        ), done.stderr
        last = steps(run)[-1]
        assert (folder / "checkpoints" / "latest").read_text() == f"step_{last:06d}"
        assert run.ended and not run.preempting and "score" in run.summary


def told(kind: str, arguments: dict) -> dict:
    values = {name: {"value": value} for name, value in arguments.items()}
    return {
        "type": kind,
        "run_id": "agent001",
        "program": "gspo",
        "args": values,
    }


def again(run: SavedRun) -> dict:
    """As W&B hands out a run that was preempted: with everything that is in its configuration."""
    return told("resume", {name: entry["value"] for name, entry in run.config.items()})


@pytest.mark.slow
@pytest.mark.daily
def test_wandbs_agent_itself_starts_a_run_and_takes_it_up_again(tmp_path):
    with serving() as server:
        fixed = [
            o
            for o in SMALL
            if not o.startswith(("steps=", "optim.lr=", "checkpoint.", "evaluation.every="))
        ]
        fixed += ["steps=40", "evaluation.every=20", "tracking.wandb=online"]
        server.sweep = {
            "command": [
                "${env}",
                "${interpreter}",
                "-m",
                "${program}",
                "train",
                *fixed,
                "${args_no_hyphens}",
            ]
        }
        server.commands = [
            lambda: told("run", {"seed": 7, "optim.lr": 1e-3}),
            lambda: again(server.runs["agent001"]),
        ]
        tools = Path(sys.executable).parent
        paths = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        agent = subprocess.Popen(
            [tools / "wandb", "agent", "team/sweeps/sweep1"], cwd=tmp_path,
            env=environment() | server.environment | paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        process = under_way(tmp_path, agent)
        os.kill(process, signal.SIGTERM)  # as a scheduler does
        output, _ = agent.communicate(timeout=300)
        run, folder = server.runs["agent001"], only_run(tmp_path)
        assert '"objective={' in output, "the second command line was the whole configuration"
        assert (
            run.preempting and json.loads((folder / "status.json").read_text())["how"] == "finished"
        ), output[-3000:]
        more = ["steps=42", "tracking.wandb=online"]
        done = train(tmp_path, f"resume={folder}", *more, account=server.environment)
        assert done.returncode == 0, done.stderr[-3000:]
        assert list(server.runs) == ["agent001"] and steps(run) == list(range(43))
        assert run.about["project"] == "sweeps" and run.config["optim"]["value"]["lr"] == 1e-3


def under_way(folder: Path, agent: subprocess.Popen) -> int:
    """Waits for the run's third step; its process."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and agent.poll() is None:
        found = list(folder.glob("runs/small/*/metrics.jsonl"))
        if found and found[0].read_text().count("\n") > 3:
            return json.loads((found[0].parent / "status.json").read_text())["pid"]
        time.sleep(0.05)
    raise AssertionError(agent.communicate()[0])
