"""Where speculation endpoints are, as an operator writes it. No look-ups here."""

from dataclasses import dataclass
from pathlib import Path

from ssd_engine.errors import ConfigError
from ssd_engine.process.addresses import host_of, join_address, split_address
from ssd_serving.config import parse_address

DNS, FILE = "dns:///", "file:///"


@dataclass(frozen=True)
class EndpointAddress:
    """The address of one endpoint."""

    address: str  # HOST:PORT that is dialled
    name: str  # HOST:PORT that somebody wrote: certificates and patterns are about it

    @property
    def host(self) -> str:
        return host_of(self.address)

    @property
    def server_name(self) -> str:
        return host_of(self.name)


@dataclass(frozen=True)
class DnsName:
    """All addresses behind a name, with one port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{DNS}{self.name}"

    @property
    def name(self) -> str:
        return join_address(self.host, self.port)


@dataclass(frozen=True)
class AddressFile:
    """HOST:PORT, one to a line; # begins a comment."""

    path: Path

    def __str__(self) -> str:
        return f"file://{self.path}"


Source = DnsName | AddressFile  # names endpoints that come and go


def at(address: str) -> EndpointAddress:
    return EndpointAddress(address, address)


def parse_draft(text: str) -> EndpointAddress | Source:
    """A value of --draft; raises ConfigError."""
    if text.startswith(DNS):
        host, port = parse_address("--draft", text.removeprefix(DNS))
        if not port:
            raise ConfigError(f"--draft: {text!r} needs the port that the endpoints listen on")
        return DnsName(host, port)
    if text.startswith(FILE):
        return AddressFile(Path(text.removeprefix("file://")))
    host, port = parse_address("--draft", text)
    if "/" in text or text != join_address(host, port):
        raise ConfigError(
            f"--draft: HOST:PORT, {DNS}NAME:PORT or {FILE}PATH is needed, got {text!r}"
        )
    return at(text)


def parse_lines(text: str) -> list[str]:
    """Addresses in an AddressFile, in its order; raises ConfigError for a line that is none."""
    found: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        try:
            host, port = split_address(address)
        except ValueError:
            host, port = "", 0
        if not port or "/" in host or len(host.split()) != 1:
            raise ConfigError(f"line {number} is not HOST:PORT: {address[:100]!r}")
        found[address] = None
    return list(found)
