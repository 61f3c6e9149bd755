"""The file in which a service says which port it listens on."""

import os
from pathlib import Path


def remove_port(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


def write_port(path: Path | None, port: int) -> None:
    """Writes it whole or not at all: a reader never sees half a number."""
    if path is None:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)
