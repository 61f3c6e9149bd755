"""What the target of a link tells of its hidden states, on its way to the speculator.

Rows travel on a plane of their own, so they may come before the frames that they belong to: before
the open of their sequence, or before the outcome that commits their tokens. Those wait here, a few
of them. Where rows are missing the target is asked for them once; it says again what it has.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.base import Speculator
from ssd_engine.speculation.frames import FeatureRequest
from ssd_engine.tensor_plane.inbox import RowsInbox
from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.report import report_of

WAITING_SECONDS = 5.0  # that rows wait for the frames that they belong to
WAITING_BYTES = 64 << 20  # of a link
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


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: RowsKey
    rows: Tensor
    since: float

    @property
    def end(self) -> int:
        return self.key.round + len(self.rows)


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
        self._max_waiting_bytes = max_waiting_bytes
        self._told: dict[int, _Told] = {}  # by open sequence
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self.requests: list[FeatureRequest] = []  # for the target
        self._counts = FeatureCounts()

    @property
    def has_rows(self) -> bool:
        return self._inbox is not None and len(self._inbox) > 0

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
        if self._inbox is None or not (self.has_rows or self._waiting):
            return max_bytes
        now = self._now()
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for key, rows in self._inbox.take(max_bytes):
            waiting.append(_Waiting(key, rows, now))
            max_bytes -= rows.nbytes
        for each in waiting:
            sequence = sequences.get(each.key.sequence)
            if sequence is None:
                self._wait(each, now)
            else:
                self._tell(sequence, each, now)
        return max(0, max_bytes)

    def _tell(self, sequence: DraftSequence, told: _Waiting, now: float) -> None:
        """As far as its tokens are committed here; the last token's own row is never of use."""
        start, known = told.key.round, sequence.num_committed - 1
        if told.end > sequence.max_tokens:
            self._counts.dropped += len(told.rows)
            return
        if start < known:
            self._pass_on(sequence, start, told.rows[: known - start])
        if told.end > known:
            skipped = max(0, known - start)
            key = RowsKey(sequence.id, start + skipped)
            self._wait(_Waiting(key, told.rows[skipped:], told.since), now)

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

    def _wait(self, told: _Waiting, now: float) -> None:
        if now - told.since > WAITING_SECONDS:
            self._counts.dropped += len(told.rows)
            return
        self._waiting.append(told)
        self._waiting_bytes += told.rows.nbytes
        while self._waiting_bytes > self._max_waiting_bytes:
            oldest = self._waiting.popleft()
            self._waiting_bytes -= oldest.rows.nbytes
            self._counts.dropped += len(oldest.rows)
