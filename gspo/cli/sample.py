"""Prints what a run's policy writes, with the verdicts: the first look at any run. `--help` says
more.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from gspo.cli.option_files import composed
from gspo.config.commands import SampleCommand
from gspo.config.schema import to_dataclass
from gspo.config.settings import Settings
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.run.directory import settings_and_checkpoint
from gspo.run.entry_point import command_line, one_line
from gspo.tracking.episodes import conversation

if TYPE_CHECKING:
    from gspo.rollout.engines.base import Engine


def main() -> None:
    """Print the samples that the command line asks for."""
    command_line(composed("sample", job))


@one_line
def job(config: DictConfig) -> None:
    """Sample responses to a few problems, score them, and print them."""
    command: SampleCommand = to_dataclass(config)
    settings, checkpoint = settings_and_checkpoint(
        command.run,
        command.step,
        command.allow_weak_sandbox,
        command.allow_outside_code,
        command.addresses,
    )
    sets = ["train", *settings.task.evaluation_sets()]
    if command.set not in sets:
        raise ValueError(f"set={command.set!r}: this run's task has {', '.join(sets)}")
    size = settings.task.size(command.set)
    if size is not None and command.set != "train" and command.first + command.problems > size:
        raise ValueError(
            f"first={command.first} problems={command.problems}: {command.set} has {size} problems"
        )
    # it imports PyTorch
    from gspo.run.build import check_engine_start, local_engine, make_engine
    from gspo.run.policies import open_policy

    if command.rollout:
        check_engine_start(command.rollout, settings.model)
    policy = open_policy(settings, checkpoint, on_cold_start_step=lambda *_: None)
    if command.rollout:  # it is told of the stop strings, so that it can end responses itself
        engine = make_engine(policy, replace(command.rollout, stop=settings.rollout.stop))
    else:
        engine = local_engine(policy, settings.rollout)
    with closing(engine), closing(settings.task):
        show(command, settings, engine)


def show(command: SampleCommand, settings: Settings, engine: Engine) -> None:
    """Sample, score and print."""
    from gspo.evaluation.evaluate import SEED, EvaluationSet, with_room
    from gspo.rollout.scoring import sample, score

    seed = settings.seed if command.set == "train" else SEED
    problems = [
        settings.task.problem(seed, command.set, command.first + i) for i in range(command.problems)
    ]
    sampling = Sampling(
        command.temperature,
        settings.rollout.longest_limit,
        stop=tuple(settings.rollout.stop),
        top_p=command.top_p,
        top_k=command.top_k,
        min_p=command.min_p,
    )
    chosen = with_room(
        EvaluationSet(command.set, settings.task, problems), engine, sampling.max_new_tokens
    )
    if chosen.left_out:
        print(
            f"{chosen.left_out} problems left out: prompt and response exceed the model's {engine.positions} positions"
        )
    random_key = (seed, "sample", command.set)
    request = SamplingRequest(chosen.problems, command.samples, sampling, random_key)
    groups = sample(engine, settings.task, request)
    score(settings.task, [r for group in groups for r in group])
    print(
        f"prompts as the policy sees them (prompt.format={settings.prompt.format}: {engine.policy.prompt_format_used}):"
    )
    # vLLM, which is not told of the rules when it starts, reports them after tokens were left out
    among = " among the tokens that were left in" if command.rules and command.rollout else ""
    for group in groups:
        problem = group[0].problem
        family = f" ({problem.family})" if problem.family else ""
        print(f"--- {problem.task} {problem.index}{family}\n{group[0].rendered.rstrip()}")
        for r in group:
            mean_logp = r.logprobs[r.policy_mask].mean() if r.length else math.nan
            reward = "not graded" if r.score.reward is None else f"{r.score.reward:g}"
            print(
                f"  [{reward} {r.score.verdict}; {r.length} tokens, mean log-prob{among} {mean_logp:.2f}]"
            )
            text = conversation([vars(turn) for turn in r.turns]) if r.turns else r.text
            print("  | " + text.replace("\n", "\n  | "))
