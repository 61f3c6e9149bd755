"""How a target speculates. Plain data, no torch."""

from dataclasses import dataclass
from enum import IntEnum

from ssd_engine.speculation.verification import Verification

HEAD_WINDOW = 1024  # positions of a sequence whose features a head inside the target keeps


class Mode(IntEnum):
    """The numbers are those of the wire."""

    AUTO = 0  # the mode below that measures fastest at the time
    OFF = 1  # plain decoding
    SYNC = 2  # draft and target take turns, the draft model inside the target's engine
    SSD = 3  # endpoints prepare while the target verifies


class Backup(IntEnum):
    """What a row does after a miss."""

    NONE = 0  # goes on without a speculation
    JUST_IN_TIME = 1  # waits for its branch, where every other row would have to wait as well
    NGRAM = 2  # looks its last tokens up in its own text
    AUTO = 3  # waits where that is measured to pay, else looks up


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """The operator's options for speculation."""

    endpoints: bool = True  # the operator has named some, or allows requests to
    depth: int = 5  # longest speculation
    adapt_depth: bool = True  # shorter where measured acceptance and times say so
    backup: Backup = Backup.AUTO
    wait_seconds: float | None = None  # for a branch at most; None: as long as it pays
    auto_off: bool = True  # an endpoint that does not pay is left, and tried again later
    link_timeout: float = 2.0  # seconds without an answer after which a link counts as stalled


@dataclass(frozen=True, slots=True)
class FeatureOptions:
    """What a target keeps of its hidden states, while a link reads them."""

    hidden_size: int = 0
    window: int = 1024  # positions of a sequence, the last ones
    window_bytes: int = 1 << 40  # for these, at most
    keep_bytes: int = 0  # for blocks of the prefix cache


@dataclass(frozen=True, slots=True)
class SpeculationRequest:
    """One request's options for speculation."""

    mode: Mode = Mode.OFF
    verification: Verification = Verification.COUPLED
    depth: int = 5
    links: list[int] | None = None  # endpoints that it may use; None: the operator's
    down_weight: float = 1.0
    trace_context: str = ""  # set for a request that is traced: endpoints are told
