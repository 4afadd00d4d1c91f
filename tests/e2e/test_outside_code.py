"""A user's own loss, reward, data, metric and callback in an empty folder: a sweep, resumed,
evaluated, drawn.
"""

import json
import subprocess
import sys

import pytest

import forked
import user_code
from commands import ROOT, SMALL, comparable, environment, train
from gspo.io.rows import read_rows

pytestmark = pytest.mark.slow

SIZES = [word for word in SMALL if not word.startswith(("task=", "cold_start", "steps="))]
OWN = [
    "cold_start.steps=0", "steps=4", "task=rows", "task.train_path=rows.jsonl", "task.columns.prompt=question",
    "task.reward=own_package.rewards:digits", "metrics.long.path=own_package.extras:Long", "metrics.long.tokens=3",
]  # fmt: skip
COPY = "own_package.losses:Copy"


@pytest.fixture
def folder(tmp_path):
    user_code.write(tmp_path)
    rows = [{"question": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def runs(folder) -> dict[str, object]:
    return {
        path.name.rpartition("-")[0]: path for path in (folder / "runs" / "small").glob("*-seed*")
    }


def evaluate(folder, run):
    script = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "evaluate",
        f"run={run}",
        "problems=2",
        "k=1",
    ]
    return forked.run(script, cwd=folder, env=environment())


def test_a_sweep_over_a_loss_of_ones_own_is_resumed_evaluated_and_drawn(folder):
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = train(folder, "-m", *SIZES, *OWN, f"objective=grpo,{COPY}", "seed=1,2", *launcher)
    assert done.returncode == 0, done.stderr
    found = runs(folder)
    assert set(found) == {"grpo-seed1", "grpo-seed2", "Copy-seed1", "Copy-seed2"}
    for seed in (1, 2):  # a copy of GRPO trains to the same bits
        assert comparable(found[f"grpo-seed{seed}"]) == comparable(found[f"Copy-seed{seed}"])
    own = found["Copy-seed1"]
    assert all("custom/long" in row for row in comparable(own)[1:])
    page = (own / "report.html").read_text()
    assert "responses of at least `tokens` tokens" in page
    assert (own / "outside" / "own_package" / "losses.py").read_text() == user_code.LOSSES

    done = train(folder, f"resume={own}", "steps=6")
    assert done.returncode == 0 and len(comparable(own)) == 7, done.stderr
    done = evaluate(folder, own)
    assert done.returncode == 0 and "rows" in done.stdout, done.stderr
    figures = [
        sys.executable,
        str(ROOT / "analysis" / "fig_curves.py"),
        "runs/small",
        "metrics=custom/long",
    ]
    done = subprocess.run(
        [*figures, "out=drawn"], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and list((folder / "drawn").glob("*.png")), done.stderr

    (folder / "own_package" / "helpers.py").write_text("def same(x):\n    return x  # changed\n")
    done = train(folder, f"resume={own}", "steps=8")
    assert (
        done.returncode == 2
        and "own_package/helpers.py" in done.stderr
        and "Traceback" not in done.stderr
    )
    done = evaluate(folder, own)
    assert done.returncode == 0 and "the present content is used" in done.stderr


def test_a_callback_ends_a_run_and_its_state_is_resumed(folder):
    stop = ["callbacks.stop.path=own_package.extras:StopAfter", "callbacks.stop.steps=3"]
    command = [*SIZES, *OWN, "steps=20", *stop]
    done = train(folder, *command)
    (run,) = runs(folder).values()
    assert done.returncode == 0
    assert "ended early at step 3/20" in done.stdout, done.stderr
    status = json.loads((run / "status.json").read_text())
    assert (status["how"], status["reason"]) == ("ended early", "by callbacks.stop")
    # a sweep leaves it alone, and counts it as ended
    done = train(folder, "-m", *command)
    assert done.returncode == 0, done.stderr
    assert "has ended early; it goes on with resume=" in done.stdout
    assert len(read_rows(run / "metrics.jsonl")) == 4
    done = train(folder, *command)
    assert done.returncode == 2 and "exists already (ended early)" in done.stderr
    done = train(folder, f"resume={run}")
    assert "ended early at step 4/20" in done.stdout, done.stderr


def test_a_wrong_reward_function_is_one_line_and_leaves_nothing(folder):
    done = train(folder, *SIZES, *OWN, "task.reward=own_package.rewards:two")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: task.reward=own_package.rewards:two(prompt, resp"
    )
    assert done.stderr.count("\n") == 1 and not (folder / "runs").exists()


def test_a_reward_function_that_fails_leaves_responses_out_and_says_why(folder):
    rewards = folder / "own_package" / "rewards.py"
    body = "    if len(response) > 5:\n        raise OSError('no server')\n    return 1\n"
    rewards.write_text("def score(prompt, response, row):\n" + body)
    done = train(folder, *SIZES, *OWN, "task.reward=own_package.rewards:score", "steps=2")
    assert done.returncode == 0, done.stderr
    assert "could not be graded and are left out; the first: task.reward=" in done.stderr
    assert "it raised OSError: no server (rewards.py, line 3)" in done.stderr
    (run,) = runs(folder).values()
    assert any(row.get("filter/ungraded") for row in comparable(run))


TWO_REWARDS = """
from dataclasses import dataclass
from typing import ClassVar

from gspo.data.problems import Problem
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Outcome


class Game(Environment):
    def step(self, text):
        rewards = {"digit": float(text[-1:].isdigit()), "short": 1 - len(text) / 64}
        return Outcome(done=True, verdict="over", rewards=rewards)


@dataclass
class Games(EnvironmentTask):
    name: str = "games"
    names_rewards: ClassVar[bool] = True

    def evaluation_sets(self):
        return ["games"]

    def problem(self, seed, split, index):
        return Problem(self.name, index, f"{index % 9}?", None)

    def environment(self, problem, position):
        return Game()
"""


def test_named_rewards_of_an_environment_of_ones_own_and_weights_of_other_names(tmp_path):
    (tmp_path / "my_games.py").write_text(TWO_REWARDS)
    task = ["task=my_games:Games", "cold_start.steps=0", "advantage=gdpo", 'rollout.stop=["a","7"]']
    task = [*SIZES, *task, "tracking.record_every=1", "tracking.wandb=disabled"]
    done = train(tmp_path, *task, "reward.weights={digit: 1, short: 0.5}", "steps=2")
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path).values()
    done = train(tmp_path, f"resume={run}", "steps=3")
    assert done.returncode == 0 and len(comparable(run)) == 4, done.stderr
    for file in (run / "rollouts").glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            rewards = row["rewards"]
            assert row["reward"] == pytest.approx(rewards["digit"] + 0.5 * rewards["short"])
    replay = [sys.executable, "-P", "-m", "gspo", "replay", str(run), "step=3"]
    done = forked.run([*replay, "advantage=group_mean"], cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr

    done = train(tmp_path, *task, "reward.weights={digit: 1, style: 0.5}", "steps=2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "a response got the rewards digit, short; give each of them a weight" in done.stderr
