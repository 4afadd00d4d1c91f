"""The settings tree, Hydra's composition of it, and the refusals.

Only this package, `run` and `cli` know Hydra.
"""
