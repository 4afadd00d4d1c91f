"""What a run will need before it starts: memory on each GPU, traffic between them, and time."""
