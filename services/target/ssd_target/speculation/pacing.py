"""How deep a row speculates and how long it may wait: decided by what rounds were seen to cost."""

from collections.abc import Callable

from ssd_engine.speculation.fan_out import AcceptanceRate, choose_depth
from ssd_engine.speculation.frames import Source
from ssd_engine.speculation.latency_model import Average, StepClock
from ssd_target.records.speculation_options import Backup, SpeculationOptions
from ssd_target.speculation.endpoints.endpoint import DraftEndpoint
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
)
from ssd_target.speculation.waiting import worthwhile_wait

NGRAM_EXPLORE = 64  # misses without a look-up, after which one is tried


class Pacing:
    def __init__(self, options: SpeculationOptions) -> None:
        self._options = options
        self.width = 1  # tokens of the forward in flight
        self.verify_clock = StepClock()  # seconds of a decode forward, by its rows
        self._sync_alpha = AcceptanceRate()
        self._sync_seconds = Average()  # seconds for one drafted token
        self._ngram_alpha = AcceptanceRate(prior=0.5)
        self._ngram_idle = 0

    # What was seen

    def drafted(self, tokens: int, seconds: float) -> None:
        """The draft model's turn, in synchronous speculation."""
        if tokens:
            self._sync_seconds.observe(seconds / tokens)

    def accepted(self, row: RowSpeculation, accepted: int, endpoint: DraftEndpoint | None) -> None:
        """A round has ended; ``endpoint`` holds the sequence."""
        drafted = len(row.speculation)
        if not drafted or row.source is Source.GRAMMAR:  # which is nobody's guess
            return
        if row.source is Source.NGRAM:
            self._ngram_alpha.observe(accepted, drafted)
        elif row.source is Source.SYNC:
            certain = row.num_certain
            self._sync_alpha.observe(max(0, accepted - certain), drafted - certain)
        elif endpoint is not None:
            endpoint.alpha.observe(accepted, drafted - row.num_cut)

    # What follows from it

    def sync_depth(self, state: SequenceSpeculation, num_rows: int) -> int:
        return self._depth(state, num_rows, self._sync_alpha, self._sync_seconds.value())

    def depth(
        self, state: SequenceSpeculation, num_rows: int, endpoint: DraftEndpoint | None
    ) -> int:
        if endpoint is None:
            return self._depth(state, num_rows, None)
        # A longer one it could not follow.
        return min(self._depth(state, num_rows, endpoint.alpha), endpoint.max_depth)

    def _depth(
        self,
        state: SequenceSpeculation,
        num_rows: int,
        alpha: AcceptanceRate | None,
        drafting: float = 0.0,
    ) -> int:
        """Tokens that the row can use."""
        most = min(state.room(), state.request.depth, self._options.depth)
        if most <= 1 or not self._options.adapt_depth or alpha is None:
            return most
        return max(1, choose_depth(alpha.value, self._round_seconds(num_rows, drafting), most))

    def _round_seconds(self, num_rows: int, drafting: float = 0.0) -> Callable[[int], float]:
        """Seconds of a round in which each row drafts, if it has to, and verifies k tokens."""
        clock = self.verify_clock
        if not clock.known:
            return lambda k: 1.0
        return lambda k: clock.seconds(num_rows * (k + 1)) + k * drafting

    def ngram_depth(self, row: RowSpeculation, num_rows: int) -> int:
        """As deep as it pays; where it does not, a short one from time to time, to learn."""
        if self._options.backup is Backup.NGRAM:
            return row.wanted
        depth = choose_depth(self._ngram_alpha.value, self._round_seconds(num_rows), row.wanted)
        self._ngram_idle = 0 if depth else self._ngram_idle + 1
        if self._ngram_idle < NGRAM_EXPLORE:
            return depth
        self._ngram_idle = 0
        return min(2, row.wanted)

    def next_depth(self, row: RowSpeculation, endpoint: DraftEndpoint) -> int:
        """How long a branch can be of use in the round after the one that is launched."""
        state = row.state
        wanted = row.wanted or min(state.request.depth, self._options.depth)
        return max(0, min(wanted, endpoint.max_depth, state.room() - 1))

    def verify_micros(self) -> int:
        """What endpoints are told: they may use as much time for their trees."""
        return int(1e6 * self.verify_clock.seconds(self.width))

    def wait_seconds(self, row: RowSpeculation, num_rows: int, endpoint: DraftEndpoint) -> float:
        """How long a row that missed is worth waiting for; 0: not at all."""
        if self._options.backup not in (Backup.AUTO, Backup.JUST_IN_TIME):
            return 0.0
        if self._options.wait_seconds is not None:
            return self._options.wait_seconds
        return worthwhile_wait(
            alpha=endpoint.alpha.value,
            depth=row.wanted,
            plain_seconds=self.verify_clock.seconds(num_rows),
            verify_seconds=self.verify_clock.seconds(num_rows * (1 + row.wanted)),
            usual_seconds=endpoint.usual_delay(),
        )
