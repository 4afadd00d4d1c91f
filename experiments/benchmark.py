"""What a training step costs, by phase, on a named workload; beside TRL if asked for. `--help` says more."""

from __future__ import annotations

import gspo.core.interrupt  # noqa: F401

# isort: split

import json
import platform
import subprocess
import sys
from pathlib import Path

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gspo.config.commands import BenchmarkCommand
from gspo.config.load import register_schemas, to_settings
from gspo.config.schema import to_dataclass
from gspo.config.settings import Settings
from gspo.model.loading import HFModel
from gspo.run.build import starting_model_folder
from gspo.run.cli import command_line, one_line
from gspo.run.directory import code_state
from gspo.tracking.tracker import Progress
from speed.generate import compare_generation, generation_table
from speed.measure import measure, table
from speed.peer import Pairs, compare
from speed.scaling import measure_curves
from speed.workload import WORKLOADS, EvenText, made_folder

register_schemas()
ROOT = Path(__file__).parents[1]


@hydra.main(version_base="1.3", config_path="../conf", config_name="benchmark")
@one_line
def main(config: DictConfig) -> None:
    command: BenchmarkCommand = to_dataclass(config)
    if command.workload not in WORKLOADS:
        raise ValueError(f"workload={command.workload!r}: choose one of {', '.join(WORKLOADS)}")
    if command.curves:
        draw_curves(command)
        return
    settings = prepared(command)
    out = Path(command.out or Path(command.runs) / "benchmarks" / f"{command.workload}.json")
    if command.peer == "none":
        record = measure(settings, command.batches)
        print(table(record))
    elif command.peer == "transformers":
        record = {"rounds": compare_generation(settings, command.rounds)}
        print(generation_table(record["rounds"]))
    else:
        if not WORKLOADS[command.workload].peer:
            raise ValueError(f"peer={command.peer} with workload={command.workload}: TRL is not run at this size")
        if command.set or {"micro_batch_size", "batch_rows"} & command.size.keys():
            raise ValueError("peer=trl: set... and size.micro_batch_size, batch_rows would change our side alone")
        own = [o for o in HydraConfig.get().overrides.task if o.split("=")[0] not in ("peer", "rounds", "out")]
        record = {"rounds": []}
        for measured in compare(settings, own, command.rounds, command.batches):
            record["rounds"].append(measured)
            write(record | {"threads": command.threads}, out)
        print(Pairs(record["rounds"]).table())
    write(record | {"threads": command.threads}, out)
    if not command.out:
        print(f"numbers in {out}")


def write(record: dict, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = platform.processor() or platform.machine()
    out.write_text(json.dumps({"machine": machine, "code": code_state(), **record}, indent=1), encoding="utf-8")


def draw_curves(command: BenchmarkCommand) -> None:
    """Measure the scaling curves and draw them."""
    out = Path(command.out or Path(command.runs) / "benchmarks" / "scaling.json")
    points = []
    for point in measure_curves([1, 2], command.runs):
        points.append(point)
        write({"points": points}, out)
    subprocess.run([sys.executable, str(ROOT / "analysis" / "fig_scaling.py"), str(out)], check=True)


def prepared(command: BenchmarkCommand) -> Settings:
    """Return the workload as the settings of a run that starts from a model folder, which is made if it is not
    there."""
    workload = WORKLOADS[command.workload].resized(command.size)
    own = [f"threads={command.threads}", f"runs={command.runs}", "tracking.wandb=offline", f"study={command.workload}"]
    settings = to_settings(compose("train", overrides=[*workload.overrides(), *own, *command.overrides()]))
    if workload.shape:
        settings.model.path = str(made_folder(workload.shape, Path(command.runs) / "benchmarks" / "models"))
        settings.task = EvenText(**{f: getattr(settings.task, f) for f in ("name", "max_operands", "largest")})
        return settings
    bar = Progress("cold start", settings.cold_start.steps, 0, sys.stderr.isatty())
    folder = starting_model_folder(settings, lambda step, _, loss: bar(step, loss=loss))
    bar.close()
    settings.model, settings.cold_start.steps = HFModel(path=str(folder)), 0
    return settings


if __name__ == "__main__":
    command_line(main)
