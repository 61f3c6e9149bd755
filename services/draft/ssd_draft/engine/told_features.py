"""What the target of a link tells of its hidden states, on its way to the speculator.

Rows travel on a plane of their own, so they may come before the frames that they belong to: before
the open of their sequence, or before the outcome that commits their tokens. And a prompt may be
told faster than it is read: nothing is passed on that would take the place of rows which were not
read yet. All those wait here, a few of them. Where rows are missing the target is asked for them
once; it says again what it has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ssd_draft.config import WAITING_BYTES
from ssd_draft.engine.waiting_rows import WaitingRows, WaitingSend
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.base import Speculator
from ssd_engine.speculation.frames import FeatureRequest
from ssd_engine.tensor_plane.inbox import RowsInbox
from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.report import report_of

WAITING_SECONDS = 5.0  # that rows wait for the frames that they belong to
SWEEP_SECONDS = 1.0  # after which those are looked for that have waited longer
HELD_SHARE = (
    0.5  # of the bytes that may wait, that open sequences fill before the rest stays in the inbox
)
TELL_BYTES = 8 << 20  # of a link, between two forwards: others wait for it
ANSWER_ROUNDS = 4  # in which a target answers, or has nothing to say


class FeatureInbox(Protocol):
    """The part of a ``RowsInbox`` that is used here."""

    reason: str
    came_up: bool

    @property
    def state(self) -> PlaneState: ...

    def __len__(self) -> int: ...

    def take(self, max_bytes: int) -> list[tuple[RowsKey, Tensor]]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class FeatureCounts:
    told: int = 0  # rows
    dropped: int = 0  # rows of no sequence, or of no use
    rounds: int = 0  # that a head followed
    late: int = 0  # of these, whose rows had not come with the next outcome


@dataclass(slots=True)
class _Told:
    end: int  # after the last position that is known
    asked_from: int  # the last request's position
    gap_until: int | None = None  # rows beyond were sent before that request was heard
    asked_in: int = 0  # round
    moved_at: float = 0.0  # when rows were last passed on


class ToldFeatures:
    """The features of one link's sequences."""

    def __init__(
        self,
        inbox: FeatureInbox | None,
        speculator: Speculator,
        clock: Callable[[], float],
        max_waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        """``inbox``: None where no plane joins the two."""
        self._inbox, self._speculator, self._now = inbox, speculator, clock
        self._told: dict[int, _Told] = {}  # by open sequence
        self._waiting = WaitingRows(max_waiting_bytes)
        self._max_held = int(max_waiting_bytes * HELD_SHARE)
        self._sweep_at = 0.0
        self.requests: list[FeatureRequest] = []  # for the target
        self._counts = FeatureCounts()

    def has_news(self, sequences: Mapping[int, DraftSequence]) -> bool:
        """Whether rows have come, or can go on, or have waited too long."""
        if self._inbox is None or not (len(self._inbox) or len(self._waiting)):
            return False
        if len(self._inbox) and not self._is_full(sequences):
            return True
        can_go_on = any(map(self._can_go_on, sequences.values()))
        return can_go_on or (len(self._waiting) > 0 and self._now() >= self._sweep_at)

    @property
    def problem(self) -> str:
        """Why nothing can be told; empty where it can."""
        if self._inbox is None:
            return "no tensor plane joins this head and its target"
        if self._inbox.state is PlaneState.BROKEN and not self._inbox.came_up:
            return f"the tensor plane to this head did not come up: {self._inbox.reason}"
        return ""

    def report(self) -> list[PlaneReport]:
        return [report_of(self._inbox)] if isinstance(self._inbox, RowsInbox) else []

    def take_counts(self) -> FeatureCounts:
        """Since they were last taken."""
        counts, self._counts = self._counts, FeatureCounts()
        return counts

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()

    # Sequences

    def opened(self, sequence: DraftSequence) -> None:
        """Asks for what is not known of it."""
        begin = self._speculator.features_from(sequence)
        self._told[sequence.id] = _Told(begin, begin)
        self._ask(sequence, begin)

    def closed(self, sequence_id: int) -> None:
        self._told.pop(sequence_id, None)

    def round_ends(self, sequence: DraftSequence) -> None:
        """The next outcome is followed: had the rows of the one before come by then? It is followed
        between two forwards, so rows that come after it, but within the same one, are in time."""
        told = self._told.get(sequence.id)
        if told is not None and sequence.round > sequence.opened_in_round:
            self._counts.rounds += 1
            self._counts.late += told.end < sequence.num_committed - 1

    def _ask(self, sequence: DraftSequence, begin: int) -> None:
        self.requests.append(FeatureRequest(sequence.id, sequence.round, begin))

    # Rows

    def tell(self, sequences: Mapping[int, DraftSequence], max_bytes: int = TELL_BYTES) -> int:
        """Tells the speculator what has come of these sequences, of new rows up to so many bytes.
        Returns how many bytes of them are left."""
        if self._inbox is None or not (len(self._inbox) or len(self._waiting)):
            return max_bytes
        now = self._now()
        self._sweep(sequences, now)
        for sequence in sequences.values():
            first = self._waiting.first(sequence.id)
            if first is not None and first < (until := self._until(sequence, first)):
                for send in self._waiting.take(sequence.id, until):
                    self._tell(sequence, send, now)
        if self._is_full(sequences):
            return max_bytes
        for key, rows in self._inbox.take(max_bytes):
            send = WaitingSend(key.sequence, key.round, rows, now)
            self._hear(sequences.get(key.sequence), send, now)
            max_bytes -= rows.nbytes
        return max(0, max_bytes)

    def _is_full(self, sequences: Mapping[int, DraftSequence]) -> bool:
        """Whether open sequences have as much to read as may wait here: the inbox keeps the rest,
        which drops nothing as long as it has room."""
        return sum(map(self._waiting.bytes_of, sequences)) > self._max_held

    def _can_go_on(self, sequence: DraftSequence) -> bool:
        """Whether rows that have waited can be passed on."""
        first = self._waiting.first(sequence.id)
        return first is not None and first < self._until(sequence, first)

    def _until(self, sequence: DraftSequence, start: int) -> int:
        """How far rows from ``start`` on can be passed on: as far as tokens are committed here, and
        there is a place for them. The last token's own row is never of use."""
        known = sequence.num_committed - 1
        return min(known, self._speculator.features_until(sequence, start))

    def _hear(self, sequence: DraftSequence | None, send: WaitingSend, now: float) -> None:
        if sequence is None:
            self._counts.dropped += self._waiting.add(send)
        else:
            self._tell(sequence, send, now)

    def _tell(self, sequence: DraftSequence, send: WaitingSend, now: float) -> None:
        """As far as it can be told now."""
        start, rows = send.start, send.rows
        if start + len(rows) > sequence.max_tokens:
            self._counts.dropped += len(rows)
            return
        count = max(0, self._until(sequence, start) - start)
        if count:
            self._told[sequence.id].moved_at = now
            self._pass_on(sequence, start, rows[:count])
        if rest := rows[count:].shape[0]:
            send = WaitingSend(sequence.id, start + count, rows[-rest:], send.since)
            self._counts.dropped += self._waiting.add(send)

    def _pass_on(self, sequence: DraftSequence, start: int, rows: Tensor) -> None:
        told = self._told[sequence.id]
        if start > told.end and self._are_missing(sequence, told, start):
            self._counts.dropped += len(rows)  # they are told again after those
            return
        told.end, told.gap_until = max(told.end, start + len(rows)), None
        self._counts.told += len(rows)
        self._speculator.take_features(sequence, start, rows)

    def _are_missing(self, sequence: DraftSequence, told: _Told, start: int) -> bool:
        """Whether rows before ``start`` may still come. They are asked for once."""
        if told.asked_from != told.end:
            told.asked_from, told.gap_until, told.asked_in = told.end, start, sequence.round
            self._ask(sequence, told.end)
            return True
        is_older = told.gap_until is not None and start > told.gap_until
        return is_older and sequence.round < told.asked_in + ANSWER_ROUNDS

    def _sweep(self, sequences: Mapping[int, DraftSequence], now: float) -> None:
        """Drops what has waited too long. What waits for a place does not, while others move on."""
        if now < self._sweep_at:
            return

        def is_over(send: WaitingSend) -> bool:
            since, sequence = send.since, sequences.get(send.sequence)
            if sequence is not None and send.start < sequence.num_committed - 1:
                since = max(since, self._told[send.sequence].moved_at)
            return now - since > WAITING_SECONDS

        self._sweep_at = now + SWEEP_SECONDS
        self._counts.dropped += self._waiting.drop(is_over)
