"""Measures this software within minutes on a GPU machine that has no network.

    python experiments/gpu/box.py collect                       on a machine with a network: wheels
                                                                into build/wheels
    python experiments/gpu/box.py run --part check --out DIR    4 minutes: is it right, how fast is
                                                                it, beside TRL
    python experiments/gpu/box.py run --part study --out DIR    8 minutes: the sweep
                                                                sweeps/gpu_routing.yaml

    --out DIR        the folder that all results are written to
    --miniature      the same commands on the CPU, with tiny models and few steps
    --seconds N      another limit for the whole part
    key=value ...    further settings of the study, for example optim.lr=1e-4

The machine needs Python 3.12 and what NEEDED names; `run` installs the wheels into build/packages,
and nothing else. A part ends by itself within its limit. What has been measured until then is in
DIR: summary.jsonl (a line for each command), a log of each command, check.json, benchmark_*.json,
and of the study finished.jsonl (a line for each finished run) and runs/ (the rows and settings of
all runs).
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS, PACKAGES, WORK = (
    ROOT / "build" / "wheels",
    ROOT / "build" / "packages",
    ROOT / "build" / "gpu",
)
STUDY = "gpu_routing"
PYTHON = (3, 12)
# What the machine has: modules, by name.
NEEDED = (
    "torch",
    "transformers",
    "pandas",
    "pyarrow",
    "matplotlib",
    "jinja2",
    "tqdm",
    "yaml",
    "numpy",
)
# What is brought along, in the versions that uv.lock and requirements/peer.txt pin.
CARRIED = (
    "hydra-core", "omegaconf", "hydra-joblib-launcher", "joblib", "cloudpickle", "math-verify", "latex2sympy2-extended",
    "requests", "urllib3", "certifi", "charset-normalizer", "idna",
)  # fmt: skip
FROM_SOURCE = ("antlr4-python3-runtime",)  # there is no wheel of it
PEER = ("trl", "datasets", "dill", "multiprocess", "xxhash")
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
MOST_MIB = 64  # what may be brought along
SECONDS = {"check": 240, "study": 480}
# Seconds before the deadline at which a command gets SIGTERM. After half of them it gets SIGKILL. The
# other half is for the results.
GRACE = 20
# times as long as on the GPU machine a miniature may take: two busy cores load PyTorch slowly
SLOWER = 3
KEPT = ("settings.yaml", "metrics.jsonl", "code.json", "train.log")  # of a run's folder
MINIATURE_STUDY = (
    "policy.device=cpu", "policy.precision=float32", "rollout.dtype=float32", "model.hidden=32", "model.layers=2",
    "model.heads=2", "model.experts=4", "model.experts_per_token=2", "model.expert_width=16", "cold_start.steps=4",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=8", "trainer.micro_batch_size=4",
    "steps=2", "seed=101", "optim.lr=6e-5", "arm=edge_gspo,edge_grpo", "threads=1", "hydra.launcher.n_jobs=2",
)  # fmt: skip
MINIATURE_SIZES = (
    "size.hidden=32", "size.layers=2", "size.heads=2", "size.key_value_heads=2", "size.head_dim=16", "size.width=16",
    "size.vocabulary=128", "size.prompts=4", "size.group_size=4", "size.new_tokens=12",
)  # fmt: skip
MINIATURE_EXPERTS = ("size.experts=4", "size.experts_per_token=2")


@dataclass(frozen=True)
class Command:
    """One command of a part: its name, its words after the interpreter, and the most seconds that
    it may take.
    """

    name: str
    words: tuple[str, ...]
    seconds: float


@dataclass
class CommandResult:
    """How a command ended."""

    name: str
    words: list[str]
    exit_code: int | None
    seconds: float
    cut_off: bool  # its time was up


def main() -> int:
    options = parser().parse_args()
    if options.action == "collect":
        return collect()
    if options.settings and options.part != "study":
        print(
            f"error: {options.settings[0]} with --part {options.part}: only the study has settings",
            file=sys.stderr,
        )
        return 2
    return run(
        options.part,
        options.out.resolve(),
        options.miniature,
        options.seconds,
        tuple(options.settings),
    )


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("collect", help="download the wheels that are brought along")
    running = actions.add_parser("run", help="run one part on the GPU machine")
    running.add_argument("--part", choices=SECONDS, required=True)
    running.add_argument("--out", type=Path, required=True, metavar="DIR")
    running.add_argument("--miniature", action="store_true")
    running.add_argument("--seconds", type=float, metavar="N")
    running.add_argument("settings", nargs="*", metavar="key=value")
    return parser


# -------------------------------------------------------------------------------------------------------
# wheels
def collect() -> int:
    """Download all wheels into build/wheels and print their size. The exit code is 1 if they are
    too large.
    """
    shutil.rmtree(WHEELS, ignore_errors=True)
    pins = pinned_versions()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = [
        "--python-version",
        "{}.{}".format(*PYTHON),
        "--implementation",
        "cp",
        *platforms,
        "--only-binary",
        ":all:",
    ]
    wanted = [f"{name}=={pins[name]}" for name in (*CARRIED, *PEER)]
    subprocess.run(
        [*pip, "download", "--no-deps", *target, "--dest", str(WHEELS), *wanted], check=True
    )
    built = [f"{name}=={pins[name]}" for name in FROM_SOURCE]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(WHEELS), *built], check=True)
    wheels = sorted(WHEELS.glob("*.whl"))
    mib = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{len(wheels)} wheels, {mib:.1f} MiB, in {WHEELS}")
    if mib > MOST_MIB:
        print(f"error: more than the {MOST_MIB} MiB that may be brought along", file=sys.stderr)
        return 1
    return 0


def pinned_versions() -> dict[str, str]:
    """Return the pinned version of each package: uv.lock's, or else that of requirements/peer.txt."""
    peer = (ROOT / "requirements" / "peer.txt").read_text(encoding="utf-8")
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", peer, re.MULTILINE))
    return pins | {package["name"]: package["version"] for package in lock["package"]}


