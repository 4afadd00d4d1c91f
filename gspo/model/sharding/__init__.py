"""Weights that are sharded over ranks: FSDP2, expert parallelism, and their files."""
