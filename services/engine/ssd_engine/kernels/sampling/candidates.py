"""The cut of a row among few candidates: three kernels, which solve all but nearly flat rows.

Tokens are counted in bins by how far they lie below the likeliest one. From the counts follows in
which bins the ranking is cut; for top-p, by bounds of a token's mass in each bin. The tokens of
these bins are the candidates. One program ranks them, knowing how many tokens and how much mass
lie above. A row with more candidates than a list holds is left to ``digit_search.py``.

Bounds decide about speed alone: that the cut lies among the candidates is checked exactly.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd_engine.kernels.sampling.token_order import (
    ALL,
    ANY,
    CUT,
    MASS_UNIT,
    NO_MASS,
    highest_of,
    mass_of,
    scaled_value,
    signed_key,
    store_cut,
    tied_mass,
    tokens_before,
    value_of,
    wait_for_inputs,
)

BINS = tl.constexpr(512)
# Bins for each 1.0 that a value lies below the highest; the last bin holds all further down.
BINS_PER_UNIT = tl.constexpr(32.0)
MOST = 4096  # candidates of a row
PROGRAMS = 512  # at most so many go over the pieces of all rows
PAIRS, PAIRED = 128, 32  # so few are compared in pairs, these at a time; more, by halving
SUMS = 2  # masses of a row: of all tokens, and of those above the candidates
NUMBERS = 2  # counts of tokens of a row: above the candidates, and the candidates
HIGHEST_KEY = tl.constexpr(2147483647)
LOWEST_KEY = tl.constexpr(-2147483648)


@triton.jit
def _bin_of(value, highest):
    distance = (highest - value) * BINS_PER_UNIT
    return tl.where(distance < BINS - 1.0, distance, BINS - 1.0).to(tl.int32)


@triton.jit
def bin_kernel(
    logits,
    temperatures,
    top_k,  # [rows] int32, 0: all
    top_p,  # [rows] float64, 1: all
    maxima,  # [rows, pieces] float32
    counts,  # [rows, BINS] int32, added to
    sums,  # [rows, SUMS] int64, added to
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tokens in each bin; for top-p alone the mass of the row."""
    row = tl.program_id(1)
    wait_for_inputs(OVERLAP)
    wanted, share = tl.load(top_k + row), tl.load(top_p + row)
    if (wanted > 0) | (share < 1.0):
        highest = highest_of(maxima, row, pieces, PIECES)
        found, mass = tl.zeros((BINS,), tl.int32), tl.zeros((PIECE,), tl.int64)
        for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
            token = piece * PIECE + tl.arange(0, PIECE)
            inside = token < vocab
            value = scaled_value(logits, stride, row, token, inside, temperatures)
            found += tl.histogram(_bin_of(value, highest), BINS, mask=inside)
            best = tl.load(maxima + row * pieces + piece)
            if (wanted <= 0) & (highest - best < NO_MASS):
                mass += mass_of(value, highest)
        here = counts + row * BINS + tl.arange(0, BINS)
        tl.atomic_add(here, found, mask=found > 0, sem="relaxed")
        if wanted <= 0:
            tl.atomic_add(sums + row * SUMS, tl.sum(mass, 0), sem="relaxed")


@triton.jit
def _bins_of_share(found, limit, total):
    """The first and the last bin in which the masses from the top may reach the limit."""
    bin = tl.arange(0, BINS)
    share = tl.exp(bin.to(tl.float64) * (-1.0 / BINS_PER_UNIT)) * MASS_UNIT
    step = tl.exp(tl.full((), -1.0 / BINS_PER_UNIT, tl.float64))
    # A value's distance is rounded before it is binned: by far less than this slack.
    most = found * (tl.floor(share * 1.0001).to(tl.int64) + 1)
    least = tl.where(bin < BINS - 1, tl.floor(share * step * 0.9999).to(tl.int64), 0)
    least = found * tl.maximum(least - 1, 0)
    most_through, least_through = tl.cumsum(most, 0), tl.cumsum(least, 0)
    most_after = tl.sum(most, 0) - most_through
    least_after = tl.sum(least, 0) - least_through
    upper = tl.minimum(most_through, total - least_after).to(tl.float64)
    lower = tl.maximum(least_through, total - most_after).to(tl.float64)
    first = tl.sum((upper < limit).to(tl.int32), 0)
    return first, tl.sum((lower < limit).to(tl.int32), 0)


