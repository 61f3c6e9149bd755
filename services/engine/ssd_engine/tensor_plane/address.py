"""Where a draft waits for its target: an abstract socket on one host, TCP between hosts."""

import re
import secrets
import socket

from ssd_engine.tensor_plane.handshake import PlaneKind
from ssd_engine.tensor_plane.state import PlaneBroken

# An abstract name lives in no file system: nothing is left of it when its process is killed.
_NAME = re.compile(r"ssd-plane-[0-9a-f]{32}")
_WILDCARDS = {"0.0.0.0", "::"}


def listen(kind: PlaneKind, bind_host: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address to give to the target."""
    if kind is PlaneKind.SHARED_MEMORY:
        name = f"ssd-plane-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place: str | tuple[str, int] = "\0" + name
    else:
        listener = socket.socket(family_of(bind_host), socket.SOCK_STREAM)
        place = (bind_host, 0)
    try:
        listener.setblocking(False)
        listener.bind(place)
        listener.listen(4)
        if kind is not PlaneKind.SHARED_MEMORY:
            name = join_address(bind_host, listener.getsockname()[1])
    except BaseException:
        listener.close()
        raise
    return listener, name


def dialled(
    kind: PlaneKind, address: str, dial_host: str | None
) -> tuple[int, str | tuple[str, int]]:
    """Family and address to connect to.

    The address is the peer's word: it may name a plane's socket on this host, or a port on the
    host that the caller dials, never a file.
    """
    if kind is PlaneKind.SHARED_MEMORY:
        if not _NAME.fullmatch(address):
            raise PlaneBroken("the peer's address is not that of a plane")
        return socket.AF_UNIX, "\0" + address
    host, port = split_address(address)
    host = dial_host or host
    if host in _WILDCARDS:
        raise PlaneBroken(f"the peer's address {address} names no host")
    return family_of(host), (host, port)


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise PlaneBroken(f"the peer's address {address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
