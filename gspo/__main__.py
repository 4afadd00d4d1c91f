"""`python -m gspo COMMAND` is the console script `gspo`, for torchrun and for other Pythons."""

from gspo.cli.main import main

main()
