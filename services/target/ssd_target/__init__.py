"""The target service: a model, its scheduler and its gRPC front."""

from importlib import metadata

__version__ = metadata.version("ssd-serve")
