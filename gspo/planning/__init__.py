"""The needs of a run before it starts: memory on each GPU, traffic between GPUs, and time."""
