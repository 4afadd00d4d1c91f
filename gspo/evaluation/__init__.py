"""Held-out evaluation: samples and their scores, estimates with intervals, Elo, evaluations that can be resumed."""
