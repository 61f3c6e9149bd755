"""The noise of a sample: a function of (seed, absolute position, token), nothing else.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with
key = seed and counter = (token, position low, position high, stream). There is no generator
state, so a sample does not depend on what else was sampled, and can be drawn again anywhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.kernels.cpu.noise_kernel import load_uniform_noise

MASK32 = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10

STREAM_SAMPLE = 0  # the target's own sample; other uses of noise take other streams
STREAM_DRAFT = 1  # rejection: what the draft draws from its own distribution,
STREAM_ACCEPT = 2  # the uniform that decides on it,
STREAM_RESIDUAL = 3  # and the target's token after the last accepted one

# Elements per piece: temporaries of this size stay in a core's cache.
_PIECE = 1 << 15


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Four output words for counter words c0..c3 and key words k0, k1, all int64 in [0, 2^32).

    Words broadcast against each other. A product of two 32-bit words may wrap in int64; its
    bits are right all the same, and the mask after the shift removes the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((p1 >> 32) ^ c1 ^ k0) & MASK32
        c2 = ((p0 >> 32) ^ c3 ^ k1) & MASK32
        # c1 and c3 keep stray high bits: they are only ever xored into a masked word.
        c1, c3 = p1, p0
        # So does the key: a carry beyond 32 bits only ever grows upwards.
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0, c1 & MASK32, c2, c3 & MASK32


def uniform(seed: Tensor, position: Tensor, token: Tensor, stream: int) -> Tensor:
    """Uniform noise, float64, of the broadcast shape of seed, position and token (int64).

    ``seed`` holds 64 bits as a two's complement int64. u = (x + 1/2) / 2^32 is never 0 or 1.
    """
    key = (seed & MASK32, (seed >> 32) & MASK32)
    words = (token, position & MASK32, (position >> 32) & MASK32, torch.full_like(token, stream))
    x = philox(words, key)[0]
    return (x.to(torch.float64) + 0.5) * 2.0**-32


def uniform_rows(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """One number for each row with seed [n] and position [n], float64 of 52 bits; never 0 or 1."""
    zero = torch.zeros_like(position)
    key = (seed & MASK32, (seed >> 32) & MASK32)
    words = (zero, position & MASK32, (position >> 32) & MASK32, zero + stream)
    high, low, *_ = philox(words, key)
    x = (high << 20) | (low >> 12)
    return (x.to(torch.float64) + 0.5) * 2.0**-52


def gumbel(seed: Tensor, position: Tensor, token: Tensor, stream: int = STREAM_SAMPLE) -> Tensor:
    """Standard Gumbel noise of ``uniform``'s shape; finite: it lies in [-3.14, 22.88]."""
    return _gumbel_of(uniform(seed, position, token, stream))


def _gumbel_of(uniform: Tensor) -> Tensor:
    """Takes the place of the uniform noise."""
    return uniform.log_().neg_().log_().neg_()


def gumbel_of_rows(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Noise of these tokens [n, width] of rows with seed [n] and position [n]: float64."""
    compiled = load_uniform_noise() if seed.device.type == "cpu" else None
    if compiled is not None:
        return _gumbel_of(compiled(seed, position, tokens, STREAM_SAMPLE))
    return gumbel(seed[:, None], position[:, None], tokens)


def gumbel_rows(
    seed: Tensor, position: Tensor, vocab_size: int, stream: int = STREAM_SAMPLE
) -> Tensor:
    """Noise of every token for rows with seed [n] and position [n]: [n, vocab_size] float64."""
    n = seed.shape[0]
    compiled = load_uniform_noise() if seed.device.type == "cpu" else None
    if compiled is not None:
        return _gumbel_of(compiled(seed, position, vocab_size, stream))
    out = torch.empty(n, vocab_size, dtype=torch.float64, device=seed.device)
    columns = seed[:, None], position[:, None]
    width = max(1, _PIECE // max(1, n)) if seed.device.type == "cpu" else vocab_size
    for begin in range(0, vocab_size, width):
        tokens = torch.arange(begin, min(begin + width, vocab_size), device=seed.device)
        out[:, begin : begin + width] = gumbel(*columns, tokens[None], stream)
    return out


def signed64(seed: int) -> int:
    """The int64 of the same 64 bits."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
