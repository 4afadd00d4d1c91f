"""The settings tree, how Hydra composes it, and what is refused. Only this room and `gspo.run` know Hydra."""
