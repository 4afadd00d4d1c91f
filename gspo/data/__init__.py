"""Problems, responses and their scores, batches of them as tensors, and random seeds."""
