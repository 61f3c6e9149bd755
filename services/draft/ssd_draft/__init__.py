"""The draft service: a speculation endpoint that many targets can share."""

from importlib import metadata

__version__ = metadata.version("ssd-serve")
