"""From a problem or a conversation to the tokens that a model sees."""
