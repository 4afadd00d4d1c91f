"""Prints what a run's policy writes, with the verdicts: the first look at any run. `--help` says more."""

from __future__ import annotations

from omegaconf import DictConfig

from gspo.commands.option_files import composed
from gspo.config.commands import SampleCommand
from gspo.config.schema import to_dataclass
from gspo.evaluation.evaluate import SEED, EvaluationSet, with_room
from gspo.rollout.requests import Sampling
from gspo.rollout.scoring import score
from gspo.run.build import local_engine, open_policy
from gspo.run.cli import command_line, one_line
from gspo.run.directory import settings_and_checkpoint


def main() -> None:
    """Print the samples that the command line asks for."""
    command_line(composed("sample", job))


@one_line
def job(config: DictConfig) -> None:
    """Sample responses to a few problems, score them, and print them."""
    command: SampleCommand = to_dataclass(config)
    settings, checkpoint = settings_and_checkpoint(
        command.run, command.step, command.allow_weak_sandbox, command.allow_outside_code
    )
    sets = ["train", *settings.task.evaluation_sets()]
    if command.set not in sets:
        raise ValueError(f"set={command.set!r}: this run's task has {', '.join(sets)}")
    size = settings.task.size(command.set)
    if size is not None and command.set != "train" and command.first + command.problems > size:
        raise ValueError(f"first={command.first} problems={command.problems}: {command.set} has {size} problems")
    policy = open_policy(settings, checkpoint, on_cold_start_step=lambda *_: None)
    engine = local_engine(policy, settings.rollout)
    seed = settings.seed if command.set == "train" else SEED
    problems = [settings.task.problem(seed, command.set, command.first + i) for i in range(command.problems)]
    sampling = Sampling(command.temperature, settings.rollout.longest_limit)
    chosen = with_room(EvaluationSet(command.set, settings.task, problems), engine, sampling.max_new_tokens)
    if chosen.left_out:
        print(
            f"{chosen.left_out} problems left out: prompt and response exceed the model's {engine.positions} positions"
        )
    try:
        groups = engine.generate(chosen.problems, command.samples, sampling, (seed, "sample", command.set))
        score(settings.task, [r for group in groups for r in group])
    finally:
        settings.task.close()
    print(f"prompts as the policy sees them (prompt.format={settings.prompt.format}: {policy.prompt_format_used}):")
    for group in groups:
        problem = group[0].problem
        print(f"--- {problem.task} {problem.index} ({problem.family})\n{group[0].rendered.rstrip()}")
        for r in group:
            mean_logp = r.logprobs.mean()
            reward = "not graded" if r.score.reward is None else f"{r.score.reward:g}"
            print(f"  [{reward} {r.score.verdict}; {len(r.token_ids)} tokens, mean log-prob {mean_logp:.2f}]")
            print("  | " + r.text.replace("\n", "\n  | "))
