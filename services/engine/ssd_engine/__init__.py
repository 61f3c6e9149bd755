"""The inference engine that every SSD service is built on.

Models, KV cache, attention, sampling and tensor parallelism. Nothing here knows of gRPC, of
services or of speculation.
"""
