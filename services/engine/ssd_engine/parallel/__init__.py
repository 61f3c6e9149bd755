"""The processes of a tensor-parallel group, on one node or on several."""
