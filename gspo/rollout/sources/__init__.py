"""Rollout sources, which hand scored groups of responses to the trainer."""
