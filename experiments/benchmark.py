"""What a training step costs, by phase, on a named workload; beside TRL if asked for. `--help` says
more.
"""

import gspo.io.interrupt  # noqa: F401

# isort: split

import json
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gspo.config.commands import BenchmarkCommand
from gspo.config.conversion import to_dataclass
from gspo.config.load import register_schemas, to_settings
from gspo.config.settings import Settings
from gspo.distributed.ranks import RankLost
from gspo.model.settings import HFModel
from gspo.run.code_state import code_state
from gspo.run.entry_point import Ended, command_line, one_line
from gspo.run.launched import as_rank, is_follower, process_count, silence
from gspo.run.policies import starting_model_folder
from gspo.run.processes import Peers, join
from gspo.tracking.tracker import Progress
from speed.generate import compare_generation, generation_table
from speed.measure import measure, table
from speed.peer import Pairs, compare
from speed.processes import measure_cases, scaling_table
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
    if process_count() > 1 and (command.curves or command.scaling or command.peer != "none"):
        raise ValueError("curves, scaling and peer start their own processes: leave torchrun away")
    if command.curves:
        draw_curves(command)
        return
    settings = composed(command)
    if command.scaling:
        check_prompts(settings, command)
    peers = join(settings)
    peers.others_wait = False  # all ranks do the same
    try:
        with peers.watched():
            from_folder(settings, command, peers)
            compare_or_measure(settings, command, peers)
    except RankLost:
        raise Ended(peers.lost.reason) from None


def compare_or_measure(settings: Settings, command: BenchmarkCommand, peers: Peers) -> None:
    """Measure what the command asks for, print it as a table and write it; of several processes
    rank 0 writes.
    """
    name = f"{command.workload}_processes" if command.scaling else command.workload
    out = Path(command.out or Path(command.runs) / "benchmarks" / f"{name}.json")
    if command.scaling:
        record = {"scaling": command.scaling, "rounds": []}
        prompts = WORKLOADS[command.workload].resized(command.size).prompts
        for measured in measure_cases(
            command.scaling, own_overrides("scaling"), prompts, command.rounds
        ):
            record["rounds"].append(measured)
            write(record, out)
        print(scaling_table(record["rounds"], command.scaling))
    elif command.peer == "none":
        record = measure(settings, command.batches, peers.ranks)
        print(table(record))
    elif command.peer == "transformers":
        record = {"rounds": compare_generation(settings, command.rounds)}
        print(generation_table(record["rounds"]))
    else:
        if not WORKLOADS[command.workload].peer:
            raise ValueError(
                f"peer={command.peer} with workload={command.workload}: TRL is not run at this size"
            )
        if command.set or {"micro_batch_size", "batch_rows"} & command.size.keys():
            raise ValueError(
                "peer=trl: set... and size.micro_batch_size, batch_rows would change our side alone"
            )
        record = {"rounds": []}
        for measured in compare(
            settings, own_overrides("peer"), command.rounds, command.batches, command.arms
        ):
            record["rounds"].append(measured)
            write(record | {"threads": command.threads}, out)
        print(Pairs(record["rounds"]).table())
    if peers.ranks.rank == 0:
        write(record | {"threads": command.threads}, out)
    if not command.out:
        print(f"numbers in {out}")


def own_overrides(key: str) -> list[str]:
    """Return this command's arguments without the one that makes it start others, and without what
    only it needs.
    """
    return [
        o
        for o in HydraConfig.get().overrides.task
        if o.split("=")[0] not in (key, "rounds", "out", "arms")
    ]


def write(record: dict, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = platform.processor() or platform.machine()
    out.write_text(
        json.dumps({"machine": machine, "code": code_state(), **record}, indent=1), encoding="utf-8"
    )


def draw_curves(command: BenchmarkCommand) -> None:
    """Measure the scaling curves and draw them."""
    out = Path(command.out or Path(command.runs) / "benchmarks" / "scaling.json")
    points = []
    for point in measure_curves([1, 2], command.runs):
        points.append(point)
        write({"points": points}, out)
    subprocess.run(
        [sys.executable, str(ROOT / "analysis" / "fig_scaling.py"), str(out)], check=True
    )


def composed(command: BenchmarkCommand) -> Settings:
    """Return the workload as the settings of a run, which does not yet say from which folder it
    starts.
    """
    workload = WORKLOADS[command.workload].resized(command.size)
    wandb = "offline" if find_spec("wandb") else "disabled"
    own = [
        f"threads={command.threads}",
        f"runs={command.runs}",
        f"tracking.wandb={wandb}",
        f"study={command.workload}",
    ]
    return to_settings(
        compose("train", overrides=[*workload.overrides(), *own, *command.overrides()])
    )


def check_prompts(settings: Settings, command: BenchmarkCommand) -> None:
    """Raise ValueError if the prompts of a step cannot be shared out, or are not the workload's,
    which is made larger for weak scaling."""
    prompts, count = WORKLOADS[command.workload].resized(command.size).prompts, command.scaling
    if prompts < count:
        raise ValueError(
            f"scaling={count} with size.prompts={prompts}: set size.prompts={count} or more"
        )
    if settings.rollout.prompts_per_step != prompts:
        raise ValueError(
            f"scaling={count} with set.rollout.prompts_per_step: set size.prompts=N instead"
        )


def from_folder(settings: Settings, command: BenchmarkCommand, peers: Peers) -> None:
    """Let the run start from a model folder, which is made if it is not there yet: by rank 0, for
    whom others wait.
    """
    if peers.ranks.rank:
        peers.ranks.broadcast(None)
    start_from_folder(settings, command)
    if peers.ranks.rank == 0:
        peers.ranks.broadcast(None)


def start_from_folder(settings: Settings, command: BenchmarkCommand) -> None:
    """Put the workload's model folder and its task into the settings."""
    shape = WORKLOADS[command.workload].resized(command.size).shape
    if shape:
        settings.model.path = str(made_folder(shape, Path(command.runs) / "benchmarks" / "models"))
        settings.task = EvenText(
            **{f: getattr(settings.task, f) for f in ("name", "max_operands", "largest")}
        )
        return
    bar = Progress("cold start", settings.cold_start.steps, 0, sys.stderr.isatty())
    folder = starting_model_folder(settings, lambda step, _, loss: bar(step, loss=loss))
    bar.close()
    settings.model, settings.cold_start.steps = HFModel(path=str(folder)), 0


if __name__ == "__main__":
    if is_follower():
        silence()
    as_rank(lambda: command_line(main))
