"""Computes the loss of a recorded training step again, without the model, under any objective.

    gspo replay runs/STUDY/RUN step=123                           the run's own objective
    gspo replay runs/STUDY/RUN step=123 objective=grpo            side by side with another
    gspo replay runs/STUDY/RUN step=123 objective.clip_high=0.28
    gspo replay runs/STUDY/RUN step=123 preset=verl_grpo
    gspo replay runs/STUDY/RUN step=123 objective=my_losses:Soft
    gspo replay runs/STUDY/RUN step=123 objective=grpo page=true
    gspo replay runs/STUDY/RUN step=123 objective=grpo model=true
    gspo replay step_000123.safetensors objective=grpo            a record by itself
    gspo replay train_data_step7.jsonl objective=gspo             a dump of NeMo-RL or prime-rl
    gspo replay rollout_data_dir step=7 objective=gspo model=DIR  texts of verl or TRL, scored

A run records steps with tracking.record_every=N or tracking.record_last=K. The replay prints clip
fractions, effective sample sizes, the cosine between the gradients by the log-probs, and the
responses that carry them. The log-probs are those of the updates that the run made, so from the
second update on the weights are those to which the run's own objective had led.

The settings of `gspo train` under objective, advantage, kl, correction, reward, trainer.aggregation
and the entropy bonus are options too. docs/replay.md explains the numbers.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from gspo.cli import replay_settings
from gspo.cli.replay_output import RECORDED, Column, numbers, write_replay_page
from gspo.config.load import read_settings
from gspo.config.settings import (
    Settings,
    has_recorded_entropy_bonus,
    has_recorded_kl_coefficient,
)
from gspo.data.foreign_records import read_dump
from gspo.data.step_record import StepRecord
from gspo.data.step_record_files import read_record, read_step
from gspo.io.arguments import HELP, help_text, option, parsed
from gspo.io.errors import SettingError
from gspo.io.escaping import escape_line
from gspo.io.files import METRICS_FILE, SETTINGS_FILE, replace_text
from gspo.io.nested import finite_or_none, mapped
from gspo.io.rows import read_rows
from gspo.io.tables import counted, text_table
from gspo.run.entry_point import command_line

# metrics of the table, with their names in words
SHOWN = {
    "optim/loss": "loss, mean of the updates",
    "clip/token_active": "tokens without gradient by the clip",
    "clip/sequence_active": "the same by response",
    "clip/token_outside": "tokens outside the clip range",
    "clip/sequence_outside": "the same by response",
    "clip/weight": "weight of a token, mean",
    "ratio/ess_token": "effective sample size, token ratios",
    "ratio/ess_sequence": "the same, sequence ratios",
    "ratio/token_max": "largest token ratio",
    "ratio/sequence_max": "largest sequence ratio",
    "mismatch/k3": "KL of engine and trainer (k3), nats",
    "kl/ref_k3": "KL to the reference (k3), nats",
    "kl/coef": "coefficient of the KL term",
    "policy/entropy": "entropy, nats",
    "policy/entropy_coef": "coefficient of the entropy bonus",
}
MAX_CAUSES = 5  # a message names so many metrics that differ


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command, besides settings of `gspo train`."""

    paths: tuple[str, ...] = option((), "a run directory, a record, or another framework's dump")
    step: int = option(-1, "the recorded step; -1: the last", least=-1)
    responses: int = option(8, "print so many responses", least=0)
    model: str = option(
        "",
        "true: also compute the gradient of the parameters, from the run's checkpoint. A path or a "
        "name: the model that scores a dump of texts",
    )
    old_model: str = option("", "the model that scores a dump of texts as the old policy")
    page: bool = option(False, "write a page with the tokens of all responses")
    out: str = option("", "write the numbers to this JSON file")
    allow_outside_code: bool = option(
        False, "import the code that the run names, although this user did not make the run"
    )


def main() -> None:
    """Replay the step that the command line names."""
    command_line(replay_step)


