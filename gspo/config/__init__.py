"""The settings tree, how Hydra composes it, and what is refused. Only this room and those above it
know Hydra.
"""
