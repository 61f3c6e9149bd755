"""The KV cache of a sequence that turns back: committed tokens, then guesses that may be dropped.

No tensors here. A *path* is the committed tokens followed by guesses. What of it is in the cache
is remembered token by token, so that a path which takes another way reuses all that it shares with
the one before, and is computed anew from there on in its next forward.
"""

from collections.abc import Sequence

from ssd_engine.forward.batch import Chunk, KVCopy
from ssd_engine.kvcache.block_pool import ROOT, BlockPool


class CachedPath:
    def __init__(
        self,
        pool: BlockPool,
        tokens: list[int],
        ahead: int,
        max_tokens: int,
        root: int = ROOT,
        spare: int = 0,
    ) -> None:
        """``tokens`` are committed; raises NoRoom unless they fit, with so many ``ahead``, and
        leave so many ``spare`` blocks. The path never has more than ``max_tokens``."""
        needed = min(len(tokens) + ahead, max_tokens)
        lease = pool.open(tokens, needed, root, spare=spare)
        if lease is None:
            raise NoRoom(f"no room for {needed} tokens")
        self.ahead = ahead
        self._lease = lease
        self.committed = list(tokens)
        self._written = self.committed[: lease.num_cached_tokens]
        # Committed tokens that are in the cache, guesses after them not counted.
        self.num_known = len(self._written)
        self.max_tokens = max_tokens

    @property
    def blocks(self) -> Sequence[int]:
        return self._lease.blocks

    @property
    def num_blocks(self) -> int:
        return self._lease.num_blocks

    def reserve(self, num_committed: int) -> None:
        """Raise NoRoom unless so many committed tokens fit, with those ahead of them."""
        needed = min(num_committed + self.ahead, self.max_tokens)
        if not self._lease.reserve(needed):
            raise NoRoom(f"no room for {needed} tokens")

    def commit(self, tokens: Sequence[int]) -> None:
        self.committed += tokens
        while self.num_known < min(len(self._written), len(self.committed)):
            if self._written[self.num_known] != self.committed[self.num_known]:
                del self._written[self.num_known :]
                break
            self.num_known += 1
        self._lease.commit(self.committed, self._num_final)

    @property
    def _num_final(self) -> int:
        """Committed tokens, the first ones, whose KV stays as it is."""
        return self.num_known

    def next_chunk(self, guesses: Sequence[int], num_logits: int, limit: int) -> Chunk:
        """The next piece of committed + guesses, at most ``limit`` tokens long.

        The piece that ends the path carries logits of its last ``num_logits`` tokens.
        """
        total = len(self.committed) + len(guesses)
        start = min(self._known(guesses), total - num_logits)
        end = min(total, start + max(limit, num_logits))
        return self.piece(guesses, start, end, num_logits if end == total else 0)

    def piece(self, guesses: Sequence[int], start: int, end: int, num_logits: int) -> Chunk:
        """A piece of committed + guesses, with logits of its last ``num_logits`` tokens."""
        path = self.committed[start:end] if start < len(self.committed) else []
        path += guesses[max(0, start - len(self.committed)) : max(0, end - len(self.committed))]
        self._lease.grow(end)
        return Chunk(path, start, self.blocks, num_logits)

    def num_missing(self, guesses: Sequence[int]) -> int:
        """How many tokens of committed + guesses are not in the cache."""
        return len(self.committed) + len(guesses) - self._known(guesses)

    def wrote(self, chunk: Chunk) -> None:
        """The chunk's KV is in the cache, and nothing after it is."""
        self._take(chunk.start, chunk.tokens)

    def grow(self, guesses: int) -> None:
        """Take the blocks of so many guesses."""
        self._lease.grow(len(self.committed) + guesses)

    def guessed(self, tokens: Sequence[int]) -> None:
        """The KV of these guesses is in the cache, after that of all committed tokens."""
        self._take(len(self.committed), tokens)

    def move(self, tokens: Sequence[int], sources: Sequence[int]) -> KVCopy | None:
        """The last committed token, then guesses: they were computed in other slots.

        None when the tokens before them are not in the cache, or these are there already.
        """
        start = len(self.committed) - 1
        tokens = tokens[: self.max_tokens - start]
        if self.num_known != start or not tokens or tokens[0] != self.committed[-1]:
            return None
        self._lease.grow(start + len(tokens))
        self._take(start, tokens)
        return KVCopy(sources[: len(tokens)], start, self.blocks)

    def _take(self, start: int, tokens: Sequence[int]) -> None:
        self._written[start:] = tokens
        self.num_known = min(self.num_known, start)
        self.commit(())

    def slot(self, position: int, block_size: int) -> int:
        return self.blocks[position // block_size] * block_size + position % block_size

    def release(self) -> None:
        self._lease.release()

    def _known(self, guesses: Sequence[int]) -> int:
        """How many leading tokens of the path are in the cache."""
        if self.num_known < len(self.committed):
            return self.num_known
        known = self.num_known
        for guess in guesses:
            if known >= len(self._written) or self._written[known] != guess:
                break
            known += 1
        return known


class NoRoom(Exception):
    """The pool cannot hold this sequence now."""
