"""Engines that sample responses, and the rollout sources that hand scored groups of them to the
trainer.
"""
