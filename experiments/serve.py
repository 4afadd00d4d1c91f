"""The command `gspo serve`, as the repository has it; `--help` says what it does."""

import gspo.core.interrupt  # noqa: F401

# isort: split

from gspo.commands.serve import main

if __name__ == "__main__":
    main()
