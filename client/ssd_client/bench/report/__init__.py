"""Results of a benchmark: files, tables and pictures."""
