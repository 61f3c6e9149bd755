"""The inference engine that every SSD service is built on.

Models, KV cache, attention, sampling, tensor parallelism, and the parts of speculation that several
services share. Nothing here knows of gRPC or of services.
"""
