"""The shell of a gRPC service around its engine: options, processes, security, observability."""
