"""Reading and writing: files within bounds, user code, text for terminals, arguments."""
