"""The frameworks whose logs are read, and how a run's framework is found from its names."""

from collections.abc import Collection

from gspo.tracking.frameworks import (
    ms_swift,
    nemo_rl,
    openrlhf,
    own,
    prime_rl,
    roll,
    skyrl,
    slime,
    trl,
    verl,
)
from gspo.tracking.frameworks.table import OTHER, Table, has, match
from gspo.tracking.metrics import Metric

MODULES = (trl, ms_swift, verl, prime_rl, roll, slime, openrlhf, nemo_rl, skyrl)
TABLES = {module.TABLE.name: module.TABLE for module in MODULES}
# names of a record's step: of all frameworks, and those of exported histories
STEP_KEYS = frozenset(
    ["_step", "global_step", *(axis.key for table in TABLES.values() for axis in table.axes)]
)
REWARD = "reward/mean"
FIRST_NAMES = 8  # that a message shows
MAX_SHOWN_CHARS = 80  # of a name in a message


def table_of(framework: str) -> Table:
    """Return a framework's table. Raises ValueError for a framework that has none."""
    name = framework.lower().replace("-", "_")
    if name not in TABLES:
        raise ValueError(f"framework={framework}: choose one of {', '.join(TABLES)}")
    return TABLES[name]


def matching(names: Collection[str]) -> list[Table]:
    """Return the tables of the frameworks that these names of metrics prove."""
    tables = []
    for table in TABLES.values():
        bare = {table.bare(name) for name in names} | set(names)
        proved = any(all(has(bare, pattern) for pattern in proof) for proof in table.proofs)
        if proved and not any(has(bare, pattern) for pattern in table.disproofs):
            tables.append(table)
    return tables


def find_table(names: Collection[str], framework: str = "") -> Table:
    """Return the table of a run's framework, by its name or else by the names of the metrics.

    Raises ValueError if the names prove no framework, or several frameworks."""
    if framework:
        return table_of(framework)
    tables = matching(names)
    if len(tables) == 1:
        return tables[0]
    if tables:
        candidates = " or ".join(f"framework={table.name}" for table in tables)
        raise ValueError(f"its names are those of several frameworks: set {candidates}")
    if REWARD in names:
        raise ValueError("its names are ours: name the run directory, which has settings.yaml too")
    shown = ", ".join(name[:MAX_SHOWN_CHARS] for name in sorted(names)[:FIRST_NAMES])
    raise ValueError(
        f"its names ({len(names)}: {shown}, ...) prove no framework that is known. If it is one of "
        f"them, set framework= ({', '.join(TABLES)}). If it is a trainer of your own, map its names "
        "to ours in foreign_run.yaml (docs/other_frameworks.md)"
    )


def definition(name: str) -> Metric:
    """Return the definition of a framework's own metric, such as trl/kl.

    Raises KeyError for a name that begins with no framework."""
    framework, _, theirs = name.partition("/")
    if framework == own.NAME:
        return Metric(name, "", "of your trainer")
    table = TABLES[framework]
    of_its_own = [entry for entry in table.entries if entry.relation == OTHER]
    entry = next((entry for entry in of_its_own if match(entry.theirs, theirs) is not None), None)
    if entry is None:
        entry, _ = table.entry(theirs)
    meaning = entry.note if entry is not None and entry.note else "not in the table"
    return Metric(name, "", f"{table.title}: {meaning}")
