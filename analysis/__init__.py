"""Figures and statistics of recorded runs. For notebooks: `from analysis import load_runs` (notebooks.py).

The modules are scripts that import each other by their bare names: here too, from this folder before any other.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
try:
    from load import Refused
    from notebooks import Recorded, load_runs
finally:
    sys.path.remove(str(Path(__file__).parent))

__all__ = ["Recorded", "Refused", "load_runs"]
