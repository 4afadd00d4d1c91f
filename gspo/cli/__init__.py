"""The commands, a module for each: `gspo train ...` calls `main` of gspo.cli.train, which reads
sys.argv.

`main` is the console script `gspo`; `option_files` says where conf/ and sweeps/ are. No other
package imports gspo.analysis.
"""

from gspo.io.telemetry import turn_off_telemetry

turn_off_telemetry()  # before a command imports a library that reports to its maker
