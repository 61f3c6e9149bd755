"""What the draft's front process and its engine process say to each other."""

from collections.abc import Callable

import msgspec

from ssd_engine.speculation.frames import DraftFrame, Load, TargetFrame
from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer
from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tracing.events import TraceEvent
from ssd_serving.engine.records import AboutLink, Beat, Fatal, LinkGone, Ready, Record


class TargetLinkUp(AboutLink, frozen=True):
    """A target has shaken hands. Link ids are never used again."""

    max_depth: int  # tokens of the longest speculation that the target verifies
    epoch: int = 0
    plane: PlaneOffer | None = None
    interface: str = ""  # own address that the target is reached from; "": not known
    features: PlaneOffer | None = None  # how the target can tell features, where it can


class TargetFrames(AboutLink, frozen=True):
    frames: list[TargetFrame]


class AnnounceLeaving(Record, frozen=True):
    """Announce to every link that this endpoint leaves; nothing new is opened."""


class GrammarVocabulary(Record, frozen=True):
    """What grammars are compiled for; it is sent where there is a tokenizer."""

    tokenizer: str  # what the tokenizers library reads one from
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class LinkOutput(AboutLink, frozen=True):
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
    feature_rows: int = 0  # that targets have told
    dropped_features: int = 0  # rows of no sequence, or of no use
    feature_rounds: int = 0  # rounds that a head followed
    late_feature_rounds: int = 0  # of these, whose rows had not come with the next outcome
    planes: tuple[PlaneReport, ...] = ()  # of all links, as they are now


class DraftOutput(Record, frozen=True):
    links: list[LinkOutput]
    load: Load
    stats: DraftEngineStats
    trace: list[TraceEvent]


ToEngine = TargetLinkUp | TargetFrames | LinkGone | AnnounceLeaving | GrammarVocabulary
ToFront = Ready | Beat | DraftOutput | Fatal

decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front: Callable[[bytes], ToFront] = msgspec.msgpack.Decoder(ToFront).decode
