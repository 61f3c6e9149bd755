"""A sequence that the target speculates for, and the speculation of one of its rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ssd_engine.speculation.frames import Source, Verification
from ssd_engine.speculation.ngram import NgramIndex
from ssd_engine.speculation.speculation import NOTHING, Speculation
from ssd_target.records.speculation_options import Mode, SpeculationRequest
from ssd_target.records.speculation_stats import LookUp, SpeculationStats
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.endpoints.session import EndpointSession

INDEXED_AT_ONCE = 1024  # tokens


class Strategy(Protocol):
    """A way to speculate. A request has one for all its life; each of its rounds goes by that, or
    by another one that it falls back to."""

    mode: Mode  # the name that its rounds are counted under

    def is_plain(self, state: "SequenceSpeculation") -> bool:
        """Whether nothing will be speculated for the next round, whatever the one before gives."""

    def look_up(self, state: "SequenceSpeculation", num_rows: int) -> "RowSpeculation":
        """The row of the next forward, which has ``num_rows``; others may fill it later."""

    def launch(self, row: "RowSpeculation") -> None:
        """The round of this row begins; endpoints are told."""

    def observe(self, row: "RowSpeculation", tokens: int, row_seconds: float) -> None:
        """The round committed so many tokens; its share of the forward took ``row_seconds``."""

    def release(self, state: "SequenceSpeculation", reason: str) -> None:
        """Give up what is held for the sequence."""


@dataclass(slots=True, eq=False)
class SequenceSpeculation:
    sequence: Sequence
    request: SpeculationRequest
    strategy: Strategy
    session: EndpointSession
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    row: "RowSpeculation | None" = None  # the round in flight
    ended_at: float = 0.0  # when the round before ended
    outcome_sent: bool = True
    told_depth: int = 0  # what the endpoint was told to prepare for the next round
    ngrams: NgramIndex | None = None
    home: int | None = None  # the endpoint whose payoff this sequence is evidence for
    rejecting: bool = False  # the endpoint draws, and sends what it draws from
    refused_by: set[int] = field(default_factory=set)
    why_detached: str = "disconnected"

    def room(self) -> int:
        """Tokens of the next round that can be right: the last of a request is never guessed."""
        return max(0, self.sequence.max_committed - self.sequence.num_committed - 1)

    def look_back(self, depth: int) -> list[int]:
        """A continuation that the text itself suggests; none while much of it is not indexed: a
        long text is, piece by piece, so that nobody else waits for it."""
        if self.ngrams is None:
            self.ngrams = NgramIndex()
        committed, begin = self.sequence.committed(), len(self.ngrams)
        self.ngrams.extend(committed[begin : begin + INDEXED_AT_ONCE])
        return self.ngrams.propose(depth) if len(self.ngrams) == len(committed) else []


def request_of(
    sequence: Sequence, begun: Mapping[int, SequenceSpeculation]
) -> SpeculationRequest | None:
    """What it asks for, whether it has begun or its tokens are still computed again."""
    state = begun.get(sequence.id)
    return sequence.speculation if state is None else state.request


@dataclass(slots=True, eq=False)
class RowSpeculation:
    """The speculation of one row of a forward."""

    state: SequenceSpeculation
    strategy: Strategy  # that this round goes by
    wanted: int = 0
    speculation: Speculation = NOTHING
    source: Source = Source.NONE
    num_certain: int = 0  # of its tokens, the first ones: nothing else can come there
    found: LookUp | None = None  # by the look-up, if there was one
    missed: bool = False  # an endpoint follows, and its branch is not here
    waited: float = 0.0  # seconds that the forward was held back for it
    wire: Tensor | None = None  # what the tokens were drawn from, in rejection
    num_cut: int = 0  # tokens, the last ones, of which that did not come
    under_speculation: bool = False  # it was launched while its endpoint was on
    shows_payoff: bool = False  # and tells what that endpoint is worth, or what rounds without are
    catches_up: bool = False  # the draft model inside reads text first: takes longer than usual

    @property
    def down_weight(self) -> float | None:
        request = self.state.request
        return request.down_weight if request.verification is Verification.REJECTION else None

    def cut(self, count: int) -> None:
        """Leaves so many tokens of the speculation."""
        self.speculation = Speculation(self.speculation.tokens[:count])
        self.wire = None if self.wire is None else self.wire[:count]
        self.num_certain = min(self.num_certain, count)
        if not count:
            self.source = Source.NONE

    def fill(self, source: Source) -> None:
        """With the branch of the outcome, as far as it is here."""
        session = self.state.session
        if session.decided is None:
            return
        tokens = session.branches.find(*session.decided)[: self.wanted]
        if tokens:
            self.speculation, self.source, self.missed = Speculation(tokens), source, False