@triton.jit
def _bins_of_cut(counts, row, wanted, share, total):
    """The first and the last bin of the candidates, the tokens above them, and theirs."""
    bin = tl.arange(0, BINS)
    found = tl.load(counts + row * BINS + bin)
    if wanted > 0:
        last = tl.sum((tl.cumsum(found, 0) < wanted).to(tl.int32), 0)
        # Top-p needs the mass of what top-k leaves: all of these are candidates.
        first = tl.where(share < 1.0, 0, last)
    else:
        first, last = _bins_of_share(found.to(tl.int64), share * total.to(tl.float64), total)
    first, last = tl.minimum(first, BINS - 1), tl.minimum(last, BINS - 1)
    above = tl.sum(tl.where(bin < first, found, 0), 0)
    return first, last, above, tl.sum(tl.where(bin <= last, found, 0), 0) - above


@triton.jit
def collect_kernel(
    logits,
    temperatures,
    top_k,
    top_p,
    maxima,
    counts,
    sums,
    numbers,  # out [rows, NUMBERS] int32
    listed,  # [rows] int32, added to
    keys,  # out [rows, MOST] int32, in any order
    masses,  # out [rows, MOST] int64, where top-p is asked for
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    NUMBERS: tl.constexpr,
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The candidates, and for top-p the mass above them."""
    row = tl.program_id(1)
    wait_for_inputs(OVERLAP)
    wanted, share = tl.load(top_k + row), tl.load(top_p + row)
    if (wanted > 0) | (share < 1.0):
        total = tl.load(sums + row * SUMS)
        first, last, above, candidates = _bins_of_cut(counts, row, wanted, share, total)
        if tl.program_id(0) == 0:
            tl.store(numbers + row * NUMBERS, above)
            tl.store(numbers + row * NUMBERS + 1, candidates)
        if candidates <= MOST:
            highest = highest_of(maxima, row, pieces, PIECES)
            mass_above = tl.zeros((PIECE,), tl.int64)
            for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
                if _bin_of(tl.load(maxima + row * pieces + piece), highest) <= last:
                    token = piece * PIECE + tl.arange(0, PIECE)
                    inside = token < vocab
                    value = scaled_value(logits, stride, row, token, inside, temperatures)
                    bin = _bin_of(value, highest)
                    chosen = inside & (bin >= first) & (bin <= last)
                    mass = tl.zeros((PIECE,), tl.int64)
                    if share < 1.0:
                        mass = mass_of(value, highest)
                        mass_above += tl.where(bin < first, mass, 0)
                    number = tl.sum(chosen.to(tl.int32), 0)
                    if number > 0:
                        place = tl.atomic_add(listed + row, number, sem="relaxed")
                        place += tl.cumsum(chosen.to(tl.int32), 0) - 1
                        chosen = chosen & (place < MOST)
                        tl.store(keys + row * MOST + place, signed_key(value), mask=chosen)
                        if share < 1.0:
                            tl.store(masses + row * MOST + place, mass, mask=chosen)
            if share < 1.0:
                tl.atomic_add(sums + row * SUMS + 1, tl.sum(mass_above, 0), sem="relaxed")


@triton.jit
def _weights(masses, at, there, COUNTED: tl.constexpr):
    """The masses of candidates, or 1 for each where they are counted."""
    return there.to(tl.int64) if COUNTED else tl.load(masses + at, mask=there, other=0)


@triton.jit
def _lowest_by_pairs(
    keys, masses, number, above, limit, COUNTED: tl.constexpr, PAIRS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, PAIRS)
    key = tl.load(keys + at, mask=at < number, other=HIGHEST_KEY)
    higher = tl.zeros((PAIRED, PAIRS), tl.int64)
    for begin in range(0, number, PAIRED):
        other_at = begin + tl.arange(0, PAIRED)
        there = other_at < number
        other = tl.load(keys + other_at, mask=there, other=LOWEST_KEY)
        weight = _weights(masses, other_at, there, COUNTED)
        higher += tl.where(other[:, None] > key[None, :], weight[:, None], 0)
    before = above + tl.sum(higher, 0)
    kept = (at < number) & (before.to(tl.float64) < limit)
    lowest = tl.min(tl.where(kept, key, HIGHEST_KEY), 0)
    return lowest, tl.max(tl.where(kept, before, above), 0)


@triton.jit
def _lowest_by_halves(
    keys, masses, number, above, limit, COUNTED: tl.constexpr, MOST: tl.constexpr
):
    at = tl.arange(0, MOST)
    there = at < number
    key = tl.load(keys + at, mask=there, other=LOWEST_KEY)
    weight = _weights(masses, at, there, COUNTED)
    low = tl.min(tl.where(there, key, HIGHEST_KEY), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        before = above + tl.sum(tl.where(key > middle.to(tl.int32), weight, 0), 0)
        fits = before.to(tl.float64) < limit
        low, high = tl.where(fits, low, middle + 1), tl.where(fits, middle, high)
    lowest = low.to(tl.int32)
    return lowest, above + tl.sum(tl.where(key > lowest, weight, 0), 0)


@triton.jit
def _lowest_candidate(
    keys, masses, number, above, limit, COUNTED: tl.constexpr, MOST: tl.constexpr,
    PAIRS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """The lowest key before which less than the limit comes, and how much that is."""
    if number <= PAIRS:
        lowest, before = _lowest_by_pairs(
            keys, masses, number, above, limit, COUNTED, PAIRS, PAIRED
        )
    else:
        lowest, before = _lowest_by_halves(keys, masses, number, above, limit, COUNTED, MOST)
    return lowest.to(tl.int64) + 2147483648, before


@triton.jit
def _mass_above(keys, masses, number, lowest, MOST: tl.constexpr):
    """The mass of candidates with a higher key."""
    at = tl.arange(0, MOST)
    key = tl.load(keys + at, mask=at < number, other=LOWEST_KEY).to(tl.int64) + 2147483648
    mass = tl.load(masses + at, mask=at < number, other=0)
    return tl.sum(tl.where(key > lowest, mass, 0), 0)


@triton.jit
def cut_kernel(
    top_k,
    top_p,
    log_min_p,  # [rows] float32, -inf: all
    maxima,
    sums,
    numbers,
    keys,
    masses,
    solved,  # out [rows] int32
    cuts,  # out [rows, CUT] int64, where solved
    digit_counts,  # out [rows, COUNTS] int32: cleared for the search by digits, where not
    digit_masses,  # out [rows, MASSES] int64: likewise
    pieces,
    PIECES: tl.constexpr,
    SUMS: tl.constexpr,
    NUMBERS: tl.constexpr,
    MOST: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRED: tl.constexpr,
    CUT: tl.constexpr,
    COUNTS: tl.constexpr,
    MASSES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Cuts a row among its candidates; one without top-k and top-p needs none."""
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    wanted, share = tl.load(top_k + row), tl.load(top_p + row)
    highest = highest_of(maxima, row, pieces, PIECES)
    lowest, allowed = tl.zeros((), tl.int64) + ALL, tl.zeros((), tl.int64) + ANY
    inside = share >= 0.0  # the cut lies among the candidates
    if (wanted > 0) | (share < 1.0):
        above = tl.load(numbers + row * NUMBERS).to(tl.int64)
        number = tl.load(numbers + row * NUMBERS + 1)
        keys += row * MOST
        masses += row * MOST
        inside = number <= MOST
        if inside & (wanted > 0):
            inside = (above < wanted) & (wanted <= above + number)
            lowest, above = _lowest_candidate(
                keys, masses, number, above, wanted.to(tl.float64), True, MOST, PAIRS, PAIRED
            )
            allowed = wanted - above
        if inside & (share < 1.0):
            total, above = tl.load(sums + row * SUMS), tl.load(sums + row * SUMS + 1)
            reached = above + _mass_above(keys, masses, number, lowest, MOST)
            each, tied = tied_mass(lowest, allowed, highest)
            limit = share * tl.where(wanted > 0, reached + tied, total).to(tl.float64)
            if (wanted > 0) & (reached.to(tl.float64) < limit):
                allowed = tl.minimum(allowed, tokens_before(limit, reached, each))
            else:
                inside = (above.to(tl.float64) < limit) & (reached.to(tl.float64) >= limit)
                lowest, above = _lowest_candidate(
                    keys, masses, number, above, limit, False, MOST, PAIRS, PAIRED
                )
                allowed = tokens_before(limit, above, mass_of(value_of(lowest), highest))
    tl.store(solved + row, inside.to(tl.int32))
    if inside:
        store_cut(cuts, row, lowest, allowed, highest, log_min_p, CUT)
    else:
        place = tl.arange(0, COUNTS)
        tl.store(digit_counts + row * COUNTS + place, tl.zeros((COUNTS,), tl.int32))
        place = tl.arange(0, MASSES)
        tl.store(digit_masses + row * MASSES + place, tl.zeros((MASSES,), tl.int64))


class Candidates:
    """Buffers of a step's rows. ``counts``, ``sums`` and ``listed`` are to be 0 in each run."""

    def __init__(self, rows: int, pieces: int, device: torch.device) -> None:
        self._grid = (min(pieces, -(-PROGRAMS // rows)), rows)

        def zeros(*sizes: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=kind, device=device)

        self.counts, self.sums = zeros(BINS.value), zeros(SUMS, kind=torch.int64)
        self.listed, self._numbers = zeros(), zeros(NUMBERS)
        self._keys, self._masses = zeros(MOST), zeros(MOST, kind=torch.int64)
        self.solved = zeros()

    def collect(
        self, given: tuple[Tensor, ...], sizes: tuple[int, int, int], **shared: Any
    ) -> None:
        """``given``: logits, temperatures, top-k, top-p, and the maxima of pieces."""
        shared = dict(shared, SUMS=SUMS, num_warps=8)
        bin_kernel[self._grid](*given, self.counts, self.sums, *sizes, **shared)
        collect_kernel[self._grid](
            *given,
            self.counts,
            self.sums,
            self._numbers,
            self.listed,
            self._keys,
            self._masses,
            *sizes,
            NUMBERS=NUMBERS,
            MOST=MOST,
            **shared,
        )

    def cut(
        self,
        given: tuple[Tensor, ...],
        out: tuple[Tensor, Tensor, Tensor],
        pieces: int,
        **shared: Any,
    ) -> None:
        """``given``: top-k, top-p, min-p, maxima; ``out``: cuts; counts and masses of digits."""
        cut_kernel[(self.solved.shape[0],)](
            *given,
            self.sums,
            self._numbers,
            self._keys,
            self._masses,
            self.solved,
            *out,
            pieces,
            SUMS=SUMS,
            NUMBERS=NUMBERS,
            MOST=MOST,
            PAIRS=PAIRS,
            PAIRED=PAIRED,
            CUT=CUT,
            COUNTS=out[1].shape[1],
            MASSES=out[2].shape[1],
            num_warps=8,
            **shared,
        )
