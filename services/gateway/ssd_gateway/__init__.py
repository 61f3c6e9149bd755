"""The gateway service: OpenAI's HTTP API, and a page, in front of targets."""

from importlib import metadata

__version__ = metadata.version("ssd-serve")
