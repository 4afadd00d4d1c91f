"""Dumps of NeMo-RL and prime-rl as step records, and the clip shares that replays compute of them.

The rows are transcribed by hand from the writers' sources (gspo.data.foreign_records names them):
neither framework can be installed here.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.corrections import Correction
from gspo.algorithm.objectives import GRPO, GSPO
from gspo.data.foreign_dumps import find_dump
from gspo.data.foreign_records import read_dump
from gspo.data.step_record import StepRecord
from gspo.data.step_record_files import read_record, write_record
from gspo.io.errors import SettingError
from gspo.io.untrusted import Unreadable
from gspo.train.replay import replay
from gspo.train.settings import Algorithm, PolicySettings, TrainerSettings

# prompt, log pi - log mu of the response's tokens, reward
RESPONSES = [
    ([5, 6], [0.3, -0.3, 0.1, -0.1], 1.0),
    ([7], [0.001, 0.001, 0.001], 1.0),
    ([5, 6], [-0.01, -0.01], 0.0),
    ([7], [0.0003], 0.0),
]
ENGINE_LOGP = -1.0
WIDTH = 8  # to which NeMo-RL pads all rows


def nemo_row(prompt: list[int], log_ratios: list[float], reward: float, index: int) -> dict:
    """Return a line of train_data_step: each value is a list with the element of one row."""
    pad = WIDTH - len(prompt) - len(log_ratios)
    zeros = [0.0] * len(prompt)
    padding = [0.0] * pad
    advantage = 1.0 if reward else -1.0
    return {
        "content": ["prompt and response"],
        "rewards": [reward],
        "input_lengths": [WIDTH - pad],
        "token_ids": [prompt + [9] * len(log_ratios) + [0] * pad],
        "token_loss_mask": [[0] * len(prompt) + [1] * len(log_ratios) + [0] * pad],
        "sample_loss_mask": [1.0],
        "advantages": [[advantage] * WIDTH],
        "generation_logprobs": [zeros + [ENGINE_LOGP] * len(log_ratios) + padding],
        # the trainer computes log-probs of the prompt too
        "prev_logprobs": [
            [0.0] + [-3.0] * (len(prompt) - 1) + [ENGINE_LOGP + x for x in log_ratios] + padding
        ],
        "idx": index,
    }


def prime_row(prompt: list[int], log_ratios: list[float], reward: float, index: int) -> dict:
    """Return a line of a token export: each list is over the tokens of a sequence."""
    length = len(prompt) + len(log_ratios)
    mask = [False] * len(prompt) + [True] * len(log_ratios)
    advantage = 0.5 if reward else -0.5
    return {
        "schema_version": 1,
        "step": 4,
        "export_step": 4,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": index,
        "export_sequence_idx": index,
        "run_id": None,
        "env_name": "reverse-text",
        "token_ids": prompt + [9] * len(log_ratios),
        "position_ids": list(range(length)),
        "loss_mask": mask,
        "advantages": [advantage] * length,
        "losses": [{"rl": {"advantage": advantage, "mask": trained}} for trained in mask],
        "rewards": [reward] * length,
        "inference_logprobs": [0.0] * len(prompt) + [ENGINE_LOGP] * len(log_ratios),
        # the first token's is log 1/V, by shift_tensor_right
        "trainer_logprobs": [-11.9]
        + [-3.0] * (len(prompt) - 1)
        + [ENGINE_LOGP + x for x in log_ratios],
        "entropy": [11.9] + [0.25] * (length - 1),
        "importance_ratio": [1.0] * length,
        "is_masked": [None] * length,
    }


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def nemo_rows() -> list[dict]:
    return [nemo_row(*response, index) for index, response in enumerate(RESPONSES)]


def prime_rows() -> list[dict]:
    return [prime_row(*response, index) for index, response in enumerate(RESPONSES)]


def nemo_dump(tmp_path: Path, rows: list[dict] | None = None) -> Path:
    return write(tmp_path / "exp_001" / "train_data_step7.jsonl", rows or nemo_rows())


def prime_dump(tmp_path: Path, rows: list[dict] | None = None) -> Path:
    folder = tmp_path / "token_exports" / "step_4"
    rows = rows or prime_rows()
    write(folder / "rank_0.jsonl", rows[:3])
    write(folder / "rank_1.jsonl", rows[3:])
    (folder / "STABLE").touch()
    return folder


def metrics(record: StepRecord, objective: GSPO | GRPO, **options: bool) -> dict[str, float]:
    algorithm = Algorithm(objective=objective)
    settings = TrainerSettings(aggregation=Aggregation("seq-mean-token-mean"))
    return replay(record, algorithm, settings, PolicySettings(), **options).metrics


@pytest.mark.parametrize("dump", [nemo_dump, prime_dump])
@pytest.mark.parametrize("recorded_advantages", [False, True])
def test_clip_shares_by_hand(tmp_path, dump, recorded_advantages):
    """Ten tokens. GSPO: mean log-ratios 0, 0.001, -0.01, 0.0003 against 1 - 3e-4 and 1 + 4e-4.

    The second, with a positive advantage, is above the range (3 tokens). The third, with a negative
    one, is below it (2 tokens). GRPO with 0.2 and 0.27: e^0.3 = 1.35 is above the range with a
    positive advantage. e^-0.3 = 0.74 lies outside too, but keeps its gradient."""
    record = read_dump(dump(tmp_path), None)
    of_gspo = metrics(record, GSPO(), recorded_advantages=recorded_advantages)
    assert of_gspo["clip/token_active"] == pytest.approx(0.5)
    assert of_gspo["clip/token_outside"] == pytest.approx(0.5)
    assert of_gspo["clip/sequence_active"] == pytest.approx(0.5)
    of_grpo = metrics(record, GRPO(), recorded_advantages=recorded_advantages)
    assert of_grpo["clip/token_active"] == pytest.approx(0.1)
    assert of_grpo["clip/token_outside"] == pytest.approx(0.2)
    # trainer against engine: from the update's log-probs, because the old policy is the engine
    assert of_grpo["mismatch/logp_abs"] == pytest.approx(0.8233 / 10, abs=1e-6)
    assert of_grpo["mismatch/logp_abs_max"] == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize(("dump", "source"), [(nemo_dump, "nemo-rl"), (prime_dump, "prime-rl")])
def test_the_record_of_a_dump(tmp_path, dump, source):
    record = read_dump(dump(tmp_path), None)
    assert record.header.source == source
    assert record.header.step == (7 if source == "nemo-rl" else 4)
    assert record.header.complete
    # rows 0 and 2 have the first prompt, rows 1 and 3 the second
    assert record.groups.tolist() == [0, 0, 1, 1]
    assert record.samples.tolist() == [0, 1, 0, 1]
    assert record.rewards.tolist() == [1, 0, 1, 0]
    assert record.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert record.response_lengths.tolist() == [4, 2, 3, 1]
    prompt, response = record.prompt_and_response(2)
    assert prompt.tolist() == [7]
    assert response.tolist() == [9, 9, 9]
    (update,) = record.updates
    assert update.rows.tolist() == [0, 1, 2, 3]
    assert update.weight is None
    assert update.clipped is None
    log_ratios = [0.3, -0.3, 0.1, -0.1, -0.01, -0.01, 0.001, 0.001, 0.001, 0.0003]
    assert (update.logp - record.old_logp).tolist() == pytest.approx(log_ratios, abs=1e-6)
    assert record.engine_logp.tolist() == [ENGINE_LOGP] * 10
    assert record.trained.all()
    assert record.sampled.all()
    if source == "prime-rl":
        assert update.entropy.tolist() == [0.25] * 10
        assert record.advantages.tolist() == [0.5] * 4 + [-0.5] * 2 + [0.5] * 3 + [-0.5]
        assert record.header.tasks == ["reverse-text"] * 4
    else:
        assert update.entropy is None
        assert "take their place" in record.header.notes[0]


@pytest.mark.parametrize("dump", [nemo_dump, prime_dump])
def test_the_record_of_a_dump_can_be_written_and_read(tmp_path, dump):
    record = read_dump(dump(tmp_path), None)
    write_record(tmp_path / "steps" / "step.safetensors", record)
    copy = read_record(tmp_path / "steps" / "step.safetensors")
    assert copy.header == record.header
    assert np.array_equal(copy.updates[0].logp, record.updates[0].logp)
    assert copy.updates[0].weight is None


def test_tokens_of_the_environment_are_in_no_loss(tmp_path):
    """A token of the environment stands between two turns, and another one ends the row."""
    rows = nemo_rows()
    rows[0]["token_loss_mask"] = [[0, 0, 1, 0, 1, 0, 0, 0]]
    record = read_dump(nemo_dump(tmp_path, rows), 7)
    assert record.response_lengths.tolist() == [3, 2, 3, 1]
    assert record.sampled[:3].tolist() == [True, False, True]
    assert record.trained[:3].tolist() == [True, False, True]
    turns = [["policy", 1, 0.0], ["environment", 1, 0.0], ["policy", 1, 1.0]]
    assert record.header.turns == {"0": turns}
    # GRPO: of eight trained tokens the one with 0.3 is clipped
    assert metrics(record, GRPO())["clip/token_active"] == pytest.approx(1 / 8)


def test_a_row_outside_nemo_s_loss_counts_for_its_group_alone(tmp_path):
    rows = nemo_rows()
    rows[0]["sample_loss_mask"] = [0.0]
    record = read_dump(nemo_dump(tmp_path, rows), None)
    assert record.updates[0].rows.tolist() == [1, 2, 3]
    assert len(record) == 4
    assert not record.trained[:4].any()
    assert "1 of 4 rows are outside the loss" in record.header.notes[1]
    # GSPO: five of six tokens
    assert metrics(record, GSPO())["clip/token_active"] == pytest.approx(5 / 6)


def test_rows_of_nemo_s_dynamic_sampling(tmp_path):
    """The rewards of all sampled rows are more than the rows, and stand beside other rows."""
    rows = nemo_rows()
    for row, (_, _, reward) in zip(rows, RESPONSES, strict=True):
        row["rewards"] = [-8.0]
        row["filtered_rewards"] = [reward]
    rows.append({key: [] for key in rows[0]} | {"rewards": [1.0], "idx": 4})
    record = read_dump(nemo_dump(tmp_path, rows), None)
    assert record.rewards.tolist() == [1, 0, 1, 0]
    assert record.header.notes[1] == "1 of the dump's lines have no trained token and are left out."


def test_tokens_of_prime_rl_s_other_losses_are_left_out(tmp_path):
    """Token 0.3 is in the cross entropy alone. A row that is in it alone is no row."""
    rows = prime_rows()
    rows[0]["losses"][2] = {"ce": {"advantage": 1.0, "mask": True}}
    rows[3]["losses"] = [{"ce": {"advantage": 1.0, "mask": True}} for _ in range(2)]
    record = read_dump(prime_dump(tmp_path, rows), None)
    assert record.response_lengths.tolist() == [3, 3, 2]
    assert record.prompt_lengths.tolist() == [3, 1, 2]
    assert any("1 of the dump's lines have no trained token" in x for x in record.header.notes)
    # the longer prompt makes a group of its own, and so does the row that lost its neighbour
    assert any("3 of 3 groups have a single row" in note for note in record.header.notes)

    # before `losses` there were weights, null for 1
    rows = prime_rows()
    for row in rows:
        del row["losses"]
        row["rl_weights"] = [None] * len(row["token_ids"])
    rows[3]["rl_weights"] = [0.0, 0.0]
    assert len(read_dump(prime_dump(tmp_path, rows), None)) == 3


def test_prime_rl_s_rewards_may_be_unknown(tmp_path):
    rows = prime_rows()
    for row in rows:
        row["rewards"] = [None] * len(row["token_ids"])
    record = read_dump(prime_dump(tmp_path, rows), None)
    assert np.isnan(record.rewards).all()
    with pytest.raises(SettingError, match="needs rewards"):
        metrics(record, GSPO())
    assert metrics(record, GSPO(), recorded_advantages=True)["clip/token_active"] == 0.5


def test_a_correction_of_the_mismatch_is_refused(tmp_path):
    record = read_dump(nemo_dump(tmp_path), None)
    algorithm = Algorithm(correction=Correction(name="truncated"))
    with pytest.raises(SettingError, match="does not tell the old policy from the engine"):
        replay(record, algorithm, TrainerSettings(), PolicySettings())


def test_an_unfinished_export_is_said(tmp_path):
    folder = prime_dump(tmp_path)
    (folder / "STABLE").unlink()
    record = read_dump(folder / "rank_0.jsonl", None)
    assert not record.header.complete
    assert "STABLE" in record.header.error
    assert len(record) == 3
    assert any("1 files of other ranks were not read" in note for note in record.header.notes)


def test_the_step_chooses_in_a_folder(tmp_path):
    rows = nemo_rows()
    for step in (2, 9, 14):
        write(tmp_path / "logs" / f"train_data_step{step}.jsonl", rows)
    assert read_dump(tmp_path / "logs", 9).header.step == 9
    with pytest.raises(Unreadable, match="no step 8; the nearest steps are 9, 2, 14"):
        read_dump(tmp_path / "logs", 8)
    with pytest.raises(Unreadable, match=r"3 steps \(2, 9, 14, ...\): set step=N"):
        read_dump(tmp_path / "logs", None)
    with pytest.raises(Unreadable, match="holds step 2, not step 3"):
        read_dump(tmp_path / "logs" / "train_data_step2.jsonl", 3)
    prime_dump(tmp_path)
    for path in (tmp_path, tmp_path / "token_exports", tmp_path / "token_exports" / "step_4"):
        assert len(read_dump(path, 4)) == 4
    with pytest.raises(Unreadable, match="the nearest steps are 4"):
        read_dump(tmp_path / "token_exports", 5)
    with pytest.raises(FileNotFoundError):
        read_dump(tmp_path / "absent", 5)


TEXTS = {
    "verl": ("3.jsonl", {"input": "q", "output": "a", "gts": "a", "score": 1.0, "step": 3}),
    "ms-swift": ("completions.jsonl", {"step": ["3"], "prompt": ["q"], "completion": ["a"]}),
    "roll": (
        "rollout_dump_data.step_3.jsonl",
        {"prompt": ["q"], "responses": ["a"], "scores": [1.0]},
    ),
}


@pytest.mark.parametrize("framework", TEXTS)
def test_dumps_of_texts_need_a_model(tmp_path, framework):
    name, row = TEXTS[framework]
    remedy = "set model=PATH" if framework == "verl" else "cannot be replayed"
    write(tmp_path / name, [row])
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(Unreadable, match=f"a dump of {framework}: .*{remedy}"):
            read_dump(path, 3)


def test_a_parquet_file_is_trl_s(tmp_path):
    pandas = pytest.importorskip("pandas")
    (tmp_path / "completions").mkdir()
    frame = pandas.DataFrame({"step": ["3"], "prompt": ["q"], "completion": ["a"]})
    frame.to_parquet(tmp_path / "completions" / "completions_00003.parquet")
    dump = find_dump(tmp_path, 3)
    assert (dump.framework, dump.step) == ("trl", 3)


def test_numbers_that_are_not_finite_stay(tmp_path):
    rows = nemo_rows()
    rows[0]["prev_logprobs"][0][2] = math.nan
    rows[1]["prev_logprobs"][0][1] = -math.inf
    record = read_dump(nemo_dump(tmp_path, rows), None)
    assert math.isnan(record.updates[0].logp[0])
    assert np.isneginf(record.updates[0].logp[6])
