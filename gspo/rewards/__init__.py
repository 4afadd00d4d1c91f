"""Verifiers that need more than a comparison: running programs. No torch here."""
