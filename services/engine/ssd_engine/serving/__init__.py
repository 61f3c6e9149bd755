"""What every service shares around its engine: options, the engine's process, the gRPC edge.

The rest of ``ssd_engine`` knows nothing of this package.
"""
