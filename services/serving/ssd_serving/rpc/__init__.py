"""Messages, statuses and streams of gRPC."""
