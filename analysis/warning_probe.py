"""Two signals of others around a collapse: mutual information and the gradient's SNR.

The recorded runs lack both, so experiments/signal_probe.py measured them in a few further runs.
They are too few for a rule's worth: the table shows the means of ten steps.
"""

from pathlib import Path

from gspo.analysis import load
from gspo.analysis.blocks import markdown_table
from gspo.analysis.runs import Run
from gspo.analysis.stats import number

STUDIES = ("signal_probe", "signal_probe_tool", "signal_probe_guess")
WINDOW = 10  # steps
METRICS = {
    "mutual information": "custom/mutual_information",
    "own prompt most probable": "custom/retrieval",
    "gradient SNR": "custom/gradient_snr",
    "groups without signal": "group/zero_variance",
}
FORMATS = dict.fromkeys(METRICS.values(), ".2f") | {"custom/gradient_snr": ".3f"}


def table(folder: Path) -> list[str]:
    """Return a Markdown row per run of the studies in the folder.

    The cells hold the mean of the first ten steps, of the ten steps before the collapse, and of the
    last ten steps. A run that did not collapse has two numbers.
    """
    head = ["means of ten steps: first / before the collapse / last", "collapsed at", *METRICS]
    rows = [head]
    for study in STUDIES:
        for run in load.load([folder / f"{study}.parquet"]).runs:
            options = f"{run.settings['options.experiment']}, {run.settings['optim.lr']:g}"
            collapsed = "-" if run.collapsed is None else str(run.collapsed)
            columns = [means(run, metric) for metric in METRICS.values()]
            rows.append([f"{options}, seed {run.seed}", collapsed, *columns])
    return markdown_table(rows)


def means(run: Run, metric: str) -> str:
    """Return the means of a metric over ten steps, as text; "-" if no step has a number."""
    values = run.column(metric)
    parts = [values.loc[1:WINDOW]]
    if run.collapsed is not None:
        parts.append(values.loc[run.collapsed - WINDOW : run.collapsed - 1])
    parts.append(values.loc[run.last - WINDOW + 1 :])
    return " / ".join(number(float(part.mean()), FORMATS[metric]) for part in parts)
