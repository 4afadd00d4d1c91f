"""Writes the documentation's table of definitions from the tables.

python -m gspo.tracking.frameworks.page > docs/other_frameworks_tables.md
"""

from gspo.tracking.frameworks.known import TABLES
from gspo.tracking.frameworks.table import Entry, Table

HEAD = """\
# Metrics of other frameworks

```sh
python -m gspo.tracking.frameworks.page > docs/other_frameworks_tables.md     # writes this page
```

[Runs of other frameworks](other_frameworks.md) says how their logs are read. The tables are in
`gspo/tracking/frameworks/`, one file per framework. The first line that matches a name counts.

| relation | meaning |
|---|---|
| same | the same definition as [our metric](metrics.md) |
| scaled | our metric is the formula, with x for theirs |
| reweighted | the same quantity, with other weights in its mean or at another moment of the step |
| other | another definition. The metric keeps its name, after the framework's: `trl/grad_norm` |

A `*` stands for any text. Names stand without the prefixes of trackers, such as `train/`. With the remark "0: absent",
a metric that is 0 in every row is left out, because it was not computed. With "-1: absent", the numbers that are -1 are
left out."""


def page() -> str:
    """Return docs/other_frameworks_tables.md, a table for each framework."""
    lines = [HEAD]
    for table in TABLES.values():
        lines += [
            "",
            f"## {table.title}",
            "",
            f"Read in the source of {table.title} {table.version}.",
        ]
        lines += _axes(table)
        lines += ["", "| in the log | our metric | relation | remark |", "|---|---|---|---|"]
        lines += [_line(entry) for entry in table.entries]
    return "\n".join(lines) + "\n"


def _axes(table: Table) -> list[str]:
    """Return sentences about the framework's steps."""
    units = {"batches": "rollout batches", "updates": "optimizer steps"}
    texts = []
    for axis in table.axes:
        start = "" if axis.first == 1 else f", from {axis.first}"
        texts.append(f"`{axis.key}` ({units[axis.counts]}{start})")
    sentences = f"Steps: {', '.join(dict.fromkeys(texts))}."
    if table.row_is_mean:
        sentences += " A row is the mean over the steps since the last row."
    return ["", sentences]


def _line(entry: Entry) -> str:
    """Return an entry's line of the table."""
    remarks = []
    if entry.objectives:
        remarks.append(f"objective {', '.join(entry.objectives)}")
    if entry.if_only:
        remarks.append("if no second name matches")
    if entry.formula() != "x":
        remarks.append(f"`{entry.formula()}`")
    if entry.note:
        remarks.append(entry.note)
    if entry.beside:
        remarks.append(f"beside {' or '.join(f'`{name}`' for name in entry.beside)}")
    if entry.absent_if_all_zero:
        remarks.append("0: absent")
    if entry.absent_value is not None:
        remarks.append(f"{entry.absent_value:g}: absent")
    ours = f"`{entry.ours}`" if entry.ours else ""
    remark = "; ".join(remarks).replace("|", r"\|")
    return f"| `{entry.theirs}` | {ours} | {entry.relation} | {remark} |"


if __name__ == "__main__":
    print(page(), end="")
