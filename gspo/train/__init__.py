"""The training step from scored responses to new weights; its diagnostics and checkpoints; the cold
start.
"""
