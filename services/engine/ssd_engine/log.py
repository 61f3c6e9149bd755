"""Logging with role and rank, the same in every process."""

import logging
import sys


def setup_logging(role: str, level: str = "info", rank: int | None = None) -> None:
    """One line per record on stderr, e.g. ``12:00:01.123 INFO target/1 loaded 8.9M parameters``."""
    name = role if rank is None else f"{role}/{rank}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)s {name} %(message)s", datefmt="%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
