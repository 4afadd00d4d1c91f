"""The cold start: learns, is cached by its settings, is made once also when two want it, survives a
kill.
"""

import fcntl
import hashlib
import json
import multiprocessing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from builders import assert_same_sums, recorded_gradients
from gspo.data.masked import masked_sum
from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.model.chat.prompts import PromptFormat
from gspo.model.loading import load
from gspo.model.policy import Policy
from gspo.model.settings import StandIn, TinyMoE
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.episodes.sampling import play
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Outcome
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.tasks.testbed.guessing import Guessing
from gspo.tasks.testbed.python_tool import PythonTool
from gspo.train import cold_start as module
from gspo.train.cold_start import cold_start, demonstrations
from gspo.train.settings import ColdStartSettings
from refusals import refuses

MODEL = TinyMoE(hidden=16, layers=2, heads=2, experts=4, expert_width=8)
TASK = ChainArithmetic(max_operands=3)
SETTINGS = ColdStartSettings(steps=30, batch_size=16, warmup_steps=5, lr=1e-2)


def make(cache: Path) -> str:
    return str(cold_start(MODEL, TASK, SETTINGS, cache, lambda *_: None))


def mean_logp(policy: Policy, settings: ColdStartSettings) -> float:
    batch = demonstrations(policy, TASK, settings, step=10_000)  # not trained on
    with torch.no_grad():
        return float(
            masked_sum(policy.forward(batch).logp_BT, batch.mask_BT).sum() / batch.mask_BT.sum()
        )


def mean_log_normalizer(folder: Path) -> float:
    """log sum exp(logits), mean over the response tokens of demonstrations that were not trained
    on.
    """
    policy = Policy(*load(str(folder)))
    batch = demonstrations(policy, TASK, SETTINGS, step=10_000)
    with torch.no_grad():
        logits_BSV = policy.model(
            input_ids=batch.tokens_BS, attention_mask=batch.attention_BS.long()
        ).logits
    return float(logits_BSV[:, batch.prompt_width - 1 : -1].logsumexp(-1)[batch.mask_BT].mean())


@pytest.mark.slow
def test_logits_become_as_large_as_asked_for(tmp_path, monkeypatch):
    """With a heavier weight than in use, under which it would take a thousand steps."""
    monkeypatch.setattr(module, "NORMALIZER_WEIGHT", 1.0)
    free = mean_log_normalizer(cold_start(MODEL, TASK, SETTINGS, tmp_path, lambda *_: None))
    drawn = replace(SETTINGS, steps=60, log_normalizer=12.0)
    reached = mean_log_normalizer(cold_start(MODEL, TASK, drawn, tmp_path, lambda *_: None))
    assert abs(reached - 12) < 0.5 * abs(free - 12), (free, reached)


@pytest.mark.slow
def test_it_learns_is_cached_and_depends_on_its_settings(tmp_path):
    reports = []
    folder = cold_start(MODEL, TASK, SETTINGS, tmp_path, lambda *r: reports.append(r))
    assert [r[:2] for r in reports] == [(s, 30) for s in range(1, 31)]
    trained, untrained = Policy(*load(str(folder))), Policy(*MODEL.make())
    assert mean_logp(trained, SETTINGS) > mean_logp(untrained, SETTINGS) + 1
    again = cold_start(
        MODEL, TASK, SETTINGS, tmp_path, lambda *r: pytest.fail("it was there already")
    )
    assert again == folder
    record = json.loads((folder / "cold_start.json").read_text())
    assert record["settings"][2]["steps"] == 30 and record["losses"][0] > record["losses"][-1]
    others = [
        cold_start(
            MODEL, TASK, ColdStartSettings(steps=2, batch_size=4, seed=1), tmp_path, lambda *_: None
        ),
        cold_start(
            MODEL,
            ChainArithmetic(max_operands=4),
            ColdStartSettings(steps=2, batch_size=4),
            tmp_path,
            lambda *_: None,
        ),
    ]
    assert len({folder, *others}) == 3


def test_who_waits_for_another_run_s_cold_start_can_stop_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    waits = []

    def on_wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    folder = module.folder_of(MODEL, TASK, SETTINGS, tmp_path, PromptFormat())
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KeyboardInterrupt):
            cold_start(MODEL, TASK, SETTINGS, tmp_path, lambda *_: None, on_wait=on_wait)
    assert waits[0] == 0 < waits[1] < waits[2]


@pytest.mark.slow
def test_demonstrations_follow_the_run_s_prompts(tmp_path):
    """A model with a chat template is cold-started on what reinforcement learning prompts it with."""
    settings, kinds = ColdStartSettings(steps=1, batch_size=4), {}
    for kind in ("plain", "chat"):
        folder = cold_start(
            Chatty(), TASK, settings, tmp_path, lambda *_: None, prompts=PromptFormat(kind)
        )
        kinds[kind] = json.loads((folder / "cold_start.json").read_text())["losses"], folder
    assert kinds["plain"][1] != kinds["chat"][1] and kinds["plain"][0] != kinds["chat"][0]


class Chatty(TinyMoE):
    """The small model with a chat template."""

    def make(self):
        model, tokenizer = MODEL.make()
        tokenizer.chat_template = "{% for turn in messages %}<{{ turn['content'] }}>{% endfor %}"
        return model, tokenizer


@pytest.mark.slow
def test_two_that_want_it_at_once_make_it_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(make, [tmp_path, tmp_path])
    assert folders[0] == folders[1]
    made = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("log_normalizer", [None, 25.0])