def replay_step() -> None:
    """Replay a step, print the comparison, and write what the options ask for."""
    words = sys.argv[1:]
    if not words or HELP & set(words):
        print(help_text(Options, __doc__))
        sys.exit(0 if words else 2)
    options, overrides = with_options(words)
    if options.out and not Path(options.out).absolute().parent.is_dir():
        raise SettingError("out", options.out, "there is no such folder", remedy="make it first")
    path, record, row = read(options)
    if options.model == "true":
        check_checkpoint(path, record)
    columns = replays(options, path, record, overrides)
    print(heading(path, record))
    print("\n".join(["", *table(record, columns)]))
    if len(columns) == 2:
        print("\n".join(["", *cosine_lines(columns)]))
    if options.responses:
        print("\n".join(["", *response_lines(record, columns, options.responses)]))
    if options.model == "true":
        print("\n".join(["", *model_lines(options, path, record, columns, row)]))
    if row and columns[0].name.endswith(RECORDED):
        print("\n".join(["", *agreement_lines(record, columns[0], row)]))
    if options.page:
        print(f"\n{write_replay_page(path, record, columns)}")
    if options.out:
        content = mapped(numbers(record, columns), finite_or_none)
        replace_text(Path(options.out), json.dumps(content, indent=1, allow_nan=False))


def with_options(words: Sequence[str]) -> tuple[Options, list[str]]:
    """Return this command's options, and the words that are settings of a run."""
    names = {field.name for field in fields(Options)}
    own_words = []
    settings = []
    for word in words:
        key, equals_sign, _ = word.partition("=")
        is_setting = equals_sign and key not in names and not Path(word).exists()
        if is_setting:
            settings.append(word)
        else:
            own_words.append(word)
    options = parsed(Options, own_words)
    if len(options.paths) != 1:
        given = ", ".join(options.paths) or "none"
        raise SettingError("PATH", given, "name one run directory or one record")
    return options, settings


def read(options: Options) -> tuple[Path, StepRecord, dict[str, float | None]]:
    """Return the path, its record, and the step's row of metrics, empty if there is none."""
    path = Path(options.paths[0])
    if not path.exists():
        raise SettingError("PATH", str(path), "does not exist")
    is_own = (path / SETTINGS_FILE).exists() or path.suffix == ".safetensors"
    if is_own and options.model not in ("", "true"):
        raise SettingError(
            "model", options.model, "only a dump of texts is scored with a model", "set model=true"
        )
    if options.old_model and (is_own or options.model in ("", "true")):
        raise SettingError(
            "old_model", options.old_model, "only a dump of texts is scored with models"
        )
    if (path / SETTINGS_FILE).exists():
        record = read_step(path, options.step)
        step = record.header.step
        rows = [row for row in read_rows(path / METRICS_FILE) if row["step"] == step]
        return path, record, rows[0] if rows else record.header.metrics
    if path.suffix == ".safetensors":
        if options.step >= 0:
            raise SettingError("step", options.step, f"{path} is the record of a single step")
        record = read_record(path)
        return path, record, record.header.metrics
    step_of_dump = options.step if options.step >= 0 else None
    if options.model in ("", "true"):
        return path, read_dump(path, step_of_dump), {}
    # these import PyTorch, which takes seconds
    from gspo.run.policies import plain_policy
    from gspo.train.scored_dump import score_dump

    policy = plain_policy(options.model)
    old_policy = plain_policy(options.old_model) if options.old_model else None
    return path, score_dump(path, step_of_dump, policy, old_policy), {}


def replays(
    options: Options, path: Path, record: StepRecord, overrides: Sequence[str]
) -> list[Column]:
    """Replay the step under its own objective, and under the one that the command line chooses."""
    trust = options.allow_outside_code
    is_run = (path / SETTINGS_FILE).exists()
    if is_run:
        recorded = read_settings(path, trust=trust)
    else:
        recorded = replay_settings.of_header(record.header, trust)
    # it imports PyTorch, which takes seconds
    from gspo.train.replay import replay

    columns = []
    is_own = record.header.source == "gspo"
    if is_own:
        name = recorded.objective_option() + RECORDED
        result = replay(record, recorded.algorithm(), recorded.trainer, recorded.policy)
        columns.append(Column(name, recorded, result))
    if overrides or not columns:
        settings, notes = replay_settings.changed(recorded, overrides, complete=is_run)
        for note in notes:
            print(f"note: {note}")
        # a dump of another framework has no settings, but perhaps advantages
        keeps_advantages = not is_own and not np.isnan(record.advantages).all()
        keeps_advantages = keeps_advantages and not any(
            w.startswith("advantage") for w in overrides
        )
        if not is_own:
            for note in check_dump_settings(settings, overrides, keeps_advantages):
                print(f"note: {note}")
        result = replay(
            record,
            settings.algorithm(),
            settings.trainer,
            settings.policy,
            recorded_kl=has_recorded_kl_coefficient(settings, recorded),
            recorded_entropy=has_recorded_entropy_bonus(settings, recorded),
            recorded_advantages=keeps_advantages,
        )
        name = " ".join(overrides) or settings.objective_option()
        columns.append(Column(escape_line(name), settings, result))
    return columns


