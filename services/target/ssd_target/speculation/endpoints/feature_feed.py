"""What endpoints are told of the target's hidden states, off the critical path.

Boundaries are watched only while somebody reads them. What a forward has told is noted when it
ends, and copied, kept and sent after the next one was launched. An endpoint asks for the features
of a sequence from a position on; it gets what is still there, then the rows of each outcome. Rows
that an endpoint does not take in time stay in the window of their sequence until newer ones need
their place: nothing else grows. Rows that the prefix cache has spared are a *lack*: the engine
computes a window of them once more when it can (``reread.py``), and what follows waits for them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.tensor_plane.host_rows import CopiesOnHost, HostRows, RowCopies
from ssd_engine.tensor_plane.protocol.rows import RowsKey, dtype_of
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_target.records.speculation_options import FeatureOptions, Mode
from ssd_target.scheduling.work import Work
from ssd_target.speculation.endpoints.endpoint import DraftEndpoint, FeatureSender
from ssd_target.speculation.endpoints.feature_text import FeatureText
from ssd_target.speculation.endpoints.kept_features import KeptFeatures
from ssd_target.speculation.endpoints.outgoing_features import OutgoingFeatures
from ssd_target.speculation.endpoints.sequence_speculation import SequenceSpeculation, request_of
from ssd_target.speculation.endpoints.watched_boundaries import WatchedBoundaries

log = logging.getLogger(__name__)

TOLD_MODES = (Mode.AUTO, Mode.SSD)
REQUESTS_A_ROUND = 2  # of a sequence, that are honoured
TELL_BYTES = 32 << 20  # to an endpoint in a flush, about: what is left follows in the next one
# What is copied in a flush to be kept, as a step waits for it: so many blocks, and a share of all
# that have come, lest they come faster.
KEEP_BLOCKS, KEEP_FLUSHES = 8, 16
LAST_FLUSHES = 4  # after the end of a sequence: by then its last rows were told and kept


@dataclass(slots=True)
class _Reader:
    """What the endpoint of a sequence was told of it."""

    endpoint: tuple[int, int]  # its link and epoch
    next: int  # the position of the row that is sent next
    round: int = 0  # of the last requests
    requests: int = 0
    has_lacked: bool = False  # rows that were to be computed once more: that happens once


@dataclass(slots=True)
class _Fed:
    text: FeatureText
    reader: _Reader | None = None
    flushes: int = 0  # since its sequence has ended


@dataclass(frozen=True, slots=True)
class _Noted:
    sequence: int
    start: int
    rows: Tensor  # [n, boundaries * hidden size], on the target's device


@dataclass(slots=True)
class FeedCounters:
    rows: int = 0  # handed to senders
    bytes: int = 0
    missed: int = 0  # that were gone before they could be sent
    requests: int = 0  # that were honoured
    refused: int = 0  # and were not
    reread: int = 0  # rows that were computed once more


@dataclass
class FeatureFeed:
    options: FeatureOptions = field(default_factory=FeatureOptions)
    inside: tuple[int, ...] = ()  # boundaries that a head inside the target reads
    copies: RowCopies = field(default_factory=CopiesOnHost)

    def __post_init__(self) -> None:
        self.boundaries = WatchedBoundaries(self.inside)
        self.counters = FeedCounters()
        self.kept = KeptFeatures(self.options.keep_bytes)
        self._block_size = 1
        self._is_cached: Callable[[int], bool] = lambda name: True
        self._fed: dict[int, _Fed] = {}
        self._ended: dict[int, _Fed] = {}  # whose last rows may still come
        # Of each forward, what it has told, and when that is complete.
        self._noted: list[tuple[torch.cuda.Event | None, list[_Noted]]] = []
        self._said_full = False  # that there was no memory to copy the last ones
        self._grown: list[_Fed] = []  # by the last flush
        self._outgoing: list[OutgoingFeatures] = []  # few rows each, handed over by the last flush
        self.lacks: dict[int, range] = {}  # by sequence, positions before what is here

    def follow_pool(self, pool: BlockPool) -> None:
        """Features of its cached blocks are kept, as long as they are cached."""
        self._block_size = pool.block_size
        self._is_cached, pool.on_forgotten = pool.is_cached, self.kept.forget

    def _new_text(self) -> FeatureText:
        return FeatureText(self.kept, self._block_size, self._is_cached)

    # Who reads

    @property
    def watched(self) -> tuple[int, ...]:
        """Boundaries that forwards tell now."""
        return self.boundaries.now

    def wanted(self, endpoints: Iterable[DraftEndpoint], now: float) -> tuple[int, ...]:
        return self.boundaries.wanted(endpoints, now)

    def watch(self, boundaries: tuple[int, ...], now: float) -> None:
        """Forwards that are launched from now on tell these; what was kept of others is over."""
        self.boundaries.watch(boundaries, now)
        self.kept.clear()
        self._noted.clear()
        self._grown.clear()
        self._ended.clear()
        self._outgoing.clear()
        self.lacks.clear()
        for fed in self._fed.values():
            fed.text = self._new_text()

    def read_inside(self, features: Tensor) -> Tensor:
        """What the head inside the target reads of them."""
        if not self.inside or self.inside == self.watched:
            return features
        places = [self.watched.index(each) for each in self.inside]
        return _at_boundaries(features, self.options.hidden_size, places)

    # What forwards tell

    def note(
        self,
        works: Rows[Work],
        features: Tensor,
        sequences: Mapping[int, SequenceSpeculation],
        reading: bool,
    ) -> None:
        """Rows of a forward that has ended, as far as their tokens are committed. ``reading``:
        an endpoint is there, or expected back."""
        width = len(self.watched) * self.options.hidden_size
        if not reading or features.shape[1] != width:  # launched when others were watched
            return
        noted: list[_Noted] = []
        begin = 0
        for work in works:
            rows = features[begin : begin + len(work.chunk.tokens)]
            begin += len(work.chunk.tokens)
            sequence, start = work.sequence, work.chunk.start
            right = rows[: max(0, sequence.num_committed - 1 - start)]
            if len(right) and self._is_fed(work, sequences):
                noted.append(_Noted(sequence.id, start, right))
        if noted:
            self._noted.append((self.copies.mark(), noted))

    def _is_fed(self, work: Work, sequences: Mapping[int, SequenceSpeculation]) -> bool:
        key = work.sequence.id
        if work.is_over:  # the last rows of one that has finished may be kept
            return work.sequence.finished and key in self._ended
        request = request_of(work.sequence, sequences)
        if request is None or request.mode not in TOLD_MODES:
            return False
        fed = self._fed.get(key)
        if fed is None:
            fed = self._fed[key] = _Fed(self._new_text())
        if work.sequence.lease is not None:
            fed.text.follow(work.sequence.lease.names)
        return True

    def tell_again(self, sequence_id: int, start: int, rows: Tensor) -> None:
        """The last rows that were lacking, from position ``start`` on."""
        self.counters.reread += len(rows)
        self._noted.append((self.copies.mark(), [_Noted(sequence_id, start, rows)]))
        lack = self.lacks[sequence_id]
        self.lacks[sequence_id] = range(lack.start, start)
        if start <= lack.start:
            self.give_up_lack(sequence_id)

    def give_up_lack(self, sequence_id: int) -> None:
        """Nothing waits for it any more."""
        self.lacks.pop(sequence_id, None)

    def end(self, sequence_id: int) -> None:
        self.give_up_lack(sequence_id)
        fed = self._fed.pop(sequence_id, None)
        if fed is not None and self.kept.keeps:
            self._ended[sequence_id] = fed

    def detach(self, sequence_id: int) -> None:
        """No endpoint reads the sequence any more; the next one asks for what it lacks."""
        self.give_up_lack(sequence_id)
        fed = self._fed.get(sequence_id)
        if fed is not None:
            fed.reader = None

    # What endpoints hear

    def request(self, endpoint: DraftEndpoint, state: SequenceSpeculation, begin: int) -> bool:
        """The endpoint asks for a sequence that it holds; False: it asks too often."""
        key, number = state.sequence.id, state.session.round
        fed = self._fed.get(key)
        if fed is None:
            fed = self._fed[key] = _Fed(self._new_text())
        reader, asking = fed.reader, (endpoint.link, endpoint.epoch or 0)
        if reader is None or reader.endpoint != asking:
            reader = fed.reader = _Reader(asking, begin, number)
        elif reader.round != number:
            reader.round, reader.requests = number, 0
        if reader.requests >= REQUESTS_A_ROUND:
            self.counters.refused += 1
            return False
        reader.requests += 1
        window = 0 if endpoint.terms is None else endpoint.terms.window
        reader.next = max(begin, fed.text.end - window) if window else begin
        self.counters.requests += 1
        return True

    def flush(self, endpoints: Iterable[DraftEndpoint]) -> None:
        """The next forward was launched: copy, keep and send what the last ones told."""
        if not self._fed and not self._ended:
            return
        self._settle()
        forwards, self._noted = self._noted, []
        for mark, noted in forwards:
            self._take(mark, noted)
        for endpoint in endpoints:
            if endpoint.features is not None and self._can_tell(endpoint):
                self._send(endpoint, endpoint.features)

    def _take(self, mark: torch.cuda.Event | None, noted: list[_Noted]) -> None:
        try:
            copies = self.copies.copy([each.rows for each in noted], mark)
        except torch.OutOfMemoryError:  # whoever reads them misses them
            if not self._said_full:
                log.warning("no memory to copy features: heads miss some")
            self._said_full = True
            return
        self._said_full = False
        for each, rows in zip(noted, copies, strict=True):
            self._add(each, rows)

    def _can_tell(self, endpoint: DraftEndpoint) -> bool:
        """Whether its plane is up, and what it reads is watched."""
        sender, terms = endpoint.features, endpoint.terms
        if sender is None or terms is None or sender.state is not PlaneState.UP:
            return False
        return set(terms.needs.boundaries) <= set(self.watched)

    def _add(self, noted: _Noted, rows: HostRows) -> None:
        fed = self._fed.get(noted.sequence) or self._ended.get(noted.sequence)
        if fed is not None:
            fed.text.add(noted.start, rows)
            self._grown.append(fed)

    def _settle(self) -> None:
        """What the last flush has copied is there: keep it with its blocks, and leave the rest."""
        for outgoing in self._outgoing:
            outgoing.settle()
        self._outgoing.clear()
        if self.kept.keeps:
            self._keep()
        for fed in self._grown:
            fed.text.prune(self._window(fed))
        self._grown.clear()

    def _keep(self) -> None:
        """The blocks of what was told are cached by now. Few are copied at a time: a step waits."""
        for fed in self._ended.values():
            fed.flushes += 1
        feds = [*self._ended.values(), *self._fed.values()]
        left = KEEP_BLOCKS + sum(fed.text.left_to_keep for fed in feds) // KEEP_FLUSHES
        for fed in feds:
            left -= fed.text.keep(left)
        self._ended = {
            key: fed
            for key, fed in self._ended.items()
            if fed.flushes < LAST_FLUSHES or fed.text.left_to_keep
        }

    def _window(self, fed: _Fed) -> int:
        """Positions of a sequence that are kept: fewer where rows are longer than heads' are."""
        row_bytes = max(1, fed.text.num_bytes // max(1, fed.text.end - fed.text.start))
        return max(1, min(self.options.window, self.options.window_bytes // row_bytes))

    def _send(self, endpoint: DraftEndpoint, sender: FeatureSender) -> None:
        """Who lacks few rows comes first: what is told again holds up no round."""
        waiting: list[tuple[int, int, _Fed, _Reader]] = []
        for key in endpoint.sequences:
            fed = self._fed.get(key)
            if fed is None or (reader := fed.reader) is None or reader.next >= fed.text.end:
                continue
            if reader.endpoint == (endpoint.link, endpoint.epoch):
                waiting.append((fed.text.end - reader.next, key, fed, reader))
        left = TELL_BYTES
        for _, key, fed, reader in sorted(waiting, key=lambda each: each[:2]):
            if left <= 0 or not sender.has_room(1):
                return
            if key not in self.lacks and not self._begins_to_lack(key, reader, endpoint):
                left -= self._send_text(key, fed.text, reader, endpoint, left)

    def _send_text(
        self, key: int, text: FeatureText, reader: _Reader, endpoint: DraftEndpoint, most: int
    ) -> int:
        """Up to so many bytes, or a bit more. Returns how many."""
        sent, sender = 0, endpoint.features
        while sender is not None and reader.next < text.end and sent < most:
            if reader.next < text.start and reader.next < (first := text.first):
                self.counters.missed += first - reader.next
                reader.next = first
            last = min(text.end, reader.next + sender.stream.max_rows)
            outgoing = OutgoingFeatures(text.pieces(reader.next, last), self._cut(endpoint, sender))
            # What waits holds all that is watched.
            weight = -(-outgoing.num_bytes // sender.stream.row_bytes)
            if not outgoing.num_rows or not sender.has_room(weight):
                break
            sender.send_made(RowsKey(key, reader.next), outgoing.make, weight, complete=True)
            if outgoing.holds_more:
                self._outgoing.append(outgoing)
            reader.next += outgoing.num_rows
            sent += outgoing.num_rows * sender.stream.row_bytes
            self.counters.rows += outgoing.num_rows
        self.counters.bytes += sent
        return sent

    def _cut(self, endpoint: DraftEndpoint, sender: FeatureSender) -> Callable[[Tensor], Tensor]:
        """What the endpoint reads of rows at all boundaries that are watched."""
        asked = self.watched if endpoint.terms is None else endpoint.terms.needs.boundaries
        places = None if asked == self.watched else [self.watched.index(each) for each in asked]
        return partial(
            _at_boundaries,
            hidden_size=self.options.hidden_size,
            places=places,
            dtype=dtype_of(sender.stream),
        )

    def _begins_to_lack(self, key: int, reader: _Reader, endpoint: DraftEndpoint) -> bool:
        """Whether the reader asks for what is before all that is here, and in its window."""
        fed = self._fed[key]
        text, window = fed.text, self._window(fed)
        if reader.has_lacked or text.start == text.end or reader.next >= text.first:
            return False
        if endpoint.terms is not None and endpoint.terms.window:
            window = min(window, endpoint.terms.window)
        lack = range(max(reader.next, text.end - window), text.start)
        reader.has_lacked = True
        if not lack or lack.start >= text.first:
            return False
        self.lacks[key] = lack
        return True


def _at_boundaries(
    rows: Tensor, hidden_size: int, places: list[int] | None, dtype: torch.dtype | None = None
) -> Tensor:
    """From rows at all boundaries that are watched [n, all] to rows at some [n, some]."""
    if places is not None:
        rows = rows.view(rows.shape[0], -1, hidden_size)[:, places].flatten(1)
    return rows if dtype is None else rows.to(dtype)
