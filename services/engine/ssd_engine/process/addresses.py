"""HOST:PORT and [IPv6]:PORT. No torch here."""


def split_address(address: str) -> tuple[str, int]:
    """The host without brackets, and the port, which may be 0. Raises ValueError."""
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdecimal() and host_of(address)) or int(port) > 65535:
        raise ValueError(f"HOST:PORT with a port up to 65535 is needed, got {address!r}")
    return host_of(address), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")
