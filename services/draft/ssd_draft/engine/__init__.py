"""The engine process: whose turn it is, and what is pushed."""
