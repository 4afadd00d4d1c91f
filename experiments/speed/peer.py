"""TRL beside us: the same checkpoint, prompts, lengths and optimizer settings, in alternation, pair
by pair.

TRL has an environment of its own (`make setup-peer`); without one it is looked for in this
process's. Every measurement is a process of its own on the same cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from tqdm import tqdm

from gspo.config.settings import Settings
from gspo.run.policies import training_device

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peer" / "bin" / "python"
# The arm "like for like" recomputes the old log-probs as TRL does; ours at its best leaves that
# pass out where it is exact. Both leave out the backward pass of groups without signal, whose
# gradient is exactly 0: `zero_variance` in the records
ARMS = {"trl": None, "like for like": "policy.old_pass=always", "best": "policy.old_pass=auto"}
COMPARED = ("total_s", "rollout_s", "train_s", "peak_memory_mib")


@dataclass
class Pairs:
    """The measurements of every round, by arm."""

    rounds: list[dict[str, dict]]

    def ratios(self, arm: str, key: str) -> list[float]:
        """Return TRL over ours; above 1 we take less."""
        return [r["trl"][key] / r[arm][key] for r in self.rounds]

    def table(self) -> str:
        columns = ("s/batch", "rollout", "train", "tokens", "MiB", "TRL/ours")
        lines = [f"{'round':<7}{'arm':<15}" + "".join(f"{name:>9}" for name in columns)]
        for number, measured in enumerate(self.rounds, 1):
            for arm, record in measured.items():
                ratio = (
                    "" if arm == "trl" else f"{measured['trl']['total_s'] / record['total_s']:.2f}"
                )
                lines.append(
                    f"{number:<7}{arm:<15}{record['total_s']:>9.3f}{record['rollout_s']:>9.3f}{record['train_s']:>9.3f}"
                    f"{record['tokens']:>9,.0f}{record['peak_memory_mib']:>9,.0f}{ratio:>9}"
                )
        for arm in [arm for arm in self.rounds[0] if arm != "trl"]:
            for key in COMPARED:
                found = self.ratios(arm, key)
                lines.append(
                    f"TRL / ours, {arm}, {key}: median {median(found):.2f} (min {min(found):.2f}, max {max(found):.2f})"
                )
        return "\n".join(lines)


def compare(
    settings: Settings, arguments: list[str], rounds: int, batches: int, arms: list[str]
) -> Iterator[dict[str, dict]]:
    """Run the arms in turn, `rounds` times, and yield the measurements of every round as soon as
    they are there. `arguments` are this command's, without its peer. Raises ValueError if there is
    no TRL."""
    peers_python()
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads or os.cpu_count())}
    if hasattr(os, "sched_setaffinity") and settings.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-settings.threads :])
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=rounds * len(arms), disable=None) as bar,
    ):
        for _ in range(rounds):
            measured = {}
            for arm in arms:
                bar.set_description(arm)
                out = Path(folder) / "record.json"
                peer = trl(settings, batches, Path(folder), out)
                command = peer if ARMS[arm] is None else ours(arguments, ARMS[arm], out)
                measured[arm] = record_of(command, arm, out)
                bar.update()
                # what was measured is in a log, even of a command that is ended too early
                if bar.disable:
                    print(
                        f"{arm}: {measured[arm]['total_s']:.3f} s a batch",
                        file=sys.stderr,
                        flush=True,
                    )
            yield measured


def peers_python() -> str:
    """Return the interpreter that has TRL: that of its own environment, else this one. Raises
    ValueError if neither has it."""
    if PYTHON.exists():
        return str(PYTHON)
    if find_spec("trl") is None:
        raise ValueError("peer=trl: there is no TRL; make its environment with `make setup-peer`")
    return sys.executable


def record_of(command: list[str], arm: str, out: Path) -> dict:
    """Return what a process measured. Raises RuntimeError with its last words if it failed."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, encoding="utf-8"
    )
    if done.returncode:
        raise RuntimeError(f"{arm} failed:\n{done.stderr[-3000:]}")
    record = json.loads(out.read_text(encoding="utf-8"))
    return record | {"train_s": record["total_s"] - record["rollout_s"]}


def ours(arguments: list[str], override: str, out: Path) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "experiments" / "benchmark.py"),
        *arguments,
        f"set.{override}",
        f"out={out}",
    ]


def trl(settings: Settings, batches: int, folder: Path, out: Path) -> list[str]:
    """Return TRL's command, with what it needs to know in a file."""
    rollout, optim, objective = settings.rollout, settings.optim, settings.objective
    count = rollout.prompts_per_step * (batches + 1)
    problems = [settings.task.problem(settings.seed, "train", i) for i in range(count)]
    device = training_device(settings).partition(":")[0]
    # of one update
    responses = rollout.prompts_per_step * rollout.group_size // settings.trainer.minibatches
    spec = {
        "checkpoint": str(Path(settings.model.path).resolve()),
        "prompts": [p.prompt for p in problems],
        "answers": [p.answer for p in problems],
        "reward": type(settings.task).__name__,
        "batches": batches + 1,
        "prompts_per_step": rollout.prompts_per_step,
        "group_size": rollout.group_size,
        "new_tokens": rollout.max_new_tokens,
        "minibatches": settings.trainer.minibatches,
        "clip": [objective.clip_low, objective.clip_high],
        "optim": asdict(optim),
        "device": device,
        "precision": settings.policy.precision if device == "cuda" else "float32",
        "micro_batch_size": settings.trainer.micro_batch_size if device == "cuda" else responses,
        "threads": settings.threads,
        "seed": settings.seed,
        "out": str(out),
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return [peers_python(), str(ROOT / "experiments" / "benchmark_trl.py"), str(path)]
