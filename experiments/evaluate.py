"""Evaluate a run's checkpoint on its task's held-out sets; prints a table, writes JSON. `--help` says more."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from gspo.checkpoint import replace_text
from gspo.config import EvaluateCommand, register_schemas
from gspo.evaluation import evaluate
from gspo.rollout.engine import LocalEngine
from gspo.runs import command_line, one_line, open_policy, recorded

register_schemas()


@hydra.main(version_base="1.3", config_path="../conf", config_name="evaluate")
@one_line
def main(config: DictConfig) -> None:
    command: EvaluateCommand = OmegaConf.to_object(config)
    settings, checkpoint = recorded(command.run, command.step)
    policy = open_policy(settings, checkpoint, report=lambda *_: None)
    step = json.loads((checkpoint / "state.json").read_text())["step"]
    try:
        metrics, groups = evaluate(
            LocalEngine(policy, settings.rollout.batch_rows),
            settings.task,
            command.evaluation,
            settings.rollout.longest_limit,
            step,
        )
    finally:
        settings.task.close()
    k = command.evaluation.samples
    print(f"{command.run}, step {step}: {command.evaluation.problems} problems a set, {k} samples a problem")
    print(f"{'set':<16}{f'avg@{k}':>10}{'+-':>8}{f'pass@{k}':>10}")
    for name in command.evaluation.sets or settings.task.evaluation_sets():
        average, error, solved = (metrics[f"eval/{name}/{m}"] for m in (f"avg@{k}", "stderr", f"pass@{k}"))
        print(f"{name:<16}{average:>10.3f}{error:>8.3f}{solved:>10.3f}")
    if "eval/elo" in metrics:
        print(f"{'Elo':<16}{metrics['eval/elo']:>10.0f}{metrics['eval/elo_stderr']:>8.0f}")
    path = Path(command.run) / f"evaluation_step_{step:06d}.json"
    result = {"step": step, "evaluation": asdict(command.evaluation), "metrics": metrics}
    replace_text(path, json.dumps(result, indent=1))
    print(f"{sum(map(len, groups))} responses; numbers in {path}")


if __name__ == "__main__":
    command_line(main)
