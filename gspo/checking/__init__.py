"""The checks of `gspo check`: whether this machine computes what it should, and how fast."""
