"""The Markdown page: what was compared, how far apart the values are, and how the rest differs, in
words.
"""

import math
from collections import Counter
from collections.abc import Callable

from gspo.algorithm.objectives import OBJECTIVES
from peers import defaults
from peers.compare import OK, OUT, STATED, UNTRANSLATED, Comparison
from peers.vectors import Unreadable

SECTIONS = {
    "Policy losses": "loss / gradient",
    "KL estimators": "loss / gradient",
    "KL coefficient": "values",
    "Advantages": "values",
    "Rewards": "values",
    "Corrections": "weights or masks",
    "Mutual information": "metrics",
}
INTRODUCTION = """\
Golden vectors are inputs with what the peers' own functions returned for them (by default those of tests/data/parity).
Each entry is translated into our dataclasses (experiments/peers) and evaluated in float64. Every number is the largest
|ours - peer's| / max(1, |peer's|) over all entries of a cell; `-` means that there is no vector. `log_ratio_bound` is
set to the peer's, or to 80 where it has none. Where peers keep 1e-8 in their denominators (verl, ROLL, OpenRLHF) the
numbers are those of our formula as we train with it; the list's column "with 1e-8" puts it into ours. A dagger marks a
remark in the list. `, dual clip` and `+ KL` are the entries in which these act. Entries with a stated difference are
listed apart and enter no cell."""


def page(command: str, comparisons: list[Comparison], unreadable: list[Unreadable]) -> str:
    """Return the whole page, ending in a newline."""
    parts = [
        f"# Numerical parity with other frameworks\n\n    {command}",
        INTRODUCTION,
        summary(comparisons, unreadable),
    ]
    parts += [section(name, comparisons) for name in SECTIONS]
    parts += [
        default_table(),
        stated_list(comparisons),
        missing_list(comparisons, unreadable),
        counters_left(comparisons),
    ]
    parts.append(entry_list(comparisons))
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(comparisons: list[Comparison], unreadable: list[Unreadable]) -> str:
    counts = Counter(c.verdict for c in comparisons)
    said = [
        f"{counts[OK]} within tolerance",
        f"{counts[OUT]} out of tolerance",
        f"{counts[STATED]} with a stated difference",
    ]
    said += [f"{counts[UNTRANSLATED]} not translated", f"{len(unreadable)} not read"]
    cases = len({c.entry.case for c in comparisons})
    return f"**{len(comparisons)} entries of {cases} cases: {', '.join(said)}.**"


def section(name: str, comparisons: list[Comparison]) -> str:
    """Return a section's table, with ours (objectives, estimators ...) as rows and peers as
    columns.
    """
    here = [c for c in comparisons if c.ours is not None and c.ours.section == name]
    if not here:
        return ""
    rows = [o.name for o in OBJECTIVES] if name == "Policy losses" else []
    rows = sorted({*rows, *(c.ours.row for c in here)}, key=row_order)
    peers = columns(comparisons)
    lines = [heading(name, f"Differences of the {SECTIONS[name]}."), header(["ours", *peers])]
    for row in rows:
        cells = [
            cell([c for c in here if c.ours.row == row and c.entry.peer == peer]) for peer in peers
        ]
        lines.append(line([row, *cells]))
    return "\n".join(lines)


def row_order(row: str) -> tuple[int, str]:
    """Return the key that sorts rows in the project's order of objectives, a variant after its
    objective, and other rows by name."""
    names = [o.name for o in OBJECTIVES]
    first = row.split(",")[0].split(" ")[0]
    return (names.index(first) if first in names else len(names), row)


def columns(comparisons: list[Comparison]) -> list[str]:
    peers = {c.entry.peer for c in comparisons}
    return [*defaults.PEERS, *sorted(peers - set(defaults.PEERS))]


def cell(entries: list[Comparison]) -> str:
    if not entries:
        return "-"
    compared = [c for c in entries if c.verdict in (OK, OUT)]
    if not compared:
        return "stated below"
    values = [most(compared, lambda c: c.loss), most(compared, lambda c: c.grad)]
    if values == [None, None]:
        values = [most(compared, lambda c: c.outputs)]
    if values == [None]:
        values = [most(compared, lambda c: c.metrics)]
    marks = "†" if any(c.remarks for c in entries) else ""
    marks += " **out**" if any(c.verdict == OUT for c in entries) else ""
    return " / ".join(difference(value) for value in values) + marks


