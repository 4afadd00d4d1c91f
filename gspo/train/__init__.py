"""The training step from scored responses to new weights, its metrics, checkpoints, the cold start."""
