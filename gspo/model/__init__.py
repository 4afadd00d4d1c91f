"""The policy and its parts: models, tokenizers, our own forward, Routing Replay, the value head.

Other packages get models from it. They import transformers for single classes only, for example the
cache of keys and values.
"""
