"""The paper's own points, read off the figures of arXiv:2507.18071.

The first lines of the CSV file say how. Training rewards carry a reading error of up to about
0.001. The paper's x axis has no ticks: only the markers' order is known.
"""

from pathlib import Path

import numpy as np
import pandas as pd

CSV = Path(__file__).parent / "data" / "gspo_paper_figures.csv"
CLIP_RANGES = {  # section 5.1
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "grpo": (0.2, 0.27),
}


def series(figure: str, name: str) -> pd.Series:
    """Return the values of a series (an arm's label) of a figure by marker number.

    A hidden marker is NaN.
    """
    points = pd.read_csv(CSV, comment="#")
    chosen = points[(points["figure"] == figure) & (points["series"] == name)]
    if chosen.empty:
        raise KeyError(f"no points of {figure!r}, {name!r} in {CSV}")
    values = chosen.set_index("marker")["value"]
    return values.reindex(np.arange(values.index.max() + 1))
