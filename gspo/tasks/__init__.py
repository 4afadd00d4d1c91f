"""Verifiable problems: what the policy is asked, and how its responses are scored. No torch here."""
