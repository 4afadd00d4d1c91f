"""Prompts that leave no room for the response in the model's positions: replaced in training, left
out elsewhere, counted and said."""

import json
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import forked
from builders import small_policy
from commands import SMALL, only_run, train
from demonstrator import Demonstrator
from gspo.data.problems import Problem
from gspo.evaluation.evaluate import evaluate, load_evaluation_sets, with_room
from gspo.evaluation.resumable import Folder, evaluate_into, table
from gspo.evaluation.settings import EvaluationSettings
from gspo.model.loading import positions, save
from gspo.model.policy import Policy
from gspo.rollout.engines.local import LocalEngine, Row
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.problem_sampler import REPLACEMENT, Uniform
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.train.cold_start import demonstrations
from gspo.train.settings import ColdStartSettings
from refusals import refuses

POSITIONS, LIMIT = 24, 14  # which leave 10 characters for a prompt
LONG = ChainArithmetic(max_operands=6)


def longrope(vocab_size: int, original_positions: int) -> Phi3Config:
    """The configuration of a small model whose longer rows change a whole batch."""
    rotation = {"rope_type": "longrope", "rope_theta": 1e4}
    rotation |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return Phi3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=original_positions,
        rope_parameters=rotation,
        pad_token_id=0,
    )


def test_longrope_is_bound_by_the_length_at_which_it_changes_a_whole_batch():
    config = longrope(40, original_positions=8)
    torch.manual_seed(0)
    assert positions(config) == 8
    model = AutoModelForCausalLM.from_config(config)
    short, long = torch.arange(6), torch.arange(12)

    def logits_beside(length: int) -> torch.Tensor:
        rows = torch.zeros(2, length, dtype=torch.long)
        rows[0, :6] = short
        rows[1] = long[:length]
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, 6:] = 0
        return model(input_ids=rows, attention_mask=mask).logits[0, :6]

    torch.testing.assert_close(logits_beside(6), logits_beside(8))
    change = (logits_beside(8) - logits_beside(9)).abs().max()
    assert change > 1e-4, "a neighbour of nine tokens changes the short row"


