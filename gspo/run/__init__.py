"""The outside of a run: its directory, its processes, the loop around its steps, and sweeps."""
