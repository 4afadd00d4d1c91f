"""Scores a dump of texts with a model, and returns a step record.

    record = score_dump(Path("rollout_data_dir"), step=7, policy=policy, old_policy=None)

verl's rollout_data_dir has in each row input, output, gts, score and step (ray_trainer.py,
_dump_generations). TRL's completions have step, prompt, completion, a column for each reward
function, and advantage (grpo_trainer.py, log). Neither has token IDs, log-probs or special tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy import ndarray

from gspo.data.batch import RolloutBatch
from gspo.data.foreign_dumps import TRL, VERL, Dump, dump_lines, find_dump, parse_row
from gspo.data.foreign_rows import Row, Rows, to_record
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import LARGEST_REWARD, Response
from gspo.data.step_record import MAX_ROWS, StepRecord
from gspo.io.untrusted import Unreadable
from gspo.model.policy import Policy
from gspo.tasks.benchmarks.records_file import file_rows

TRL_OTHER_COLUMNS = frozenset(["step", "prompt", "completion", "advantage"])
TEXT_NOTE = (
    "The dump has texts without special tokens, so the tokens are those of the texts alone. "
    "Responses have no end-of-sequence token, because the dump does not say which were cut off."
)
SAME_POLICY_NOTE = "One model is both policies, so all ratios are 1."
TWO_POLICIES_NOTE = "The ratios are between the two models, not between updates of the run."
NO_ADVANTAGE_NOTE = "The dump has no advantages: compute them from the rewards."


@dataclass
class TextRow:
    """A prompt and a response, with the reward and the advantage. NaN stands for unknown."""

    prompt: str
    response: str
    reward: float
    advantage: float
    named_rewards: dict[str, float] = field(default_factory=dict)  # by reward function


def score_dump(
    path: Path,
    step: int | None,
    policy: Policy,
    old_policy: Policy | None,
    micro_batch_size: int = 16,
) -> StepRecord:
    """Read verl's or TRL's dump, and compute its log-probs with models.

    The update's log-probs are those of `policy`. The old policy's are those of `old_policy`, which
    must have the same tokenizer, or of `policy` if it is None. The record has no log-probs of the
    engine: they are NaN. Raises ValueError for texts that the model cannot read, and the errors of
    gspo.data.foreign_records.read_dump."""
    dump = find_dump(path, step)
    if dump.framework == VERL:
        texts = _verl_rows(dump)
    elif dump.framework == TRL:
        texts = _trl_rows(dump)
    else:
        raise Unreadable(f"{dump.files[0]} is a dump of {dump.framework}, which cannot be scored")
    responses = []
    rows = Rows()
    scored_texts = []
    for text in texts:
        prompt_ids, token_ids = _encode(policy, text)
        if not prompt_ids or not token_ids:
            rows.omitted["an empty prompt or response"] += 1
            continue
        responses.append(_response(len(responses), prompt_ids, token_ids))
        scored_texts.append(text)
        if len(responses) > MAX_ROWS:
            raise Unreadable(f"{dump.files[0]} has more than {MAX_ROWS:,} rows")
    if not responses:
        raise Unreadable(f"{dump.files[0]} has no row with a prompt and a response")

    batch = pack(responses, policy.pad_id)
    logp = _scored(policy, batch, micro_batch_size)
    old_logp = logp
    if old_policy is not None:
        old_logp = _scored(old_policy, batch, micro_batch_size)

    for i, (response, text) in enumerate(zip(responses, scored_texts, strict=True)):
        tokens = len(response.token_ids)
        row = Row(
            prompt_ids=np.array(response.prompt_ids, np.int32),
            token_ids=np.array(response.token_ids, np.int32),
            trained=np.ones(tokens, dtype=bool),
            # to_record makes these the old policy's
            engine_logp=old_logp[i],
            trainer_logp=logp[i],
            advantages=np.full(tokens, text.advantage, np.float32),
            entropy=None,
            reward=text.reward,
            task=dump.framework,
            in_loss=True,
            named_rewards=text.named_rewards,
        )
        rows.rows.append(row)
    record = to_record(dump, rows, _notes(scored_texts, has_old_policy=old_policy is not None))
    record.engine_logp = np.full_like(record.engine_logp, math.nan)
    record.header.vocabulary = {
        str(token): str(policy.tokenizer.decode([token]))
        for token in np.unique(record.token_ids).tolist()
    }
    return record


def _notes(texts: list[TextRow], has_old_policy: bool) -> list[str]:
    """Return what the reader of a scored dump must know, in sentences."""
    notes = [TEXT_NOTE, TWO_POLICIES_NOTE if has_old_policy else SAME_POLICY_NOTE]
    names = list(texts[0].named_rewards)
    if names:
        weights = ", ".join(f"{name}: 1" for name in names)
        notes.append(
            f"The reward is the sum of the columns {', '.join(names)}. If one of them is no reward, "
            f"give it the weight 0 in 'reward.weights={{{weights}}}'."
        )
    if all(math.isnan(text.advantage) for text in texts):
        notes.append(NO_ADVANTAGE_NOTE)
    return notes


def _encode(policy: Policy, text: TextRow) -> tuple[list[int], list[int]]:
    """Return the token IDs of a prompt and a response, both plain texts."""
    tokenizer = policy.tokenizer
    prompt_ids = tokenizer(text.prompt)["input_ids"]
    if prompt_ids and prompt_ids[-1] == tokenizer.eos_token_id:
        prompt_ids = prompt_ids[:-1]
    token_ids = tokenizer(text.response, add_special_tokens=False)["input_ids"]
    length = len(prompt_ids) + len(token_ids)
    if policy.positions is not None and length > policy.positions:
        raise ValueError(
            f"a prompt with its response has {length} tokens, and the model has "
            f"{policy.positions} positions"
        )
    return prompt_ids, token_ids


def _response(index: int, prompt_ids: list[int], token_ids: list[int]) -> Response:
    """Return a response for packing. Its log-probs are not used."""
    return Response(
        problem=Problem("", index, "", None),
        sample=0,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), np.float32),
        finish_reason="",
        text="",
        policy_step=0,
    )


def _scored(policy: Policy, batch: RolloutBatch, micro_batch_size: int) -> list[ndarray]:
    """Return the log-probs of each response's tokens."""
    logp_BT = policy.score(batch, micro_batch_size).logp_BT.float().numpy()
    mask_BT = batch.mask_BT.numpy()
    return [logp_T[mask_T] for logp_T, mask_T in zip(logp_BT, mask_BT, strict=True)]