def check_dump_settings(
    settings: Settings, overrides: Sequence[str], keeps_advantages: bool
) -> list[str]:
    """Return notes on the settings of a preset that cannot act on a dump of another framework.

    A dump tells neither why a response ended nor how long it could be. If its advantages are kept,
    rewards are not read. Raises ValueError for such a setting on the command line."""
    of_truncation = ["trainer.mask_truncated", "reward.overlong_cache"]
    truncation_reason = "a dump does not tell which responses were truncated"
    of_rewards: list[str] = []
    reward_reason = "the advantages of the dump are kept, so this would change nothing"
    reward_remedy = "leave it out, or compute the advantages anew with advantage=..."
    if keeps_advantages:
        of_rewards = ["reward", "advantage"]
        if settings.kl.in_reward:
            raise SettingError("kl", settings.kl.name, reward_reason, remedy=reward_remedy)
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if replay_settings.belongs_to(key, of_truncation):
            raise SettingError(key, value, truncation_reason, remedy="leave it out")
        if replay_settings.belongs_to(key, of_rewards):
            raise SettingError(key, value, reward_reason, remedy=reward_remedy)
    notes = []
    preset_keys = replay_settings.keys_of_preset(overrides)
    for unread, reason in ((of_truncation, truncation_reason), (of_rewards, reward_reason)):
        from_preset = [key for key in preset_keys if replay_settings.belongs_to(key, unread)]
        preset_keys = [key for key in preset_keys if key not in from_preset]
        if from_preset:
            notes.append(f"the preset also sets {', '.join(from_preset)}: {reason}")
    return notes


# --------------------------------------------------------------------------------------------------
# text
def heading(path: Path, record: StepRecord) -> str:
    """Return the first line: the step, its responses and updates."""
    header = record.header
    parts = [
        f"step {header.step} of {escape_line(str(path))}",
        counted(len(record), "response"),
        counted(len(record.updates), "update"),
    ]
    lines = [", ".join(parts), *(f"note: {escape_line(note)}" for note in header.notes)]
    if not header.complete:
        lines.append(f"the step did not end: {escape_line(header.error)}")
    return "\n".join(lines)


def table(record: StepRecord, columns: Sequence[Column]) -> list[str]:
    """Return a table with a line for each number and a column for each replay."""
    from gspo.train.replay_comparison import effective_responses, gradient_norm, response_weights

    rows = [["", *(column.name for column in columns)]]
    rows.append(["aggregation", *(c.settings.trainer.aggregation.mode for c in columns)])
    trained_counts = [int(column.replayed.trained.sum()) for column in columns]
    rows.append(["tokens in the loss", *(f"{count:,}" for count in trained_counts)])
    for name, words in SHOWN.items():
        values = [column.replayed.metrics.get(name) for column in columns]
        if any(value is not None for value in values):
            rows.append([words, *("-" if value is None else f"{value:.4g}" for value in values)])
    norms = [gradient_norm(column.replayed) for column in columns]
    rows.append(["norm of the gradient by log-probs", *(f"{norm:.4g}" for norm in norms)])
    shares = [response_weights(record, column.replayed).share for column in columns]
    counts = [f"{effective_responses(share):.1f}" for share in shares]
    rows.append(["responses that carry it, effective number", *counts])
    return text_table(rows, right_aligned=True)


def cosine_lines(columns: Sequence[Column]) -> list[str]:
    """Return the cosine between the two gradients, over all updates and by update."""
    from gspo.train.replay_comparison import cosines

    whole, *by_update = cosines(columns[0].replayed, columns[1].replayed)
    if math.isnan(whole):
        return ["a gradient is 0 or not finite, so there is no angle between the two"]
    lines = [f"cosine between the two gradients: {whole:.4f}"]
    if len(by_update) > 1:
        listed = ", ".join(f"{value:.4f}" for value in by_update)
        lines.append(f"  by update: {listed}")
    return lines