def install() -> None:
    """Install the wheels into build/packages. Raises ValueError if the machine lacks what is not
    brought along.
    """
    if sys.version_info[:2] != PYTHON:
        raise ValueError(
            f"this is Python {sys.version.split()[0]}, and the wheels are for {PYTHON[0]}.{PYTHON[1]}"
        )
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"this machine's Python lacks {', '.join(missing)}; experiments/gpu/README.md says what it needs"
        )
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not wheels:
        raise ValueError(
            f"{WHEELS} is empty: run `python experiments/gpu/box.py collect` where there is a network"
        )
    shutil.rmtree(PACKAGES, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", "--target", str(PACKAGES), *wheels],
        check=False,
    )
    if done.returncode:
        raise ValueError(f"pip could not install {WHEELS}")


def environment() -> dict[str, str]:
    """Return the environment of the commands: the packages that were brought along, and no network."""
    paths = [str(PACKAGES), str(ROOT)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


# -------------------------------------------------------------------------------------------------------
# the parts
def commands(
    part: str, out: Path, miniature: bool, settings: tuple[str, ...] = ()
) -> list[Command]:
    """Return the commands of a part, the most important first."""
    if part == "check":
        planned = [check(out, miniature), *benchmarks(out, miniature)]
    else:
        planned = [Command("study", (*study(miniature), *settings), SECONDS["study"])]
    if miniature:
        planned = [replace(command, seconds=SLOWER * command.seconds) for command in planned]
    return planned


def check(out: Path, miniature: bool) -> Command:
    """Return the check of what the machine computes."""
    device, seconds = ("cpu", 20) if miniature else ("cuda", 45)
    words = (
        "check",
        f"device={device}",
        f"seconds={seconds}",
        f"json={out / 'check.json'}",
    )
    return Command("check", ("-m", "gspo", *words), 70)


def benchmarks(out: Path, miniature: bool) -> list[Command]:
    """Return the benchmarks: the shape of Qwen3-0.6B beside TRL, and a small MoE alone.

    On an H200 the first took 126 s, and TRL's step of the second does not fit into what is left."""
    beside_trl = ("peer=trl", "arms=[best,trl]", "rounds=1", "batches=1")
    planned = []
    for workload, seconds, how in (
        ("qwen3_0p6b", 135.0, beside_trl),
        ("moe_100m", 35.0, ("batches=2",)),
    ):
        words = [f"workload={workload}", *how]
        words += [f"runs={runs_folder(miniature)}", f"out={out / f'benchmark_{workload}.json'}"]
        if miniature:
            words += [
                "threads=1",
                *MINIATURE_SIZES,
                *(MINIATURE_EXPERTS if "moe" in workload else ()),
            ]
        else:
            words += ["threads=8"]
        planned.append(
            Command(f"benchmark_{workload}", ("experiments/benchmark.py", *words), seconds)
        )
    return planned


def study(miniature: bool) -> tuple[str, ...]:
    """Return the command of the study."""
    words = [f"runs={runs_folder(miniature)}", "tracking.wandb=disabled"]
    words += MINIATURE_STUDY if miniature else ["policy.device=cuda"]
    return ("-m", "gspo", "train", "-cd", "sweeps", "-cn", STUDY, "-m", *words)


def runs_folder(miniature: bool) -> Path:
    """Return the folder that runs are made in. The same command again goes on with what it finds
    there.
    """
    return WORK / ("miniature" if miniature else "runs")


def run(
    part: str, out: Path, miniature: bool, seconds: float | None, settings: tuple[str, ...]
) -> int:
    """Run a part within its limit. The exit code is 1 if any command failed or was cut off."""
    deadline = time.monotonic() + (seconds or SECONDS[part] * (SLOWER if miniature else 1))
    out.mkdir(parents=True, exist_ok=True)
    try:
        install()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = False
    for command in commands(part, out, miniature, settings):
        outcome = run_one(
            command, out, deadline, lambda: keep_rows(runs_folder(miniature) / STUDY, out)
        )
        failed = failed or outcome.exit_code != 0
        with (out / "summary.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        end = "cut off" if outcome.cut_off else f"exit code {outcome.exit_code}"
        print(f"{command.name}: {end}, {outcome.seconds:.0f} s", flush=True)
    return int(failed)


def run_one(
    command: Command, out: Path, deadline: float, keep: Callable[[], None]
) -> CommandResult:
    """Run one command until it ends or its time is up, with its output in a log. `keep` is called
    every second.
    """
    words = [sys.executable, *command.words]
    left = deadline - GRACE - time.monotonic()
    if left < GRACE:
        return CommandResult(command.name, words, None, 0.0, cut_off=True)
    started = time.monotonic()
    end = started + min(left, command.seconds)
    cut_off = False
    log = out / f"{command.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None:
            keep()
            time.sleep(1)
            if time.monotonic() > end and not cut_off:
                cut_off = True
                end_group(process)
    keep()
    print(log.read_text(encoding="utf-8", errors="replace")[-4000:], flush=True)
    return CommandResult(
        command.name, words, process.returncode, time.monotonic() - started, cut_off
    )


def end_group(process: subprocess.Popen) -> None:
    """Ask a command and the processes that it started to end. Kill them after half of GRACE seconds."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE / 2)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def keep_rows(study_folder: Path, out: Path) -> None:
    """Copy what is small of every run to `out`, and write a line for each that has finished."""
    done = []
    for rows in sorted(study_folder.glob("*/metrics.jsonl")):
        folder = out / "runs" / study_folder.name / rows.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (rows.parent / name).is_file():
                shutil.copyfile(rows.parent / name, folder / name)
        done.append(finished_run(rows))
    lines = [json.dumps(line) for line in done if line]
    if lines:
        (out / "finished.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def finished_run(rows: Path) -> dict | None:
    """Return the numbers of a run that has made all its steps; None for another."""
    steps = re.search(
        r"^steps: (\d+)$", (rows.parent / "settings.yaml").read_text(encoding="utf-8"), re.MULTILINE
    )
    lines = [line for line in rows.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    entries = [json.loads(line) for line in lines]
    if not steps or not entries or entries[-1]["step"] < int(steps[1]):
        return None
    last_fifth = entries[-max(int(steps[1]) // 5, 1) :]
    names = ("reward/mean", "routing/consistency_after_step", "kl/old_k3")
    means = {
        name: mean([entry[name] for entry in last_fifth if entry.get(name) is not None])
        for name in names
    }
    return {
        "run": rows.parent.name,
        "steps": int(steps[1]),
        "last_fifth": means,
        "last": entries[-1],
    }


def mean(values: list[float]) -> float | None:
    """Return the mean; None where there is no value."""
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    sys.exit(main())
