"""The processes of ranks on one node: how they start, follow rank 0 and fail."""
