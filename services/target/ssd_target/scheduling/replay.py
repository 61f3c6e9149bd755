"""How the KV of tokens that were generated before, elsewhere or until a sequence was set aside, is
computed again."""

from ssd_engine.forward.batch import Chunk
from ssd_target.scheduling.sequence import Sequence


class PrefillAgain:
    """In prefill, like that of the prompt. All committed tokens are shared."""

    shared_unit = 1  # blocks

    def num_prefilled(self, sequence: Sequence) -> int:
        """Tokens, the first ones, that go through prefill."""
        return sequence.num_committed

    def num_shared(self, sequence: Sequence, written: int) -> int:
        """Tokens that may enter the prefix cache, of those that were written."""
        return written


class ReplayInSteps:
    """In steps like those that generated them, where the bits of a row depend on the shape of its
    forward. So a token's KV always comes from the same kind of forward: the prompt's from prefill
    on the grid, and only such whole chunks are shared."""

    def __init__(self, rows: int, prefill_chunk: int, block_size: int) -> None:
        """``rows``: tokens that a step can replay."""
        self._rows, self._prefill_chunk = rows, prefill_chunk
        self.shared_unit = prefill_chunk // block_size

    def num_prefilled(self, sequence: Sequence) -> int:
        return len(sequence.prompt)

    def num_shared(self, sequence: Sequence, written: int) -> int:
        written = min(written, len(sequence.prompt))
        return written - written % self._prefill_chunk

    def piece(self, sequence: Sequence) -> Chunk:
        """The last token, after which the sequence goes on, is a piece of its own."""
        start, last = sequence.num_written, sequence.num_committed - 1
        if start >= last:
            return Chunk([sequence.last_token], last, sequence.blocks, 1)
        tokens = sequence.committed()[start : min(last, start + self._rows)]
        return Chunk(tokens, start, sequence.blocks, 0)
