"""Recorded measurements of gspo.planning.memory, which the tests read instead of measuring again.

A measurement traces a model's forward and backward pass, which takes up to half a minute. The file
holds the measurements of the plans in tests/unit/planning. Add those of a new test, or record all
of them anew after a change of the model or of the measurement:

    RECORD_MEASUREMENTS=missing pytest -n 0 tests/unit/planning/test_run_plan.py
    RECORD_MEASUREMENTS=all pytest -n 0 -m 'slow or not slow' tests/unit/planning/test_run_plan.py

A slow test measures some of them anew and compares.
"""

import dataclasses
import hashlib
import json
import os
from functools import cache
from pathlib import Path

from transformers import PretrainedConfig

from gspo.planning.memory import Measured, Work, measure

FILE = Path(__file__).parents[1] / "data" / "plan_measurements.json"
RECORD = os.environ.get("RECORD_MEASUREMENTS", "")  # "missing" or "all"
measured: dict[str, Measured] = {}  # by this process


@cache
def recorded() -> dict[str, Measured]:
    """Return the recorded measurements by their keys."""
    return {key: Measured(**fields) for key, fields in json.loads(FILE.read_text()).items()}


def key_of(config: PretrainedConfig, work: Work) -> str:
    """Return a key that names the model and a rank's work."""
    facts = config.to_diff_dict()
    facts.pop("transformers_version", None)
    text = json.dumps(facts, sort_keys=True, default=str) + repr(work)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measurement(config: PretrainedConfig, work: Work) -> Measured:
    """Return the recorded measurement, or measure if there is none."""
    key = key_of(config, work)
    if RECORD != "all" and key in recorded():
        return recorded()[key]
    if key not in measured:
        measured[key] = measure(config, work)
    return measured[key]


def record() -> None:
    """Write the measurements of this process, if RECORD_MEASUREMENTS asks for it.

    Else raise AssertionError if a test had to measure, which would slow the suite unnoticed.
    """
    if not RECORD:
        assert not measured, f"{len(measured)} plans have no record: RECORD_MEASUREMENTS=missing"
        return
    known = measured if RECORD == "all" else {**recorded(), **measured}
    fields = {key: dataclasses.asdict(known[key]) for key in sorted(known)}
    FILE.write_text(json.dumps(fields, indent=0) + "\n")
