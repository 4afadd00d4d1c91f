"""The commands of `gspo`, a module for each: `gspo train ...` calls `main` of gspo.cli.train.

`main` is the console script `gspo`. `option_files` finds conf/ and sweeps/. No other package
imports gspo.analysis.
"""

from gspo.io.telemetry import turn_off_telemetry

turn_off_telemetry()  # before a command imports a library that reports to its maker
