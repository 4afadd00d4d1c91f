"""The processes that train one policy together, and the collectives that they use."""
