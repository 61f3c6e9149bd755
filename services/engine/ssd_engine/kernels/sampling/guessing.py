"""A draft's guesses on the device: the best tokens of every row, and what rejection draws.

Only the likeliest tokens of a row are looked at, as in ``guesses.py``: filters, noise and ranking
are a matter of these few, so that they cost next to nothing. They are found in two steps, by the
best token of each leaf: the likeliest tokens lie in the leaves with the best ones. A draft's sums
may be rounded: they decide about speed, not about text.

In a row that is verified by rejection the likeliest tokens are ranked, and one is drawn from sigma,
which is reported as the weights that are shipped.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd_engine.forward.step_inputs import StepInputs
from ssd_engine.kernels.elementwise import overlapping
from ssd_engine.kernels.sampling.drawing import LEAF, gumbel
from ssd_engine.kernels.sampling.filtering import PIECE, wait_for_inputs
from ssd_engine.sampling import guesses as guessing
from ssd_engine.sampling.noise import STREAM_DRAFT
from ssd_engine.sampling.rejection import LIKELIEST, WIRE, smallest_weight

LOWEST = tl.constexpr(-(1 << 31))  # the lowest key
FILTERED, FIRST = tl.constexpr(guessing.FILTERED), tl.constexpr(guessing.FIRST)


@triton.jit
def leaf_kernel(
    logits,
    temperatures,
    best,  # out [rows, leaves] float32
    maxima,  # out [rows, pieces] float32: divided by the temperature
    sums,  # out [rows, pieces] float32: of exp(value - maximum)
    stride,  # elements between two rows of logits
    vocab,
    leaves,
    pieces,
    LEAF: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    token = piece * PIECE + tl.arange(0, PIECE)
    here = logits + row.to(tl.int64) * stride + token
    x = tl.load(here, mask=token < vocab, other=float("-inf"))
    leaf = piece * (PIECE // LEAF) + tl.arange(0, PIECE // LEAF)
    highest = tl.max(tl.reshape(x, (PIECE // LEAF, LEAF)), 1)
    tl.store(best + row * leaves + leaf, highest, mask=leaf < leaves)
    temperature = tl.load(temperatures + row)
    value = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    maximum = tl.max(value, 0)
    share = tl.where(value > float("-inf"), tl.exp(value - maximum), 0.0)
    tl.store(maxima + row * pieces + piece, maximum)
    tl.store(sums + row * pieces + piece, tl.sum(share, 0))


@triton.jit
def _key_of(x):
    """An integer that is ordered as x is; 0 and -0 are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _places(key, there, wanted):
    """Which are the ``wanted`` highest, ties by the lower index, and the place of each of these in
    the order of indices. Two bits of the lowest are found at a time, by three counts in one sum."""
    lowest = tl.full((), LOWEST, tl.int64)  # at least so many reach it
    for digit in tl.static_range(16):
        found = tl.zeros(key.shape, tl.int64)
        for i in tl.static_range(3):
            bound = (lowest + ((i + 1) << (30 - 2 * digit))).to(tl.int32)
            found += (there & (key >= bound)).to(tl.int64) << (20 * i)
        counts = tl.sum(found, 0)
        for i in tl.static_range(3):
            enough = ((counts >> (20 * i)) & 0xFFFFF) >= wanted
            lowest += enough.to(tl.int64) << (30 - 2 * digit)
    bound = lowest.to(tl.int32)
    above, tied = there & (key > bound), there & (key == bound)
    reached = tl.cumsum((above.to(tl.int32) << 16) | tied.to(tl.int32), 0)
    allowed = wanted - tl.sum(above.to(tl.int32), 0)
    ties = reached & 0xFFFF
    chosen = above | (tied & (ties <= allowed))
    return chosen, (reached >> 16) + tl.minimum(ties, allowed) - 1


