"""Token ids as they travel: 4 bytes little-endian each. No torch here."""

import numpy as np


def pack_tokens(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<u4").tolist()
