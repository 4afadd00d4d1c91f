"""Scaling over processes: one process with one thread, beside several threads and several
processes, in alternation.

Strong scaling shares out one batch; weak scaling gives each process a batch of the first's size.
Beside them are as many runs side by side that exchange nothing: what they lose is the machine's,
not the exchange's. Every measurement is a command of its own, and several processes are started by
torchrun.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from speed.exchanges import PHASES

BENCHMARK = Path(__file__).parents[1] / "benchmark.py"
# `next` is sampling, scoring and the exchange of responses; `handover` the new weights to the
# engine's copy
SHOWN = {
    "next": "rollout",
    "old_logprobs": "old pass",
    "update": "update",
    "handover": "hand-over",
    "total": "step",
}
KINDS = ("waiting", "exchanging")
# The pass for the old log-probs is spared where one process shares its weights with the engine, and
# never with shards. Where all make it, all do the same work.
ALIKE = ("set.policy.old_pass=always", "set.policy.device=cpu")


@dataclass(frozen=True)
class Case:
    """One way to use the machine. With mode none several processes are runs of their own; `times`
    multiplies the prompts of a step."""

    label: str
    processes: int
    threads: int
    mode: str
    times: int = 1


def cases(count: int) -> list[Case]:
    """Return the cases of `count` processes or threads, the first of which the others are compared
    with.
    """
    several = f"{count} processes"
    return [
        Case("1 process, 1 thread", 1, 1, "none"),
        Case(f"1 process, {count} threads", 1, count, "none"),
        Case(f"{count} runs side by side", count, 1, "none"),
        *(Case(f"{several}, {mode}", count, 1, mode) for mode in ("replicate", "shard")),
        *(
            Case(f"{several}, {mode}, {count} x prompts", count, 1, mode, count)
            for mode in ("replicate", "shard")
        ),
    ]


def measure_cases(
    count: int, arguments: list[str], prompts: int, rounds: int
) -> Iterator[dict[str, dict]]:
    """Run the cases in turn, `rounds` times, each time beginning with another, and yield the
    records of every round by the case's label. `arguments` are this command's, without those that a
    case sets."""
    planned = cases(count)
    with tqdm(total=rounds * len(planned), disable=None) as bar:
        for number in range(rounds):
            first, measured = number % len(planned), {}
            for case in planned[first:] + planned[:first]:
                bar.set_description(case.label)
                measured[case.label] = record(
                    case, [*ALIKE, *arguments, f"size.prompts={prompts * case.times}"]
                )
                bar.update()
            yield {case.label: measured[case.label] for case in planned}


def record(case: Case, arguments: list[str]) -> dict:
    """Return what a case measured; of runs side by side the sum of their tokens, and the means of
    their seconds. Raises RuntimeError with the last words of a process that failed."""
    own = [str(BENCHMARK), *arguments, f"threads={case.threads}", f"set.parallel.mode={case.mode}"]
    launcher, runs = [], case.processes
    if case.mode != "none":
        launcher, runs = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"],
            1,
        )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        outs = [Path(folder) / f"{number}.json" for number in range(runs)]
        words = [
            stack.enter_context(out.with_suffix(".txt").open("w+", encoding="utf-8"))
            for out in outs
        ]
        started = [
            subprocess.Popen(
                [sys.executable, *launcher, *own, f"out={out}"],
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": str(case.threads)},
            )
            for out, file in zip(outs, words, strict=True)
        ]
        codes = [process.wait() for process in started]
        for code, file in zip(codes, words, strict=True):
            if code:
                file.seek(0)
                raise RuntimeError(f"{case.label} failed:\n{file.read()[-3000:]}")
        return side_by_side([json.loads(out.read_text(encoding="utf-8")) for out in outs])


def side_by_side(records: list[dict]) -> dict:
    """Return the record of runs that went on at the same time: tokens and sequences are summed,
    seconds are means.
    """
    sums = {key: sum(r[key] for r in records) for key in ("tokens", "sequences")}
    means = {key: fmean(r[key] for r in records) for key in records[0] if key.endswith("_s")}
    return records[0] | means | sums


def scaling_table(rounds: list[dict[str, dict]], count: int) -> str:
    """Return medians over the rounds as Markdown tables: seconds; tokens per second against the
    first case; and the share of the time that is spent in exchanges."""
    # it imports pandas, for which no measurement should wait
    from gspo.analysis.blocks import markdown_table

    first, *others = rounds[0]
    seconds = [["seconds for a batch", *SHOWN.values(), "responses", "tokens"]]
    for label, r in rounds[0].items():
        times = [f"{median(each[label][f'{phase}_s'] for each in rounds):.2f}" for phase in SHOWN]
        seconds.append([label, *times, f"{r['sequences']:.0f}", f"{r['tokens']:,.0f}"])
    # one process hands nothing over
    compared = [phase for phase in SHOWN if rounds[0][first][f"{phase}_s"]]
    gains = [
        [
            "tokens/s, times those of one thread",
            *(SHOWN[phase] for phase in compared),
            f"of {count} x",
        ]
    ]
    for label in others:
        found = {
            phase: [rate(each[label], phase) / rate(each[first], phase) for each in rounds]
            for phase in compared
        }
        gains.append([label, *map(spread, found.values()), f"{median(found['total']) / count:.0%}"])
    exchanged = [["waiting + exchanging, of the time", *SHOWN.values(), "exchanges"]]
    for label in others:
        if "exchanges" in rounds[0][label]:
            parts = [
                " + ".join(
                    f"{median(share(each[label], phase, kind) for each in rounds):.1%}"
                    for kind in KINDS
                )
                for phase in SHOWN
            ]
            exchanged.append([label, *parts, f"{rounds[0][label]['exchanges']:.0f}"])
    return "\n".join("\n".join(markdown_table(rows)) + "\n" for rows in (seconds, gains, exchanged))


def rate(record: dict, phase: str) -> float:
    """Return the tokens of a batch over the seconds of a phase."""
    return record["tokens"] / record[f"{phase}_s"]


def share(record: dict, phase: str, kind: str) -> float:
    """Return the share of a phase that ranks wait for each other, or exchange; of the whole step
    where it is total. Zero for a phase that takes no time."""
    parts = [record[f"{p}_{kind}_s"] for p in PHASES if phase in (p, "total")]
    return sum(parts) / record[f"{phase}_s"] if record[f"{phase}_s"] else 0.0


def spread(ratios: list[float]) -> str:
    """Return the median, and the range in brackets."""
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
