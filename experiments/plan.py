"""The command `gspo plan`, as the repository has it; `--help` says what it does."""

from gspo.commands.plan import main

if __name__ == "__main__":
    main()
