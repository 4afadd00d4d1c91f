"""A model of one's own on GSM8K: its defaults, what is said when nothing can be learned, and what the model saw.

The model is a small Qwen3 with random weights and a real byte-level BPE tokenizer with ChatML's template, in a folder
as `transformers` writes it; problems come from the real GSM8K file where it is there.
"""

import re

import pytest
from test_config import options, settings

from gspo.checks import nothing_to_learn
from gspo.monitor import report

HF = ("model=hf", "model.path=some/folder", "task=gsm8k")


def test_a_model_of_ones_own_runs_with_the_papers_clip_range_and_a_real_models_sizes():
    s = settings(*HF)
    assert (s.objective.name, s.objective.clip_low, s.objective.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (s.rollout.prompts_per_step, s.rollout.group_size, s.rollout.max_new_tokens) == (64, 8, 4096)
    assert (s.trainer.minibatches, s.optim.lr, s.rollout.max_prompt_tokens) == (4, 1e-6, 2048)
    assert s.rollout == settings("preset=roll_current", *HF).rollout, "the peer whose sizes they are"
    assert settings("rollout=vllm", *HF).rollout.max_new_tokens == 4096


def test_sizes_stand_below_experiment_preset_and_command_line():
    tiny = settings("experiment=tiny_moe", "model=hf", "model.path=x")
    assert (tiny.rollout.prompts_per_step, tiny.rollout.max_new_tokens, tiny.optim.lr) == (32, 80, 2e-4)
    assert settings("preset=minirl", *HF).rollout.max_new_tokens == 32768
    assert settings(*HF, "rollout.max_new_tokens=300").rollout.max_new_tokens == 300
    assert settings("model=tiny_dense").rollout.max_new_tokens == 80, "a tiny model's"


@pytest.mark.parametrize("experiment", options("experiment"))
def test_a_testbed_brings_its_own_clip_range_which_everything_after_it_overrides(experiment):
    chosen, tiny = settings(f"experiment={experiment}"), settings("objective=gspo_tiny").objective
    assert chosen.objective == tiny and chosen.objective.clip_low == 3.5e-4
    assert settings(f"experiment={experiment}", "preset=paper_gspo").objective.clip_low == 3e-4
    assert settings(f"experiment={experiment}", "preset=paper_gspo", "arm=gspo").objective == tiny
    assert settings(f"experiment={experiment}", "objective=gspo").objective.clip_low == 3e-4


def numbered(count: int, **metrics: float) -> list[dict]:
    return [
        {"step": step} | {name.replace("__", "/"): value for name, value in metrics.items()} for step in range(count)
    ]


NOTHING = {"reward__mean": 0.0, "group__zero_variance": 1.0, "optim__grad_norm": 0.0, "optim__grad_norm_max": 0.0,
           "routing__consistency": 1.0}  # fmt: skip


@pytest.mark.parametrize("count", [3, 40])
def test_the_report_of_a_run_that_could_learn_nothing_says_no(count):
    reward, gradient, routing = report(numbered(count + 1, **NOTHING)).splitlines()
    assert reward.startswith(f"Does the reward keep rising? No: no signal (none of {count} steps had")
    assert gradient.startswith(f"Is the gradient norm in a reasonable range? No: no signal, {count} of {count} steps")
    assert routing.startswith("Does expert activation stay consistent? It says nothing: no signal")


def test_a_gradient_of_the_kl_term_alone_is_no_signal_and_a_few_silent_steps_are_not_the_run():
    by_kl = report(numbered(41, **NOTHING | {"optim__grad_norm": 0.1, "optim__grad_norm_max": 0.1}))
    assert by_kl.count("no signal") == 3
    learning = numbered(41, **NOTHING | {"group__zero_variance": 0.2, "optim__grad_norm": 0.1})
    for row in learning[:10]:
        row["optim/grad_norm"] = 0.0
    assert "no signal" not in report(learning)
    for row in learning[:30]:
        row["optim/grad_norm"] = 0.0
    assert "No: no signal, 29 of 40 steps" in report(learning)
    silent = [row | {"reward/mean": 0.5 + row["step"] % 2} for row in numbered(41, **NOTHING)]
    assert report(silent).count("no signal") == 3, "rewards that differ between problems only: no gradient"


FIRST = {"length/truncated": 0.0, "group/zero_variance": 1.0, "reward/mean": 0.0}


@pytest.mark.parametrize(
    ("metrics", "overrides", "lines"),
    [
        ({"group/zero_variance": 0.5, "reward/mean": 0.2}, [], []),
        (
            {"length/truncated": 0.988, "group/zero_variance": 0.95},
            [],
            ["98.8% .*max_new_tokens=4096.*raise it"],
        ),
        ({"length/truncated": 1.0}, ["rollout.max_new_tokens=80"], ["100.0% .*rollout.max_new_tokens=80", "earned 0"]),
        ({}, [], [r"earned 0.*step_000001.jsonl.*prompt.format=auto: chat.*task=gsm8k"]),
        ({"reward/mean": 1.0}, [], ["earned 1.*harder problems than task=gsm8k"]),
        ({"reward/mean": 0.5}, [], ["rollout.group_size=8.*raise it"]),
        ({"reward/mean": 0.5}, ["advantage=returns"], []),
    ],
)
def test_a_first_step_without_signal_is_said_with_what_to_change(metrics, overrides, lines):
    chosen = settings(*HF, *overrides)
    chosen.prompt_used = "chat"
    found = nothing_to_learn(chosen, FIRST | metrics)
    assert len(found) == len(lines) and all(re.search(line, text) for line, text in zip(lines, found, strict=True)), (
        found
    )
