"""The command `gspo check`, as the repository has it; `--help` says what it does."""

from gspo.commands.check import main

if __name__ == "__main__":
    main()
