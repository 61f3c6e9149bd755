"""The rows that a check computes: several sequences, over contexts of several lengths."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, KVCopy, Part, Rows, TreeRows, slots_at
from ssd_engine.kvcache.cache import KVCache

CONTEXTS = (330, 64, 1, 127, 700, 17, 200, 0)  # tokens before a sequence's rows
PREFIX = 80  # before the rows of a prefill
TREE_DEPTH = 1  # tokens of a branch before its last one
MOVED = 2  # tokens of a taken branch


@dataclass(frozen=True)
class CheckRoom:
    """Blocks that the sequences of a check share, and what bounds a sequence."""

    options: RunnerOptions
    num_blocks: int
    vocab_size: int

    def tokens(self, count: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.vocab_size) for _ in range(count)]

    def chunk(
        self, sequence: int, sequences: int, rows: int, start: int, after: int = 0
    ) -> Chunk | None:
        """A chunk of as many rows, and as long a context, as there is room for, with so many
        positions ``after`` them; None where there is none for a single row."""
        size, longest = self.options.block_size, self.options.max_model_len
        share = self.num_blocks // sequences
        count = min(share - self._scratch_blocks, -(-longest // size))
        room = min(max(0, count) * size, longest - after)
        rows = min(rows, room)
        if rows < 1:
            return None
        start, first = min(start, room - rows), sequence * share
        # No more than are used: what a check writes to is widened, too.
        blocks = list(range(first, first + -(-(start + rows) // size)))
        return Chunk(self.tokens(rows, sequence), start, blocks, rows)

    def most_sequences(self, wanted: int) -> int:
        """The number of sequences that get a block each, and a scratch."""
        return max(1, min(wanted, self.num_blocks // (1 + self._scratch_blocks)))

    @property
    def _scratch_blocks(self) -> int:
        """Blocks for a tree's branches and a branch that was taken: these follow its own."""
        tail = self.options.max_tail
        return -(-(tail + MOVED) // self.options.block_size) if tail else 0

    def scratch(self, blocks: Sequence[int], count: int) -> list[int]:
        """Slots of the sequence that has these blocks."""
        first = (blocks[-1] + 1) * self.options.block_size
        return list(range(first, first + count))


def round_parts(room: CheckRoom, runs: int, rows_per_run: int, most_rows: int) -> list[Part]:
    """Rounds of several sequences, of different lengths; the last place stays empty."""
    sequences = room.most_sequences(max(1, runs - 1))
    parts: list[Part] = []
    for i in range(sequences):
        left = most_rows - sum(len(part.tokens) for part in parts)
        rows = min(max(1, rows_per_run - i % 3), left)
        chunk = room.chunk(i, sequences, rows, CONTEXTS[i % len(CONTEXTS)]) if rows else None
        if chunk is not None:
            parts.append(chunk)
    return parts


def tree_parts(room: CheckRoom, runs: int, branches: int, most_rows: int, chain: int) -> list[Part]:
    """One depth of the trees of several sequences. With a ``chain``, each after so many new tokens,
    and after a branch that was taken."""
    runs_each = 2 if chain else 1
    sequences = room.most_sequences(max(1, runs // runs_each))
    parts: list[Part] = []
    for i in range(sequences):
        left = most_rows - sum(len(part.tokens) for part in parts)
        start = max(MOVED, CONTEXTS[i % len(CONTEXTS)])
        before = room.chunk(i, sequences, max(1, chain), start, after=TREE_DEPTH + 1)
        if before is None or left < branches + chain or (chain and not before.start):
            break
        tree = _tree_after(room, before if chain else None, before, branches)
        if chain and before.start >= MOVED:
            taken = room.scratch(before.blocks, room.options.max_tail + MOVED)[-MOVED:]
            parts.append(KVCopy(taken, before.start - MOVED, before.blocks))
        parts += [before, tree] if chain else [tree]
    return parts


def _tree_after(room: CheckRoom, chain: Chunk | None, chunk: Chunk, branches: int) -> TreeRows:
    """Branches that leave the chain after each of its tokens."""
    context = chunk.start if chain is not None else chunk.end
    length = len(chain.tokens) if chain is not None else 0
    depth = TREE_DEPTH if (TREE_DEPTH + 1) * branches <= room.options.max_tail else 0
    limits = [context - 1 + i % (length + 1) for i in range(branches)]
    scratch = room.scratch(chunk.blocks, branches * (depth + 1))
    return TreeRows(
        room.tokens(branches, context),
        [limit + depth + 1 for limit in limits],
        limits,
        scratch[-branches:],
        context,
        chunk.blocks,
        scratch,
    )


def prefill_parts(room: CheckRoom, rows: int) -> list[Part]:
    """The rest of a prompt whose beginning is in the cache."""
    chunk = room.chunk(0, 1, rows, PREFIX)
    return [] if chunk is None else [chunk]


def fill_context(kv: KVCache, parts: Sequence[Part]) -> None:
    """Keys and values of earlier tokens: any will do, as long as no two are equal."""
    used = used_blocks(kv, parts)
    generator = torch.Generator(kv.pool.device).manual_seed(0)
    for cache in kv.layers:
        for tensor in (cache.key, cache.value):
            shape = (len(used), *tensor.shape[1:])
            filler = torch.randn(shape, generator=generator, device=tensor.device)
            tensor[used] = filler.to(tensor.dtype)


def clear_context(kv: KVCache, parts: Sequence[Part]) -> None:
    used = used_blocks(kv, parts)
    for cache in kv.layers:
        cache.clear(used)


def used_blocks(kv: KVCache, parts: Sequence[Part]) -> Tensor:
    used = {block for part in parts for block in part.blocks}
    for part in parts:
        slots = part.scratch if isinstance(part, TreeRows) else ()
        slots = part.sources if isinstance(part, KVCopy) else slots
        used |= {slot // kv.spec.block_size for slot in slots}
    return torch.tensor(sorted(used), device=kv.pool.device)


@dataclass(frozen=True)
class VisibleKeys:
    """Keys that some rows of one sequence see."""

    rows: Tensor  # [n] of the forward
    slots: Tensor  # [keys] of the cache
    visible: Tensor  # [n, keys]


def visible_keys(
    parts: Sequence[Part], block_size: int, chosen: Sequence[int], device: torch.device
) -> list[VisibleKeys]:
    """Those of the ``chosen`` rows of a forward over ``parts``, run by run."""
    wanted, first, found = set(chosen), 0, []
    for part in parts:
        rows = [r for r in range(first, first + len(part.tokens)) if r in wanted]
        if rows and not isinstance(part, KVCopy):
            found.append(_visible_keys(part, [r - first for r in rows], first, block_size, device))
        first += len(part.tokens)
    return found


def _visible_keys(
    part: Rows, rows: list[int], first: int, block_size: int, device: torch.device
) -> VisibleKeys:
    limits = part.limits if isinstance(part, TreeRows) else part.positions
    seen = range(max(limits[r] for r in rows) + 1)
    slots = slots_at(part.blocks, seen, block_size)
    limit = torch.tensor([limits[r] for r in rows])[:, None]
    visible = torch.arange(len(seen)) <= limit
    if isinstance(part, TreeRows):
        branch = torch.arange(len(part.scratch)) % len(part.tokens)
        visible = torch.cat((visible, branch == torch.tensor(rows)[:, None]), dim=1)
        slots += part.scratch
    return VisibleKeys(
        torch.tensor([first + r for r in rows], device=device),
        torch.tensor(slots, device=device),
        visible.to(device),
    )
