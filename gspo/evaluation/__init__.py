"""Held-out evaluation: estimates with intervals, Elo ratings, comparisons, resumable evaluations."""
