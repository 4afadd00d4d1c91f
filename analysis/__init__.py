"""Figures and statistics of recorded runs. In a notebook, use `from analysis import load_runs`
(notebooks.py).
"""

from gspo.analysis.load import Refused
from gspo.analysis.notebooks import Recorded, load_runs

__all__ = ["Recorded", "Refused", "load_runs"]
