"""Dumps of texts, scored with models."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from builders import perturb, small_policy
from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.objectives import GSPO
from gspo.data.step_record_files import read_record, write_record
from gspo.io.errors import SettingError
from gspo.io.untrusted import Unreadable
from gspo.train.replay import groups_of, replay
from gspo.train.scored_dump import score_dump
from gspo.train.settings import Algorithm, PolicySettings, TrainerSettings

ALGORITHM = Algorithm(objective=GSPO())
SETTINGS = TrainerSettings(aggregation=Aggregation("seq-mean-token-mean"))
TEXTS = [("7+5=", "12", 1.0), ("9-1=", "80", 0.0), ("7+5=", "13", 0.0), ("9-1=", "8", 1.0)]


@pytest.fixture(scope="module")
def policy():
    return small_policy()


def verl_dump(tmp_path: Path) -> Path:
    rows = [
        {"input": prompt, "output": response, "gts": "", "score": score, "step": 7}
        for prompt, response, score in TEXTS
    ]
    (tmp_path / "7.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def trl_dump(tmp_path: Path, **changed: list) -> Path:
    columns = {
        "step": ["7"] * len(TEXTS),
        "prompt": [prompt for prompt, _, _ in TEXTS],
        "completion": [response for _, response, _ in TEXTS],
        "accuracy_reward": [score for _, _, score in TEXTS],
        "format_reward": [0.5, math.nan, 0.5, 0.5],
        "advantage": [0.7, -0.7, -0.7, 0.7],
    }
    (tmp_path / "completions").mkdir()
    file = tmp_path / "completions" / "completions_00007.parquet"
    pd.DataFrame(columns | changed).to_parquet(file)
    return tmp_path


def test_verl_s_texts_are_scored(tmp_path, policy):
    record = score_dump(verl_dump(tmp_path), 7, policy, None)
    assert (record.header.source, record.header.step) == ("verl", 7)
    assert record.groups.tolist() == [0, 0, 1, 1]
    assert record.rewards.tolist() == [1, 0, 0, 1]
    assert record.response_lengths.tolist() == [2, 2, 2, 1]
    prompt, response = record.prompt_and_response(2)
    tokenizer = policy.tokenizer
    assert tokenizer.decode(prompt, skip_special_tokens=True) == "9-1="
    assert tokenizer.decode(response) == "80"
    # the log-probs of the model itself, token by token
    with torch.no_grad():
        token_ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        logp_SV = policy.model(token_ids).logits[0].log_softmax(-1)
    expected = [float(logp_SV[len(prompt) + i - 1, token]) for i, token in enumerate(response)]
    assert record.updates[0].logp[record.tokens_of(2)].tolist() == pytest.approx(expected, abs=1e-4)
    assert np.array_equal(record.updates[0].logp, record.old_logp)
    assert np.isnan(record.engine_logp).all()
    assert any("all ratios are 1" in note for note in record.header.notes)
    assert any("no end-of-sequence token" in note for note in record.header.notes)

    metrics = replay(record, ALGORITHM, SETTINGS, PolicySettings()).metrics
    assert metrics["clip/token_active"] == 0
    assert not any(name.startswith("mismatch/") for name in metrics)
    with pytest.raises(SettingError, match="no advantages"):
        replay(record, ALGORITHM, SETTINGS, PolicySettings(), recorded_advantages=True)
    write_record(tmp_path / "steps" / "step.safetensors", record)
    assert read_record(tmp_path / "steps" / "step.safetensors").header == record.header


def test_a_second_model_is_the_old_policy(tmp_path, policy):
    later = small_policy()
    perturb(later, 0.02)
    record = score_dump(verl_dump(tmp_path), None, later, policy)
    old = score_dump(tmp_path, None, policy, None)
    assert np.array_equal(record.old_logp, old.old_logp)
    log_ratio = record.updates[0].logp - record.old_logp
    assert np.abs(log_ratio).min() > 0
    # GSPO clips a response if its mean log-ratio leaves the range on the side of its advantage
    clipped_tokens = 0
    for row, advantage in enumerate([1, -1, -1, 1]):
        tokens = log_ratio[record.tokens_of(row)]
        ratio = math.exp(tokens.mean())
        is_clipped = ratio > 1 + 4e-4 if advantage > 0 else ratio < 1 - 3e-4
        clipped_tokens += len(tokens) * is_clipped
    metrics = replay(record, ALGORITHM, SETTINGS, PolicySettings()).metrics
    assert metrics["clip/token_active"] == pytest.approx(clipped_tokens / 7)


def test_trl_s_texts_are_scored(tmp_path, policy):
    record = score_dump(trl_dump(tmp_path), 7, policy, None)
    assert record.header.source == "trl"
    # a function that does not apply has NaN
    assert record.rewards.tolist() == [1.5, 0.5, 0, 1.5]
    tokens = [0.7] * 2 + [-0.7] * 2 + [-0.7] * 2 + [0.7]
    assert record.advantages.tolist() == pytest.approx(tokens)
    replay(record, ALGORITHM, SETTINGS, PolicySettings(), recorded_advantages=True)


def test_a_row_of_trl_without_any_reward_leaves_the_columns_without_names(tmp_path, policy):
    folder = trl_dump(tmp_path, accuracy_reward=[1.0, math.nan, 0.0, 1.0])
    record = score_dump(folder, 7, policy, None)
    assert record.header.named_rewards == {}
    assert math.isnan(record.rewards[2]) and record.rewards[0] == 1.5


def test_a_column_of_trl_that_is_no_reward_is_named_and_can_be_left_out(tmp_path, policy):
    """TRL writes the columns of `log_extra` beside the rewards, in the same table."""
    record = score_dump(trl_dump(tmp_path), 7, policy, None)
    assert any("the columns accuracy_reward, format_reward" in n for n in record.header.notes)
    assert record.header.named_rewards["format_reward"] == [0.5, 0.5, 0.0, 0.5]
    assert [[r.reward for r in group] for group in groups_of(record, {})] == [[1.5, 0.5], [0, 1.5]]
    weights = {"accuracy_reward": 1.0, "format_reward": 0.0}
    assert [[r.reward for r in group] for group in groups_of(record, weights)] == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "q", "output": 3, "score": 1.0}, "no text"),
        ({"input": "q", "output": "a", "score": "1"}, "score is no finite number"),
        ({"input": "q", "output": "a", "score": math.nan}, "score is no finite number"),
        ({"input": "q", "output": "a", "score": 10**400}, "score is no finite number"),
        ({"input": "", "output": "", "score": 1.0}, "no row with a prompt and a response"),
    ],
)
def test_wrong_rows_are_refused(tmp_path, policy, row, message):
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(Unreadable, match=message):
        score_dump(tmp_path, 1, policy, None)


def test_a_text_that_is_too_long_is_refused(tmp_path, policy):
    row = {"input": "q", "output": "a" * 100_000, "score": 1.0}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="positions"):
        score_dump(tmp_path, 1, policy, None)


def test_other_dumps_are_not_scored(tmp_path, policy):
    (tmp_path / "completions.jsonl").write_text('{"prompt": ["q"], "completion": ["a"]}\n')
    with pytest.raises(Unreadable, match="ms-swift, which cannot be scored"):
        score_dump(tmp_path, None, policy, None)
