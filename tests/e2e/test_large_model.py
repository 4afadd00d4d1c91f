"""experiment=qwen3_30b_a3b: that it composes with the paper's settings, and takes steps on two
ranks with sizes cut.
"""

import json

import pytest
import yaml

from composing import settings
from gspo.model.loading import save
from gspo.model.settings import TinyMoE
from gspo.tracking.tracker import read_rows
from rank_processes import launch


@pytest.fixture
def problems(tmp_path):
    """Files of sums, as a benchmark of mathematics is written."""
    for name, first in (("train", 10), ("test", 60)):
        rows = [
            {"problem": f"What is {n} + {n}?", "answer": str(2 * n)}
            for n in range(first, first + 16)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["experiment=qwen3_30b_a3b", "task.train_path=train.jsonl", "task.path=test.jsonl"]


def test_it_has_the_settings_of_the_paper(tmp_path, problems, monkeypatch):
    monkeypatch.chdir(tmp_path)
    s = settings(*problems)
    assert (s.objective.clip_low, s.objective.clip_high, s.trainer.minibatches) == (3e-4, 4e-4, 4)
    assert (s.rollout.prompts_per_step, s.rollout.group_size, s.policy.routing_replay) == (
        512,
        16,
        "none",
    )
    assert s.parallel.mode == "shard" and s.policy.precision == s.rollout.dtype == "bfloat16"
    rival = settings(*problems, "objective=grpo", "policy.routing_replay=r2")
    assert (rival.objective.clip_low, rival.objective.clip_high) == (0.2, 0.27), (
        "no option of it leaks onto another arm"
    )


@pytest.mark.distributed
def test_cut_down_it_takes_two_steps_on_two_ranks(tmp_path, problems):
    save(*TinyMoE(hidden=32, layers=2, heads=2, experts=8).make(), tmp_path / "model")
    cut = [
        "model.path=model", "steps=2", "rollout.prompts_per_step=8", "rollout.group_size=4", "threads=1",
        "rollout.max_new_tokens=16", "rollout.max_prompt_tokens=200", "evaluation.every=1", "evaluation.problems=4",
        "policy.device=cpu",
    ]  # fmt: skip
    ranks = launch(tmp_path, 2, *problems, *cut)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    (run,) = (tmp_path / "runs" / "qwen3_30b_a3b").glob("*-seed*")
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["routing/consistency"] > 0.5 and row["mismatch/k3"] > 0 for row in rows[1:]), (
        "bfloat16 engines differ"
    )
    written = yaml.safe_load((run / "settings.yaml").read_text())
    assert written["trainer"]["minibatches"] == 4 and written["parallel"]["mode"] == "shard"
