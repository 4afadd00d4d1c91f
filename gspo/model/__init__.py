"""The policy and its parts: models, tokenizers, our own forward, Routing Replay, the value head.

This package imports transformers. Apart from it only gspo.rollout does, for its cache.
"""
