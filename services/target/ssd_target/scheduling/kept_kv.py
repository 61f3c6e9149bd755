"""The KV of sequences that were set aside: kept in the host's memory where that is quicker than
computing it again. Pure Python: what is to be copied is said, not done."""

from dataclasses import dataclass

from ssd_engine.kvcache.swap import Swap
from ssd_engine.speculation.latency_model import Average
from ssd_target.scheduling.sequence import Kept, Sequence


@dataclass(frozen=True)
class KeptOptions:
    num_blocks: int  # that the host's memory holds
    block_seconds: float  # to copy one out and in


class KeptKV:
    def __init__(self, options: KeptOptions, block_size: int, replay_rows: int) -> None:
        """``replay_rows``: tokens that a step can replay; 0: they are prefilled like the prompt."""
        self._options, self._block_size, self._replay_rows = options, block_size, replay_rows
        self._prefill, self.step_seconds = Average(), Average()  # of a token; of a decode forward
        self._held: list[range] = []  # places, in their order
        self.num_kept = 0  # sequences so far

    @property
    def num_blocks(self) -> int:
        """That are held now."""
        return sum(map(len, self._held))

    def prefilled(self, tokens: int, seconds: float) -> None:
        self._prefill.observe(seconds / max(1, tokens))

    def keep(self, sequence: Sequence) -> list[Swap]:
        """Before the sequence loses its blocks."""
        blocks = list(sequence.blocks[: -(-sequence.num_written // self._block_size)])
        place = self._find(len(blocks))
        if not blocks or place is None or not self._pays(sequence, len(blocks)):
            return []
        sequence.kept = Kept(range(place, place + len(blocks)), sequence.num_written)
        self._held.append(sequence.kept.places)
        self._held.sort(key=lambda places: places.start)
        self.num_kept += 1
        return [Swap(True, place, blocks)]

    def _find(self, number: int) -> int | None:
        """The first of so many free places side by side."""
        begin = 0
        for places in [*self._held, range(self._options.num_blocks, self._options.num_blocks)]:
            if places.start - begin >= number:
                return begin
            begin = places.stop
        return None

    def _pays(self, sequence: Sequence, num_blocks: int) -> bool:
        """What is not measured yet is taken to be slow."""
        prompt = min(sequence.num_written, len(sequence.prompt))
        said = sequence.num_written - prompt
        again = self._prefill.value() * (prompt if self._replay_rows else prompt + said)
        if self._replay_rows:
            again += self.step_seconds.value() * -(-said // self._replay_rows)
        return not self._prefill.known or num_blocks * self._options.block_seconds < again

    def bring_back(self, sequence: Sequence) -> list[Swap]:
        """After it was admitted: what of its KV the prefix cache does not have."""
        kept, lease = sequence.kept, sequence.lease
        if kept is None or lease is None:
            return []
        self.drop(sequence)
        first = sequence.num_written // self._block_size
        if sequence.num_written >= kept.num_written:
            return []
        lease.grow(kept.num_written)
        sequence.num_written = kept.num_written
        return [Swap(False, kept.places.start + first, lease.blocks[first : len(kept.places)])]

    def drop(self, sequence: Sequence) -> None:
        """Its places may be written to again: copies are made in the order in which they are
        said."""
        kept, sequence.kept = sequence.kept, None
        if kept is not None:
            self._held.remove(kept.places)

    def check_integrity(self, waiting: list[Sequence]) -> None:
        kept = [sequence.kept.places for sequence in waiting if sequence.kept]
        if sorted(kept, key=lambda places: places.start) != self._held:
            raise RuntimeError("kept KV integrity: places of no sequence")
        ends = [0, *(places.stop for places in self._held)]
        begins = [*(places.start for places in self._held), self._options.num_blocks]
        if any(end > begin for end, begin in zip(ends, begins, strict=True)):
            raise RuntimeError("kept KV integrity: places overlap")
