"""make check: lint, types, and kernels compiled for a GPU."""
