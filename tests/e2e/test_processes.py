"""Runs of several processes, as torchrun starts them: the numbers of one, resumed, stopped, killed,
refused.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

import forked
from commands import ROOT, command, comparable, environment, only_run, train
from daily import daily_but
from learning_runs import LEARNING, near
from rank_processes import launch

pytestmark = pytest.mark.distributed
TWO = (*LEARNING, "parallel.mode=replicate")
SHARD = (*LEARNING, "parallel.mode=shard")
EXPERTS = (*SHARD, "parallel.experts=2")
KILLER = str(ROOT / "tests" / "support" / "killer.py")


def good(ranks) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), [rank.err[-3000:] for rank in ranks]
    assert not any(rank.out or rank.err for rank in ranks[1:]), "rank 0 alone speaks"


@pytest.mark.parametrize(
    "several",
    [pytest.param(TWO, marks=pytest.mark.daily, id="replicate"), pytest.param(SHARD, id="shard")],
)
def test_two_and_three_processes_write_what_one_writes_and_each_goes_on_with_the_others_run(
    tmp_path, several
):
    """2 -> 2 to the bit; 2 -> 3 -> 1 -> 2 up to rounding."""
    alone = tmp_path / "one"
    alone.mkdir()
    assert train(alone, *LEARNING).returncode == 0
    for name in ("two", "again", "others"):
        (tmp_path / name).mkdir()
        shutil.copytree(alone / "runs" / "cold_starts", tmp_path / name / "runs" / "cold_starts")
    good(launch(tmp_path / "two", 2, *several))
    rows = comparable(only_run(tmp_path / "two"))
    near(rows, comparable(only_run(alone)))
    assert only_run(alone).name == only_run(tmp_path / "two").name, (
        "the hash does not say how many processes there were"
    )

    good(launch(tmp_path / "again", 2, *several, "steps=6"))
    good(launch(tmp_path / "again", 2, *several))
    assert comparable(only_run(tmp_path / "again")) == rows

    good(launch(tmp_path / "others", 2, *several, "steps=4"))
    good(launch(tmp_path / "others", 3, *several, "steps=8"))
    run = only_run(tmp_path / "others")
    done = train(tmp_path / "others", f"resume={run}", "parallel.mode=none", "steps=10")
    assert done.returncode == 0, done.stderr
    good(launch(tmp_path / "others", 2, *several))
    near(rows, comparable(run))


def test_experts_that_are_dealt_to_two_processes_go_on_to_the_bit_and_otherwise(tmp_path, straight):
    """2 -> 2 to the bit; dealt -> gathered -> one process -> dealt up to rounding; with a critic
    and a reference.
    """
    rows, cold_starts = straight(EXPERTS)
    near(straight(SHARD)[0], rows)
    for name in ("again", "others"):
        (tmp_path / name).mkdir()
        shutil.copytree(cold_starts, tmp_path / name / "runs" / "cold_starts")
    for steps in ("steps=6", "steps=12"):
        good(launch(tmp_path / "again", 2, *EXPERTS, *REMEMBERED, steps))
    assert comparable(only_run(tmp_path / "again")) == rows

    good(launch(tmp_path / "others", 2, *EXPERTS, *REMEMBERED, "steps=4"))
    run = only_run(tmp_path / "others")
    good(launch(tmp_path / "others", 2, f"resume={run}", "parallel.mode=shard", "steps=6"))
    done = train(tmp_path / "others", f"resume={run}", "parallel.mode=none", "steps=8")
    assert done.returncode == 0, done.stderr
    good(launch(tmp_path / "others", 2, *EXPERTS, *REMEMBERED))
    near(rows, comparable(run))


def test_batches_that_are_sampled_beside_the_training_are_waited_for_at_the_end(tmp_path):
    """With a verifier slower than the training, batches are under way when the last checkpoint is
    written.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    ahead = [
        "rollout.staleness=2",
        "rollout.overlap=true",
        "steps=4",
        "callbacks.it=slow:Fast",
        "evaluation.every=0",
    ]
    good(launch(tmp_path, 2, *TWO, *ahead, env={rank: {"PYTHONPATH": "."} for rank in (0, 1)}))
    rows = comparable(only_run(tmp_path))
    good(
        launch(
            tmp_path, 2, *TWO, *ahead, "steps=6", env={rank: {"PYTHONPATH": "."} for rank in (0, 1)}
        )
    )
    assert comparable(only_run(tmp_path))[:5] == rows


