"""The round, from the target's side: look up, wait rule, launch, then send outcome and launch.

One rule covers hit, late, miss and dead: take the speculation for this outcome, waiting no longer
than the wait budget. A wait holds the whole forward, so there is none when any row is ready; what
one row finds or misses never touches what another one has.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_engine.fan_out import AcceptanceRate, choose_depth
from ssd_engine.frames import (
    Branches,
    Close,
    DraftFrame,
    Launch,
    Load,
    Notice,
    NoticeKind,
    Open,
    Outcome,
    Plane,
    Source,
    TargetFrame,
    Verification,
)
from ssd_engine.ngram import NgramIndex
from ssd_engine.pace import Average, StepClock
from ssd_engine.tensor_plane import PlaneBroken, Receiver, RowsKey
from ssd_engine.token_ids import pack_tokens
from ssd_target.records import LinkUp
from ssd_target.sequence import Sequence
from ssd_target.speculation.endpoint import BUSY_SECONDS, Endpoint
from ssd_target.speculation.options import Backup, Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.payoff import Payoff
from ssd_target.speculation.rounds import Rounds
from ssd_target.speculation.stats import SpeculationStats
from ssd_target.speculation.sync_drafter import DraftRow, SyncDrafter
from ssd_target.speculation.waiting import WaitCase, worthwhile_wait
from ssd_target.verifier import Drawn

ROWS_SECONDS = 0.05  # that distributions may come later than the end of their forward
NGRAM_EXPLORE = 64  # misses without a look-up, after which one is tried

Send = Callable[[int, int, list[TargetFrame]], None]  # link, epoch, frames
Receive = Callable[[float], bool]  # handle what comes within so many seconds; False: nothing came


@dataclass(slots=True)
class Speculated:
    """A sequence that this target speculates for."""

    sequence: Sequence
    request: SpeculationRequest
    rounds: Rounds
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    source: Source = Source.NONE  # of the round in flight
    drafted: int = 0
    judged: int = 0  # of these, the tokens before a cut
    ended_at: float = 0.0  # of the round before
    attached_before: bool = False  # the endpoint followed before the round in flight
    outcome_sent: bool = True
    ngrams: NgramIndex | None = None
    num_indexed: int = 0
    home: int | None = None  # the endpoint whose payoff this sequence is evidence for
    rejecting: bool = False  # the endpoint draws, and sends what it draws from
    under_speculation: bool = False  # the round in flight was launched while that one was on
    refused_by: set[int] = field(default_factory=set)
    why_detached: str = "disconnected"


@dataclass(slots=True)
class Taken:
    """The speculation of one row of the next forward."""

    speculated: Speculated
    wanted: int
    tokens: list[int] = field(default_factory=list)
    source: Source = Source.NONE
    missed: bool = False  # an endpoint follows, and its branch is not here
    wire: Tensor | None = None  # what the tokens were drawn from, in rejection


class Speculator:
    def __init__(
        self,
        options: SpeculationOptions,
        vocab_size: int,
        send: Send = lambda link, epoch, frames: None,
        receive: Receive = lambda seconds: False,
        stalled: Callable[[int, int, str], None] = lambda link, epoch, reason: None,
        drafter: SyncDrafter | None = None,
        open_plane: Callable[[LinkUp, Plane], Receiver | None] = lambda up, plane: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._drafter = drafter
        self._open_plane = open_plane
        self._sync_alpha = AcceptanceRate()
        self._sync_seconds = Average()  # of one drafted token
        self._vocab_size = vocab_size
        self._send, self._receive, self._stalled = send, receive, stalled
        self._now = clock
        self.endpoints: dict[int, Endpoint] = {}
        self._sequences: dict[int, Speculated] = {}
        self._verify_clock = StepClock()  # seconds of a decode forward, by its rows
        self._ngram_alpha = AcceptanceRate(prior=0.5)
        self._ngram_idle = 0
        self._step_begin = 0.0
        self.totals = SpeculationStats()
        self.dropped = 0  # branches and frames that did not fit

    # Endpoints

    def connected(self, up: LinkUp) -> None:
        """The endpoint of a link, or its next epoch."""
        endpoint = self.endpoints.get(up.link)
        if endpoint is None:
            payoff = Payoff(self._options.auto_off)
            endpoint = self.endpoints[up.link] = Endpoint(up.link, payoff, up.named)
        if endpoint.epoch is not None:
            self.disconnected(up.link, endpoint.epoch)
        endpoint.connect(up)

    def disconnected(self, link: int, epoch: int, reason: str = "disconnected") -> None:
        endpoint = self.endpoints.get(link)
        if endpoint is None or endpoint.epoch != epoch:
            return
        for key in list(endpoint.sequences):
            self._detach(self._sequences[key], reason)
        endpoint.disconnect()

    def gone(self, link: int) -> None:
        """The link was down, and will not come up again."""
        self.endpoints.pop(link, None)

    def follow(self, link: int, epoch: int, frames: Rows[DraftFrame], load: Load | None) -> None:
        """What an endpoint says; of another epoch it says nothing."""
        endpoint = self.endpoints.get(link)
        if endpoint is None or endpoint.epoch != epoch:
            self.dropped += len(frames)
            return
        endpoint.heard(load)
        for frame in frames:
            if isinstance(frame, Notice):
                self._notice(endpoint, frame)
            elif isinstance(frame, Plane):
                self._plane(endpoint, frame)
            else:
                self._branches(endpoint, frame)

    def _plane(self, endpoint: Endpoint, plane: Plane) -> None:
        """Only an endpoint that the operator trusts was offered one, and it answers once."""
        if endpoint.up_record is None or not endpoint.up_record.trusted or endpoint.receiver:
            self.dropped += 1
            return
        endpoint.receiver = self._open_plane(endpoint.up_record, plane)

    def _branches(self, endpoint: Endpoint, frame: Branches) -> None:
        speculated = self._sequences.get(frame.sequence)
        if speculated is None or endpoint.epoch is None:
            self.dropped += len(frame.branches)
            return
        self.dropped += speculated.rounds.push(endpoint.link, endpoint.epoch, frame)

    def _notice(self, endpoint: Endpoint, notice: Notice) -> None:
        if notice.kind is NoticeKind.LEAVING:
            endpoint.leaving = True
            for key in list(endpoint.sequences):
                self._leave(self._sequences[key], "leaving")
            return
        if notice.sequence not in endpoint.sequences:
            self.dropped += 1
            return
        speculated = self._sequences[notice.sequence]
        if notice.kind is NoticeKind.BUSY:
            endpoint.busy_until = self._now() + BUSY_SECONDS
        elif notice.kind is NoticeKind.REFUSED:
            speculated.refused_by.add(endpoint.link)
        # The endpoint may hold it for all that: the notice may have crossed with a new open.
        self._leave(speculated, notice.kind.name.lower())

    def _detach(self, speculated: Speculated, reason: str) -> None:
        endpoint = self.endpoints[speculated.rounds.link]
        endpoint.sequences.discard(speculated.sequence.id)
        if not endpoint.sequences:
            endpoint.unanswered_since = None  # it has nothing to answer
        speculated.rounds.detach()
        speculated.why_detached = reason
        speculated.outcome_sent = True

    def _leave(self, speculated: Speculated, reason: str) -> None:
        """Detach, and tell the endpoint."""
        rounds = speculated.rounds
        frame = Close(speculated.sequence.id, max(0, rounds.round))
        self.endpoints[rounds.link].outbox.append(frame)
        self._detach(speculated, reason)

    def _check_stalls(self) -> None:
        """An endpoint that leaves rounds unanswered for too long is given up by its link."""
        for endpoint in self.endpoints.values():
            since, epoch = endpoint.unanswered_since, endpoint.epoch
            if since is None or epoch is None:
                continue
            if self._now() - since > self._options.link_timeout:
                self._give_up(endpoint, "rounds stay unanswered")

    def _give_up(self, endpoint: Endpoint, reason: str) -> None:
        """End this epoch of the link."""
        epoch = endpoint.epoch
        if epoch is not None:
            self.disconnected(endpoint.link, epoch, "stalled")
            self._stalled(endpoint.link, epoch, reason)

    # Sequences

    def begin(self, sequence: Sequence, request: SpeculationRequest) -> None:
        """Round 0, the prefill, is about to be launched: endpoints prefill at the same time."""
        rounds = Rounds(self._vocab_size, self._options.depth)
        speculated = Speculated(sequence, request, rounds)
        self._sequences[sequence.id] = speculated
        self._launch(Taken(speculated, 0))

    def knows(self, sequence: Sequence) -> bool:
        return sequence.id in self._sequences

    def end(self, sequence_id: int) -> SpeculationStats | None:
        """The sequence is finished or cancelled; returns what speculation did for it."""
        speculated = self._sequences.pop(sequence_id, None)
        if speculated is None:
            return None
        if speculated.rounds.attached:
            self._leave(speculated, "closed")
        if self._drafter is not None:
            self._drafter.end(sequence_id)
        self.totals.add(speculated.stats)
        return speculated.stats

    # The round

    def take(self, sequences: Rows[Sequence]) -> list[Taken]:
        """The speculations of the next forward, row by row."""
        self._step_begin = self._now()
        self._check_stalls()
        rows = [self._look_up(self._sequences[s.id], len(sequences)) for s in sequences]
        self._wait(rows)
        self._back_up(rows)
        self._draft([row for row in rows if row.speculated.request.mode is Mode.SYNC])
        return rows

    def launch(self, rows: Rows[Taken]) -> None:
        """The next forward begins; what endpoints must know of it goes out with ``flush``."""
        for row in rows:
            self._launch(row)

    def ended(self, sequence: Sequence, accepted: int, token: int, committed: int) -> None:
        """A round has ended in (accepted, token); so many tokens of it were committed."""
        speculated, now = self._sequences[sequence.id], self._now()
        rounds = speculated.rounds
        if rounds.round > 0:
            right, seconds = min(accepted, committed), now - speculated.ended_at
            speculated.stats.ended(speculated.source, speculated.drafted, right, seconds)
        speculated.ended_at = now
        self._learn(speculated, accepted)
        rounds.outcome(accepted, token)
        speculated.outcome_sent = not rounds.attached

    def drawn(self, rows: Rows[Taken]) -> list[Drawn | None]:
        """How each row of the forward that has just ended is verified."""
        deadline = self._now() + ROWS_SECONDS
        return [self._drawn(row, deadline) for row in rows]

    def _drawn(self, row: Taken, deadline: float) -> Drawn | None:
        speculated = row.speculated
        if speculated.request.verification is not Verification.REJECTION or not row.tokens:
            return None
        if row.source is not Source.SYNC and not speculated.rejecting:
            speculated.stats.fell_back("coupled: the endpoint is not trusted")
            return None
        if row.source in (Source.CACHE, Source.JUST_IN_TIME):
            row.wire = self._rows(speculated, row, max(0.0, deadline - self._now()))
            speculated.judged = min(len(row.tokens), len(row.wire))
        speculated.stats.rejection_rounds += 1
        return Drawn(row.wire)

    def _rows(self, speculated: Speculated, row: Taken, seconds: float) -> Tensor:
        """What the tokens were drawn from; without rows, the speculation is cut at its start."""
        none = torch.empty(0, self._vocab_size)
        endpoint = self.endpoints.get(speculated.rounds.link)
        if endpoint is None or endpoint.receiver is None:
            speculated.stats.fell_back("no distributions")
            return none
        key = RowsKey(speculated.sequence.id, speculated.rounds.round, 0)
        try:
            rows = endpoint.receiver.receive(key, len(row.tokens), seconds)
        except PlaneBroken as error:
            self._give_up(endpoint, f"the tensor plane broke: {error}")
            rows = None
        if rows is None:
            speculated.stats.fell_back("no distributions")
        return none if rows is None else rows

    def stepped(self, rows: Rows[Taken], seconds: float, committed: Rows[int]) -> None:
        """A decode forward is over: it took ``seconds``, its rows committed so many tokens."""
        width = sum(1 + len(row.tokens) for row in rows)
        self._verify_clock.observe(width, seconds)
        row_seconds = (self._now() - self._step_begin) / max(1, len(rows))
        for row, tokens in zip(rows, committed, strict=True):
            speculated = row.speculated
            endpoint = self.endpoints.get(-1 if speculated.home is None else speculated.home)
            if endpoint is None or (endpoint.payoff.attaches and not speculated.attached_before):
                continue  # while its endpoint learns of the sequence, a round proves nothing
            endpoint.payoff.observe(speculated.under_speculation, tokens, row_seconds)

    def flush(self) -> None:
        """Sending is a put: it never waits for a link."""
        for endpoint in self.endpoints.values():
            if endpoint.outbox and endpoint.epoch is not None:
                frames, endpoint.outbox = endpoint.outbox, []
                self._send(endpoint.link, endpoint.epoch, frames)

    def check_integrity(self) -> None:
        held = {
            key: endpoint.link for endpoint in self.endpoints.values() for key in endpoint.sequences
        }
        attached = {key: s.rounds.link for key, s in self._sequences.items() if s.rounds.attached}
        if held != attached:
            raise RuntimeError("speculation integrity: endpoints and sequences do not agree")
        for speculated in self._sequences.values():
            speculated.rounds.branches.check_integrity()
        if self._drafter is not None:
            self._drafter.check_integrity()

    # Look up

    def _look_up(self, speculated: Speculated, num_rows: int) -> Taken:
        taken = Taken(speculated, self._wanted(speculated, num_rows))
        rounds, stats = speculated.rounds, speculated.stats
        if not taken.wanted or speculated.request.mode is not Mode.SSD:
            return taken
        if not rounds.attached:
            stats.fell_back(speculated.why_detached)
            return taken
        if rounds.decided is None or not self.endpoints[rounds.link].payoff.speculates:
            return taken
        stats.looked_up(rounds.branches.look_up(*rounds.decided, taken.wanted))
        self._fill(taken, Source.CACHE)
        taken.missed = not taken.tokens
        return taken

    def _fill(self, taken: Taken, source: Source) -> None:
        rounds = taken.speculated.rounds
        if rounds.decided is None:
            return
        tokens = rounds.branches.find(*rounds.decided)[: taken.wanted]
        if tokens:
            taken.tokens, taken.source, taken.missed = tokens, source, False

    def _wanted(self, speculated: Speculated, num_rows: int) -> int:
        """Tokens that the row can use: the last token of a request is never speculated."""
        sequence = speculated.sequence
        room = sequence.max_committed - sequence.num_committed - 1
        most = min(room, speculated.request.depth, self._options.depth)
        if most <= 1 or not self._options.adapt_depth:
            return max(0, most)
        if speculated.request.mode is Mode.SYNC:
            seconds = self._round_seconds(num_rows, self._sync_seconds.value())
            return max(1, choose_depth(self._sync_alpha.value, seconds, most))
        endpoint = self.endpoints.get(speculated.rounds.link)
        if endpoint is None:
            return most
        return max(1, choose_depth(endpoint.alpha.value, self._round_seconds(num_rows), most))

    def _round_seconds(self, num_rows: int, drafting: float = 0.0) -> Callable[[int], float]:
        """Seconds of a round in which each row drafts, if it has to, and verifies k tokens."""
        clock = self._verify_clock
        if not clock.known:
            return lambda k: 1.0
        return lambda k: clock.seconds(num_rows * (k + 1)) + k * drafting

    # Wait

    def _wait(self, rows: Rows[Taken]) -> None:
        missed = [row for row in rows if row.missed]
        if not missed or len(missed) < len(rows):
            return
        budget = min(self._wait_budget(row, len(rows)) for row in missed)
        for row in missed:
            endpoint = self.endpoints[row.speculated.rounds.link]
            endpoint.unwaited = 0 if budget else endpoint.unwaited + 1
        if budget:
            self._wait_for(missed, budget)

    def _wait_budget(self, row: Taken, num_rows: int) -> float:
        options = self._options
        if options.backup not in (Backup.AUTO, Backup.JUST_IN_TIME):
            return 0.0
        if options.wait_seconds is not None:
            return options.wait_seconds
        endpoint = self.endpoints[row.speculated.rounds.link]
        clock = self._verify_clock
        case = WaitCase(
            alpha=endpoint.alpha.value,
            depth=row.wanted,
            plain_seconds=clock.seconds(num_rows),
            verify_seconds=clock.seconds(num_rows * (1 + row.wanted)),
            usual_seconds=endpoint.usual_delay(),
        )
        return worthwhile_wait(case)

    def _wait_for(self, missed: list[Taken], budget: float) -> None:
        """Tell the endpoints the outcomes, and wait for the branches that they name."""
        for row in missed:
            self._send_outcome(row.speculated)
        self.flush()
        begin = self._now()
        elapsed = 0.0
        while elapsed < budget and any(self._is_awaited(row) for row in missed):
            if not self._receive(budget - elapsed):
                elapsed = budget
                break
            elapsed = self._now() - begin
        for row in missed:
            self._fill(row, Source.JUST_IN_TIME)
            row.speculated.stats.wait_micros += int(elapsed * 1e6)
            endpoint = self.endpoints.get(row.speculated.rounds.link)
            if endpoint is not None:
                endpoint.waited(elapsed, bool(row.tokens))

    def _is_awaited(self, row: Taken) -> bool:
        rounds = row.speculated.rounds
        if not rounds.attached or rounds.decided is None:
            return False
        return len(rounds.branches.find(*rounds.decided)) < row.wanted

    def _back_up(self, rows: Rows[Taken]) -> None:
        """An instant guess for rows that have none."""
        backup = self._options.backup
        if backup not in (Backup.AUTO, Backup.NGRAM):
            return
        for row in rows:
            if row.missed:
                depth = row.wanted if backup is Backup.NGRAM else self._ngram_depth(row, len(rows))
                tokens = self._index(row.speculated).propose(depth) if depth else []
                if tokens:
                    row.tokens, row.source = tokens, Source.NGRAM

    def _ngram_depth(self, row: Taken, num_rows: int) -> int:
        """As deep as it pays; where it does not, a short one from time to time, to learn."""
        seconds = self._round_seconds(num_rows)
        depth = choose_depth(self._ngram_alpha.value, seconds, row.wanted)
        self._ngram_idle = 0 if depth else self._ngram_idle + 1
        if self._ngram_idle < NGRAM_EXPLORE:
            return depth
        self._ngram_idle = 0
        return min(2, row.wanted)

    def _index(self, speculated: Speculated) -> NgramIndex:
        if speculated.ngrams is None:
            speculated.ngrams = NgramIndex()
        committed = speculated.sequence.committed()
        speculated.ngrams.extend(committed[speculated.num_indexed :])
        speculated.num_indexed = len(committed)
        return speculated.ngrams

    def _draft(self, rows: Rows[Taken]) -> None:
        """Synchronous speculation: the draft model's turn."""
        if not rows:
            return
        if self._drafter is None:
            raise RuntimeError("synchronous speculation without a draft model")
        begin = self._now()
        drafts = [DraftRow(r.speculated.sequence, r.wanted, _down_weight(r)) for r in rows]
        self._drafter.draft(drafts)
        longest = max(len(draft.tokens) for draft in drafts)
        if longest:
            self._sync_seconds.observe((self._now() - begin) / longest)
        for row, draft in zip(rows, drafts, strict=True):
            if draft.tokens:
                row.tokens, row.source = draft.tokens, Source.SYNC
                row.wire = torch.stack(draft.wires) if draft.wires else None
            elif row.wanted:
                row.speculated.stats.fell_back("no room")

    # Launch

    def _launch(self, row: Taken) -> None:
        speculated, rounds = row.speculated, row.speculated.rounds
        speculated.source, speculated.drafted = row.source, len(row.tokens)
        speculated.judged = speculated.drafted
        speculated.attached_before = rounds.attached
        if rounds.attached and not self.endpoints[rounds.link].payoff.attaches:
            self._leave(speculated, "does not pay")
        if rounds.attached:
            self._send_launch(row)
        elif (endpoint := self._choose_endpoint(speculated)) is not None:
            self._send_open(row, endpoint)
        else:
            rounds.launch(len(row.tokens))
        home = self.endpoints.get(-1 if speculated.home is None else speculated.home)
        speculated.under_speculation = home is not None and home.payoff.speculates

    def _send_outcome(self, speculated: Speculated) -> None:
        rounds = speculated.rounds
        if speculated.outcome_sent or rounds.decided is None:
            return
        frame = Outcome(speculated.sequence.id, rounds.round, *rounds.decided)
        self.endpoints[rounds.link].outbox.append(frame)
        speculated.outcome_sent = True

    def _send_launch(self, row: Taken) -> None:
        speculated, rounds = row.speculated, row.speculated.rounds
        endpoint = self.endpoints[rounds.link]
        self._send_outcome(speculated)
        rounds.launch(len(row.tokens))
        if speculated.rejecting and endpoint.receiver is not None and row.tokens:
            key = RowsKey(speculated.sequence.id, rounds.round, 0)
            endpoint.receiver.expect(key, len(row.tokens))
        endpoint.outbox.append(
            Launch(
                speculated.sequence.id,
                rounds.round,
                row.tokens,
                row.source,
                self._next_depth(speculated, row),
                self._verify_micros(row),
            )
        )
        self._expect_answer(endpoint)

    def _send_open(self, row: Taken, endpoint: Endpoint) -> None:
        speculated, sequence = row.speculated, row.speculated.sequence
        if endpoint.epoch is None:
            raise RuntimeError("an endpoint that is not connected was chosen")
        speculated.rounds.launch_open(len(row.tokens), endpoint.link, endpoint.epoch)
        rejection = speculated.request.verification is Verification.REJECTION
        speculated.rejecting = rejection and endpoint.receiver is not None
        endpoint.sequences.add(sequence.id)
        endpoint.outbox.append(
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
                self._next_depth(speculated, row),
                self._verify_micros(row),
            )
        )
        self._expect_answer(endpoint)

    def _expect_answer(self, endpoint: Endpoint) -> None:
        if endpoint.unanswered_since is None:
            endpoint.unanswered_since = self._now()

    def _next_depth(self, speculated: Speculated, row: Taken) -> int:
        """How long a branch can be of use in the round after this one."""
        sequence = speculated.sequence
        room = sequence.max_committed - sequence.num_committed - 2
        wanted = row.wanted or min(speculated.request.depth, self._options.depth)
        return max(0, min(wanted, room))

    def _verify_micros(self, row: Taken) -> int:
        return int(1e6 * self._verify_clock.seconds(1 + len(row.tokens)))

    def _choose_endpoint(self, speculated: Speculated) -> Endpoint | None:
        """The least occupied of those that may hold the sequence; its payoff has the last word."""
        request, sequence = speculated.request, speculated.sequence
        if request.mode is not Mode.SSD:
            return None
        now, needed = self._now(), sequence.num_committed + self._options.depth
        fitting = [
            endpoint
            for endpoint in self.endpoints.values()
            if endpoint.has_room(now)
            and needed < endpoint.max_context
            and endpoint.link not in speculated.refused_by
            and (endpoint.link in request.links if request.links else not endpoint.named)
        ]
        paying = [endpoint for endpoint in fitting if endpoint.payoff.attaches]
        chosen = min(paying or fitting, key=lambda endpoint: endpoint.occupancy, default=None)
        if chosen is None:
            return None
        speculated.home = chosen.link
        if not chosen.payoff.attaches:
            speculated.why_detached = "does not pay"
            return None
        return chosen

    def _learn(self, speculated: Speculated, accepted: int) -> None:
        if not speculated.drafted:
            return
        if speculated.source is Source.NGRAM:
            self._ngram_alpha.observe(accepted, speculated.drafted)
        if speculated.source is Source.SYNC:
            self._sync_alpha.observe(accepted, speculated.drafted)
        endpoint = self.endpoints.get(speculated.rounds.link)
        if endpoint is not None and speculated.source in (Source.CACHE, Source.JUST_IN_TIME):
            endpoint.alpha.observe(accepted, speculated.judged)


def _down_weight(row: Taken) -> float | None:
    request = row.speculated.request
    return request.down_weight if request.verification is Verification.REJECTION else None
