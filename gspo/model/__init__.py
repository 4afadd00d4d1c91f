"""The policy and what it is made of: models, tokenizers, our own forward, Routing Replay, the value
head.

This room imports transformers. Beside it only gspo.rollout does, for its cache.
"""
