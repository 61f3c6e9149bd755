"""How rows travel: shared memory, NCCL, TCP."""
