"""Held-out evaluation: sampling and scoring, estimates with intervals, Elo ratings, resumable
evaluations.
"""
