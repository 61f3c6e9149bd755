"""The leader of a cluster, and the nodes that join it."""
