"""How rows travel: shared memory, process groups, TCP."""
