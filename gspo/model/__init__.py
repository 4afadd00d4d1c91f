"""The policy: loading models and tokenizers, our own forward, Routing Replay, the value head.

Only here is transformers imported.
"""
