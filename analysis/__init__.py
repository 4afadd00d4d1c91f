"""Figures and statistics of recorded runs; `from gspo.analysis import load_runs` in a notebook."""

from gspo.analysis.notebooks import RecordedRuns, load_runs
from gspo.analysis.runs import RunsError

__all__ = ["RecordedRuns", "RunsError", "load_runs"]
