"""What one forward computes: plain integers, so that they can travel to other ranks as such."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a forward writes to the cache."""

    tokens: Sequence[int]
    start: int  # position of the first; all before it are in the cache
    blocks: Sequence[int]  # enough for start + len(tokens)
    num_logits: int  # how many of the last tokens need logits

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def encode_chunks(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    flat: list[int] = [len(chunks)]
    for chunk in chunks:
        flat += (len(chunk.tokens), chunk.start, len(chunk.blocks), chunk.num_logits)
        flat += chunk.tokens
        flat += chunk.blocks
    return np.array(flat, dtype=np.int32)


def decode_chunks(flat: NDArray[np.int32]) -> list[Chunk]:
    values: list[int] = flat.tolist()
    chunks, at = [], 1
    for _ in range(values[0]):
        num_tokens, start, num_blocks, num_logits = values[at : at + 4]
        at += 4
        tokens = values[at : at + num_tokens]
        blocks = values[at + num_tokens : at + num_tokens + num_blocks]
        at += num_tokens + num_blocks
        chunks.append(Chunk(tokens, start, blocks, num_logits))
    return chunks


def max_encoded_size(max_tokens: int, max_sequences: int, max_blocks_per_sequence: int) -> int:
    return 1 + max_tokens + max_sequences * (4 + max_blocks_per_sequence)
