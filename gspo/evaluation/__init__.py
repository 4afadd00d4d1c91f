"""Held-out evaluation: estimates, Elo ratings, comparisons, and resumable evaluations."""
