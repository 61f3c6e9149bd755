"""Where a draft waits for its target: an abstract socket on one host, TCP between hosts."""

import errno
import random
import re
import secrets
import socket

from ssd_engine.process.addresses import join_address, split_address
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.state import PlaneBroken

# An abstract name lives in no file system: nothing is left of it when its process is killed.
_NAME = re.compile(r"ssd-plane-[0-9a-f]{32}")
_WILDCARDS = {"0.0.0.0", "::"}


def listen(
    kind: PlaneKind, bind_host: str, ports: range | None = None
) -> tuple[socket.socket, str]:
    """A listening socket, and the address to give to the target. No ``ports``: any free one."""
    if kind is PlaneKind.SHARED_MEMORY:
        name = f"ssd-plane-{secrets.token_hex(16)}"
        return _listening(socket.AF_UNIX, "\0" + name), name
    family = family_of(bind_host)
    listener = (
        _listening(family, (bind_host, 0))
        if ports is None
        else _listening_within(family, bind_host, ports)
    )
    return listener, join_address(bind_host, listener.getsockname()[1])


def _listening(family: int, place: str | tuple[str, int], again: bool = False) -> socket.socket:
    """``again``: a port that connections of earlier planes still have may be listened on."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if again:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(place)
        listener.listen(4)
    except BaseException:
        listener.close()
        raise
    return listener


def _listening_within(family: int, host: str, ports: range) -> socket.socket:
    """From a random one on, so that planes that begin together seldom try the same port."""
    first = random.randrange(len(ports))
    for port in (*ports[first:], *ports[:first]):
        try:
            return _listening(family, (host, port), again=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port from {ports[0]} to {ports[-1]} is free on {host}")


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
    host, port = parse_peer(address)
    host = dial_host or host
    if host in _WILDCARDS:
        raise PlaneBroken(f"the peer's address {address} names no host")
    return family_of(host), (host, port)


def is_wildcard(host: str) -> bool:
    return host in _WILDCARDS


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def parse_peer(address: str) -> tuple[str, int]:
    try:
        host, port = split_address(address)
    except ValueError:
        host, port = "", 0
    if not port:
        raise PlaneBroken(f"the peer's address {address!r} is not host:port")
    return host, port
