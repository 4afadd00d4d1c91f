"""The step: from scored responses to new weights; its diagnostics, its checkpoints, the cold start before it."""
