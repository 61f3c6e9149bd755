"""What the draft's front process and its engine process say to each other."""

import msgspec

from ssd_engine.speculation.frames import DraftFrame, Load, TargetFrame
from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer
from ssd_engine.tracing.events import TraceEvent
from ssd_serving.engine.records import Beat, Fatal, Ready, Record


class TargetLinkUp(Record, frozen=True):
    """A target has shaken hands. Link ids are never used again."""

    link: int
    max_depth: int  # tokens of the longest speculation that the target verifies
    epoch: int = 0
    plane: PlaneOffer | None = None
    interface: str = ""  # own address that the target is reached from; "": not known


class TargetFrames(Record, frozen=True):
    link: int
    frames: list[TargetFrame]


class TargetLinkDown(Record, frozen=True):
    """The stream has ended: its sequences go."""

    link: int


class AnnounceLeaving(Record, frozen=True):
    """Announce to every link that this endpoint leaves; nothing new is opened."""


class LinkOutput(Record, frozen=True):
    link: int
    frames: list[DraftFrame]
    consumed: int  # frames of this link that the engine has looked at since the last output


class DraftEngineStats(Record, frozen=True):
    links: int
    sequences: int
    used_blocks: int
    reserved_blocks: int
    cached_blocks: int
    # Since start:
    steps: int
    rows: int  # token rows computed
    branches: int  # begun
    branch_tokens: int  # pushed
    rounds: int  # launches seen
    evictions: int
    refusals: int
    dropped_frames: int  # stale, unknown or malformed
    builds: list[int]  # trees by their time: a count for each of histogram.EDGES, one beyond
    build_micros: int


class DraftOutput(Record, frozen=True):
    links: list[LinkOutput]
    load: Load
    stats: DraftEngineStats
    trace: list[TraceEvent]


ToEngine = TargetLinkUp | TargetFrames | TargetLinkDown | AnnounceLeaving
ToFront = Ready | Beat | DraftOutput | Fatal

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_to_front(data: bytes) -> ToFront:
    return _to_front.decode(data)
