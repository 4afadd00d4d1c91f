"""Verifiable problems: what the policy is asked, and how its responses are scored. This package
does not use torch.
"""
