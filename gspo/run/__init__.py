"""One run seen from outside: its directory, the trainer built for it, the loop around its steps; sweeps of runs."""
