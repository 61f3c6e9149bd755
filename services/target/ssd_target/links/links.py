"""All links of a target: to the operator's endpoints, found or named, and to those that requests
name."""

import asyncio
import fnmatch
import ipaddress
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ssd_engine.errors import InputError
from ssd_engine.process.addresses import host_of
from ssd_engine.speculation.frames import TargetFrame
from ssd_serving.engine.records import LinkGone
from ssd_serving.supervisor import Supervisor
from ssd_target.links.discovery import Discovery, LookUp, look_up
from ssd_target.links.draft_credentials import DraftCredentials
from ssd_target.links.endpoint_addresses import EndpointAddress, at, parse_draft
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.link import DraftLink
from ssd_target.links.link_errors import LinkBroken
from ssd_target.links.link_state import DraftLinkState

log = logging.getLogger(__name__)

MAX_NAMED = 64  # endpoints beyond the operator's own that requests may add


class Links:
    """All links of a target: the operator's, those that look-ups find, and those that requests
    name."""

    def __init__(
        self,
        drafts: Sequence[str],
        allowed: Sequence[str],
        trusted: Sequence[str],
        to_engine: Callable[[Any], None],
        backlog: Callable[[], int],
        credentials: DraftCredentials | None = None,
        discover_seconds: float = 5.0,
        look: LookUp = look_up,
        clock: Callable[[], float] = time.monotonic,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._clock = clock
        self._supervisor = supervisor or Supervisor()
        self._credentials = credentials or DraftCredentials()
        parsed = [parse_draft(text) for text in dict.fromkeys(drafts)]
        self._drafts = [each for each in parsed if isinstance(each, EndpointAddress)]
        self.discoveries = [
            Discovery(each, discover_seconds, self._found, look)
            for each in parsed
            if not isinstance(each, EndpointAddress)
        ]
        self._allowed = list(allowed)
        self._trusted = list(trusted)
        self._to_engine = to_engine
        self._backlog = backlog
        self._identity: TargetIdentity | None = None
        self.links: dict[int, DraftLink] = {}
        self._by_address: dict[str, int] = {}
        self._numbers = itertools.count()  # never used again
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._look_ups: list[asyncio.Task[None]] = []
        self._past_failures: Counter[str] = Counter()
        self._past_unknown = 0

    def start(self, identity: TargetIdentity) -> None:
        self._identity = identity
        for place in self._drafts:
            self._dial(place, named=False)
        self._look_ups = [
            self._supervisor.start("look_up", each.run, str(each.source))
            for each in self.discoveries
        ]

    # Those that look-ups find

    def _found(self, discovery: Discovery) -> None:
        """Who has come is dialled; who has gone is left, once its link is down."""
        for place in discovery.places:
            self._keep(place, str(discovery.source))
        for link in list(self.links.values()):
            if link.source and not self._is_leaving(link) and not self._is_sought(link):
                self._leave(link)

    def _keep(self, place: EndpointAddress, source: str) -> None:
        known = self.links.get(self._by_address.get(place.address, -1))
        if known is not None and known.state is not DraftLinkState.CLOSED:
            if not known.named:
                known.left = False
                return
            self._drop(known)  # it was for the requests that name it; now it is for all
        self.links[self._dial(place, named=False)].source = source

    def _is_sought(self, link: DraftLink) -> bool:
        return any(each.names(link.address) for each in self.discoveries)

    def _leave(self, link: DraftLink) -> None:
        if link.state is not DraftLinkState.UP:
            self._drop(link)
        elif not link.left:
            link.left = True
            log.info("link to %s: %s names it no more", link.address, link.source)

    def _drop(self, link: DraftLink) -> None:
        self._tasks[link.number].cancel()
        del self._by_address[link.address]

    def _on_failure(self, link: DraftLink) -> None:
        for discovery in self.discoveries:
            if discovery.names(link.address):
                discovery.hurry()

    # Those that requests name

    def number_of(self, address: str) -> int:
        """The link to an endpoint that a request names; dialled only if the operator allows it."""
        known = self._by_address.get(address)
        if known is not None and self.links[known].state is not DraftLinkState.CLOSED:
            self.links[known].name_again()
            return known
        if not _matches(address, self._allowed):
            raise InputError(
                "speculation.endpoints",
                f"{address!r} is not allowed here; the operator names endpoints with --draft "
                "and --allow-draft",
            )
        self._make_room()
        return self._dial(at(address), named=True)

    def _make_room(self) -> None:
        """For one more that requests name: of those that are down the longest unnamed one goes."""
        named = [link for link in self.links.values() if link.named and not self._is_leaving(link)]
        if len(named) < MAX_NAMED:
            return
        down = [link for link in named if link.state is not DraftLinkState.UP]
        if not down:
            raise InputError("speculation.endpoints", f"at most {MAX_NAMED} may be added")
        oldest = min(down, key=lambda link: link.last_named)
        self._drop(oldest)

    def _is_leaving(self, link: DraftLink) -> bool:
        return self._by_address.get(link.address) != link.number

    def _dial(self, place: EndpointAddress, named: bool) -> int:
        if self._identity is None:
            raise RuntimeError("links are dialled once the tokenizer is loaded")
        number = next(self._numbers)
        link = DraftLink(
            number,
            place,
            named,
            _matches(place.address, self._trusted) or _matches(place.name, self._trusted),
            self._identity,
            self._to_engine,
            self._backlog,
            self._credentials,
            self._on_failure,
            self._clock,
        )
        self.links[number] = link
        self._by_address[place.address] = number
        task = self._supervisor.start("link", link.run, f"to {place.address}")
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._forget(link))
        return number

    def _forget(self, link: DraftLink) -> None:
        self._past_failures += link.report.failures
        self._past_unknown += link.report.unknown
        del self.links[link.number], self._tasks[link.number]
        if self._by_address.get(link.address) == link.number:
            del self._by_address[link.address]
        self._to_engine(LinkGone(link.number))

    def failures(self) -> Counter[str]:
        """Epochs that failed, by reason, of all links that there ever were."""
        return sum(
            (link.report.failures for link in list(self.links.values())), self._past_failures
        )

    def look_ups(self) -> Counter[str]:
        """Look-ups of all sources, by result."""
        return sum((each.results for each in self.discoveries), Counter())

    def unknown(self) -> int:
        """Frames of newer endpoints that were passed over."""
        return sum((link.report.unknown for link in list(self.links.values())), self._past_unknown)

    def send(self, number: int, epoch: int, frames: list[TargetFrame]) -> None:
        link = self.links.get(number)
        if link is not None:
            link.send(epoch, frames)

    def stalled(self, number: int, epoch: int, reason: str) -> None:
        link = self.links.get(number)
        if link is not None:
            link.break_off(epoch, LinkBroken("stalled", reason))

    async def stop(self) -> None:
        tasks = [*self._look_ups, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _matches(address: str, patterns: Sequence[str]) -> bool:
    """A pattern of digits, such as 10.0.*:7420, means addresses, not the name 10.0.example.org."""
    return any(
        fnmatch.fnmatchcase(address, pattern)
        and (_is_numeric(address) or not _wants_numeric(pattern))
        for pattern in patterns
    )


def _wants_numeric(pattern: str) -> bool:
    host = host_of(pattern)
    return any(map(str.isdecimal, host)) and not any(map(str.isalpha, host))


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(host_of(address))
    except ValueError:
        return False
    return True
