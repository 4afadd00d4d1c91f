"""Compare our losses, advantages and weights with golden vectors of other frameworks; prints a
Markdown page.

    python experiments/parity.py
    python experiments/parity.py out=experiments/PARITY.md

experiments/peers/vectors.py describes the format of golden vectors.

Exit code 1 if an entry is out of its tolerance, 2 if the command or the folder is wrong.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gspo.io.arguments import HELP, help_text, option, parsed
from gspo.io.escaping import escape_output
from peers.compare import OUT, compare
from peers.table import page
from peers.vectors import load

ROOT = Path(__file__).parent.parent
DEFAULT = "tests/data/parity"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this script."""

    vectors: str = option("", f"a folder of golden vectors (default: {DEFAULT})")
    out: str = option("", "a file for the page, which is printed otherwise")


def main(arguments: list[str]) -> int:
    if HELP & set(arguments):
        print(help_text(Options, __doc__))
        return 0
    try:
        options = parsed(Options, arguments)
        entries, unreadable = load(options.vectors or ROOT / DEFAULT)
        torch.set_num_threads(1)
        comparisons = [compare(entry) for entry in entries]
        command = " ".join(
            [
                "python experiments/parity.py",
                *(f"{name}={value}" for name, value in asdict(options).items() if value),
            ]
        )
        text = page(command, comparisons, unreadable)
        if options.out:
            Path(options.out).write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any(c.verdict == OUT for c in comparisons) else 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main(sys.argv[1:]))
