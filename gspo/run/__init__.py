"""One run seen from outside: its directory, how its trainer is built, the loop around its steps;
and sweeps of runs.
"""
