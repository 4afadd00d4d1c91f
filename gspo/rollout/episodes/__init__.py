"""Episodes of several turns: how they begin, go on and end."""
