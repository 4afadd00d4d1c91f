"""Print what a run's policy writes, with the verdicts: the first look at any run. `--help` says more."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from gspo.commands import SampleCommand
from gspo.config import register_schemas
from gspo.evaluation import SEED
from gspo.process import command_line, one_line
from gspo.rollout.engine import LocalEngine
from gspo.rollout.rows import Sampling
from gspo.rollout.scoring import score
from gspo.runs import open_policy, recorded
from gspo.schema import to_dataclass

register_schemas()


@hydra.main(version_base="1.3", config_path="../conf", config_name="sample")
@one_line
def main(config: DictConfig) -> None:
    command: SampleCommand = to_dataclass(config)
    settings, checkpoint = recorded(command.run, command.step)
    sets = ["train", *settings.task.evaluation_sets()]
    if command.set not in sets:
        raise ValueError(f"set={command.set!r}: this run's task has {', '.join(sets)}")
    size = settings.task.size(command.set)
    if size is not None and command.set != "train" and command.first + command.problems > size:
        raise ValueError(f"first={command.first} problems={command.problems}: {command.set} has {size} problems")
    engine = LocalEngine(open_policy(settings, checkpoint, report=lambda *_: None))
    seed = settings.seed if command.set == "train" else SEED
    problems = [settings.task.problem(seed, command.set, command.first + i) for i in range(command.problems)]
    sampling = Sampling(command.temperature, settings.rollout.longest_limit)
    try:
        groups = engine.generate(problems, command.samples, sampling, (seed, "sample", command.set))
        score(settings.task, [r for group in groups for r in group])
    finally:
        settings.task.close()
    for group in groups:
        problem = group[0].problem
        print(f"--- {problem.task} {problem.index} ({problem.family})\n{problem.prompt.rstrip()}")
        for r in group:
            mean_logp = r.logprobs.mean()
            reward = "not graded" if r.score.reward is None else f"{r.score.reward:g}"
            print(f"  [{reward} {r.score.verdict}; {len(r.token_ids)} tokens, mean log-prob {mean_logp:.2f}]")
            print("  | " + r.text.replace("\n", "\n  | "))


if __name__ == "__main__":
    command_line(main)
