"""Prints responses of a run's policy, with the verdicts: the first look at any run.

`--help` says more.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from gspo.cli.option_files import composed
from gspo.config.commands import SampleCommand
from gspo.config.conversion import to_dataclass
from gspo.config.settings import Settings
from gspo.io.errors import SettingError
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.run.directory import settings_and_checkpoint
from gspo.run.entry_point import command_line, one_line
from gspo.tracking.episodes import conversation

if TYPE_CHECKING:
    from gspo.rollout.engines.base import Engine


def main() -> None:
    """Print samples, with the settings of the command line."""
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
        raise SettingError("set", command.set, f"this run's task has {', '.join(sets)}")
    size = settings.task.size(command.set)
    if size is not None and command.set != "train" and command.first + command.problems > size:
        raise SettingError(
            "first",
            command.first,
            f"with problems={command.problems}, set={command.set} has {size} problems",
        )
    # it imports PyTorch
    from gspo.run.build import check_engine_start, local_engine, make_engine
    from gspo.run.policies import open_policy

    if command.rollout:
        check_engine_start(command.rollout, settings.model)
    policy = open_policy(settings, checkpoint, on_cold_start_step=lambda *_: None)
    if command.rollout:
        # the engine gets the stop strings, so that it can end responses itself
        engine = make_engine(policy, replace(command.rollout, stop=settings.rollout.stop))
    else:
        engine = local_engine(policy, settings.rollout)
    with closing(engine), closing(settings.task):
        show(command, settings, engine)


def show(command: SampleCommand, settings: Settings, engine: Engine) -> None:
    """Sample responses, score them, and print the groups."""
    from gspo.evaluation.evaluate import SEED, EvaluationSet, with_room
    from gspo.rollout.scoring import sample, score
    from gspo.rollout.sources.behaviour_logprobs import check_on_prompts

    seed = settings.seed if command.set == "train" else SEED
    problems = [
        settings.task.problem(seed, command.set, index)
        for index in range(command.first, command.first + command.problems)
    ]
    sampling = Sampling(
        command.temperature,
        settings.rollout.longest_limit,
        stop=tuple(settings.rollout.stop),
        top_p=command.top_p,
        top_k=command.top_k,
        min_p=command.min_p,
    )
    evaluation_set = with_room(
        EvaluationSet(command.set, settings.task, problems), engine, sampling.max_new_tokens
    )
    if evaluation_set.left_out:
        print(
            f"{evaluation_set.left_out} problems left out: prompt and response exceed the model's "
            f"{engine.positions} positions"
        )
    if command.rollout:
        check_on_prompts(engine, evaluation_set.problems, command.rollout)
    random_key = (seed, "sample", command.set)
    request = SamplingRequest(evaluation_set.problems, command.samples, sampling, random_key)
    groups = [score(settings.task, group) for group in sample(engine, settings.task, request)]
    print(
        f"prompts as the policy sees them (prompt.format={settings.prompt.format}: "
        f"{engine.policy.prompt_format_used}):"
    )
    # This vLLM starts without the rules (top_p, top_k, min_p), so its log-probs are of the
    # distribution after they have removed tokens.
    log_prob_name = "mean log-prob"
    if command.rules and command.rollout:
        log_prob_name += " among the tokens that were left in"
    for group in groups:
        problem = group[0].problem
        family = f" ({problem.family})" if problem.family else ""
        print(f"--- {problem.task} {problem.index}{family}\n{group[0].rendered.rstrip()}")
        for response in group:
            mean_logp = math.nan
            if response.length:
                mean_logp = response.logprobs[response.policy_mask].mean()
            reward = response.score.reward
            reward_text = "not graded" if reward is None else f"{reward:g}"
            print(
                f"  [{reward_text} {response.score.verdict}; {response.length} tokens, "
                f"{log_prob_name} {mean_logp:.2f}]"
            )
            text = response.text
            if response.turns:
                text = conversation([vars(turn) for turn in response.turns])
            print("  | " + text.replace("\n", "\n  | "))
