"""A link: one stream of one target, as the front sees it. No gRPC here."""

import asyncio
import time
from collections import deque
from enum import Enum

from ssd_engine.errors import SSDError
from ssd_engine.speculation.frames import Branches, DraftFrame

MAX_MESSAGE_COST = 65_536  # numbers that one message carries, about


class TargetLinkState(Enum):
    GREETING = "greeting"  # the engine knows nothing of it
    UP = "up"
    LEAVING = "leaving"  # the endpoint drains; what is open is served until the target leaves
    ENDED = "ended"  # the engine was told, or had never heard of it


class TargetLinkEvent(Enum):
    WELCOME = "welcome"
    DRAIN = "drain"
    END = "end"  # by either side, by an error, or with the connection


TRANSITIONS = {
    (TargetLinkState.GREETING, TargetLinkEvent.WELCOME): TargetLinkState.UP,
    (TargetLinkState.GREETING, TargetLinkEvent.END): TargetLinkState.ENDED,
    (TargetLinkState.UP, TargetLinkEvent.DRAIN): TargetLinkState.LEAVING,
    (TargetLinkState.UP, TargetLinkEvent.END): TargetLinkState.ENDED,
    (TargetLinkState.LEAVING, TargetLinkEvent.END): TargetLinkState.ENDED,
}


def transition(state: TargetLinkState, event: TargetLinkEvent) -> TargetLinkState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a link that is {state.value} cannot {event.value}") from None


class Window:
    """Counts the frames that were read from a target and not yet looked at by the engine.

    While it is full nothing more is read, so a target that floods fills its own connection and
    nobody else's memory.
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._messages: deque[tuple[int, int]] = deque()  # frames and bytes of each
        self._bytes = 0
        self.frames = 0
        self._room = asyncio.Event()
        self._room.set()

    async def room(self) -> None:
        await self._room.wait()

    def add(self, frames: int, size: int) -> None:
        self._messages.append((frames, size))
        self.frames += frames
        self._bytes += size
        self._settle()

    def consume(self, frames: int) -> None:
        """Frames are looked at in order; a message counts until its last one is."""
        self.frames -= frames
        while frames:
            count, size = self._messages.popleft()
            if count > frames:
                self._messages.appendleft((count - frames, size))
                break
            frames -= count
            self._bytes -= size
        self._settle()

    def _settle(self) -> None:
        if self.frames >= self._max_frames or self._bytes >= self._max_bytes:
            self._room.clear()
        else:
            self._room.set()


class Outbox:
    """Frames for a target that are not written yet.

    When a slow reader lets too many gather, the oldest branches go: they are about rounds that
    have ended, and a branch with a gap is of no harm. Notices stay.
    """

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._frames: deque[DraftFrame] = deque()
        self._waiting = asyncio.Event()

    def __len__(self) -> int:
        return len(self._frames)

    def push(self, frames: list[DraftFrame]) -> int:
        """Returns how many frames were dropped."""
        self._frames.extend(frames)
        if self._frames:
            self._waiting.set()
        surplus = len(self._frames) - self._max_frames
        return self._drop_branches(surplus) if surplus > 0 else 0

    @property
    def overfull(self) -> bool:
        """Whether there is too much, and nothing left that could be dropped."""
        return len(self._frames) > self._max_frames

    async def take(self) -> list[DraftFrame]:
        """Wait for a frame, then take all that have gathered, as far as one message goes."""
        await self._waiting.wait()
        taken, cost = [self._frames.popleft()], 0
        while self._frames and cost < MAX_MESSAGE_COST:
            cost += _cost(taken[-1])
            taken.append(self._frames.popleft())
        if not self._frames:
            self._waiting.clear()
        return taken

    def _drop_branches(self, surplus: int) -> int:
        kept: deque[DraftFrame] = deque()
        dropped = 0
        for frame in self._frames:
            if dropped < surplus and isinstance(frame, Branches):
                dropped += 1
            else:
                kept.append(frame)
        self._frames = kept
        return dropped


def _cost(frame: DraftFrame) -> int:
    if not isinstance(frame, Branches):
        return 64
    return 8 + sum(8 + len(branch.tokens) for branch in frame.branches)


class TargetLink:
    """The link of one target; make it inside an event loop."""

    def __init__(self, link_id: int, max_frames: int, max_bytes: int) -> None:
        self.id = link_id
        self.identity = ""  # who the target is, or its host where nobody is known
        self.used = time.monotonic()  # when it came, or its last frames did
        self.state = TargetLinkState.GREETING
        self.came_up = False
        self.window = Window(max_frames, max_bytes)
        self.outbox = Outbox(max_frames)
        self.failure: asyncio.Future[SSDError] = asyncio.get_running_loop().create_future()

    @property
    def known_to_engine(self) -> bool:
        return self.state in (TargetLinkState.UP, TargetLinkState.LEAVING)

    def move(self, event: TargetLinkEvent) -> None:
        self.state = transition(self.state, event)
        self.came_up |= self.state is TargetLinkState.UP

    def fail(self, error: SSDError) -> None:
        """Whoever serves the stream ends it with this error. Later ones change nothing."""
        if not self.failure.done():
            self.failure.set_result(error)
