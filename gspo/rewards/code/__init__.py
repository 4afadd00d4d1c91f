"""Grading programs by their tests."""
