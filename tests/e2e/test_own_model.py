"""A model of one's own on GSM8K: its defaults, what is said when nothing can be learned, and what
the model saw.

The model is a small Qwen3 with random weights and a real byte-level BPE tokenizer with ChatML's
template, in a folder as `transformers` writes it; problems come from the real GSM8K file where it
is there.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import forked
from commands import environment, train
from composing import options, settings
from gspo.config.remarks import nothing_to_learn
from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.model.chat.prompts import PromptFormat
from gspo.model.loading import save
from gspo.model.policy import Policy
from gspo.model.settings import HFModel
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.tracking.monitor import stability_report
from gspo.tracking.tracker import rollout_row

ROOT = Path(__file__).parents[2]
GSM8K = Path(os.environ.get("GSPO_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"
CHATML = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{{ turn['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HF = ("model=hf", "model.path=some/folder", "task=gsm8k")


def test_a_model_of_ones_own_runs_with_the_papers_clip_range_and_a_real_models_sizes():
    s = settings(*HF)
    assert (s.objective.name, s.objective.clip_low, s.objective.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (s.rollout.prompts_per_step, s.rollout.group_size, s.rollout.max_new_tokens) == (
        64,
        8,
        4096,
    )
    assert (s.trainer.minibatches, s.optim.lr, s.rollout.max_prompt_tokens) == (4, 1e-6, 2048)
    assert s.rollout == settings("preset=roll_current", *HF).rollout, (
        "the peer whose sizes they are"
    )
    assert settings("rollout=vllm", *HF).rollout.max_new_tokens == 4096


@pytest.mark.slow
def test_sizes_stand_below_experiment_preset_and_command_line():
    tiny = settings("experiment=tiny_moe", "model=hf", "model.path=x")
    assert (tiny.rollout.prompts_per_step, tiny.rollout.max_new_tokens, tiny.optim.lr) == (
        32,
        80,
        2e-4,
    )
    assert settings("preset=minirl", *HF).rollout.max_new_tokens == 32768
    assert settings(*HF, "rollout.max_new_tokens=300").rollout.max_new_tokens == 300
    assert settings("model=tiny_dense").rollout.max_new_tokens == 80, "a tiny model's"


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment", [name for name in options("experiment") if name.endswith("_moe")]
)
def test_a_testbed_brings_its_own_clip_range_which_everything_after_it_overrides(experiment):
    chosen, tiny = settings(f"experiment={experiment}"), settings("objective=gspo_tiny").objective
    assert chosen.objective == tiny and chosen.objective.clip_low == 3.5e-4
    assert settings(f"experiment={experiment}", "preset=paper_gspo").objective.clip_low == 3e-4
    assert settings(f"experiment={experiment}", "preset=paper_gspo", "arm=gspo").objective == tiny
    assert settings(f"experiment={experiment}", "objective=gspo").objective.clip_low == 3e-4


def numbered(count: int, **metrics: float) -> list[dict]:
    return [
        {"step": step} | {name.replace("__", "/"): value for name, value in metrics.items()}
        for step in range(count)
    ]


NOTHING = {"reward__mean": 0.0, "group__zero_variance": 1.0, "optim__grad_norm": 0.0, "optim__grad_norm_max": 0.0,
           "routing__consistency": 1.0}  # fmt: skip


@pytest.mark.parametrize("count", [3, 40])
def test_the_report_of_a_run_that_could_learn_nothing_says_no(count):
    reward, gradient, routing = stability_report(numbered(count + 1, **NOTHING)).splitlines()
    assert reward.startswith(
        f"Does the reward keep rising? No: no signal (none of {count} steps had"
    )
    assert gradient.startswith(
        f"Is the gradient norm in a reasonable range? No: no signal, {count} of {count} steps"
    )
    assert routing.startswith("Does expert activation stay consistent? It says nothing: no signal")


def test_a_gradient_of_the_kl_term_alone_is_no_signal_and_a_few_silent_steps_are_not_the_run():
    by_kl = stability_report(
        numbered(41, **NOTHING | {"optim__grad_norm": 0.1, "optim__grad_norm_max": 0.1})
    )
    assert by_kl.count("no signal") == 3
    learning = numbered(41, **NOTHING | {"group__zero_variance": 0.2, "optim__grad_norm": 0.1})
    for row in learning[:10]:
        row["optim/grad_norm"] = 0.0
    assert "no signal" not in stability_report(learning)
    for row in learning[:30]:
        row["optim/grad_norm"] = 0.0
    assert "No: no signal, 29 of 40 steps" in stability_report(learning)
    silent = [row | {"reward/mean": 0.5 + row["step"] % 2} for row in numbered(41, **NOTHING)]
    assert stability_report(silent).count("no signal") == 3, (
        "rewards that differ between problems only: no gradient"
    )


FIRST = {"length/truncated": 0.0, "group/zero_variance": 1.0, "reward/mean": 0.0}


@pytest.mark.parametrize(
    ("metrics", "is_equal", "overrides", "lines"),
    [
        ({"group/zero_variance": 0.5, "reward/mean": 0.2}, False, [], []),
        (
            {"length/truncated": 0.988, "group/zero_variance": 0.95, "reward/mean": 0.01},
            False,
            [],
            ["98.8% .*4096 tokens \(rollout.max_new_tokens.*raise the limit"],
        ),
        (
            {"length/truncated": 1.0},
            True,
            ["rollout.max_new_tokens=80"],
            ["100.0% .*80 tokens \(rollout.max_new_tokens", "earned 0"],
        ),
        ({}, True, [], [r"earned 0.*step_000001.jsonl.*prompt.format=auto: chat.*task=gsm8k"]),
        ({"reward/mean": 1.0}, True, [], ["earned 1.*harder problems than task=gsm8k"]),
        (
            {"reward/mean": 0.5},
            True,
            ["advantage=returns"],
            ["earned 0.5, so there is nothing to learn"],
        ),
        ({"reward/mean": 0.5}, False, [], ["rollout.group_size=8.*raise it"]),
        ({"reward/mean": 0.5}, False, ["advantage=returns"], []),
    ],
)
def test_a_first_step_without_signal_is_said_with_what_to_change(
    metrics, is_equal, overrides, lines
):
    chosen = settings(*HF, *overrides)
    chosen.prompt_used = "chat"
    measured = FIRST | metrics
    mean = measured["reward/mean"]
    rewards = [mean] * 2 if is_equal else [mean / 2, mean * 1.5]
    responses = [
        SimpleNamespace(reward=reward, score=Score(reward, "partial"), turns=[])
        for reward in rewards
    ]
    found = nothing_to_learn(chosen, measured, responses, step=1)
    assert len(found) == len(lines) and all(
        re.search(line, text) for line, text in zip(lines, found, strict=True)
    ), found


# a real folder, in real processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen3 of 30,000 parameters with a byte-level BPE and ChatML, and four problems of
    GSM8K's format.
    """
    folder = tmp_path_factory.mktemp("own")
    questions = [
        f"Tom has {n} apples and buys {n + 1} more. How many apples does he have?" for n in range(4)
    ]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        questions, vocab_size=400, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML,
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, intermediate_size=32, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    save(Qwen3ForCausalLM(config), tokenizer, folder / "model")
    (folder / "gsm8k").mkdir()
    lines = [
        json.dumps({"question": q, "answer": f"So.\n#### {2 * n + 1}"})
        for n, q in enumerate(questions)
    ]
    (folder / "gsm8k" / "train.jsonl").write_text("\n".join(lines[1:]) + "\n")
    (folder / "gsm8k" / "test.jsonl").write_text(lines[0] + "\n")
    return folder


