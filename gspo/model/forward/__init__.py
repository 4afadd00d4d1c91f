"""Our own forward pass over the weights of a transformers model."""