def short_model(family: str) -> Policy:
    tokenizer = small_policy().tokenizer
    ends = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1}
    ends["eos_token_id"] = tokenizer.eos_token_id
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=POSITIONS, **ends)
        return Policy(GPT2LMHeadModel(config), tokenizer)
    if family == "gpt_neo":
        layers = {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
        config = GPTNeoConfig(hidden_size=16, max_position_embeddings=POSITIONS, **layers, **ends)
        return Policy(AutoModelForCausalLM.from_config(config), tokenizer)
    if family == "phi3":
        config = longrope(len(tokenizer), original_positions=POSITIONS)
        return Policy(AutoModelForCausalLM.from_config(config), tokenizer)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(**sizes, intermediate_size=16, max_position_embeddings=POSITIONS, **ends)
    return Policy(Qwen2ForCausalLM(config), tokenizer)


@pytest.mark.parametrize(
    "options", [{}, {"token_budget": 5, "in_flight": 12}, {"staleness": 1}, {"query_set": 32}]
)
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_training_problems_that_do_not_fit_are_replaced_and_counted(family, options):
    rollout = RolloutSettings(prompts_per_step=8, group_size=2, max_new_tokens=LIMIT, **options)
    source, counted = make_source(LocalEngine(short_model(family)), LONG, rollout, Uniform(), 1), 0
    for step in (1, 2):
        taken = source.next(step)
        assert all(len(r.prompt_ids) <= POSITIONS - LIMIT for r in taken.responses)
        assert any(r.problem.index >= REPLACEMENT for r in taken.responses)
        counted += taken.filtered["prompt_too_long"]
        source.update(step)
    assert counted > 0
    source.close()


def test_the_smaller_of_the_users_limit_and_the_room_holds():
    for wanted, limit in ((None, 10), (7, 7), (10, 10), (20, 10)):
        rollout = RolloutSettings(
            max_new_tokens=LIMIT - 4, extend={5: LIMIT}, max_prompt_tokens=wanted
        )
        source = make_source(LocalEngine(short_model("gpt2")), LONG, rollout, Uniform(), 1)
        assert source.problems.max_prompt_tokens == limit, (
            "the longest response of the whole run counts"
        )
    unbounded = LocalEngine(short_model("gpt2"))
    unbounded.policy.model.config.max_position_embeddings = None
    assert unbounded.fits(Problem("math", 0, "1" * 999, ""), 999)


def test_where_no_prompt_fits_one_line_says_so():
    rollout = RolloutSettings(prompts_per_step=8, group_size=2, max_new_tokens=POSITIONS - 2)
    source = make_source(LocalEngine(short_model("gpt2")), LONG, rollout, Uniform(), 1)
    problem = "leave 2 of 24 positions for a prompt, and 1000 problems of task=math"
    with refuses("rollout.max_prompt_tokens", 2, problem):
        source.check(0)


def test_an_engine_refuses_what_does_not_fit():
    engine = LocalEngine(short_model("gpt2"))
    fits, does_not = Problem("math", 1, "1+2+3+4=??", ""), Problem("math", 2, "1+2+3+4+5=?", "")
    assert engine.fits(fits, LIMIT) and not engine.fits(does_not, LIMIT)
    (group,) = engine.generate(SamplingRequest([fits], 4, Sampling(1.0, LIMIT), (1,)))
    assert max(len(r.prompt_ids) + len(r.token_ids) for r in group) == POSITIONS, (
        "to the last position"
    )
    message = r"problem 2 of task 'math': its prompt of 11 tokens and up to 14 .* exceed the 24"
    with pytest.raises(ValueError, match=message):
        engine.generate(SamplingRequest([does_not], 4, Sampling(1.0, LIMIT), (1,)))


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neo"])
def test_a_row_that_ended_at_the_last_position_disturbs_no_other(family):
    """One of 20 rows begins at position 20 and ends at the last one. It is fed on until it is
    dropped, because few rows have ended. The other rows are those of a batch without it.
    """
    policy = short_model(family)
    policy.network = None
    policy.stop_ids = set()

    def tokens_of_short_rows(long_rows: int) -> list[list[int]]:
        rows = []
        for i in range(20):
            prefix = 20 if i < long_rows else 4
            problem = Problem("math", i, "1+1=?", "")
            rows.append(Row(problem, 0, [5 + i] * prefix, done=0, limit=POSITIONS - prefix))
        request = SamplingRequest([row.problem for row in rows], 1, Sampling(1.0, 20), (1,))
        LocalEngine(policy).converse(rows, 1, request, lambda rows: [])
        assert all(len(row.token_ids) == row.limit for row in rows)
        return [row.token_ids for row in rows[1:]]

    assert tokens_of_short_rows(1) == tokens_of_short_rows(0)


def test_a_cold_start_refuses_demonstrations_that_do_not_fit():
    with refuses("cold_start.steps", 5, "tokens exceeds the model's 24"):
        demonstrations(short_model("qwen2"), LONG, ColdStartSettings(steps=5), 0)


def test_held_out_problems_that_do_not_fit_are_left_out_and_counted():
    engine, settings = (
        LocalEngine(short_model("gpt2")),
        EvaluationSettings(problems=20, samples=2, sets=["rated"]),
    )
    metrics, groups = evaluate(engine, LONG, settings, LIMIT, 0)
    assert 0 < len(groups) < 20 and metrics["eval/rated/prompt_too_long"] == 20 - len(groups)
    (whole,) = load_evaluation_sets(LONG, ["rated"], 20)
    assert [group[0].problem for group in groups] == [
        p for p in whole.problems if len(p.prompt) <= 10
    ]
    with pytest.raises(
        ValueError,
        match="22 response tokens leave no room for any prompt of the set rated in 24 pos",
    ):
        with_room(whole, engine, 22)


def test_an_evaluation_with_left_out_problems_goes_on_after_a_stop(tmp_path):
    class Short(Demonstrator):
        def fits(self, problem, new_tokens):
            return len(problem.prompt) <= 10

    def run(path):
        engine = Short(LONG, batch_rows=8)
        sets = [with_room(s, engine, 14) for s in load_evaluation_sets(LONG, ["rated"], 20)]
        results = evaluate_into(
            Folder(path, {}),
            engine,
            sets,
            [s.request(4, Sampling(), step=0) for s in sets],
            on_progress=lambda *what: None,
        )
        return results, (path / "responses" / "rated.jsonl").read_bytes()

    results, whole = run(tmp_path / "whole")
    left_out = results["rated"]["prompt_too_long"]
    assert 0 < left_out < 20 and results["rated"]["problems"] == 20 - left_out
    assert f"rated: {left_out} problems left out, whose prompt and response exceed" in table(
        results, 4
    )
    Folder(tmp_path / "cut", {})
    (tmp_path / "cut" / "responses" / "rated.jsonl").write_bytes(whole[: 2 * len(whole) // 3])
    assert run(tmp_path / "cut") == (results, whole)


@pytest.mark.slow
def test_whole_runs_on_a_model_with_few_positions(tmp_path):
    """Train, evaluate, look at samples: what does not fit is said once in each."""
    policy = short_model("gpt2")
    save(policy.model, policy.tokenizer, tmp_path / "gpt2")
    small = [o for o in SMALL if not o.startswith(("model.", "rollout.max_new", "cold_start"))]
    small += [
        "steps=3",
        "evaluation.sets=[math_easy,rated]",
        "evaluation.problems=20",
        "cold_start.steps=0",
        "model=hf",
        f"model.path={tmp_path / 'gpt2'}",
    ]
    done = train(tmp_path, *small, "rollout.max_new_tokens=14")
    assert done.returncode == 0, done.stderr[-2000:]
    said = [
        line
        for line in done.stderr.splitlines()
        if "too long for 14 response tokens in 24 positions" in line
    ]
    assert sum("filter/prompt_too_long" in line for line in said) == 1
    assert sum("eval/rated/prompt_too_long" in line for line in said) == 1
    run = only_run(tmp_path)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (
        sum(row["filter/prompt_too_long"] for row in rows[1:]) > 0
        and rows[0]["eval/rated/prompt_too_long"] > 0
    )
    for command, options, words in (
        (
            "evaluate",
            ["sets=[math_easy,rated]", "problems=20", "k=2"],
            "problems left out, whose prompt and response exceed",
        ),
        (
            "sample",
            ["set=rated", "problems=20", "samples=1"],
            "problems left out: prompt and response exceed",
        ),
    ):
        call = [sys.executable, "-P", "-m", "gspo", command, f"run={run}", *options]
        done = forked.run(call, cwd=tmp_path)
        assert done.returncode == 0 and words in done.stdout, done.stderr[-2000:]
    none = train(tmp_path, *small, "rollout.max_new_tokens=22", "study=none")
    assert none.returncode == 2 and "leave 2 of 24 positions for a prompt" in none.stderr
    hard = train(
        tmp_path, *small, "rollout.max_new_tokens=14", "evaluation.sets=[math_hard]", "study=none"
    )
    assert (
        hard.returncode == 2
        and "no room for any prompt of the set math_hard in 24 positions" in hard.stderr
    )
    assert none.stderr.count("\n") == hard.stderr.count("\n") == 1
    assert not list((tmp_path / "runs" / "none").rglob("settings.yaml"))
