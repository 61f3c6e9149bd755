"""The front process: gRPC calls, text, and the engine's pipe."""
