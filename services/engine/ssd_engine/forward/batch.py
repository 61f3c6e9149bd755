"""What one forward computes: plain integers, so that they can travel to other ranks as such."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import SamplingParams


class Drawing(IntEnum):
    """How much a step does to draw its tokens. Each kind does what those before it do, too."""

    PLAIN = 0  # temperatures
    FILTERED = 1  # top-k, top-p and min-p
    ADJUSTED = 2  # penalties, logit bias and grammars
    REPORTED = 3  # log probabilities of what was drawn


class Draw(NamedTuple):
    """Everything besides its logits that it takes to draw a row's token, where the logits are."""

    seed: int
    temperature: float  # 0: greedy
    position: int  # absolute, of the token to be drawn
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    history: History | None = None
    recent: int = 0  # tokens of the row's run, up to its own, that come after history and path
    path: Sequence[int] = ()  # a draft's, after the history; only told where there is one
    top_logprobs: int = -1  # reported with log probabilities, of so many likeliest too; -1: none
    # A draft's, for rejection: so many of the likeliest are down-weighted; -1: coupled.
    width: int = -1
    down_weight: float = 1.0

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        position: int,
        history: History | None = None,
        recent: int = 0,
        path: Sequence[int] = (),
        top_logprobs: int = -1,
    ) -> "Draw":
        filters = (0, 1.0, 0.0) if params.greedy else (params.top_k, params.top_p, params.min_p)
        noise = (params.seed, params.temperature, position)
        return cls(*noise, *filters, history, recent, path, top_logprobs)

    def moved(self, by: int) -> "Draw":
        """The same draw, so many tokens further."""
        before, after = self[:_POSITION], self[_POSITION + 1 :]
        return tuple.__new__(Draw, (*before, self.position + by, *after))

    @property
    def drawing(self) -> Drawing:
        if self.top_logprobs >= 0:
            return Drawing.REPORTED
        if self.history is not None:
            return Drawing.ADJUSTED
        return Drawing.FILTERED if self.filters else Drawing.PLAIN

    @property
    def is_held(self) -> bool:
        """Whether the token has to follow a grammar."""
        return self.history is not None and self.history.grammar is not None

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def signed_seed(self) -> int:
        """The int64 of the same 64 bits."""
        return self.seed - (1 << 64) if self.seed >= 1 << 63 else self.seed


_POSITION = Draw._fields.index("position")


