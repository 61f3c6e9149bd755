"""The round, from the target's side: look up, wait rule, launch, then send outcome and launch.

One rule covers hit, late, miss and dead: take the speculation for this outcome, waiting no longer
than the wait budget. What one row finds or misses never touches what another one has.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows

from torch import Tensor

from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.speculation.frames import Source, Verification
from ssd_engine.speculation.speculation import Speculation
from ssd_engine.tracing.events import NoTrace, Trace
from ssd_target.records.speculation_options import Mode, SpeculationOptions
from ssd_target.records.speculation_stats import SpeculationStats
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import RoundOutcome
from ssd_target.scheduling.work import Work
from ssd_target.speculation.endpoints.distributions import Distributions
from ssd_target.speculation.endpoints.draft_endpoints import (
    DISCONNECTED,
    DraftEndpoints,
    OpenFeatures,
    OpenPlane,
    Send,
    Stalled,
)
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
    Strategy,
    request_of,
)
from ssd_target.speculation.endpoints.session import EndpointSession
from ssd_target.speculation.missed_rows import MissedRows, Receive
from ssd_target.speculation.off import PlainDecoding
from ssd_target.speculation.pacing import Pacing
from ssd_target.speculation.round_frames import RoundFrames
from ssd_target.speculation.round_metrics import RoundMetrics
from ssd_target.speculation.ssd import EndpointSpeculation, FastestSpeculation
from ssd_target.speculation.sync import SyncSpeculation
from ssd_target.speculation.sync_drafter import Drafter

MOST_RECORDS = 64  # records of links that are heard between one round and the next


class SpeculationCoordinator:
    def __init__(
        self,
        options: SpeculationOptions,
        vocab_size: int,
        send: Send = lambda link, epoch, frames: None,
        receive: Receive = lambda seconds: False,
        stalled: Stalled = lambda link, epoch, reason: None,
        drafter: Drafter | None = None,
        open_plane: OpenPlane = lambda up, plane: None,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
        open_features: OpenFeatures = lambda up, plane: None,
        feed: FeatureFeed | None = None,
    ) -> None:
        trace = trace or NoTrace()
        self.depth = options.depth  # tokens of the longest speculation
        self.totals = SpeculationStats()
        self._vocab_size, self._receive, self._now = vocab_size, receive, clock
        self._sequences: dict[int, SequenceSpeculation] = {}
        self.endpoints = DraftEndpoints(
            options, self._sequences, send, stalled, open_plane, clock, trace, open_features, feed
        )
        self.feed = self.endpoints.feed
        self.distributions = Distributions(self.endpoints, vocab_size)
        self._pacing = Pacing(options)
        self.metrics = RoundMetrics(self._pacing, trace, clock)
        frames = RoundFrames(self.endpoints, self.distributions, self._pacing, clock)
        self._missed_rows = MissedRows(
            options.backup, self.endpoints, frames, self._pacing, receive, trace, clock
        )
        self._plain = PlainDecoding()
        self._strategies: dict[Mode, Strategy] = {Mode.OFF: self._plain}
        self._sync: SyncSpeculation | None = None
        if drafter is not None:
            self._sync = self._strategies[Mode.SYNC] = SyncSpeculation(
                drafter, self._plain, self._pacing, self.endpoints, options.auto_off, trace, clock
            )
        inside = self._sync if options.auto_off else None
        # Modes in which rounds may be drafted by the model inside.
        self._inside_for = (Mode.SYNC, Mode.SSD, Mode.AUTO) if inside else (Mode.SYNC,)
        with_endpoints = (self.endpoints, frames, self._pacing, self._plain, inside)
        self._strategies[Mode.SSD] = EndpointSpeculation(*with_endpoints)
        self._strategies[Mode.AUTO] = FastestSpeculation(*with_endpoints)

    # The life of a sequence

    def begin(self, sequence: Sequence) -> None:
        """Round 0, the prefill, is about to be launched: endpoints prefill at the same time. One
        that was set aside begins again; one that has begun goes on."""
        request, sequence.speculation = sequence.speculation, None
        if request is None:
            return
        state = self._sequences.get(sequence.id)
        if state is None:
            state = self._sequences[sequence.id] = SequenceSpeculation(
                sequence,
                request,
                self._strategies[request.mode],
                EndpointSession(self._vocab_size, self.depth),
            )
            sequence.begun_at = time.monotonic()
        else:
            state.ended_at, state.why_detached = self._now(), DISCONNECTED
        self._pacing.width = 1  # a prefill takes at least as long
        self._launch(RowSpeculation(state, self._plain))

    def set_aside(self, sequence: Sequence) -> None:
        """The sequence loses its KV, and all that was prepared for it. What is in flight for it is
        in vain: its tokens are drawn again, and are the same."""
        state = self._sequences.get(sequence.id)
        if state is not None:
            state.strategy.release(state, "set aside")
            sequence.speculation = state.request

    def end(self, sequence_id: int) -> SpeculationStats | None:
        """The sequence is finished or cancelled; returns what speculation did for it."""
        state = self._sequences.pop(sequence_id, None)
        if state is None:
            self._forget_features(sequence_id)  # its rows are told before it begins
            return None
        state.strategy.release(state, "closed")
        self._forget_features(sequence_id)
        state.row = None  # it knows its state: no circle is left behind
        self.totals.add(state.stats)
        return state.stats

    def _forget_features(self, sequence_id: int) -> None:
        self.feed.end(sequence_id)
        if self._sync is not None and self._sync.drafter.reads_features:
            self._sync.drafter.end(sequence_id)

    def is_plain(self, sequence: Sequence) -> bool:
        """Whether nothing will be speculated for its next round, whatever the one before gives."""
        state = self._sequences.get(sequence.id)
        return state is not None and state.strategy.is_plain(state)

    @property
    def drafts_from_features(self) -> bool:
        """Whether the draft inside reads them: it has to be told before it drafts."""
        return self._sync is not None and self._sync.drafter.reads_features

    # The round

    def take(self, sequences: Rows[Sequence]) -> list[RowSpeculation]:
        """The speculations of the next forward, row by row."""
        self._begin_step(len(sequences))
        states = [self._sequences[sequence.id] for sequence in sequences]
        rows = [state.strategy.look_up(state, len(states)) for state in states]
        self._missed_rows.wait(rows)
        self._missed_rows.guess(rows)
        if self._sync is not None:
            drafting = [row for row in rows if row.strategy is self._sync]
            for row in drafting:
                self._begin_with_certain(row)
            self._sync.draft(drafting)
        for row, sequence in zip(rows, sequences, strict=True):
            if sequence.grammar is not None:
                self._hold_to_grammar(row, sequence, sequence.grammar)
        return rows

    def _begin_with_certain(self, row: RowSpeculation) -> None:
        """Tokens that nothing else can come in place of are not drafted, but what follows them."""
        state, grammar = row.state, row.state.sequence.grammar
        if grammar is None or state.request.verification is not Verification.COUPLED:
            return
        most = self._most_tokens(state)
        if forced := grammar.forced(state.sequence.output, most):
            row.speculation, row.source = Speculation(forced), Source.GRAMMAR
            row.num_certain = len(forced)
            row.wanted = min(len(forced) + row.wanted, most)

    def _hold_to_grammar(
        self, row: RowSpeculation, sequence: Sequence, grammar: GrammarFollower
    ) -> None:
        """Leaves out what cannot be right. Tokens that are certain are speculated where that is
        more: they take no forward of their own, and nothing is drawn for them."""
        if row.speculation.tokens:
            fits = grammar.num_allowed(sequence.output, row.speculation.tokens)
            if fits < len(row.speculation):
                row.cut(fits)
        forced = grammar.forced(sequence.output, self._most_tokens(row.state))
        if len(forced) > len(row.speculation):
            row.speculation, row.source, row.wire = Speculation(forced), Source.GRAMMAR, None
        if row.state.request.verification is Verification.COUPLED:
            row.num_certain = _num_common(forced, row.speculation.tokens)

    def _most_tokens(self, state: SequenceSpeculation) -> int:
        """The longest speculation that the sequence can use, and that its endpoint can follow."""
        endpoint = self.endpoints.of(state)
        most = self.depth if endpoint is None else min(self.depth, endpoint.max_depth)
        return min(most, state.room())

    def take_nothing(self, sequences: Rows[Sequence]) -> list[RowSpeculation]:
        """The rows of a forward that was launched before its speculations could be looked up."""
        self._begin_step(len(sequences))
        return [RowSpeculation(self._sequences[each.id], self._plain) for each in sequences]

    def _begin_step(self, num_rows: int) -> None:
        self.metrics.begin_step()
        self.listen(MOST_RECORDS)  # branches may have come while rounds were judged
        self.endpoints.check_stalls()
        if not num_rows:
            return
        for endpoint in self.endpoints:
            endpoint.payoff.about_to_run(num_rows)
        if self._sync is not None:
            self._sync.payoff.about_to_run(num_rows)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where the target's hidden states are to be watched."""
        return self.feed.wanted(self.endpoints, self._now())

    def prepare_watch(self, boundaries: tuple[int, ...]) -> None:
        """Steps are captured that tell these."""
        self.feed.boundaries.prepare(boundaries, self._now())

    def watch(self, boundaries: tuple[int, ...]) -> None:
        """Forwards that are launched from now on tell these."""
        self.feed.watch(boundaries, self._now())

    def cannot_watch(self, boundaries: tuple[int, ...]) -> None:
        """There is no memory for it: everything goes on as before."""
        self.feed.boundaries.give_up(boundaries, self.endpoints, self._now())

    @property
    def reads_features(self) -> bool:
        """Whether there is somebody who wants to be told them."""
        inside = self._sync is not None and self._sync.drafter.reads_features
        return inside or bool(self.feed.watched)

    def tell_features(self, works: Rows[Work], features: Tensor | None) -> None:
        """What the rows of a forward told that has ended, as far as their tokens are committed.
        None: it was launched before anything was watched."""
        if features is None:
            return
        if self._sync is not None and self._sync.drafter.reads_features:
            self._tell_inside(self._sync.drafter, works, self.feed.read_inside(features))
        if self.feed.watched:
            self.feed.note(works, features, self._sequences, self.endpoints.reads_features)

    def next_lack(self) -> tuple[Sequence, range] | None:
        """A sequence with rows that heads lack, as the prefix cache has spared them: where."""
        for reader in self._readers():
            for key, positions in reader.lacks.items():
                if (state := self._sequences.get(key)) is not None:
                    return state.sequence, positions
        return None

    def tell_again(self, sequence: Sequence, start: int, features: Tensor) -> None:
        """What the last of these rows told, from position ``start`` on."""
        end = start + len(features)
        for reader in self._readers():
            lack = reader.lacks.get(sequence.id)
            if lack is None or lack.stop != end:
                continue
            inside = reader is not self.feed
            reader.tell_again(
                sequence.id, start, self.feed.read_inside(features) if inside else features
            )

    def give_up_lack(self, sequence: Sequence) -> None:
        for reader in self._readers():
            reader.give_up_lack(sequence.id)

    def _readers(self) -> list[FeatureFeed | Drafter]:
        """Who is told the target's hidden states."""
        if self._sync is None or not self._sync.drafter.reads_features:
            return [self.feed]
        return [self._sync.drafter, self.feed]

    def _tell_inside(self, drafter: Drafter, works: Rows[Work], features: Tensor) -> None:
        begin = 0
        for work in works:
            rows = features[begin : begin + len(work.chunk.tokens)]
            begin += len(work.chunk.tokens)
            start, sequence = work.chunk.start, work.sequence
            request = request_of(sequence, self._sequences)
            if request is not None and not work.is_over and request.mode in self._inside_for:
                right = rows[: sequence.num_committed - 1 - start]
                drafter.take_features(sequence.id, start, right)

    def launch(self, rows: Rows[RowSpeculation]) -> None:
        """The next forward begins; what endpoints must know of it goes out with their ``flush``."""
        self._pacing.width = sum(1 + len(row.speculation) for row in rows)
        for row in rows:
            self._launch(row)

    def _launch(self, row: RowSpeculation) -> None:
        row.state.row = row
        row.state.strategy.launch(row)

    def listen(self, most: int = 1) -> None:
        """Hear what links have said so far, up to so many records."""
        while most and self._receive(0.0):
            most -= 1

    def foreseen(self, sequence: Sequence, accepted: int) -> list[int]:
        """What endpoints expect after so many accepted tokens of the round in flight."""
        return self._sequences[sequence.id].session.branches.foreseen(accepted)

    def end_round(self, sequence: Sequence, outcome: RoundOutcome, committed: int) -> Source:
        """A round has ended, and so many tokens of it were committed. Returns where its speculation
        came from."""
        state, now = self._sequences[sequence.id], self._now()
        session, row = state.session, state.row
        if row is None:
            raise RuntimeError("a round that was not launched has ended")
        if session.round > 0:
            self.metrics.count(row, min(outcome.accepted, committed), now)
        state.ended_at = now
        self._pacing.accepted(row, outcome.accepted, self.endpoints.of(state))
        session.outcome(outcome.accepted, outcome.tokens[-1])
        state.outcome_sent = not session.attached
        return row.source

    def check_integrity(self) -> None:
        self.endpoints.check_integrity()
        for state in self._sequences.values():
            state.session.branches.check_integrity()
        if self._sync is not None:
            self._sync.drafter.check_integrity()


def _num_common(one: Rows[int], other: Rows[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
