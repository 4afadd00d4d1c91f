"""The settings tree, how Hydra composes it, and what is refused. Beside `gspo.run` the only room that knows Hydra."""