def drawing_of(draws: Sequence[Draw | None]) -> Drawing:
    """The kind of a step that draws all of these."""
    return max((draw.drawing for draw in draws if draw is not None), default=Drawing.PLAIN)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a forward writes to the cache."""

    tokens: Sequence[int]
    start: int  # position of the first; all before it are in the cache
    blocks: Sequence[int]  # enough for start + len(tokens)
    num_logits: int  # how many of the last tokens need logits
    num_scored: int = 0  # how many of the first tokens are told how likely what follows them is

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def positions(self) -> range:
        return range(self.start, self.end)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """One depth of several continuations of one sequence: one row for each of them.

    Row i sees the sequence's positions up to ``limits[i]``, which are in the cache, and of the
    slots in ``scratch``, as many for each depth as there are rows, those of its own branch: i,
    i + rows, and so on. All rows need logits.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    limits: Sequence[int]
    slots: Sequence[int]  # where the rows' own KV goes: the last ones of the scratch
    context: int  # positions that every row sees
    blocks: Sequence[int]  # enough for the highest limit
    scratch: Sequence[int]

    @property
    def num_logits(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class KVCopy:
    """Consecutive tokens of one sequence that were computed elsewhere in the cache, as a branch.

    They are copied to where they belong before anything is computed.
    """

    sources: Sequence[int]  # slots
    start: int  # position of the first
    blocks: Sequence[int]  # enough for start + len(sources)

    tokens: ClassVar[Sequence[int]] = ()
    num_logits: ClassVar[int] = 0

    @property
    def end(self) -> int:
        return self.start + len(self.sources)

    @property
    def positions(self) -> range:
        return range(self.start, self.end)


Rows = Chunk | TreeRows
Part = Rows | KVCopy  # a sequence's share of a forward has one or more

_CHUNK, _TREE, _MOVED = 0, 1, 2
_NUMBERS_OF_PART = 6  # before its lists
_PARTS_OF_TREE = 3  # parts of one sequence: what was moved, what is new, the branches


def slots_at(blocks: Sequence[int], positions: Iterable[int], size: int) -> list[int]:
    """Where the cache has these positions of a sequence with these blocks of ``size``."""
    return [blocks[p // size] * size + p % size for p in positions]


def slots_of(part: Part, size: int) -> Sequence[int]:
    """Where the cache has the rows of a part."""
    return part.slots if isinstance(part, TreeRows) else slots_at(part.blocks, part.positions, size)


def logit_rows(parts: Sequence[Part]) -> list[int]:
    """Rows of a forward that need logits."""
    ends = accumulate(len(part.tokens) for part in parts)
    return [
        row
        for part, end in zip(parts, ends, strict=True)
        for row in range(end - part.num_logits, end)
    ]


def scored_rows(parts: Sequence[Part]) -> list[int]:
    """Rows of a forward whose tokens are scored."""
    begins = accumulate((len(part.tokens) for part in parts), initial=0)
    return [
        row
        for part, begin in zip(parts, begins, strict=False)
        if isinstance(part, Chunk)
        for row in range(begin, begin + part.num_scored)
    ]


def encode_parts(parts: Sequence[Part]) -> NDArray[np.int32]:
    flat: list[int] = [len(parts)]
    for part in parts:
        if isinstance(part, Chunk):
            flat += (_CHUNK, len(part.tokens), part.start, len(part.blocks), part.num_logits)
            flat.append(part.num_scored)
            flat += (*part.tokens, *part.blocks)
        elif isinstance(part, KVCopy):
            flat += (_MOVED, len(part.sources), part.start, len(part.blocks), 0, 0)
            flat += (*part.sources, *part.blocks)
        else:
            flat += (_TREE, len(part.tokens), part.context, len(part.blocks), len(part.scratch), 0)
            flat += (*part.tokens, *part.positions, *part.limits, *part.slots)
            flat += (*part.blocks, *part.scratch)
    return np.array(flat, dtype=np.int32)


class _Reader:
    def __init__(self, flat: NDArray[np.int32]) -> None:
        self._values: list[int] = flat.tolist()
        self._at = 0

    def take(self, count: int) -> list[int]:
        self._at += count
        return self._values[self._at - count : self._at]


def decode_parts(flat: NDArray[np.int32]) -> list[Part]:
    reader = _Reader(flat)
    return [_decode_part(reader) for _ in range(reader.take(1)[0])]


def _decode_part(reader: _Reader) -> Part:
    kind, rows, start, num_blocks, last, scored = reader.take(_NUMBERS_OF_PART)
    if kind == _CHUNK:
        return Chunk(reader.take(rows), start, reader.take(num_blocks), last, scored)
    if kind == _MOVED:
        return KVCopy(reader.take(rows), start, reader.take(num_blocks))
    tokens, positions, limits, slots = (reader.take(rows) for _ in range(4))
    blocks, scratch = reader.take(num_blocks), reader.take(last)
    return TreeRows(tokens, positions, limits, slots, start, blocks, scratch)


def max_encoded_size(
    max_tokens: int, max_sequences: int, max_blocks_per_sequence: int, max_tail: int = 0
) -> int:
    """The most integers of an encoded forward; ``max_tail`` is 0 where there are no trees."""
    per_token = 4 if max_tail else 1
    per_part = _NUMBERS_OF_PART + max_blocks_per_sequence + max_tail
    parts = max_sequences * (_PARTS_OF_TREE if max_tail else 1)
    return 1 + max_tokens * per_token + parts * per_part
