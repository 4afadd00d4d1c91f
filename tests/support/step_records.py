"""Records of steps that are made by hand, for tests of the pages that show them."""

import numpy as np

from gspo.data.step_record import ACTIVE, OUTSIDE, Header, RecordedUpdate, StepRecord
from gspo.data.step_record_files import record_file, write_record
from spoiled_runs import ESCAPE, MARKUP

GROUP_SIZE = 4


def step_record(
    rows=8,
    prompt=3,
    length=6,
    updates=2,
    layers=0,
    step=3,
    words=40,
    seed=0,
    entropy=True,
    **header,
) -> StepRecord:
    """A record in which each row is in one update. Tokens of a row differ in all numbers.

    `length` is the number of tokens of the longest response, which is row 0."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, length - np.arange(rows) % max(length // 2, 1)).astype(np.int32)
    prompts = np.full(rows, prompt, np.int32)
    count = int(lengths.sum())
    total = int(prompts.sum()) + count

    def normal(scale, size=count):
        return (rng.standard_normal(size) * scale).astype(np.float32)

    engine_logp = -np.abs(normal(1.0))
    old_logp = engine_logp + normal(1e-3)
    old_experts = None
    if layers:
        old_experts = rng.integers(0, 8, (total, layers, 2)).astype(np.int8)
    ends = np.cumsum(lengths)
    record = StepRecord(
        header=Header(
            step=step,
            label="hand-made",
            settings={"objective": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2}},
            tasks=["sums"] * rows,
            finish_reasons=["stop"] * rows,
            verdicts=[("correct", "wrong")[row % 2] for row in range(rows)],
            vocabulary={str(i): f" w{i}" for i in range(words)},
            metrics={"reward/mean": 0.5, "clip/token_active": 0.25},
        ),
        prompt_lengths=prompts,
        response_lengths=lengths,
        groups=(np.arange(rows) // GROUP_SIZE).astype(np.int32),
        problems=np.arange(rows) // GROUP_SIZE,
        samples=(np.arange(rows) % GROUP_SIZE).astype(np.int32),
        policy_steps=np.full(rows, step - 1, np.int32),
        rewards=(np.arange(rows) % 2).astype(np.float64),
        token_ids=rng.integers(0, words, total).astype(np.int32),
        trained=np.ones(count, bool),
        sampled=np.ones(count, bool),
        engine_logp=engine_logp,
        old_logp=old_logp,
        advantages=np.repeat(rng.standard_normal(rows), lengths).astype(np.float32),
        old_experts=old_experts,
    )
    for name, value in header.items():
        setattr(record.header, name, value)
    for number in range(updates):
        update_rows = np.arange(number, rows, updates)
        tokens = np.concatenate([np.arange(ends[r] - lengths[r], ends[r]) for r in update_rows])
        n = len(tokens)
        update = RecordedUpdate(
            rows=update_rows.astype(np.int32),
            logp=old_logp[tokens] + normal(0.05, n),
            weight=1 + normal(0.1, n),
            clipped=rng.choice([0, 0, 0, OUTSIDE, OUTSIDE | ACTIVE], n).astype(np.uint8),
            entropy=np.abs(normal(1.0, n)) if entropy else None,
        )
        if layers:
            update.experts = rng.integers(0, 8, (n, layers, 2)).astype(np.int8)
        record.updates.append(update)
    return record


def write_step(run, record: StepRecord) -> None:
    """Write a record into a run directory."""
    write_record(record_file(run, record.header.step), record)


def make_episode(record: StepRecord, row: int) -> None:
    """Make a row of at least four tokens an episode, whose second and third token are the
    environment's, and whose last token is out of the loss."""
    begin, end = record.tokens_of(row).start, record.tokens_of(row).stop
    record.header.turns[str(row)] = [
        ["policy", 1, 0.0],
        ["environment", 2, 0.0],
        ["policy", end - begin - 3, 0.5],
    ]
    record.sampled[begin + 1 : begin + 3] = False
    record.trained[begin + 1 : begin + 3] = False
    record.trained[end - 1] = False


def hostile_record() -> StepRecord:
    """A record all of whose texts try to act on the reader."""
    record = step_record(rows=4, length=6, updates=1, words=8)
    bad = f'{ESCAPE}{MARKUP}</script><script>alert(2)</script><!--\' onerror="x" {{{{ 7 * 7 }}}}'
    bad += "<img src=x onerror=alert(3)>"
    texts = (bad, "\u2028\u2029", "\u202eabc", "\ud83d", "x" * 10_000, "", "\n", '"\\')
    header = record.header
    header.vocabulary = {str(token): text for token, text in enumerate(texts)}
    header.label = header.error = header.source = bad
    header.complete = False
    header.tasks, header.verdicts, header.finish_reasons = [bad] * 4, [bad] * 4, [bad] * 4
    header.settings = {"objective": {"name": bad, bad: bad, "list": [bad]}, "policy": [bad]}
    header.metrics = {"reward/mean": None, bad: 1.0}
    header.notes = [bad]
    return record
