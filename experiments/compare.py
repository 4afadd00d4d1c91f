"""The command `gspo compare`, as the repository has it; `--help` says what it does."""

from gspo.commands.compare import main

if __name__ == "__main__":
    main()
