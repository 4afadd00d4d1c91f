"""Checks in three minutes whether this software computes correctly on this machine, and how fast.

    gspo check                            # the GPU if there is one, else the CPU
    gspo check device=cuda seconds=300
    gspo check json=check.json            # a file to attach to a bug report

Each finding is a line: `ok`, `SLOW` (correct, but slower than it should be), `FAIL` (wrong), or
`skip` (not checked, with the reason). The exit code is 1 if anything failed. Nothing is downloaded,
and no account is needed: the models have random weights and are created on the device.
"""

import json
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.checking.report import FAIL, SKIP, SLOW, Finding, header
from gspo.data.lazy_torch import torch
from gspo.io.arguments import command_options, option
from gspo.io.errors import SettingError
from gspo.io.files import replace_text
from gspo.run.code_state import code_state
from gspo.run.entry_point import command_line


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command."""

    device: str = option("auto", "the device that is checked: auto, cpu or cuda")
    seconds: float = option(
        150.0, "how long it may take; a check is skipped if too little time is left", above=0
    )
    json: str = option("", "a file for all numbers, versions and tracebacks")


def main() -> None:
    """Run the checks, with the options of the command line."""
    command_line(check)


def check() -> None:
    """Print each finding as soon as its check yields it. The exit code is 1 if a check failed."""
    options = command_options(Options, __doc__)
    if options.json:
        try:  # fail before the checks if the file cannot be written
            Path(options.json).parent.mkdir(parents=True, exist_ok=True)
            replace_text(Path(options.json), "{}\n")
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise SettingError("json", options.json, problem, "name another file") from None
    # these import PyTorch and transformers, which takes seconds
    from gspo.checking import run
    from gspo.checking.bench import Bench
    from gspo.run.policies import usable_device

    device = torch.device(usable_device(options.device, "device"))
    started = time.monotonic()
    bench = Bench(device, started + options.seconds)
    print(header())
    findings: list[Finding] = []
    record: dict[str, Any] = {
        "code": code_state(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__config__.show(),
    }

    def write_record() -> None:
        """Write the findings so far, so that Ctrl-C loses nothing."""
        record["seconds"] = round(time.monotonic() - started, 2)
        record["seconds_by_check"] = bench.seconds_by_check
        record["findings"] = [finding.record() for finding in findings]
        if options.json:
            replace_text(Path(options.json), json.dumps(record, indent=1, default=str) + "\n")

    for finding in run.findings(bench, run.CHECKS):
        findings.append(finding)
        print(finding.line(), flush=True)
        write_record()
    write_record()
    counts = Counter(finding.status for finding in findings)
    print(f"\n{summary(counts)}, {time.monotonic() - started:.0f} s")
    if options.json:
        print(f"all numbers in {options.json}")
    sys.exit(1 if counts[FAIL] else 0)


def summary(counts: Counter[str]) -> str:
    """Return the numbers of failed, slow, skipped and passed checks in words."""
    text = "nothing failed"
    if counts[FAIL]:
        text = f"{counts[FAIL]} failed: do not trust a run on this machine before you know why"
    return f"{text}; {counts[SLOW]} slow, {counts[SKIP]} skipped, {counts['ok']} ok"
