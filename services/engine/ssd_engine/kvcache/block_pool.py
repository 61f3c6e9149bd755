"""Which KV blocks belong to whom: reservation, sharing and the prefix cache. No tensors here.

A *lease* is one sequence's hold on blocks. It reserves before it grows, so that growing cannot
fail: when it is opened, and later, as far as there are blocks that nobody has reserved. A full
block whose tokens are all committed enters the prefix cache and may be shared; it stays there after
its last lease ends, until its place is needed, least recently used first.

A cached block is named by (name of the block before it, its tokens). Names are never reused and
tokens are compared in full, so that two prefixes can only meet in a block when they are equal,
whatever their hashes are.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

ROOT = 0  # the name before the first block, unless a lease has a root of its own

_Key = tuple[int, tuple[int, ...]]


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty = list(range(num_blocks))  # a heap: low ids first keeps runs adjacent
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody, oldest first
        self._holders = [0] * num_blocks
        self._index: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}  # block -> its key in the index
        self._names: dict[int, int] = {}  # block -> its name, as long as it is cached
        self._cached_names: set[int] = set()
        self._next_name = ROOT + 1
        self.num_reserved = 0
        self._leases: set[BlockLease] = set()
        # Hears the name of a block that is cached no more.
        self.on_forgotten: Callable[[int], None] = lambda name: None

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, reserved ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._index)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def new_root(self) -> int:
        """A root of its own: blocks under different roots are never shared."""
        self._next_name += 1
        return self._next_name - 1

    @staticmethod
    def root_after(root: int, token: int) -> int:
        """Under a root a further one, for texts that are cached without their first token: what
        lies under it depends on that, too. It is below all names that are given."""
        return -(root << 32 | token) - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be reserved."""
        return self.num_free - self.num_reserved

    def open(
        self,
        tokens: Sequence[int],
        num_tokens: int,
        root: int = ROOT,
        unit: int = 1,
        spare: int = 0,
    ) -> "BlockLease | None":
        """A lease for a sequence that starts with ``tokens``, with room for ``num_tokens``.

        None when it does not fit now with so many ``spare`` blocks left. The last token is never
        taken from the cache: its forward gives the logits of the next one. Blocks are taken from
        there in multiples of ``unit``.
        """
        shared = self._match(tokens[: max(0, len(tokens) - 1)], root)
        del shared[len(shared) // unit * unit :]
        wanted = max(0, self.blocks_for(num_tokens) - len(shared))
        revived = sum(self._holders[block] == 0 for block in shared)
        if wanted + spare > self.num_available - revived:
            return None
        for block in shared:
            self._hold(block)
        self.num_reserved += wanted
        lease = BlockLease(self, shared, wanted, root)
        self._leases.add(lease)
        return lease

    def _match(self, tokens: Sequence[int], root: int = ROOT) -> list[int]:
        """The longest run of cached blocks that spells a prefix of ``tokens``."""
        blocks: list[int] = []
        name = root
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self._index.get((name, tuple(tokens[end - self.block_size : end])))
            if block is None:
                break
            blocks.append(block)
            name = self._names[block]
        return blocks

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self._idle.pop(block, None)

    def _take(self) -> int:
        """A block for writing; a reservation guarantees that there is one."""
        self.num_reserved -= 1
        if self._empty:
            block = heapq.heappop(self._empty)
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _forget(self, block: int) -> None:
        del self._index[self._keys.pop(block)]
        name = self._names.pop(block)
        self._cached_names.discard(name)
        self.on_forgotten(name)

    def _enter(self, block: int, name: int, tokens: tuple[int, ...]) -> int:
        """Cache a full block; returns the name of this content, which may be cached already."""
        key = (name, tokens)
        known = self._index.get(key)
        if known is not None:
            return self._names[known]
        self._index[key] = block
        self._keys[block] = key
        self._names[block] = self._next_name
        self._cached_names.add(self._next_name)
        self._next_name += 1
        return self._names[block]

    def is_cached(self, name: int) -> bool:
        """Whether the prefix cache has a block of this name still."""
        return name in self._cached_names

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._keys:
            self._idle[block] = None
        else:
            heapq.heappush(self._empty, block)

    def check_integrity(self) -> None:
        """Raise RuntimeError when the books do not agree."""
        holders = [0] * self.num_blocks
        for lease in self._leases:
            for block in lease.blocks:
                holders[block] += 1
        held = {block for lease in self._leases for block in lease.blocks}
        empty, idle = set(self._empty), set(self._idle)
        problems = {
            "holders": holders != self._holders,
            "a block is both held and free": not held.isdisjoint(empty)
            or not held.isdisjoint(idle),
            "a block is empty and idle": not idle.isdisjoint(empty)
            or len(empty) != len(self._empty),
            "a block is lost": len(held) + len(empty) + len(idle) != self.num_blocks,
            "an idle block is not cached": not idle <= self._keys.keys(),
            "an empty block is cached": not empty.isdisjoint(self._keys),
            "index": {b: k for k, b in self._index.items()} != self._keys,
            "names": self._names.keys() != self._keys.keys()
            or len(set(self._names.values())) != len(self._names)
            or set(self._names.values()) != self._cached_names,
            "reservations": self.num_reserved != sum(lease.reserved for lease in self._leases),
            "over-reserved": not 0 <= self.num_reserved <= self.num_free,
        }
        broken = [name for name, bad in problems.items() if bad]
        if broken:
            raise RuntimeError(f"block pool integrity: {', '.join(broken)}")


class BlockLease:
    """One sequence's blocks, in order of position."""

    def __init__(self, pool: BlockPool, shared: list[int], reserved: int, root: int) -> None:
        self._pool = pool
        self.blocks = shared
        self.reserved = reserved
        self.num_cached_tokens = len(shared) * pool.block_size
        self._num_entered = len(shared)
        self._root = root
        self.names = [pool._names[block] for block in shared]  # of its cached blocks, the first

    @property
    def num_blocks(self) -> int:
        """Blocks that are held or reserved."""
        return len(self.blocks) + self.reserved

    def reserve(self, num_tokens: int) -> bool:
        """Whether there is room for the first ``num_tokens`` tokens, now or from now on."""
        more = self._pool.blocks_for(num_tokens) - self.num_blocks
        if more > self._pool.num_available:
            return False
        if more > 0:
            self.reserved += more
            self._pool.num_reserved += more
        return True

    def grow(self, num_tokens: int) -> None:
        """Hold blocks for the first ``num_tokens`` tokens."""
        for _ in range(self._pool.blocks_for(num_tokens) - len(self.blocks)):
            if not self.reserved:
                raise RuntimeError(f"lease grows to {num_tokens} tokens, beyond its reservation")
            self.blocks.append(self._pool._take())
            self.reserved -= 1

    def grow_ahead(self, num_tokens: int) -> None:
        """Holds blocks likewise, as far as its reservation goes."""
        self.grow(min(num_tokens, self.num_blocks * self._pool.block_size))

    def can_enter(self, num_written: int) -> bool:
        """Whether ``commit`` would find a full block that is not in the prefix cache yet."""
        return (self._num_entered + 1) * self._pool.block_size <= num_written

    def commit(self, tokens: Sequence[int], num_written: int) -> None:
        """Offer to the prefix cache the full blocks among the first ``num_written`` tokens.

        ``tokens`` are committed, and the KV of the first ``num_written`` of them is in the cache.
        """
        size = self._pool.block_size
        while self.can_enter(num_written):
            begin = self._num_entered * size
            content = tuple(tokens[begin : begin + size])
            before = self.names[-1] if self.names else self._root
            self.names.append(self._pool._enter(self.blocks[self._num_entered], before, content))
            self._num_entered += 1

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        if self not in self._pool._leases:
            return
        self._pool._leases.remove(self)
        self._pool.num_reserved -= self.reserved
        self.reserved = 0
        # The end of a prefix goes first in least-recently-used order, its beginning last.
        for block in reversed(self.blocks):
            self._pool._drop(block)
        self.blocks = []
