"""The round, from the target's side: look up, wait rule, launch, then send outcome and launch.

One rule covers hit, late, miss and dead: take the speculation for this outcome, waiting no longer
than the wait budget. A wait holds the whole forward, so there is none when any row is ready; what
one row finds or misses never touches what another one has.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from hashlib import blake2b
from secrets import token_bytes
from typing import NamedTuple

from ssd_engine.sampling.rejection import whole_wire
from ssd_engine.speculation.frames import Launch, Open, Outcome, Source, Verification
from ssd_engine.text.token_ids import pack_tokens
from ssd_engine.tracing.events import NoTrace, Trace, TraceEventKind
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.records.speculation_stats import DOWN, LookUp, SpeculationStats
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import DraftDistributions
from ssd_target.speculation.distributions import Distributions
from ssd_target.speculation.endpoint import DraftEndpoint
from ssd_target.speculation.endpoint_session import EndpointSession
from ssd_target.speculation.endpoints import DISCONNECTED, DraftEndpoints, OpenPlane, Send, Stalled
from ssd_target.speculation.pacing import Pacing
from ssd_target.speculation.payoff import STEADY_STEPS, Payoff
from ssd_target.speculation.sequence_speculation import RowSpeculation, SequenceSpeculation
from ssd_target.speculation.sync_drafter import DraftRow, SyncDrafter

# As they are written in a trace.
_NUMBERS: dict[LookUp | None, int] = {found: i for i, found in enumerate(LookUp, start=1)}
MOST_RECORDS = 64  # records of links that are heard between one round and the next
Receive = Callable[[float], bool]  # handle what comes within so many seconds; False: nothing came


class ForwardTiming(NamedTuple):
    """The size and the time of a decode forward that has ended."""

    width: int  # tokens
    row_seconds: float  # since its speculations were looked up, for each row


class SpeculationCoordinator:
    def __init__(
        self,
        options: SpeculationOptions,
        vocab_size: int,
        send: Send = lambda link, epoch, frames: None,
        receive: Receive = lambda seconds: False,
        stalled: Stalled = lambda link, epoch, reason: None,
        drafter: SyncDrafter | None = None,
        open_plane: OpenPlane = lambda up, plane: None,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
    ) -> None:
        self._options = options
        self._trace = trace or NoTrace()
        self._vocab_size = vocab_size
        self._receive = receive
        self._drafter = drafter
        self._now = clock
        self._sequences: dict[int, SequenceSpeculation] = {}
        self.endpoints = DraftEndpoints(
            options, self._sequences, send, stalled, open_plane, clock, self._trace
        )
        self._distributions = Distributions(self.endpoints, vocab_size, clock)
        self._pacing = Pacing(options)
        self._scope_key = token_bytes(16)
        # Whether the draft model inside pays. None: there is none, or it is used whatever it pays;
        # rounds that miss an endpoint go plain then.
        self._drafter_payoff = Payoff() if drafter is not None and options.auto_off else None
        self._step_begin = 0.0
        self._held_up = 0  # steps, one after the other, in which the draft model inside caught up
        self._width = 1  # tokens of the forward in flight
        self.totals = SpeculationStats()

    # The life of a sequence

    def begin(self, sequence: Sequence, request: SpeculationRequest) -> None:
        """Round 0, the prefill, is about to be launched: endpoints prefill at the same time."""
        rounds = EndpointSession(self._vocab_size, self._options.depth)
        speculated = SequenceSpeculation(sequence, request, rounds)
        self._sequences[sequence.id] = speculated
        self._width = 1  # a prefill takes at least as long
        self._launch(RowSpeculation(speculated, 0))

    def set_aside(self, sequence: Sequence) -> SpeculationRequest:
        """The sequence loses its KV, and all that was prepared for it. Returns what it asks for."""
        speculated = self._sequences[sequence.id]
        if speculated.rounds.attached:
            self.endpoints.leave(speculated, "set aside")
        if self._drafter is not None:
            self._drafter.end(sequence.id)
        return speculated.request

    def resume(self, sequence: Sequence) -> None:
        """What ``begin`` is for a new one."""
        speculated = self._sequences[sequence.id]
        speculated.ended_at, speculated.why_detached = self._now(), DISCONNECTED
        self._width = 1
        self._launch(RowSpeculation(speculated, 0))

    @property
    def depth(self) -> int:
        """The length of the longest speculation, in tokens."""
        return self._options.depth

    def knows(self, sequence: Sequence) -> bool:
        return sequence.id in self._sequences

    def is_plain(self, sequence: Sequence) -> bool:
        """Whether nothing will be speculated for its next round, whatever the one before gives."""
        speculated = self._sequences.get(sequence.id)
        if speculated is None:
            return False
        if speculated.request.mode is Mode.OFF:
            return True
        if speculated.request.mode is Mode.SYNC:
            return self._leaves_drafter
        return (
            speculated.may_use_endpoints
            and not speculated.rounds.attached
            and self._mode_without_endpoint is Mode.OFF
            and not any(endpoint.up and endpoint.payoff.attaches for endpoint in self.endpoints)
        )

    @property
    def _leaves_drafter(self) -> bool:
        """Whether the draft model inside does not pay, or these rounds are to compare it with."""
        return self._drafter_payoff is not None and not self._drafter_payoff.speculates

    @property
    def _mode_without_endpoint(self) -> Mode:
        """The mode of rounds that may use an endpoint and do not."""
        payoff = self._drafter_payoff
        return Mode.SYNC if payoff is not None and payoff.speculates else Mode.OFF

    def end(self, sequence_id: int) -> SpeculationStats | None:
        """The sequence is finished or cancelled; returns what speculation did for it."""
        speculated = self._sequences.pop(sequence_id, None)
        if speculated is None:
            return None
        if speculated.rounds.attached:
            self.endpoints.leave(speculated, "closed")
        if self._drafter is not None:
            self._drafter.end(sequence_id)
        self.totals.add(speculated.stats)
        return speculated.stats

    # The round

    def take(self, sequences: Rows[Sequence]) -> list[RowSpeculation]:
        """The speculations of the next forward, row by row."""
        self._begin_step(len(sequences))
        rows = [self._look_up(self._sequences[s.id], len(sequences)) for s in sequences]
        self._wait(rows)
        self._back_up(rows)
        self._draft([row for row in rows if row.mode is Mode.SYNC])
        return rows

    def take_nothing(self, sequences: Rows[Sequence]) -> list[RowSpeculation]:
        """The rows of a forward that was launched before its speculations could be looked up."""
        self._begin_step(len(sequences))
        return [RowSpeculation(self._sequences[sequence.id], 0) for sequence in sequences]

    def _begin_step(self, num_rows: int) -> None:
        self._step_begin = self._now()
        self.listen(MOST_RECORDS)  # branches may have come while rounds were judged
        self.endpoints.check_stalls()
        if not num_rows:
            return
        for endpoint in self.endpoints:
            endpoint.payoff.about_to_run(num_rows)
        if self._drafter_payoff is not None:
            self._drafter_payoff.about_to_run(num_rows)

    def launch(self, rows: Rows[RowSpeculation]) -> None:
        """The next forward begins; what endpoints must know of it goes out with ``flush``."""
        self._width = sum(1 + len(row.tokens) for row in rows)
        for row in rows:
            self._launch(row)

    def flush(self) -> None:
        self.endpoints.flush()

    def listen(self, most: int = 1) -> None:
        """Hear what links have said so far, up to so many records."""
        while most and self._receive(0.0):
            most -= 1

    def foreseen(self, sequence: Sequence, length: int) -> list[list[int]]:
        """What follows 0, 1, … ``length`` accepted tokens of the round in flight, as endpoints
        expect it."""
        branches = self._sequences[sequence.id].rounds.branches
        return [branches.foreseen(accepted) for accepted in range(length + 1)]

    def drawn(self, rows: Rows[RowSpeculation]) -> list[DraftDistributions | None]:
        """How each row of the forward that has just ended is verified."""
        return self._distributions.of(rows)

    def ended(self, sequence: Sequence, accepted: int, token: int, committed: int) -> Source:
        """A round has ended in (accepted, token); so many tokens of it were committed. Returns
        where its speculation came from."""
        speculated, now = self._sequences[sequence.id], self._now()
        rounds = speculated.rounds
        if rounds.round > 0:
            right, seconds = min(accepted, committed), now - speculated.ended_at
            speculated.stats.ended(
                speculated.mode, speculated.source, speculated.drafted, right, seconds
            )
            if speculated.waited:
                speculated.stats.waited(speculated.waited)
                speculated.waited = 0.0
            self._trace.span(
                TraceEventKind.ROUND,
                speculated.ended_at,
                now,
                sequence=sequence.id,
                round=rounds.round,
                tokens=speculated.drafted,
                accepted=right,
                origin=speculated.source,
                look_up=_NUMBERS.get(speculated.found, 0),
            )
        speculated.ended_at = now
        self._pacing.accepted(speculated, accepted, self.endpoints.of(speculated))
        rounds.outcome(accepted, token)
        speculated.outcome_sent = not rounds.attached
        return speculated.source

    def measure(self, rows: Rows[RowSpeculation]) -> ForwardTiming:
        """The forward in flight is over."""
        return ForwardTiming(self._width, (self._now() - self._step_begin) / max(1, len(rows)))

    def stepped(
        self,
        rows: Rows[RowSpeculation],
        seconds: float,
        committed: Rows[int],
        measured: ForwardTiming,
    ) -> None:
        """A decode forward took ``seconds``, its rows committed so many tokens."""
        self._pacing.verified(measured.width, seconds)
        if not self._is_evidence(rows):
            return
        for row, tokens in zip(rows, committed, strict=True):
            if row.speculated.request.mode is not Mode.OFF:
                self._observe(row, tokens, measured.row_seconds)

    def _is_evidence(self, rows: Rows[RowSpeculation]) -> bool:
        """A row that catches up has held up all of them. Where that is the rule, as where requests
        are short and many, it is a part of the price."""
        catches_up = any(row.catches_up for row in rows)
        self._held_up = self._held_up + 1 if catches_up else 0
        return not catches_up or self._held_up > STEADY_STEPS

    def _observe(self, row: RowSpeculation, tokens: int, row_seconds: float) -> None:
        """What the round tells of the endpoint and of the draft model inside."""
        endpoint, drafter = self.endpoints.home_of(row.speculated), self._drafter_payoff
        if endpoint is not None and row.shows_payoff:
            endpoint.payoff.observe(row.under_speculation, tokens, row_seconds)
        if drafter is None or row.mode is Mode.SSD:
            return
        before = drafter.verdict
        drafter.observe(row.mode is Mode.SYNC, tokens, row_seconds)
        if drafter.verdict != before:
            for each in self.endpoints:
                each.payoff.forget_without()

    def check_integrity(self) -> None:
        self.endpoints.check_integrity()
        for speculated in self._sequences.values():
            speculated.rounds.branches.check_integrity()
        if self._drafter is not None:
            self._drafter.check_integrity()

    # Look up

    def _look_up(self, speculated: SequenceSpeculation, num_rows: int) -> RowSpeculation:
        if speculated.request.mode is Mode.OFF:
            return RowSpeculation(speculated, 0)
        if speculated.request.mode is Mode.SYNC:
            return self._look_inside(speculated, num_rows)
        speculated.found = None
        endpoint = self.endpoints.of(speculated)
        if endpoint is None or not endpoint.payoff.speculates:
            return self._go_without(speculated, num_rows, endpoint)
        wanted = self._pacing.depth(speculated, num_rows, endpoint)
        taken = RowSpeculation(speculated, wanted, Mode.SSD)
        rounds = speculated.rounds
        if not wanted or rounds.decided is None:
            return taken
        speculated.found = rounds.look_up(*rounds.decided, wanted)
        speculated.stats.looked_up(speculated.found)
        taken.fill(Source.CACHE)
        taken.missed = not taken.tokens
        return taken

    def _look_inside(self, speculated: SequenceSpeculation, num_rows: int) -> RowSpeculation:
        """A request for the draft model inside drafts with it, unless that does not pay."""
        wanted = self._pacing.sync_depth(speculated, num_rows)
        if not self._leaves_drafter:
            return RowSpeculation(speculated, wanted, Mode.SYNC)
        if wanted:
            speculated.stats.fell_back("does not pay")
        return RowSpeculation(speculated, 0)

    def _go_without(
        self, speculated: SequenceSpeculation, num_rows: int, endpoint: DraftEndpoint | None
    ) -> RowSpeculation:
        """No endpoint holds the sequence, or it does and these rounds are to compare it with."""
        stats = speculated.stats
        if self._misses_endpoint(speculated, endpoint) and self._pacing.depth(
            speculated, num_rows, None
        ):
            stats.fell_back(speculated.why_detached)
            if speculated.why_detached in DOWN:
                stats.looked_up(LookUp.DISCONNECTED)
        if self._mode_without_endpoint is Mode.OFF:
            return RowSpeculation(speculated, 0)
        wanted = self._pacing.sync_depth(speculated, num_rows)
        if endpoint is not None:
            wanted = min(wanted, endpoint.max_depth)  # a longer one it could not follow
        return RowSpeculation(speculated, wanted, Mode.SYNC)

    def _misses_endpoint(
        self, speculated: SequenceSpeculation, endpoint: DraftEndpoint | None
    ) -> bool:
        """Whether it goes without one that was asked for. Who names no mode asks for none by name,
        and where none pays, none is missed."""
        if endpoint is not None or speculated.request.mode is Mode.SSD:
            return endpoint is None
        return self._options.endpoints and speculated.why_detached != "does not pay"

    # Rows that have missed

    def _wait(self, rows: Rows[RowSpeculation]) -> None:
        """Only where every row has missed."""
        if not rows or not all(row.missed for row in rows):
            return
        waits = []
        for row in rows:
            endpoint = self._endpoint_of(row)
            waits.append(self._pacing.wait_seconds(row, len(rows), endpoint))
        budget = min(waits)
        for row in rows:
            endpoint = self._endpoint_of(row)
            endpoint.unwaited = 0 if budget else endpoint.unwaited + 1
        if budget:
            self._wait_for(rows, budget)

    def _wait_for(self, rows: Rows[RowSpeculation], budget: float) -> None:
        """Tell the endpoints the outcomes, and wait for the branches that they name."""
        for row in rows:
            self._send_outcome(row.speculated)
        self.flush()
        begin = self._now()
        elapsed = 0.0
        while elapsed < budget and any(_is_awaited(row) for row in rows):
            if not self._receive(budget - elapsed):
                elapsed = budget
                break
            elapsed = self._now() - begin
        self._trace.span(TraceEventKind.WAIT, begin, begin + elapsed)
        for row in rows:
            row.fill(Source.JUST_IN_TIME)
            row.speculated.waited = elapsed
            endpoint = self.endpoints.of(row.speculated)
            if endpoint is not None:
                endpoint.waited(elapsed, bool(row.tokens))

    def _back_up(self, rows: Rows[RowSpeculation]) -> None:
        """An instant guess for rows that have none."""
        if self._options.backup not in (Backup.AUTO, Backup.NGRAM):
            return
        for row in rows:
            depth = self._pacing.ngram_depth(row, len(rows)) if row.missed else 0
            tokens = row.speculated.look_back(depth) if depth else []
            if tokens:
                row.tokens, row.source = tokens, Source.NGRAM

    def _draft(self, rows: Rows[RowSpeculation]) -> None:
        """Synchronous speculation: the draft model's turn."""
        if not rows:
            return
        if self._drafter is None:
            raise RuntimeError("synchronous speculation without a draft model")
        begin = self._now()
        behind = [self._drafter.is_behind(row.speculated.sequence) for row in rows]
        drafts = [DraftRow(r.speculated.sequence, r.wanted, r.down_weight) for r in rows]
        self._drafter.draft(drafts)
        end, longest = self._now(), max(len(draft.tokens) for draft in drafts)
        if not any(behind):
            self._pacing.drafted(longest, end - begin)
        self._trace.span(TraceEventKind.DRAFT, begin, end, tokens=longest)
        for row, draft, was_behind in zip(rows, drafts, behind, strict=True):
            row.catches_up = was_behind and bool(draft.tokens)
            if draft.tokens:
                row.tokens, row.source = draft.tokens, Source.SYNC
                row.wire = whole_wire(draft.wires) if draft.wires else None
            elif row.wanted:
                row.speculated.stats.fell_back("no room")

    # Launch

    def _launch(self, row: RowSpeculation) -> None:
        speculated, rounds = row.speculated, row.speculated.rounds
        speculated.mode = row.mode
        if speculated.request.mode is Mode.OFF:
            rounds.launch(0)
            return
        speculated.source, speculated.drafted = row.source, len(row.tokens)
        speculated.judged = speculated.drafted
        followed, prepared = rounds.attached, speculated.told_depth > 0
        endpoint = self.endpoints.of(speculated)
        if endpoint is not None and not endpoint.payoff.attaches:
            self.endpoints.leave(speculated, "does not pay")
        if rounds.attached:
            self._send_launch(row)
        elif (endpoint := self._choose_endpoint(row)) is not None:
            self._send_open(row, endpoint)
        else:
            rounds.launch(len(row.tokens))
        home = self.endpoints.home_of(speculated)
        if home is not None:
            row.under_speculation = home.payoff.speculates
            row.shows_payoff = self._shows_payoff(home.payoff, followed, prepared)

    def _shows_payoff(self, payoff: Payoff, followed: bool, prepared: bool) -> bool:
        """Whether a round is evidence. ``followed``: its endpoint had the sequence before;
        ``prepared``: and branches were asked of it."""
        if payoff.speculates:
            return followed and prepared
        # Until it is known how rounds without an endpoint go best, they say nothing of one.
        drafter = self._drafter_payoff
        settled = drafter is None or drafter.follows_verdict
        return settled and (followed or not payoff.attaches)

    def _choose_endpoint(self, row: RowSpeculation) -> DraftEndpoint | None:
        if not row.speculated.may_use_endpoints:
            return None
        return self.endpoints.choose(row.speculated, len(row.tokens))

    def _endpoint_of(self, row: RowSpeculation) -> DraftEndpoint:
        endpoint = self.endpoints.of(row.speculated)
        if endpoint is None:
            raise RuntimeError("the sequence is not attached to an endpoint")
        return endpoint

    def _send_outcome(self, speculated: SequenceSpeculation) -> None:
        rounds, endpoint = speculated.rounds, self.endpoints.of(speculated)
        if endpoint is None or speculated.outcome_sent or rounds.decided is None:
            return
        endpoint.outbox.append(Outcome(speculated.sequence.id, rounds.round, *rounds.decided))
        speculated.outcome_sent = True

    def _depth_to_prepare(self, row: RowSpeculation, endpoint: DraftEndpoint) -> int:
        """Nothing in rounds that an endpoint is compared with: on the target's device, its trees
        would slow them down."""
        return self._pacing.next_depth(row, endpoint) if endpoint.payoff.speculates else 0

    def _send_launch(self, row: RowSpeculation) -> None:
        rounds, endpoint = row.speculated.rounds, self._endpoint_of(row)
        self._send_outcome(row.speculated)
        rounds.launch(len(row.tokens))
        row.speculated.told_depth = self._depth_to_prepare(row, endpoint)
        self._distributions.expect(row)
        endpoint.say(
            Launch(
                row.speculated.sequence.id,
                rounds.round,
                row.tokens,
                Source.NGRAM if row.source is Source.SYNC else row.source,  # the target's own
                row.speculated.told_depth,
                self._pacing.verify_micros(self._width),
            ),
            self._now(),
        )

    def _scope_number(self, scope: str) -> int:
        """Tells scopes apart for an endpoint, and nothing else about them."""
        digest = blake2b(scope.encode(), digest_size=8, key=self._scope_key).digest()
        return int.from_bytes(digest)

    def _send_open(self, row: RowSpeculation, endpoint: DraftEndpoint) -> None:
        speculated, sequence = row.speculated, row.speculated.sequence
        if endpoint.epoch is None:
            raise RuntimeError("an endpoint that is not connected was chosen")
        speculated.rounds.launch_open(len(row.tokens), endpoint.link, endpoint.epoch)
        speculated.told_depth = self._depth_to_prepare(row, endpoint)
        rejection = speculated.request.verification is Verification.REJECTION
        speculated.rejecting = rejection and endpoint.receiver is not None
        endpoint.sequences.add(sequence.id)
        endpoint.say(
            Open(
                sequence.id,
                speculated.rounds.round,
                pack_tokens(sequence.prompt),
                pack_tokens(sequence.output),
                row.tokens,
                sequence.max_committed,
                sequence.sampling,
                Verification.REJECTION if speculated.rejecting else Verification.COUPLED,
                speculated.request.down_weight,
                speculated.told_depth,
                self._pacing.verify_micros(self._width),
                speculated.request.trace_context,
                self._scope_number(sequence.scope),
            ),
            self._now(),
        )


def _is_awaited(row: RowSpeculation) -> bool:
    rounds = row.speculated.rounds
    if not rounds.attached or rounds.decided is None:
        return False
    useful = min(row.wanted, row.speculated.told_depth)  # more is not sent
    return len(rounds.branches.find(*rounds.decided)) < useful