SMALL = ["model=hf", "model.path=model", "task=gsm8k", "steps=1", "study=own", "rollout.prompts_per_step=2",
         "rollout.group_size=2", "trainer.minibatches=2", "rollout.max_new_tokens=8", "evaluation.samples=1",
         "tracking.wandb=disabled", "threads=1"]  # fmt: skip


def test_a_response_keeps_the_prompt_as_the_policy_saw_it(folder):
    model, tokenizer = HFModel(path=str(folder / "model")).make()
    for prompts, text in (
        (PromptFormat(), "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"),
        (
            PromptFormat(system="Think."),
            "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (PromptFormat("plain"), "1+1?"),
    ):
        policy = Policy(model, tokenizer, prompts=prompts)
        assert policy.prompt_format_used == ("plain" if prompts.format == "plain" else "chat")
        engine, seed = LocalEngine(policy), (1, "rollout")
        ((response,),) = engine.generate(
            SamplingRequest([Problem("gsm8k", 0, "1+1?", "2")], 1, Sampling(1.0, 8, budget=3), seed)
        )
        assert response.rendered == text and response.finish_reason == "budget"
        (longer,) = engine.extend([response], SamplingRequest([], 1, Sampling(1.0, 8), seed))
        assert longer.rendered == text, "also where a response is continued"
        longer = longer.scored(Score(0.0, "truncated"))
        assert rollout_row(longer)["rendered"] == text and rollout_row(longer)["prompt"] == "1+1?"


@pytest.mark.slow
def test_what_the_model_saw_and_that_nothing_can_be_learned(folder):
    """Train one step, sample, evaluate: the run says chat, shows the rendered prompt, and why it
    cannot learn.
    """
    done = train(folder, *SMALL, "task.path=gsm8k")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "100.0% of the responses were cut off at 8 tokens (rollout.max_new_tokens, " in done.stderr
    )
    assert (
        "step 1: every response earned 0" in done.stderr
        and "prompt.format=auto: chat" in done.stderr
    )
    assert (
        "keep rising? No: no signal" in done.stdout
        and "reasonable range? No: no signal" in done.stdout
    )
    (run,) = (folder / "runs" / "own").glob("gspo-seed1-*")
    recorded = yaml.safe_load((run / "settings.yaml").read_text())
    assert (recorded["prompt"]["format"], recorded["prompt_used"]) == ("auto", "chat")
    assert recorded["objective"]["clip_low"] == 3e-4
    row = first_row(run)
    assert (
        row["rendered"] == f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "&lt;|im_start|&gt;user" in (run / "report.html").read_text()
    again = train(folder, f"resume={run}", "steps=2")
    assert again.returncode == 0 and "step 1:" not in again.stderr, again.stderr[-2000:]
    look = run_script(folder, "sample", f"run={run}", "problems=1", "samples=1")
    assert (
        "prompt.format=auto: chat" in look.stdout and "<|im_start|>user\nTom has" in look.stdout
    ), look.stderr
    scored = run_script(folder, "evaluate", "model=hf", "model.path=model", "benchmark=gsm8k", "data=.", "k=1",
                        "max_new_tokens=9")  # fmt: skip
    assert scored.returncode == 0, scored.stderr[-2000:]
    assert "warning: gsm8k: 100.0% of the responses were cut off at 9 tokens" in scored.stderr
    (result,) = (folder / "runs" / "evaluations").glob("model-*/result.json")
    kept = json.loads(result.read_text())["settings"]
    assert kept["max_new_tokens"] == {"gsm8k": 9} and kept["prompt"]["used"] == "chat"
    assert not (folder / "evaluations").exists()
    long = run_script(folder, "evaluate", f"run={run}", "k=1")
    assert long.returncode == 0, long.stderr[-2000:]
    assert re.search(
        r"gsm8k: up to \d+ response tokens in place of 2048: \d+ positions", long.stdout
    ), "its own, not 8"


def first_row(run: Path) -> dict:
    with open(run / "rollouts" / "step_000001.jsonl") as file:
        return json.loads(file.readline())


def run_script(cwd: Path, name: str, *arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-P", "-m", "gspo", name, *arguments]
    return forked.run(line, cwd=cwd, env=environment())


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K's files are not here")
def test_plain_prompts_are_said_too(folder):
    done = train(folder, *SMALL, f"task.path={GSM8K}", "prompt.format=plain", "study=plain")
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = (folder / "runs" / "plain").glob("gspo-seed1-*")
    assert yaml.safe_load((run / "settings.yaml").read_text())["prompt_used"] == "plain"
    row = first_row(run)
    assert row["rendered"] == row["prompt"] and "prompt.format=plain: plain" in done.stderr