def test_the_micro_batch_does_not_change_what_is_learned(tmp_path, monkeypatch, log_normalizer):
    monkeypatch.setattr(module, "NORMALIZER_WEIGHT", 1.0)
    found = []
    for size in (3, 16):
        settings = ColdStartSettings(
            steps=1, batch_size=16, micro_batch_size=size, log_normalizer=log_normalizer
        )
        with recorded_gradients() as gradients:
            cold_start(MODEL, TASK, settings, tmp_path, lambda *_: None)
        found.append(gradients[0])
    assert_same_sums(*found)


def test_demonstrations_end_and_hold_wrong_answers_at_the_set_rate():
    policy = Policy(*MODEL.make())
    right = []
    for step in range(20):
        batch = demonstrations(
            policy, TASK, ColdStartSettings(batch_size=16, wrong_step_rate=0.3), step
        )
        for i in range(16):
            ids = batch.tokens_BS[i][batch.attention_BS[i]].tolist()
            assert ids[-1] == policy.tokenizer.eos_token_id
            prompt, answer = policy.tokenizer.decode(ids, skip_special_tokens=True).split("=?")
            right.append(answer.split("#")[1] == str(eval(prompt)))
    assert 0.45 < sum(right) / len(right) < 0.75  # (0.7 + 0.49) / 2 = 0.595, 320 draws


TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Told(EnvironmentTask):
    """A demonstrated task that has everything of its own: first messages, tools, a role and what is
    said.
    """

    name: str = "told"
    role: str = "user"
    said: str = "日本 ☃ né ok"
    messages: list = field(
        default_factory=lambda: [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Go?"},
        ]
    )

    def evaluation_sets(self):
        return ["told"]

    def problem(self, seed, split, index):
        return Problem(self.name, index, "What nobody reads.", None)

    def environment(self, problem, position):
        parts = {
            "reset": lambda _, problem: self.messages,
            "step": lambda _, text: Outcome(self.said),
            "role": self.role,
        }
        return type(
            "Teller",
            (Environment,),
            parts | {"tools": ({"type": "function", "function": {"name": "f"}},)},
        )()

    def demonstrated_turns(self, problem, wrong_step_rate, rng):
        return ["ask", self.said, "end"]


def chat_policy() -> Policy:
    model, tokenizer = StandIn(path="Qwen/Qwen3-0.6B").make()
    tokenizer.chat_template = TOOLS
    return Policy(model, tokenizer)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_demonstrated_episode_is_the_one_that_is_played(role):
    policy, task = chat_policy(), Told(role=role)
    batch = demonstrations(policy, task, ColdStartSettings(steps=1, batch_size=2), 0)
    ids = batch.tokens_BS[0][batch.attention_BS[0]].tolist()
    said = task.said if role == "user" else f"<tool_response>\n{task.said}\n</tool_response>"
    assert policy.tokenizer.decode(ids) == (
        "[f]<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nGo?<|im_end|>\n<|im_start|>assistant\n"
        f"ask<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\nend<|im_end|>"
    )
    own = policy.tokenizer.decode(batch.tokens_BS[0][-batch.mask_BT.shape[1] :][batch.mask_BT[0]])
    assert own == "ask<|im_end|>end<|im_end|>"
    [[played]] = play(
        LocalEngine(policy),
        task,
        SamplingRequest([task.problem(0, "train", 0)], 1, Sampling(1.0, 2), (0, "rollout")),
    )
    assert ids[: len(played.prompt_ids)] == played.prompt_ids


def test_a_demonstrated_observation_is_cut_where_a_played_one_is():
    policy, task = chat_policy(), Told(said="☃" * 50, observation_tokens=7)
    batch = demonstrations(policy, task, ColdStartSettings(steps=1, batch_size=1), 0)
    snow = policy.tokenizer("☃" * 50)["input_ids"]
    assert [i for i in batch.tokens_BS[0].tolist() if i in snow] == snow[:7]


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user", "content": "x" * 10_000_000}]], ids=["nothing", "much"]
)
def test_a_demonstration_that_does_not_begin_is_refused_in_words(messages):
    with refuses("cold_start.steps", 1, "problem 0 of task 'told' does not"):
        demonstrations(
            chat_policy(), Told(messages=messages), ColdStartSettings(steps=1, batch_size=1), 0
        )


@pytest.mark.parametrize(
    ("task", "digest"),
    [
        (Guessing(), "f587c9af68d13d45"),
        (PythonTool(), "65828b6e57809c88"),
        (PythonTool(log=290), "05cee4e0a5737429"),
    ],
    ids=str,
)
def test_the_demonstrations_of_the_own_tasks_are_those_that_their_cold_starts_were_made_of(
    task, digest
):
    batch = demonstrations(
        Policy(*MODEL.make()), task, ColdStartSettings(batch_size=16, wrong_step_rate=0.3), 7
    )
    found = hashlib.sha256(batch.tokens_BS.numpy().tobytes() + batch.mask_BT.numpy().tobytes())
    assert found.hexdigest()[:16] == digest


def test_without_a_graded_response_the_reason_is_given(monkeypatch):
    ungraded = Score(None, "sandbox-error", reason="the fork server has died")
    monkeypatch.setattr(ChainArithmetic, "score", lambda self, answers: [ungraded] * len(answers))
    with pytest.raises(RuntimeError, match="could be graded: the fork server has died"):
        module.sampled_reward(Policy(*MODEL.make()), TASK, seed=1)
