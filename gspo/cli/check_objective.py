"""Checks your own objective by the invariances that every objective here must pass.

    gspo check-objective my_pkg.losses:Mine
    gspo check-objective my_pkg.losses:Mine clip_high=0.3

It prints a line for each invariance: `holds` or `FAILS`, with the reason.

== Options (key=value) ==

  MODULE:NAME  the class of the objective, or the name of a built-in one
  KEY=VALUE    a setting of the objective
"""

import sys

from omegaconf import OmegaConf

from gspo.algorithm.objectives import OBJECTIVES, Objective
from gspo.config.conversion import to_dataclass
from gspo.config.user_code import load_class, with_values
from gspo.io.arguments import HELP, nearest
from gspo.io.user_code import is_path
from gspo.run.entry_point import command_line

BUILT_IN = {kind.name: kind for kind in OBJECTIVES}


def main() -> None:
    """Check the objective that the command line names."""
    command_line(check)


def check() -> None:
    """Print a line for each invariance. The exit code is 1 if an invariance does not hold."""
    if len(sys.argv) < 2 or HELP & set(sys.argv):
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] else 2)
    objective = chosen(sys.argv[1], sys.argv[2:])
    # it imports PyTorch, which takes seconds
    from gspo.algorithm.invariances import check_objective

    results = check_objective(objective)
    width = max(len(result.name) for result in results)
    for result in results:
        verdict = "holds" if result.holds else "FAILS"
        print(f"{verdict:<6} {result.name:<{width}}  {result.text}")
    failed = sum(not result.holds for result in results)
    summary = f"{failed} of {len(results)} do not hold" if failed else f"all {len(results)} hold"
    print(f"{sys.argv[1]}: {summary}")
    sys.exit(1 if failed else 0)


def chosen(name: str, values: list[str]) -> Objective:
    """Return the objective that the command names, with these settings.

    Raises ValueError for an unknown objective or a wrong setting."""
    if not is_path(name) and name not in BUILT_IN:
        raise ValueError(
            f"{name}: give MODULE:NAME, or a built-in one; the nearest is {nearest(name, BUILT_IN)}"
        )
    kind = BUILT_IN.get(name) or load_class(name, "objective", "objective")
    return to_dataclass(with_values(kind, OmegaConf.from_dotlist(values), "objective"))