SLOW = """
import time
from dataclasses import dataclass
from gspo.rollout import scoring
from gspo.train.extensions import Callback

plain = scoring.score


def slowly(*args):
    time.sleep(0.5)
    return plain(*args)


@dataclass
class Fast(Callback):
    def before_step(self, step, trainer):
        scoring.score = slowly
"""


def torchrun(folder: Path, *overrides: str):
    """Start the program by torchrun as two ranks, and wait for its end."""
    options = [
        "--nproc-per-node=2",
        "--master-port=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    ]
    words = command(*overrides)[2:]  # without python -P
    launcher = [sys.executable, "-c", TORCHRUN, *options, *words]
    return forked.run(launcher, cwd=folder, env=environment() | {"PYTHONPATH": "."})


TORCHRUN = "from torch.distributed.run import main; main()"


def test_torchrun_starts_them(tmp_path):
    done = torchrun(tmp_path, *TWO, "steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        len(comparable(only_run(tmp_path))) == 3 and done.stdout.count("finished at step 2/2") == 1
    )


WRONG = {
    "key": (["lr=1"], "error: lr: there is no such setting; here it is optim.lr"),
    "mode": (
        ["parallel.mode=none"],
        "error: parallel.mode=none: there are 2 processes; set parallel.mode=replicate or",
    ),
    "device": (["policy.device=cuda:9"], "error: policy.device=cuda:9: cannot be used here: "),
    "one rank": (
        ["callbacks.it=failing:OnRankOne"],
        "error: rank 1: RuntimeError: this rank's disk is gone",
    ),
}


@pytest.mark.parametrize("case", daily_but(WRONG, "one rank", "mode"))
def test_torchrun_shows_last_why_a_launch_failed_and_one_rank_prints_it(tmp_path, case):
    (tmp_path / "failing.py").write_text(FAILING)
    overrides, line = WRONG[case]
    done = torchrun(tmp_path, *TWO, *overrides)
    assert done.returncode == 1
    printed = [text for text in done.stderr.splitlines() if text.startswith(line)]
    assert len(printed) == 1, done.stderr
    shown = [text for text in done.stderr.splitlines() if text.strip().startswith("traceback :")]
    cause = shown[-1].strip()
    if case == "one rank":  # torchrun shows the rank that it sees end first; both name rank 1
        assert cause.startswith("traceback : error: rank 1"), done.stderr
        assert "this rank's disk is gone" in cause, done.stderr
    else:
        assert cause.startswith(f"traceback : {line}"), done.stderr


# What a run remembers beside its weights: a critic, a refreshed reference, the KL coefficient, a
# curriculum, moments.
REMEMBERED = [
    "preset=ppo", "kl=loss", "kl.target=1e-4", "kl.horizon=100", "kl.refresh_every=3", "sampler=grouped",
    "rollout.query_set=16", "reward.shift=running", "reward.scale=running", "optim.warmup_updates=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The rows of runs on two ranks that nothing disturbs, by mode, and their cold start."""
    made = {}

    def run(several) -> tuple[list[dict], Path]:
        if several not in made:
            folder = tmp_path_factory.mktemp("straight")
            good(launch(folder, 2, *several, *REMEMBERED))
            made[several] = comparable(only_run(folder)), folder / "runs" / "cold_starts"
        return made[several]

    return run


@pytest.mark.parametrize(
    ("several", "moment"),
    [
        (TWO, "update.gradient_clipped"),
        (SHARD, "rollout.some_token"),
        (SHARD, "checkpoint.some_files"),
        pytest.param(EXPERTS, "update.in_a_layer", marks=pytest.mark.daily),
        pytest.param(TWO, "rollout.some_token", marks=pytest.mark.daily),
        pytest.param(TWO, "update.first_minibatch_done", marks=pytest.mark.daily),
        pytest.param(SHARD, "update.in_a_layer", marks=pytest.mark.daily),
        pytest.param(SHARD, "update.backward", marks=pytest.mark.daily),
        pytest.param(SHARD, "update.first_minibatch_done", marks=pytest.mark.daily),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1].split("=")[1],
)
def test_a_killed_rank_ends_the_run_with_its_name_and_the_same_command_goes_on(
    tmp_path, straight, several, moment
):
    rows, cold_starts = straight(several)
    shutil.copytree(cold_starts, tmp_path / "runs" / "cold_starts")
    ranks = launch(tmp_path, 2, *several, *REMEMBERED, scripts={1: [KILLER, moment, "5"]})
    assert ranks[1].code == -9 and ranks[0].code == 1 and ranks[0].seconds - ranks[1].seconds < 30
    error = [line for line in ranks[0].err.splitlines() if line.startswith("error:")]
    assert (
        len(error) == 1
        and "rank 1 (process " in error[0]
        and "has ended before its time" in error[0]
    ), ranks[0].err
    assert "go on with resume=" in error[0] and "Traceback" not in ranks[0].err + ranks[1].err
    run = only_run(tmp_path)
    status = json.loads((run / "status.json").read_text())
    assert status["how"] == "failed" and "rank 1" in status["reason"]
    good(launch(tmp_path, 2, *several, *REMEMBERED))
    assert comparable(run) == rows


@pytest.mark.parametrize(
    ("several", "moment"),
    [
        (TWO, "checkpoint.half_an_optimizer"),
        (SHARD, "checkpoint.not_renamed"),
        (SHARD, "update.in_a_layer"),
    ],
)
def test_rank_0_killed_is_named_by_another(tmp_path, several, moment):
    ranks = launch(tmp_path, 3, *several, scripts={0: [KILLER, moment, "3"]})
    assert ranks[0].code == -9 and ranks[1].code == ranks[2].code == 1
    errors = [
        [line for line in rank.err.splitlines() if line.startswith("error")] for rank in ranks
    ]
    assert (
        len(errors[1]) == 1 and errors[1][0].startswith("error: rank 0 (process ") and not errors[2]
    )
    assert "Traceback" not in ranks[1].err + ranks[2].err


def test_a_rank_that_fails_says_why(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    ranks = launch(
        tmp_path,
        2,
        *TWO,
        "callbacks.it=failing:OnRankOne",
        env={r: {"PYTHONPATH": "."} for r in (0, 1)},
    )
    assert [rank.code for rank in ranks] == [1, 1]
    assert (
        "error: rank 1 (process " in ranks[0].err
        and "has failed: this rank's disk is gone" in ranks[0].err
    )


FAILING = """
import os
from dataclasses import dataclass
from gspo.train.extensions import Callback


@dataclass
class OnRankOne(Callback):
    def before_step(self, step, trainer):
        if step == 3 and os.environ["RANK"] == "1":
            raise RuntimeError("this rank's disk is gone")
"""


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    (tmp_path / "asking.py").write_text(
        FAILING.replace("OnRankOne", "Asking").replace(
            'raise RuntimeError("this rank\'s disk is gone")', "os.kill(os.getpid(), 15)"
        )
    )
    ranks = launch(
        tmp_path,
        2,
        *TWO,
        "callbacks.it=asking:Asking",
        env={r: {"PYTHONPATH": "."} for r in (0, 1)},
    )
    assert [rank.code for rank in ranks] == [143, 143], ranks
    run = only_run(tmp_path)
    assert json.loads((run / "status.json").read_text())["how"] == "stopped"
    assert [row["step"] for row in comparable(run)] == [0, 1, 2, 3]
    assert (run / "checkpoints" / "latest").read_text() == "step_000003"


# ------------------------------------------------------------------------------------------------------------
# refused
REFUSED = {
    "none": ("parallel.mode=none: there are 2 processes; set parallel.mode=replicate", ["parallel.mode=none"], {}, {}),
    "settings": (
        "rank 1 was started with other settings than rank 0: optim.lr: 0.002 against 0.001",
        [],
        {1: ["optim.lr=2e-3"]},
        {},
    ),
    "steps": ("rank 1 was started with other settings than rank 0: steps: 13 against 12", [], {1: ["steps=13"]}, {}),
    "speed": ("rollout.batch_rows: 8 against ", [], {1: ["rollout.batch_rows=8"]}, {}),
    "few": (
        "rollout.prompts_per_step=1: is less than the 2 processes",
        ["rollout.prompts_per_step=1", "trainer.minibatches=1", "allow_on_policy=true"],
        {},
        {},
    ),
    "experts": (
        "parallel.experts=3: does not divide the 2 processes",
        ["parallel.mode=shard", "parallel.experts=3"],
        {},
        {},
    ),
    "mode of experts": ("parallel.experts=2: needs parallel.mode=shard", ["parallel.experts=2"], {}, {}),
    "odd": (
        "parallel.experts=2: does not divide the model's 5 experts",
        ["parallel.mode=shard", "parallel.experts=2", "model.experts=5"],
        {},
        {},
    ),
    "ranks": ("parallel.ranks=3: there are 2 processes; start 3, or leave it out", ["parallel.ranks=3"], {}, {}),
    "vllm": (
        "rollout.own_process=false: with 2 processes, vLLM would take itself for one of them",
        ["rollout=vllm", "rollout.own_process=false"],
        {},
        {},
    ),
    "tensor parallel": (
        "rollout.tensor_parallel_size=3: does not divide the 2 processes",
        ["rollout=vllm", "rollout.tensor_parallel_size=3"],
        {},
        {},
    ),
    "rank": ("WORLD_SIZE=2: RANK is missing; start the processes by torchrun", [], {}, {0: {"RANK": ""}, 1: {"RANK": ""}}),
    "sweep": ("a sweep, with several processes: they share one run", ["-m", "seed=1,2"], {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_one_line_of_rank_0(tmp_path, case):
    message, overrides, extra, env = REFUSED[case]
    ranks = launch(
        tmp_path,
        2,
        *(["-m"] if "-m" in overrides else []),
        *TWO,
        *(o for o in overrides if o != "-m"),
        extra=extra,
        env=env,
    )  # -m comes first
    assert message in ranks[0].err and "Traceback" not in ranks[0].err, ranks
    assert all(rank.code == 2 for rank in ranks), ranks
    assert case == "rank" or not ranks[1].out + ranks[1].err
    assert not list(Path(tmp_path).glob("runs/small/*/metrics.jsonl"))


def test_several_processes_without_torchrun_are_refused(tmp_path):
    done = forked.run(command(*TWO), cwd=tmp_path, env=environment())
    assert (
        done.returncode == 2
        and "parallel.mode=replicate: there is one process; start the processes by" in done.stderr
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = forked.run(command(*SHARD), cwd=tmp_path, env=environment() | alone)
    assert (
        done.returncode == 2
        and "parallel.mode=shard: with one process, there is nothing to spread" in done.stderr
    )


def test_weights_that_are_multiplied_in_bfloat16_pass_the_check_of_the_engine(tmp_path):
    """The engine's copy is in float32, and no nearer to the trainer than its bfloat16 is."""
    good(
        launch(
            tmp_path, 2, *SHARD, "policy.precision=bfloat16", "policy.checkpointing=true", "steps=2"
        )
    )
    rows = comparable(only_run(tmp_path))
    assert all(1e-5 < row["mismatch/after_sync"] < 0.15 for row in rows[1:])


def test_a_run_that_was_begun_with_two_processes_goes_on_with_others(tmp_path):
    """Also where it says how many hold a copy of the weights, and how many processes it was for."""
    good(launch(tmp_path, 2, *SHARD, "parallel.shard_size=2", "parallel.ranks=2", "steps=2"))
    run = f"resume={only_run(tmp_path)}"
    done = train(tmp_path, run, "parallel.mode=none", "steps=3")
    assert done.returncode == 0, done.stderr
    good(launch(tmp_path, 3, run, "parallel.mode=shard", "steps=4"))
    good(launch(tmp_path, 2, run, "steps=5"))
