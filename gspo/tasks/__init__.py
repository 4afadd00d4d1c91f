"""Verifiable problems and the scoring of responses to them. This package does not use torch."""
