"""Engines that sample responses, and the sources that hand scored groups of them to the trainer."""
