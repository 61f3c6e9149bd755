"""What an operator sets about nodes. No torch here."""

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from ssd_engine.errors import ConfigError

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 4096


@dataclass(frozen=True)
class ClusterOptions:
    """The leader's options for its cluster; its engine process is started with them."""

    nodes: int
    host: str
    port: int
    secret: bytes = field(repr=False)
    software: str  # name and versions; equal on every node
    model: str  # as the operator named it
    digest: str  # the checkpoint's
    join_timeout: float  # seconds until all nodes are there
    timeout: float  # seconds of silence until a node is lost
    farewell: Connection  # a byte on it ends the cluster on purpose


def read_secret(path: Path) -> bytes:
    """The secret in --cluster-secret-file, without the white space around it."""
    flag = "--cluster-secret-file"
    try:
        with path.open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{flag}: {path} holds {len(secret)} bytes, {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} "
            "are needed; make one with: head -c 32 /dev/urandom | base64"
        )
    return secret