def response_lines(record: StepRecord, columns: Sequence[Column], count: int) -> list[str]:
    """Return a table of the responses that carry most of the gradient in any column."""
    from gspo.train.replay_comparison import response_weights

    weights = [response_weights(record, column.replayed) for column in columns]
    largest = weights[0].share
    for other in weights[1:]:
        largest = largest.clip(min=other.share)
    numbers_of_columns = range(1, len(columns) + 1)
    rows = [
        ["response", "group", "reward", "tokens", "mean log-ratio"]
        + [f"[{number}] share" for number in numbers_of_columns]
        + [f"[{number}] clipped" for number in numbers_of_columns]
    ]
    for row in (-largest).argsort(kind="stable")[:count].tolist():
        rows.append(
            [
                str(row),
                str(record.groups[row]),
                f"{record.rewards[row]:.3g}",
                str(record.response_lengths[row]),
                f"{weights[0].log_ratio[row]:+.2e}",
                *(f"{weight.share[row]:.1%}" for weight in weights),
                *(f"{weight.clipped[row]:.1%}" for weight in weights),
            ]
        )
    names = [f"[{i}] {column.name}" for i, column in enumerate(columns, start=1)]
    title = f"responses by their share of the gradient under {', '.join(names)}:"
    return [title, *text_table(rows, right_aligned=True)]


def agreement_lines(record: StepRecord, column: Column, row: dict[str, float | None]) -> list[str]:
    """Say whether the replay under the recorded objective gives the run's metrics again."""
    from gspo.train.replay_comparison import agreement, without_balance

    if not record.header.complete:
        return ["the step did not end, so its metrics are not compared"]
    balance_coef = column.settings.trainer.router_aux_loss_coef
    agreed = agreement(column.replayed.metrics, without_balance(row, balance_coef, record))
    if not agreed.compared:
        return ["the run has no metrics of this step to compare with"]
    if not agreed.differing:
        farthest = ""
        if agreed.largest_name:
            farthest = f" (largest relative difference {agreed.largest:.1e}, {agreed.largest_name})"
        return [
            f"the replay from the record alone equals the run in all {agreed.compared} "
            f"metrics{farthest}"
        ]
    number = counted(len(agreed.differing), "metric")
    lines = [f"the replay from the record alone differs from the run in {number}:"]
    for name, value, recorded in agreed.differing[:MAX_CAUSES]:
        lines.append(f"  {name}: {value:.6g} here, {recorded:.6g} in the run")
    return lines


def check_checkpoint(path: Path, record: StepRecord) -> None:
    """Raise ValueError, before the table, if the model cannot be brought to the recorded step."""
    if not (path / SETTINGS_FILE).exists():
        raise SettingError("model", True, "a record by itself has no checkpoint: name its run")
    from gspo.run.model_replay import starting_step

    starting_step(path, record.header.step)


def model_lines(
    options: Options,
    path: Path,
    record: StepRecord,
    columns: Sequence[Column],
    row: dict[str, float | None],
) -> list[str]:
    """Replay the step with the model under each column's settings, and return a table."""
    from gspo.run.model_replay import parameter_cosine, replay_with_model

    step = record.header.step
    trust = options.allow_outside_code
    replayed = [replay_with_model(path, step, column.settings, trust) for column in columns]
    rows = [["with the model", *(column.name for column in columns), "the run"]]
    for name in ("optim/grad_norm", "optim/grad_norm_max", *SHOWN):
        # the engine's log-probs are those of the record, so there is nothing to compare
        if name.startswith("mismatch/"):
            continue
        values = [*(result.metrics.get(name) for result in replayed), row.get(name)]
        if any(value is not None for value in values[:-1]):
            rows.append([name, *("-" if value is None else f"{value:.6g}" for value in values)])
    lines = text_table(rows, right_aligned=True)
    if len(replayed) == 2:
        cosine = parameter_cosine(*replayed)
        lines.append(f"cosine between the parameter gradients of the first update: {cosine:.4f}")
    return lines
