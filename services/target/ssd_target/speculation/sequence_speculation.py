"""A sequence that the target speculates for, and the speculation of its next round."""

from dataclasses import dataclass, field

from torch import Tensor

from ssd_engine.speculation.frames import Source, Verification
from ssd_engine.speculation.ngram import NgramIndex
from ssd_target.records.speculation_options import Mode, SpeculationRequest
from ssd_target.records.speculation_stats import LookUp, SpeculationStats
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.endpoint_session import EndpointSession

INDEXED_AT_ONCE = 1024  # tokens


@dataclass(slots=True)
class SequenceSpeculation:
    sequence: Sequence
    request: SpeculationRequest
    rounds: EndpointSession
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    mode: Mode = Mode.OFF  # that the round in flight went by
    source: Source = Source.NONE  # where its speculation came from
    found: LookUp | None = None  # when that round was looked up
    drafted: int = 0
    judged: int = 0  # those of them before a cut
    ended_at: float = 0.0  # when the round before ended
    waited: float = 0.0  # seconds that the round in flight was held back
    outcome_sent: bool = True
    told_depth: int = 0  # what the endpoint was told to prepare for the next round
    ngrams: NgramIndex | None = None
    home: int | None = None  # the endpoint whose payoff this sequence is evidence for
    rejecting: bool = False  # the endpoint draws, and sends what it draws from
    refused_by: set[int] = field(default_factory=set)
    why_detached: str = "disconnected"

    @property
    def may_use_endpoints(self) -> bool:
        return self.request.mode in (Mode.SSD, Mode.AUTO)

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


@dataclass(slots=True)
class RowSpeculation:
    """The speculation of one row of the next forward."""

    speculated: SequenceSpeculation
    wanted: int
    mode: Mode = Mode.OFF  # how this round goes: never AUTO
    tokens: list[int] = field(default_factory=list)
    source: Source = Source.NONE
    missed: bool = False  # an endpoint follows, and its branch is not here
    wire: Tensor | None = None  # what the tokens were drawn from, in rejection
    under_speculation: bool = False  # it was launched while its endpoint was on
    shows_payoff: bool = False  # and tells what that endpoint is worth, or what rounds without are
    catches_up: bool = False  # the draft model inside reads text first: takes longer than usual

    @property
    def down_weight(self) -> float | None:
        request = self.speculated.request
        return request.down_weight if request.verification is Verification.REJECTION else None

    def fill(self, source: Source) -> None:
        """With the branch of the outcome, as far as it is here."""
        rounds = self.speculated.rounds
        if rounds.decided is None:
            return
        tokens = rounds.branches.find(*rounds.decided)[: self.wanted]
        if tokens:
            self.tokens, self.source, self.missed = tokens, source, False
