"""Engines sample responses, and rollout sources return scored groups of them to the trainer."""
