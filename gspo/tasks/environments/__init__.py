"""The protocol of environments, and the threads that play them."""