@triton.jit
def best_leaves_kernel(
    best,
    chosen,  # out [rows, MOST] int32; -1 where there are no more
    leaves,
    wanted,
    MOST: tl.constexpr,
    LEAVES: tl.constexpr,  # a power of 2
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    leaf, slot = tl.arange(0, LEAVES), tl.arange(0, MOST)
    x = tl.load(best + row * leaves + leaf, mask=leaf < leaves, other=float("-inf"))
    taken, place = _places(_key_of(x), leaf < leaves, wanted)
    tl.store(chosen + row * MOST + slot, tl.full((MOST,), -1, tl.int32), mask=slot >= wanted)
    tl.store(chosen + row * MOST + place, leaf, mask=taken)


@triton.jit
def likeliest_kernel(
    logits,
    chosen,
    tokens,  # out [rows, MOST] int32, lowest id first; -1 where there are no more
    stride,
    vocab,
    wanted,
    MOST: tl.constexpr,
    LEAF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    slot = tl.arange(0, MOST)
    leaf = tl.load(chosen + row * MOST + slot)
    token = leaf[:, None] * LEAF + tl.arange(0, LEAF)[None, :]
    there = (leaf >= 0)[:, None] & (token < vocab)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=there, other=float("-inf"))
    x, token = tl.reshape(x, (MOST * LEAF,)), tl.reshape(token, (MOST * LEAF,))
    there = tl.reshape(there, (MOST * LEAF,))
    taken, place = _places(_key_of(x), there, wanted)
    tl.store(tokens + row * MOST + slot, tl.full((MOST,), -1, tl.int32), mask=slot >= wanted)
    tl.store(tokens + row * MOST + place, token, mask=taken)


@triton.jit
def _before(score, there):
    """[n, n]: whether the second comes before the first in a ranking; ties by the lower index."""
    index = tl.arange(0, score.shape[0])
    mine, other = score[:, None], score[None, :]
    earlier = index[None, :] < index[:, None]
    return there[None, :] & ((other > mine) | ((other == mine) & earlier))


@triton.jit
def _kept(
    value,
    mass,
    highest,
    there,
    ahead,
    rank,
    row,
    each_row,
    maxima,
    sums,
    top_k,
    top_p,
    log_min_p,
    pieces,
    PIECES: tl.constexpr,
):
    """Which of the likeliest tokens the filters of their row leave."""
    piece = tl.arange(0, PIECES)
    each = tl.load(sums + row * pieces + piece, mask=piece < pieces, other=0.0).to(tl.float64)
    most = tl.load(maxima + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    scale = tl.exp(most.to(tl.float64) - highest)
    total = tl.sum(tl.where(most > float("-inf"), each * scale, 0.0), 0)
    k, share = tl.load(top_k + each_row), tl.load(top_p + each_row)
    within = there & ((k == 0) | (rank < k))
    few = (k > 0) & (k <= value.shape[0])
    total = tl.where(few, tl.sum(tl.where(within, mass, 0.0), 0), total)
    reached = tl.sum(tl.where(ahead, mass[None, :], 0.0), 1)
    limit = tl.where(share < 1.0, share * total, float("inf"))
    bound = highest + tl.load(log_min_p + row).to(tl.float64)
    return within & (reached < limit) & (value >= bound)


@triton.jit
def _weights(kept, mass, rank, width, down_weight, smallest):
    """Sigma as it is shipped: ``rejection.draft_distribution``."""
    q = tl.where(kept, mass, 0.0)
    q = q / tl.sum(q, 0)
    weighted = tl.where(rank < width, q * down_weight.to(tl.float64), q)
    left = tl.sum(weighted, 0)
    q = tl.where(left > 0, weighted / left, q)
    return tl.where(q < smallest, 0.0, q).to(tl.float32).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _draw_weight(weight, seed, position, STREAM: tl.constexpr):
    """An index, in proportion to the weights: ``rejection.draw_from``."""
    index = tl.arange(0, weight.shape[0])
    zero = (index * 0).to(tl.uint32)
    high, low, _, _ = tl.philox(seed, zero, zero + position, zero, zero + STREAM, 10)
    word = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    wide = weight.to(tl.float64)
    at = (word.to(tl.float64) + 0.5) * 2.220446049250313e-16 * tl.sum(wide, 0)
    beyond = tl.sum((tl.cumsum(wide, 0) <= at).to(tl.int32), 0)
    return tl.minimum(beyond, tl.max(tl.where(weight > 0, index, 0), 0))


@triton.jit
def guess_kernel(
    logits,
    tokens,
    maxima,
    sums,
    seeds,  # [rows] int64
    temperatures,  # [rows] float32, 0: greedy
    positions,  # [rows] of the token to be guessed
    top_k,  # [rows] int32, 0: all
    top_p,  # [rows] float64
    log_min_p,  # [rows] float32
    widths,  # [rows] int32: rejection, so many are down-weighted; -1: coupled
    down_weights,  # [rows] float32
    out,  # [rows, RANKS + 1 + 2 * MOST] int32: see ``Guesses``
    last,  # [rows] the tokens that follow, once more
    stride,
    vocab,
    pieces,
    smallest,  # weight that is shipped
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,  # RANKS as a power of 2
    MOST: tl.constexpr,
    PIECES: tl.constexpr,  # a power of 2
    STREAM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    slot = tl.arange(0, MOST)
    token = tl.load(tokens + row * MOST + slot)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token >= 0, other=float("-inf"))
    each_row = row + slot * 0
    temperature, width = tl.load(temperatures + each_row), tl.load(widths + each_row)
    greedy, warm = temperature <= 0, temperature > 0
    coupled, rejecting = width < 0, width >= 0
    value = tl.div_rn(x, tl.where(greedy, 1.0, temperature)).to(tl.float64)
    there = (token >= 0) & (value > float("-inf"))
    highest = tl.max(tl.where(there, value, float("-inf")), 0)
    mass = tl.where(there, tl.exp(value - highest), 0.0)

    ahead = _before(value, there)
    rank = tl.sum(ahead.to(tl.int32), 1)
    kept = _kept(
        value, mass, highest, there, ahead, rank, row, each_row, maxima, sums, top_k, top_p,
        log_min_p, pieces, PIECES,
    )  # fmt: skip
    kept = (kept & warm) | (there & greedy & (rank == 0))

    # The best: by the target's noise, or where that is its own, the likeliest. Tokens that the
    # filters leave out come after the best of the others.
    seed, position = tl.load(seeds + row), tl.load(positions + row).to(tl.uint32)
    zero = (slot * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, token.to(tl.uint32), zero + position, zero, zero, 10)
    drawn = coupled & warm
    score = tl.where(drawn, value + gumbel(word), value)
    is_first = drawn & kept & (score == tl.max(tl.where(kept, score, float("-inf")), 0))
    score = tl.where(drawn & ~kept, score - FILTERED, score)
    score = tl.where(is_first, score + FIRST, score)
    place = tl.sum(_before(score, there).to(tl.int32), 1)
    count = tl.sum(there.to(tl.int32), 0)
    line, r = out + row * (RANKS + 1 + 2 * MOST), tl.arange(0, WIDTH)
    tl.store(line + r, tl.full((WIDTH,), -1, tl.int32), mask=(r >= count) & (r < RANKS))
    tl.store(line + place, token, mask=there & (place < RANKS))

    # Sigma, and what is drawn from it.
    weight = _weights(kept, mass, rank, width, tl.load(down_weights + row), smallest)
    at = _draw_weight(weight, seed, position, STREAM)
    follows = (coupled & there & (place == 0)) | (rejecting & (slot == at))
    next_token = tl.max(tl.where(follows, token, 0), 0)
    tl.store(line + RANKS, next_token)
    tl.store(last + row, tl.minimum(tl.maximum(next_token, 0), vocab - 1))
    tl.store(line + RANKS + 1 + slot, token)
    tl.store(line + RANKS + 1 + MOST + slot, weight.to(tl.int32, bitcast=True))


class Guesses:
    """Every row of a step gets a line of ``width`` numbers: its best tokens, the one that follows,
    and sigma's tokens and weights (the bits of float32)."""

    def __init__(
        self, rows: int, vocab: int, ranks: int, device: torch.device, overlap: bool
    ) -> None:
        self._rows, self._vocab, self._ranks = rows, vocab, ranks
        self._leaves, self._pieces = -(-vocab // LEAF), -(-vocab // PIECE)
        self._options = overlapping(overlap)
        self.width = line_width(ranks)

        def empty(*sizes: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=kind, device=device)

        self._best = empty(self._leaves)
        self._maxima, self._sums = empty(self._pieces), empty(self._pieces)
        self._chosen = empty(LIKELIEST, kind=torch.int32)
        self._tokens = empty(LIKELIEST, kind=torch.int32)

    def make(self, logits: Tensor, inputs: StepInputs, out: Tensor, last: Tensor) -> None:
        self._find_likeliest(logits, inputs["temperatures"])
        names = ("seeds", "temperatures", "draw_positions", "top_k", "top_p", "log_min_p")
        guess_kernel[(self._rows,)](
            logits,
            self._tokens,
            self._maxima,
            self._sums,
            *(inputs[name] for name in names),
            inputs["widths"],
            inputs["down_weights"],
            out,
            last,
            logits.stride(0),
            self._vocab,
            self._pieces,
            smallest_weight(WIRE),
            RANKS=self._ranks,
            WIDTH=triton.next_power_of_2(self._ranks),
            MOST=LIKELIEST,
            PIECES=triton.next_power_of_2(self._pieces),
            STREAM=STREAM_DRAFT,
            num_warps=2,  # most of its time goes into sums over few numbers
            **self._options,
        )

    def _find_likeliest(self, logits: Tensor, temperatures: Tensor) -> None:
        leaf_kernel[(self._pieces, self._rows)](
            logits,
            temperatures,
            self._best,
            self._maxima,
            self._sums,
            logits.stride(0),
            self._vocab,
            self._leaves,
            self._pieces,
            LEAF=LEAF,
            PIECE=PIECE,
            **self._options,
        )
        best_leaves_kernel[(self._rows,)](
            self._best,
            self._chosen,
            self._leaves,
            min(LIKELIEST, self._leaves),
            MOST=LIKELIEST,
            LEAVES=triton.next_power_of_2(self._leaves),
            **self._options,
        )
        likeliest_kernel[(self._rows,)](
            logits,
            self._chosen,
            self._tokens,
            logits.stride(0),
            self._vocab,
            min(LIKELIEST, self._vocab),
            MOST=LIKELIEST,
            LEAF=LEAF,
            num_warps=8,
            **self._options,
        )


def line_width(ranks: int) -> int:
    return ranks + 1 + 2 * LIKELIEST
