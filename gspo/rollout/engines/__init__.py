"""Engines, which sample responses: in the trainer's process, or by vLLM."""
