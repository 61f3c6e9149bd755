"""Bodies of requests: within bounds, and turned into what targets are asked."""