def most(comparisons: list[Comparison], of: Callable[[Comparison], float | None]) -> float | None:
    """Return the largest difference: NaN if one is NaN, None if no entry has any."""
    values = [of(c) for c in comparisons]
    given = [value for value in values if value is not None]
    if not given:
        return None
    if any(math.isnan(value) for value in given):
        return math.nan
    return max(given)


def default_table() -> str:
    lines = [
        heading(
            "Defaults",
            "How each peer's default differs from ours; the numbers above set them alike.",
        )
    ]
    lines += [header(["", *defaults.COLUMNS]), line(["**ours**", *defaults.OURS])]
    return "\n".join([*lines, *(line([peer, *said]) for peer, said in defaults.PEERS.items())])


def stated_list(comparisons: list[Comparison]) -> str:
    here = [c for c in comparisons if c.verdict == STATED]
    words = "Log-ratios beyond our bounds, and values that are not finite in the peer (finite parts are compared)."
    if not here:
        return heading("Stated differences", words) + "\nNone in these vectors."
    lines = [
        heading("Stated differences", words),
        header(["case", "entry", "loss", "gradient", "values", "difference"]),
    ]
    for c in here:
        numbers = [difference(x) for x in (c.loss, c.grad, c.outputs)]
        lines.append(line([c.entry.case, f"`{c.entry.key}`", *numbers, "; ".join(c.remarks)]))
    return "\n".join(lines)


def missing_list(comparisons: list[Comparison], unreadable: list[Unreadable]) -> str:
    missing = [c for c in comparisons if c.verdict == UNTRANSLATED]
    lines = [
        f"- not translated: `{c.entry.key}` ({c.entry.case}): {'; '.join(c.remarks)}"
        for c in missing
    ]
    lines += [f"- not read: {bad.name}: {bad.reason}" for bad in unreadable]
    return heading("Not translated", "") + "\n" + ("\n".join(lines) or "None in these vectors.")


def counters_left(comparisons: list[Comparison]) -> str:
    """Return the sentence on the peers' metrics that are not clip counters, or that our outputs
    cannot give.
    """
    left: dict[str, set[str]] = {}
    for c in comparisons:
        left.setdefault(c.entry.peer, set()).update(
            set(c.entry.metrics) - set(c.ours.metrics if c.ours else {})
        )
    said = [f"- {peer}: {', '.join(sorted(names))}" for peer, names in left.items() if names]
    words = "Metrics of the peers that are no clip counters: averages of KL, ratios, weights and loss parts."
    return heading("Metrics not compared", words) + "\n" + "\n".join(said)


def entry_list(comparisons: list[Comparison]) -> str:
    titles = [
        "case",
        "entry",
        "ours",
        "loss",
        "gradient",
        "with 1e-8",
        "values",
        "counters",
        "tolerance",
        "verdict",
    ]
    lines = [heading("Entries", ""), header(titles)]
    for c in comparisons:
        numbers = [difference(x) for x in (c.loss, c.grad, c.epsilon, c.outputs, c.metrics)]
        verdict = "; ".join([c.verdict, *c.remarks])
        setting = "" if c.ours is None else f"`{c.ours.setting}`"
        lines.append(
            line(
                [
                    c.entry.case,
                    f"`{c.entry.key}`",
                    setting,
                    *numbers,
                    str(c.tolerance or "-"),
                    verdict,
                ]
            )
        )
    return "\n".join(lines)


def heading(name: str, words: str) -> str:
    return f"## {name}\n\n{words}\n" if words else f"## {name}\n"


def header(titles: list[str]) -> str:
    return line(titles) + "\n" + line(["---"] * len(titles))


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def difference(x: float | None) -> str:
    if x is None:
        return "-"
    return "0" if x == 0 else f"{x:.1e}"
