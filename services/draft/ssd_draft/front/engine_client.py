"""The front's side of the engine process: links come, speak and go."""

import time
from collections import Counter
from collections.abc import Callable

from ssd_draft.config import DraftEngineOptions
from ssd_draft.front.link import TargetLink, TargetLinkEvent, TargetLinkState
from ssd_draft.records import (
    AnnounceLeaving,
    DraftEngineStats,
    DraftOutput,
    LinkOutput,
    TargetFrames,
    TargetLinkUp,
    decode_to_front,
)
from ssd_engine.errors import SSDError
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.speculation.frames import DraftFrame, Load, TargetFrame
from ssd_serving.engine.client import EngineProcess
from ssd_serving.engine.records import LinkGone
from ssd_serving.rpc.status import NotServing, ReaderStalled


class DraftEngine(EngineProcess):
    """Keeps the links. Use from one event loop."""

    def __init__(
        self,
        options: DraftEngineOptions,
        max_frames: int,
        max_bytes: int,
        on_drop: Callable[[int], None],
        trace_events: int = 0,
        forks: ForkServer | None = None,
    ) -> None:
        """A link may have so many frames, and bytes, on their way in either direction."""
        super().__init__(
            "ssd_draft.engine.engine_process",
            options,
            decode_to_front,
            trace_events=trace_events,
            forks=forks,
        )
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._links: dict[int, TargetLink] = {}
        self._next_id = 0
        self.stats: DraftEngineStats | None = None
        self.load = Load(0)

    def count(self) -> Counter[TargetLinkState]:
        return Counter(link.state for link in list(self._links.values()))  # asked on any thread

    @property
    def num_up(self) -> int:
        return sum(link.known_to_engine for link in self._links.values())

    def num_links_of(self, identity: str) -> tuple[int, int]:
        """Links of an identity: up, and not yet so."""
        own = [link for link in self._links.values() if link.identity == identity]
        up = sum(link.known_to_engine for link in own)
        return up, len(own) - up

    def link_to_give_way(self, identity: str) -> TargetLink | None:
        """Return the idlest link of whoever has most links, if that leaves it as many as
        ``identity`` has with one more."""
        up = [link for link in self._links.values() if link.known_to_engine]
        held = Counter(link.identity for link in up)
        most = max(held, key=lambda each: held[each], default=identity)
        if held[identity] + 1 >= held[most]:
            return None
        return min((link for link in up if link.identity == most), key=lambda each: each.used)

    def new_link(self) -> TargetLink:
        """A stream that has yet to greet."""
        self._next_id += 1
        link = TargetLink(self._next_id, self._max_frames, self._max_bytes)
        self._links[link.id] = link
        return link

    def welcome(self, link: TargetLink, up: TargetLinkUp) -> None:
        self.raise_if_stalled()
        link.move(TargetLinkEvent.WELCOME)
        self.send(up)

    def pass_on(self, link: TargetLink, frames: list[TargetFrame], size: int) -> None:
        """``size``: the bytes of these frames, as they came."""
        if frames and link.known_to_engine:
            link.used = time.monotonic()
            link.window.add(len(frames), size)
            self.send(TargetFrames(link.id, frames))

    def end(self, link: TargetLink) -> None:
        """Ends a link for any reason. The engine hears of it once, however often this is called."""
        if self._links.pop(link.id, None) is None:
            return
        if link.known_to_engine:
            self.send(LinkGone(link.id))
        link.move(TargetLinkEvent.END)

    def drain(self) -> None:
        """The engine tells every link that is up; who has not greeted yet goes elsewhere."""
        self.send(AnnounceLeaving())
        for link in self._links.values():
            if link.state is TargetLinkState.UP:
                link.move(TargetLinkEvent.DRAIN)
            else:
                link.fail(NotServing("the endpoint is draining; use another one"))

    def end_all(self, error: SSDError) -> None:
        for link in self._links.values():
            link.fail(error)

    def forget(self) -> None:
        for link in self._links.values():
            link.move(TargetLinkEvent.END)
        self._links.clear()
        self.stats = None

    def dispatch(self, record: DraftOutput) -> None:
        self.stats, self.load = record.stats, record.load
        self.keep(record.trace)
        for output in record.links:
            link = self._links.get(output.link)
            if link is not None:
                self._deliver(link, output)

    def _deliver(self, link: TargetLink, output: LinkOutput) -> None:
        link.window.consume(output.consumed)
        self.push_frames(link, output.frames)

    def push_frames(self, link: TargetLink, frames: list[DraftFrame]) -> None:
        dropped = link.outbox.push(frames)
        if dropped:
            self._on_drop(dropped)
        if link.outbox.overfull:
            link.fail(ReaderStalled("the target does not read what it is told"))
