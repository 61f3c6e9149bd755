"""Products of a few rows with a weight on a GPU."""
