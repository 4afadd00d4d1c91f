"""The checks of `gspo check`: whether this machine computes correctly, and how fast."""
