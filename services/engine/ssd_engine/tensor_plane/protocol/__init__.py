"""Streams of rows, records, states and the handshake of the tensor plane."""
