"""The policy: models and tokenizers, log-probabilities, routing record and replay. transformers stays on this floor."""
