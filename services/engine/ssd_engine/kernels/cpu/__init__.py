"""Products of float32 rows with packed weights on a CPU."""