def _verl_rows(dump: Dump) -> Iterator[TextRow]:
    """Yield the rows of verl's dump. Lines that are no rows are an error."""
    for file in dump.files:
        for number, line in enumerate(dump_lines(file), start=1):
            content = parse_row(line)
            if content is None:
                raise Unreadable(f"{file}, line {number} is no JSON object")
            prompt = content.get("input")
            response = content.get("output")
            score = content.get("score")
            if not isinstance(prompt, str) or not isinstance(response, str):
                raise Unreadable(f"{file}, line {number}: input or output is no text")
            if not isinstance(score, int | float) or not -LARGEST_REWARD <= score <= LARGEST_REWARD:
                raise Unreadable(f"{file}, line {number}: score is no finite number")
            yield TextRow(_readable(prompt), _readable(response), float(score), math.nan)


def _trl_rows(dump: Dump) -> Iterator[TextRow]:
    """Yield the rows of TRL's dump. The reward is the sum over all columns of floats.

    They are the reward functions' and, which the file does not tell apart, those of `log_extra`.
    A function that does not apply to a row has NaN or null, which counts as 0. With several such
    columns the rewards have their names."""
    all_rows = chain.from_iterable(file_rows(file) for file in dump.files)
    rows = list(islice(all_rows, MAX_ROWS + 1))
    names: list[str] = []
    for row in rows:
        for name, value in row.values.items():
            if name not in TRL_OTHER_COLUMNS and isinstance(value, float) and name not in names:
                names.append(name)
    rewards_of_rows: list[dict[str, float]] = []
    for row in rows:
        rewards = {}
        for name in names:
            value = row.values.get(name)
            if isinstance(value, float) and not math.isnan(value):
                rewards[name] = value
        rewards_of_rows.append(rewards)
    # a row without any reward has no sum, whatever the weights
    has_names = len(names) > 1 and all(rewards_of_rows)
    for row, rewards in zip(rows, rewards_of_rows, strict=True):
        advantage = row.get("advantage", int, float, default=math.nan)
        reward = sum(rewards.values()) if rewards else math.nan
        named_rewards = {}
        if has_names:
            named_rewards = {name: rewards.get(name, 0.0) for name in names}
        prompt = row.get("prompt", str)
        response = row.get("completion", str)
        yield TextRow(prompt, response, reward, float(advantage), named_rewards)


def _readable(text: str) -> str:
    """Return a text whose lone surrogates, which JSON can spell, are replaced."""
    return text.encode("utf-8", "replace").decode()
