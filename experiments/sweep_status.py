"""The command `gspo sweep-status`, as the repository has it; `--help` says what it does."""

from gspo.commands.sweep_status import main

if __name__ == "__main__":
    main()
