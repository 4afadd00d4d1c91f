"""Compare our losses, advantages and weights with golden vectors of other frameworks; prints a
Markdown page.

    python experiments/parity.py [vectors=DIR] [out=FILE]

vectors: a folder of golden vectors (experiments/peers/vectors.py says their format); by default
tests/data/parity. out: the page goes into this file instead. experiments/PARITY.md is kept that
way.

Exit code 1 if an entry is out of its tolerance, 2 if the command or the folder is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gspo.io.arguments import key_values
from gspo.io.escaping import escape_output
from peers.compare import OUT, compare
from peers.table import page
from peers.vectors import load

ROOT = Path(__file__).parent.parent
DEFAULT = "tests/data/parity"


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    try:
        options = parse(arguments)
        given = options.get("vectors")
        entries, unreadable = load(ROOT / DEFAULT if given is None else given)
        torch.set_num_threads(1)
        comparisons = [compare(entry) for entry in entries]
        command = " ".join(
            [
                "python experiments/parity.py",
                *(f"{name}={value}" for name, value in options.items()),
            ]
        )
        text = page(command, comparisons, unreadable)
        if "out" in options:
            Path(options["out"]).write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any(c.verdict == OUT for c in comparisons) else 0


def parse(arguments: list[str]) -> dict[str, str]:
    """Return the options: `name=value` words. Raises ValueError for anything else."""
    chosen, _ = key_values(arguments, {"vectors": "", "out": ""}, empty=False)
    return {name: value for name, value in chosen.items() if value}


if __name__ == "__main__":
    escape_output()
    sys.exit(main(sys.argv[1:]))
