"""Endpoints that come and go: names and files are looked up again and again.

A look-up may hang for as long as a resolver likes, so each has a thread of its own, which nobody
waits for at the end; one source never has more than one. A look-up that fails changes nothing: what
is known stays known.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ssd_engine.errors import SSDError
from ssd_engine.process.addresses import join_address
from ssd_serving.daemon_thread import in_daemon_thread
from ssd_target.links.endpoint_addresses import (
    AddressFile,
    DnsName,
    EndpointAddress,
    Source,
    at,
    parse_lines,
)

log = logging.getLogger(__name__)

MAX_PLACES = 64  # endpoints of one source that are used
LOOK_UP_SECONDS = 5.0  # after which a look-up counts as failed
LEAST_SECONDS = 0.5  # between two look-ups, however many links fail
MAX_FILE = 65_536  # characters
# What a resolver answers when there is such a service and nobody behind it, or no such name.
NOBODY = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

LookUp = Callable[[Source], list[EndpointAddress]]  # blocks


class DiscoveredAddresses(Protocol):
    def __call__(self, discovery: "Discovery") -> None: ...


def look_up(source: Source) -> list[EndpointAddress]:
    """Asks the resolver, or reads the file; raises OSError or SSDError."""
    return _resolve(source) if isinstance(source, DnsName) else _read(source)


def _resolve(name: DnsName) -> list[EndpointAddress]:
    try:
        answers = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in NOBODY:
            return []
        raise
    hosts = dict.fromkeys(str(address[0]) for *_, address in answers)
    return [EndpointAddress(join_address(host, name.port), name.name) for host in hosts]


def _read(file: AddressFile) -> list[EndpointAddress]:
    with file.path.open() as lines:
        text = lines.read(MAX_FILE + 1)
    if len(text) > MAX_FILE:
        raise SSDError(f"more than {MAX_FILE} characters")
    return [at(address) for address in parse_lines(text)]


class Discovery:
    """One source, and the places that it named last."""

    def __init__(
        self, source: Source, seconds: float, found: DiscoveredAddresses, look: LookUp = look_up
    ) -> None:
        """``found`` is called after each look-up that did not fail."""
        self.source = source
        self.places: list[EndpointAddress] = []
        self.results: Counter[str] = Counter()  # look-ups: found, empty, failed
        self._seconds = seconds
        self._found = found
        self._look = look
        self._hurry = asyncio.Event()
        self._pending: asyncio.Future[list[EndpointAddress]] | None = None
        self._said = ""  # what was logged last

    def names(self, address: str) -> bool:
        return any(place.address == address for place in self.places)

    def hurry(self) -> None:
        """Somebody whom it named is not there: look again soon."""
        self._hurry.set()

    async def run(self) -> None:
        while True:
            await self._look_once()
            await asyncio.sleep(min(LEAST_SECONDS, self._seconds))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._seconds - LEAST_SECONDS)):
                    await self._hurry.wait()
            self._hurry.clear()

    async def _look_once(self) -> None:
        if self._pending is None:
            self._pending = in_daemon_thread(lambda: self._look(self.source), "look-up")
        # The last one may hang still: it is waited for, not joined by another.
        done, _ = await asyncio.wait({self._pending}, timeout=LOOK_UP_SECONDS)
        if not done:
            self._failed(f"no answer within {LOOK_UP_SECONDS:g} s")
            return
        answer, self._pending = self._pending, None
        try:
            places = answer.result()
        except (OSError, SSDError, ValueError) as error:
            self._failed(str(error) or type(error).__name__)
            return
        self._take(places)

    def _take(self, places: list[EndpointAddress]) -> None:
        unique = {place.address: place for place in places}
        # Those that are used go first: the answer comes in any order.
        kept = [unique.pop(place.address) for place in self.places if place.address in unique]
        self.places = [*kept, *unique.values()][:MAX_PLACES]
        self.results["found" if places else "empty"] += 1
        surplus = len(kept) + len(unique) - len(self.places)
        if surplus:
            self._say(logging.WARNING, f"{surplus} beyond the first {MAX_PLACES} are not used")
        elif not places:
            self._say(logging.WARNING, "nobody is there")
        elif self._said:
            self._say(logging.INFO, "endpoints are found again")
            self._said = ""
        self._found(self)

    def _failed(self, why: str) -> None:
        self.results["failed"] += 1
        self._say(logging.WARNING, f"look-up failed: {why}; what is known stays")

    def _say(self, level: int, text: str) -> None:
        """Once: what stays as it is is no news."""
        if text != self._said:
            log.log(level, "%s: %s", self.source, text)
            self._said = text
