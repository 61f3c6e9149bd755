"""The network interface that has an address: NCCL is told names, not addresses.

The kernel is asked here rather than by psutil, which would be one more dependency of every server
for this one look-up.
"""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from ssd_engine.errors import ConfigError

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def interface_of(host: str) -> str:
    address = ipaddress.ip_address(host.split("%")[0])
    if address.is_loopback:
        return "lo"
    found = _with_ipv4(address) if address.version == 4 else _with_ipv6(address)
    if found is None:
        raise ConfigError(
            f"no network interface has the address {host}: name one in NCCL_SOCKET_IFNAME"
        )
    return found


def _with_ipv4(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode()[: _NAME_BYTES - 1])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if answer[20:24] == address.packed:
                return name
    return None


def _with_ipv6(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        packed, *_, name = line.split()
        if bytes.fromhex(packed) == address.packed:
            return name
    return None
