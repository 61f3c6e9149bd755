"""Room for sequences: who is admitted, and who is evicted for another.

A link is never harmed by one that holds more than its fair share of places and memory.
"""

from collections.abc import Callable, Mapping

from ssd_draft.engine.link_sequences import Counters, LinkSequences
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.base import Speculator
from ssd_engine.kvcache.cached_path import NoRoom
from ssd_engine.speculation.frames import NoticeKind

ROUNDING = 1e-9
IDLE_SECONDS = 30.0  # a sequence that was not heard of for so long may be evicted


class SequenceRoom:
    def __init__(
        self,
        speculator: Speculator,
        links: Mapping[int, LinkSequences],
        max_num_seqs: int,
        max_seqs_per_link: int | None,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._speculator, self._links = speculator, links
        self._max_num_seqs = max_num_seqs
        self._max_seqs_per_link = max_seqs_per_link or max_num_seqs
        self._counters, self._now = counters, clock

    @property
    def num_sequences(self) -> int:
        return sum(len(link.sequences) for link in self._links.values())

    def admit(self, link: LinkSequences, sequence: DraftSequence) -> None:
        """Opens it; raises NoRoom or CannotSpeculate."""
        if len(link.sequences) >= self._max_seqs_per_link:
            raise NoRoom(f"this link has its {self._max_seqs_per_link} sequences")
        if self.num_sequences >= self._max_num_seqs and not self._evict_for(link, sequence):
            raise NoRoom(f"the endpoint has its {self._max_num_seqs} sequences")
        while True:
            try:
                self._speculator.open(sequence, link.scopes.root_of(sequence.cache_scope))
                break
            except NoRoom:
                if not self._evict_for(link, sequence):
                    raise
        link.sequences[sequence.id] = sequence

    def grow(self, link: LinkSequences, sequence: DraftSequence) -> None:
        """Follows a frame; raises NoRoom where that takes more memory than can be had."""
        while True:
            try:
                return self._speculator.on_round_changed(sequence)
            except NoRoom:
                if not self._evict_to_grow(link, sequence):
                    raise

    def give_up(
        self, link: LinkSequences, sequence: DraftSequence, kind: NoticeKind, why: str
    ) -> None:
        self.close(link, sequence)
        link.notify(sequence.id, sequence.round, kind, why)

    def close(self, link: LinkSequences, sequence: DraftSequence) -> None:
        sequence.close()
        self._speculator.close(sequence)
        link.sequences.pop(sequence.id, None)
        if link.features is not None:
            link.features.closed(sequence.id)

    def _evict_for(self, link: LinkSequences, sequence: DraftSequence) -> bool:
        """Makes room for a sequence of ``link``: where nobody is harmed, or within fair shares.

        First a sequence of its own that has not been heard of for long; then, when the link stays
        within its share of places and memory, the least recent one of a link that holds more.
        """
        idle = self._least_recent(link)
        if idle is not None and self._now() - idle.changed_at > IDLE_SECONDS:
            self._evict(link, idle)
            return True
        share = 1 / max(1, len(self._links)) + ROUNDING
        largest = max(self._links.values(), key=self._share_held)
        wanted = self._share_held(link) + self._share_of(sequence)
        victim = self._least_recent(largest)
        if victim is None or wanted > share or self._share_held(largest) <= share:
            return False
        self._evict(largest, victim)
        return True

    def _evict_to_grow(self, own: LinkSequences, sequence: DraftSequence) -> bool:
        """Evicts the youngest of the link that holds most, but none older than the sequence. A link
        beyond its share makes room for itself among its own."""
        share = 1 / max(1, len(self._links)) + ROUNDING
        links = [own] if self._share_held(own) > share else [*self._links.values()]
        for link in sorted(links, key=self._share_held, reverse=True):
            youngest = max(link.sequences.values(), key=lambda s: s.opened_at, default=sequence)
            if youngest is not sequence and youngest.opened_at >= sequence.opened_at:
                self._evict(link, youngest)
                return True
        return False

    def _share_held(self, link: LinkSequences) -> float:
        return sum(map(self._share_of, link.sequences.values()))

    def _share_of(self, sequence: DraftSequence) -> float:
        """The part of the endpoint that it takes: of places or of memory, whichever is more."""
        return max(1 / self._max_num_seqs, self._speculator.memory_share(sequence))

    def _least_recent(self, link: LinkSequences) -> DraftSequence | None:
        return min(link.sequences.values(), key=lambda s: s.changed_at, default=None)

    def _evict(self, link: LinkSequences, sequence: DraftSequence) -> None:
        self._counters.evictions += 1
        self.give_up(link, sequence, NoticeKind.LOST, "evicted: the endpoint is full")
