"""How long the commands of README and docs/getting_started.md take on this machine: `make times`.

    python experiments/times.py                      # the answers and the first run, some minutes
    python experiments/times.py reproduce=true       # the comparison of `make reproduce` too

The pages state times of one machine, which they name. Run this when nothing else runs.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gspo.io.arguments import command_options, option

ROOT = Path(__file__).resolve().parents[1]
GSPO = [sys.executable, "-m", "gspo.cli.main"]
FIRST_RUN = ["train", "experiment=micro_moe", "objective=gspo_tiny"]
COMMANDS = {  # what it is -> the words after `gspo`, and the exit code that is right
    "help": (["train", "--help"], 0),
    "a mistyped setting": (["train", "lr=1"], 2),
    "dry run": (["train", "experiment=micro_moe", "dry_run=true"], 0),
    "dry run of 30 jobs": (["train", "-cn", "paper_figures", "-m", "dry_run=true"], 0),
    "the first run, with its cold start": (FIRST_RUN, 0),
    "the next run, another seed": ([*FIRST_RUN, "seed=2"], 0),
    "its report": (["report", "RUN"], 0),
    "compare the two": (["compare", "runs/micro_moe"], 0),
}
# the sweeps of `make reproduce`, each with the number of its runs
REPRODUCED = {"effect": 36, "effect_comfortable": 12, "effect_range": 12}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this script."""

    reproduce: bool = option(False, "also the sweeps and the figures of `make reproduce`")
    json: str = option("", "a file for the numbers")


def main() -> None:
    """Time the commands one after the other in an empty folder, and print a table."""
    options = command_options(Options, __doc__)
    commands = dict(COMMANDS)
    if options.reproduce:
        for study, count in REPRODUCED.items():
            commands[f"reproduce: {study}, {count} runs"] = (["train", "-cn", study, "-m"], 0)
        figures = ["figures", "runs/effect", "beside=[runs/effect_comfortable,runs/effect_range]"]
        commands["reproduce: figures"] = (figures, 0)
    print(machine())
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="gspo-times-") as folder:
        for name, (words, right) in commands.items():
            seconds[name] = timed(words, right, Path(folder))
            print(f"{name:<36}{seconds[name]:8.1f} s   gspo {' '.join(words)[:70]}", flush=True)
    if options.json:
        Path(options.json).write_text(
            json.dumps({"machine": machine(), "seconds": seconds}, indent=1) + "\n",
            encoding="utf-8",
        )


def timed(words: list[str], right: int, folder: Path) -> float:
    """Run a command in a folder and return its seconds. `RUN` stands for the run directory that is
    there. Ends the program if the command ends with another exit code than the right one."""
    runs = sorted(path.parent for path in folder.glob("runs/*/*/settings.yaml"))
    words = [str(runs[0]) if word == "RUN" else word for word in words]
    environment = os.environ | {"WANDB_MODE": "offline"}
    started = time.monotonic()
    done = subprocess.run(
        [*GSPO, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    taken = time.monotonic() - started
    if done.returncode != right:
        sys.exit(
            f"gspo {' '.join(words)} ended with {done.returncode}, not {right}:\n{done.stderr[-2000:]}"
        )
    return taken


def machine() -> str:
    """Return the processor, the number of its cores that may be used, the memory, and the system."""
    model = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        names = [
            line.partition(":")[2].strip()
            for line in described.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"


if __name__ == "__main__":
    main()
