"""Figures and statistics of recorded runs. In a notebook, use `from analysis import load_runs`
(notebooks.py).
"""

from analysis.load import Refused
from analysis.notebooks import Recorded, load_runs

__all__ = ["Recorded", "Refused", "load_runs"]
