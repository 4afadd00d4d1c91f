"""The benchmark: its workloads' models, its arithmetic, and one real measurement from the command line."""

import json
import sys
from pathlib import Path

import pytest
import torch

import forked
from builders import problems
from gspo.config.commands import flat
from gspo.model.policy import Policy
from gspo.model.tokenizer import character_tokenizer
from gspo.rollout.engine import LocalEngine
from gspo.rollout.requests import Sampling
from speed.peer import Pairs
from speed.workload import TINY, WORKLOADS, EvenText, Shape, made

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [120, 250])
def test_responses_of_a_random_model_end_after_about_the_length_that_was_asked_for(tokens):
    shape = Shape(hidden=32, layers=2, heads=2, key_value_heads=2, width=16, mean_length=tokens)
    policy = Policy(made(shape), character_tokenizer())
    groups = LocalEngine(policy).generate(problems(), 40, Sampling(1.0, 12 * tokens), (1, "lengths"))
    lengths = torch.tensor([float(len(r.token_ids)) for group in groups for r in group])
    assert 0.6 * tokens < lengths.mean() < 1.6 * tokens
    assert lengths.std() > 0.5 * tokens, "ends come by chance, as a geometric distribution's"


def test_the_random_models_are_known_to_our_own_forward_and_the_same_everywhere():
    a, b = made(TINY), made(TINY)
    assert Policy(a, character_tokenizer()).network
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_random_text_earns_a_reward_half_of_the_time():
    texts = [f"{i * 7919 % 1000}x{i}" for i in range(400)]
    problem = problems()[0]
    rewards = [score.reward for score in EvenText().score([(problem, text, True) for text in texts])]
    assert 0.4 < sum(rewards) / len(rewards) < 0.6
    assert [s.verdict for s in EvenText().score([(problem, "ab", True), (problem, "aa", True)])] == ["odd", "even"]


def test_sizes_can_be_changed_and_unknown_ones_are_refused():
    changed = WORKLOADS["long"].resized({"hidden": 128, "prompts": 4})
    assert (changed.shape.hidden, changed.prompts, changed.new_tokens) == (128, 4, 512)
    assert "rollout.prompts_per_step=4" in changed.overrides()
    for workload, key in (("long", "depth"), ("tiny", "hidden")):
        with pytest.raises(ValueError, match=f"size.{key}=3"):
            WORKLOADS[workload].resized({key: 3})
    with pytest.raises(ValueError, match=r"size.hiden=3: .*the nearest is size.hidden"):
        WORKLOADS["long"].resized({"hiden": 3})


def test_ratios_are_pair_by_pair_and_their_median_is_shown():
    def record(total):
        return {"total_s": total, "rollout_s": total / 4, "train_s": total / 2, "peak_memory_mib": 100.0, "tokens": 10}

    rounds = [{"trl": record(t), "like for like": record(1.0), "best": record(0.5)} for t in (2.0, 8.0, 3.0)]
    pairs = Pairs(rounds)
    assert pairs.ratios("like for like", "total_s") == [2.0, 8.0, 3.0]
    assert "TRL / ours, best, total_s: median 6.00 (min 4.00, max 16.00)" in pairs.table()


def test_nested_settings_become_a_command_line():
    assert flat({"a": {"b": {"c": 1}, "d": "x"}, "e": 2.5}) == ["a.b.c=1", "a.d=x", "e=2.5"]


@pytest.mark.slow
def test_the_command_measures_and_writes(tmp_path):
    sizes = ["size.prompts=4", "size.group_size=4", "size.new_tokens=12", "size.hidden=16", "size.layers=1"]
    command = [sys.executable, str(ROOT / "experiments" / "benchmark.py"), "workload=long", "batches=2", *sizes]
    out = tmp_path / "x.json"
    done = forked.run([*command, f"out={out}", f"runs={tmp_path}"])
    assert done.returncode == 0, done.stderr
    for phase in ("rollout", "update", "diagnostics", "tracking", "of matmul peak", "peak memory"):
        assert phase in done.stdout
    record = json.loads(out.read_text())
    assert len(record["batches"]) == 2 and record["sequences"] == 16 and 16 <= record["tokens"] <= 192
    phases = ("rollout", "scoring", "old_logprobs", "update", "diagnostics", "tracking")
    parts = [record["batches"][0][f"{phase}_s"] for phase in phases]
    assert 0.8 < sum(parts) / record["batches"][0]["total_s"] <= 1.0 + 1e-6
    assert record["own_forward"] and record["matmul_gflops"] > 0.1
    gpu = [*command[:2], "peer=trl", "workload=gpu"]
    refused = forked.run(gpu, cwd=tmp_path)
    assert refused.returncode == 2 and "workload=gpu" in refused.stderr
