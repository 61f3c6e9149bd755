"""What the front process and the engine process say to each other: small binary records."""

from collections.abc import Callable

import msgspec

from ssd_engine.sampling.params import Logprobs, SamplingParams
from ssd_engine.speculation.features import FeatureTerms
from ssd_engine.speculation.frames import DraftFrame, Load, TargetFrame
from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer
from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.text.completion import StopRules
from ssd_engine.tracing.events import TraceEvent
from ssd_serving.engine.records import AboutLink, Beat, Fatal, LinkGone, Ready, Record
from ssd_target.records.speculation_options import SpeculationRequest
from ssd_target.records.speculation_stats import SpeculationStats


class Vocabulary(Record, frozen=True):
    """The first record: the bytes of each token id, for stop strings, and what cuts texts."""

    token_bytes: list[bytes]
    control_spellings: dict[int, bytes]  # control tokens as they are written
    tokenizer: str  # what the tokenizers library reads one from, for grammars


class Submit(Record, frozen=True):
    sequence: int
    prompt: bytes  # token ids, 4 bytes little-endian each
    generated: bytes
    sampling: SamplingParams
    rules: StopRules
    num_logprobs: int | None
    speculation: SpeculationRequest
    owner: str = ""  # the identity whose request it is
    scope: str = ""  # what is cached of one is never found from another
    prompt_logprobs: int | None = None  # as num_logprobs, of the tokens of the prompt


class Cancel(Record, frozen=True):
    sequence: int


class GiveBackWaiting(Record, frozen=True):
    """Give back what has not begun: it holds nothing, and may begin elsewhere at once."""


class DraftLinkUp(AboutLink, frozen=True):
    """A speculation endpoint has shaken hands. Epochs of a link only ever grow."""

    epoch: int
    named: bool  # only for requests that name it
    max_sequences: int
    max_context: int
    max_depth: int
    host: str = ""  # the endpoint's host, for its tensor plane
    trusted: bool = False  # with rejection verification
    features: FeatureTerms | None = None  # what it reads of the target's hidden states


class DraftLinkDown(AboutLink, frozen=True):
    epoch: int


class DraftFrames(AboutLink, frozen=True):
    """Frames from an endpoint."""

    epoch: int
    frames: list[DraftFrame]
    load: Load | None


class LinkSend(AboutLink, frozen=True):
    """Frames for an endpoint."""

    epoch: int
    frames: list[TargetFrame]


class LinkStalled(AboutLink, frozen=True):
    """The endpoint is of no use: this epoch is over."""

    epoch: int
    reason: str


class Delta(Record, frozen=True):
    """Tokens that a sequence committed in a step; the last ones when it is finished."""

    sequence: int
    tokens: list[int]
    logprobs: list[Logprobs] | None
    cached_tokens: int
    finished: bool
    error: str | None = None
    field: str = ""  # of the request, where that is at fault for the error
    speculation: SpeculationStats | None = None  # with the last tokens
    source: int = 0  # where speculated tokens among them came from, a Source; 0: there are none
    accepted: int = 0  # so many, the first ones
    returned: bool = False  # it was not begun
    begun_at: float | None = None  # the first alone: when its prefill began, by the host's clock
    # Before any tokens: lines of log probabilities, as ReportedLogprobs reads them, of tokens of
    # the prompt, each time the next ones; the first token has none.
    prompt_scores: bytes = b""


def failed(sequence: int, problem: str, field: str = "", cached_tokens: int = 0) -> Delta:
    """The end of a sequence that cannot go on. ``field``: of the request, where it is at fault."""
    return Delta(sequence, [], None, cached_tokens, finished=True, error=problem, field=field)


class PlaneAbility(Record, frozen=True):
    """How the engine can exchange rows of tensors with a draft's, and which."""

    offer: PlaneOffer
    tells_features: bool = False


class EndpointStats(AboutLink, frozen=True):
    sequences: int
    payoff: str  # "on", "plain" or "off"
    acceptance: float
    planes: tuple[PlaneReport, ...] = ()


class TargetEngineStats(Record, frozen=True):
    running: int
    waiting: int
    used_blocks: int
    reserved_blocks: int
    cached_blocks: int
    prompt_tokens: int  # since start, as the following
    hit_tokens: int
    set_aside: int  # sequences, for want of blocks
    replayed_tokens: int  # computed again after it
    swapped_out: int  # those of them whose KV went to the host's memory
    swapped_blocks: int  # blocks that are there now
    steps: int
    forwards: int  # rounds' forwards, all sequences together
    forward_seconds: float
    gap_seconds: float  # the device had nothing to do for so long before them
    speculation: SpeculationStats
    dropped_frames: int  # frames from endpoints that were stale, unknown or out of bounds
    endpoints: list[EndpointStats]
    feature_rows: int = 0  # sent to heads, since start
    feature_bytes: int = 0
    missed_features: int = 0  # rows that were gone before they could be sent
    reread_features: int = 0  # rows that were computed once more to be sent
    feature_requests: int = 0  # of heads, to be told a sequence from a position on
    refused_feature_requests: int = 0  # those that came too often
    kept_feature_bytes: int = 0  # of what the prefix cache holds, now


class StepOutput(Record, frozen=True):
    deltas: list[Delta]
    stats: TargetEngineStats
    trace: list[TraceEvent]
    cancelled: list[int]  # sequences that hold nothing here any more, since they were


LinkRecord = DraftLinkUp | DraftLinkDown | LinkGone | DraftFrames
ToEngine = Vocabulary | Submit | Cancel | GiveBackWaiting | LinkRecord
ToFront = Ready | Beat | StepOutput | LinkSend | LinkStalled | PlaneAbility | Fatal

decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front: Callable[[bytes], ToFront] = msgspec.msgpack.Decoder(ToFront).decode
