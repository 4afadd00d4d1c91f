"""Checks in three minutes whether this software computes what it should on this machine, and how
fast.

    gspo check                                  the GPU if there is one, else the CPU
    gspo check device=cuda --seconds 300
    gspo check --json check.json                a file to attach to a bug report

    device=auto|cpu|cuda    the device that is checked (default: auto)
    --seconds N             how long it may take (default: 150); checks for which no time is left
                            are skipped
    --json FILE             write all numbers, versions and tracebacks

A line for each finding: `ok`, `SLOW` (right, but slower than it should be), `FAIL` (wrong), or
`skip` (not checked, and why). The exit code is 1 if anything failed. Nothing is downloaded, and no
account is needed: the models are random and made on the device.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gspo.checking.report import FAIL, SKIP, SLOW, Finding, header
from gspo.data.lazy_torch import torch
from gspo.io.arguments import nearest
from gspo.io.files import replace_text
from gspo.run.code_state import code_state
from gspo.run.entry_point import command_line

if TYPE_CHECKING:
    from gspo.checking.bench import Bench

OPTIONS = {"--seconds": "150", "--json": "", "device": "auto"}


class Options(NamedTuple):
    """What the command line asks for."""

    device: str
    seconds: float
    json: str


def main() -> None:
    """Run the checks that the command line asks for."""
    command_line(check)


def check() -> None:
    """Print the findings as they come. The exit code is 1 if any check failed."""
    options = options_of(sys.argv[1:])
    if options is None:
        print(__doc__)
        return
    if options.json:
        # a folder that cannot be written is said before the checks
        replace_text(Path(options.json), "{}\n")
    from gspo.checking import run  # these import PyTorch and transformers, which takes seconds
    from gspo.checking.bench import Bench
    from gspo.run.policies import usable_device

    device = torch.device(usable_device(options.device, "device"))
    started = time.monotonic()
    bench = Bench(device, started + options.seconds)
    print(header())
    found: list[Finding] = []
    record = {
        "code": code_state(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__config__.show(),
    }
    for finding in run.findings(bench, run.CHECKS):
        found.append(finding)
        print(finding.line(), flush=True)
        write(record, found, bench, started, options.json)
    write(record, found, bench, started, options.json)
    counts = Counter(finding.status for finding in found)
    print(f"\n{summary(counts)}, {time.monotonic() - started:.0f} s")
    if options.json:
        print(f"all numbers in {options.json}")
    sys.exit(1 if counts[FAIL] else 0)


def write(record: dict, found: list[Finding], bench: Bench, started: float, file: str) -> None:
    """Write what was found so far, so that Ctrl-C loses nothing. Without a file nothing is written."""
    if file:
        seconds = {"seconds": round(time.monotonic() - started, 2), "seconds_by_check": bench.spent}
        whole = record | seconds | {"findings": [finding.record() for finding in found]}
        replace_text(Path(file), json.dumps(whole, indent=1, default=str) + "\n")


def options_of(arguments: list[str]) -> Options | None:
    """Return what the words of the command line say, None if they ask for help. Raises ValueError
    for words that are not known."""
    values, rest = dict(OPTIONS), list(arguments)
    while rest:
        name, given, value = rest.pop(0).partition("=")
        if name in ("-h", "--help"):
            return None
        if name not in OPTIONS:
            raise ValueError(f"there is no {name}; the nearest is {nearest(name, OPTIONS)}")
        if not given and not rest:
            raise ValueError(f"{name} needs a value")
        values[name] = value if given else rest.pop(0)
    try:
        seconds = float(values["--seconds"])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds {values['--seconds']} must be a number above 0")
    return Options(values["device"], seconds, values["--json"])


def summary(counts: Counter[str]) -> str:
    """Return in words how the checks went."""
    failed, slow, skipped = counts[FAIL], counts[SLOW], counts[SKIP]
    if failed:
        text = f"{failed} failed: do not trust a run on this machine before you know why"
    else:
        text = "nothing failed"
    return f"{text}; {slow} slow, {skipped} skipped, {counts['ok']} ok"
