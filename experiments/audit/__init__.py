"""Attacks on the sandbox, answers written to fool the math verifier, and the user's own cases for
both.
"""
