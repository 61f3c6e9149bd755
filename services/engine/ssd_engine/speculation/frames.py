"""What a target and a draft say to each other about a sequence, as plain data. No torch here.

A *round* verifies a *speculation* s1..sk; round 0 is the prefill, with k = 0. It ends in an
*outcome* (accepted, token). A *branch* is named by (sequence, round, accepted, token): the
continuation if that round ends in that outcome.
"""

from enum import IntEnum

import msgspec

from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.verification import Verification
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer

# Grows with each minor release that changes what is said. Such a release may add fields, values of
# enums, kinds of frames and methods; it speaks its own version and the one before, and ignores and
# counts what it does not know. So peers that are one version apart work together.
PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = max(1, PROTOCOL_VERSION - 1)


class Source(IntEnum):
    """Where the speculation of a round came from. Tokens and traces say it in these numbers."""

    NONE = 1
    CACHE = 2  # a branch that was there when the outcome was known
    JUST_IN_TIME = 3  # a branch that the target waited for
    NGRAM = 4  # the target's own look-up
    SYNC = 5  # a draft model inside the target; never on the wire
    GRAMMAR = 6  # no other tokens could come; never on the wire


class NoticeKind(IntEnum):
    LOST = 1  # the endpoint does not hold this sequence (any more); it may be opened again
    BUSY = 2  # no room for this sequence now
    REFUSED = 3  # the endpoint cannot serve this sequence at all
    LEAVING = 4  # the endpoint drains


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    sequence: int
    round: int


class Open(Frame, frozen=True):
    """A sequence as it stands in ``round``, which is being verified."""

    prompt: bytes  # token ids, 4 bytes little-endian each
    output: bytes
    speculation: list[int]
    max_tokens: int  # prompt and output together are never longer
    sampling: SamplingParams
    verification: Verification
    down_weight: float
    depth: int  # tokens of the longest branch that is of use
    verify_micros: int  # 0: not known
    trace_context: str = ""  # set for a request that is traced
    cache_scope: int = 0  # what is cached of one is never found from another


class Outcome(Frame, frozen=True):
    """``round`` has ended."""

    accepted: int
    token: int


class Launch(Frame, frozen=True):
    """``round`` has begun."""

    speculation: list[int]
    source: Source
    depth: int
    verify_micros: int


class Close(Frame, frozen=True):
    pass


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """``tokens`` from depth ``start`` on; a branch only ever grows."""

    accepted: int
    token: int
    start: int
    tokens: list[int]


class Branches(Frame, frozen=True):
    branches: list[Branch]


class Notice(Frame, frozen=True):
    kind: NoticeKind
    reason: str


class Plane(Frame, frozen=True):
    """Says where a tensor plane of this epoch is made; it belongs to no sequence."""

    answer: PlaneAnswer


class FeatureRequest(Frame, frozen=True):
    """Asks for the features of a sequence from a position on."""

    from_position: int


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy the draft is."""

    open_sequences: int


TargetFrame = Open | Outcome | Launch | Close
DraftFrame = Branches | Notice | Plane | FeatureRequest
