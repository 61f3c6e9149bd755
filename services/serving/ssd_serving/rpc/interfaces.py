"""Which address of this host a peer is reached from."""

import socket
from urllib.parse import unquote

from ssd_engine.process.addresses import host_of

DISCARD = 9  # any port will do: nothing is sent


def interface_to(peer: str) -> str:
    """The own address on the way to a gRPC peer (``ipv4:10.0.0.5:4711``); "" where none is known.

    Connecting a datagram socket asks the routing table, and sends nothing.
    """
    kind, _, place = unquote(peer).partition(":")
    family = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}.get(kind)
    if family is None:
        return ""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host_of(place), DISCARD))
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
    return address
