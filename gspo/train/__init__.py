"""The training step from scored responses to new weights, metrics, checkpoints, cold start."""
