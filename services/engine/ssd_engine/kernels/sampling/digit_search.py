"""The cut of a row by a search over all of its tokens, whatever they are: ties, nearly flat rows.

The lowest key that survives is found digit by digit: each pass counts the tokens of every next
digit, or adds up their masses, and the digit is chosen in which the ranking is cut. Pieces of a
row whose best token lies below what is looked for are passed over. Rows that were solved among
their candidates are left alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd_engine.kernels.sampling.token_order import (
    ALL,
    ANY,
    NO_MASS,
    highest_of,
    key_of,
    mass_of,
    scaled_value,
    tied_mass,
    tokens_before,
    value_of,
    wait_for_inputs,
)

# Bits of a digit: of top-k's search, which counts, and of top-p's, which adds masses up.
COUNT_BITS, MASS_DIGIT_BITS = 8, 4
PROGRAMS = 1024  # at most so many go over the pieces of all rows


@triton.jit
def _chosen_digits(sums, states, row, limit, digit, BITS: tl.constexpr):
    """Where the search stands before a digit is looked at, from what the pass before has
    added up: where the interval begins, and what lies above it."""
    DIGITS: tl.constexpr = 32 // BITS
    BINS: tl.constexpr = 1 << BITS
    begin, above = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if digit > 0:
        before = row * DIGITS + digit - 1
        begin, above = tl.load(states + 2 * before), tl.load(states + 2 * before + 1)
        place = tl.arange(0, BINS)
        found = tl.load(sums + before * BINS + place).to(tl.int64)
        higher = above + tl.sum(found, 0) - tl.cumsum(found, 0)
        chosen = tl.min(tl.where(higher.to(tl.float64) < limit, place, BINS - 1), 0)
        begin += chosen.to(tl.int64) << (32 - BITS * digit)
        above = tl.sum(tl.where(place == chosen, higher, 0), 0)
    return begin, above


@triton.jit
def _note(states, row, begin, above, digit, BITS: tl.constexpr):
    here = states + 2 * (row * (32 // BITS) + digit)
    tl.store(here, begin)
    tl.store(here + 1, above)


@triton.jit(do_not_specialize=["digit"])
def count_kernel(
    logits,
    temperatures,
    top_k,  # [rows] int32, 0: all
    maxima,
    solved,  # [rows] int32
    counts,  # [rows, digits, bins] int32, added to
    states,  # [rows, digits, 2] int64
    stride,
    vocab,
    pieces,
    digit,
    BITS: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tokens of each value of the next digit, of those with the digits that were chosen so far."""
    row = tl.program_id(1)
    wait_for_inputs(OVERLAP)
    wanted = tl.load(top_k + row)
    if (tl.load(solved + row) == 0) & (wanted > 0):
        BINS: tl.constexpr = 1 << BITS
        begin, above = _chosen_digits(counts, states, row, wanted.to(tl.float64), digit, BITS)
        if tl.program_id(0) == 0:
            _note(states, row, begin, above, digit, BITS)
        found = tl.zeros((BINS,), tl.int32)
        for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
            if key_of(tl.load(maxima + row * pieces + piece)) >= begin:
                token = piece * PIECE + tl.arange(0, PIECE)
                value = scaled_value(logits, stride, row, token, token < vocab, temperatures)
                offset = key_of(value) - begin
                place = offset >> (32 - BITS * (digit + 1))
                there = (token < vocab) & (offset >= 0) & (place < BINS)
                found += tl.histogram(tl.where(there, place, 0).to(tl.int32), BINS, mask=there)
        here = counts + (row * (32 // BITS) + digit) * BINS + tl.arange(0, BINS)
        tl.atomic_add(here, found, mask=found > 0, sem="relaxed")


@triton.jit
def _cut_of_counts(top_k, counts, states, row, BITS: tl.constexpr):
    """What top-k leaves: its lowest key, and how many tokens of just that."""
    lowest, allowed = tl.zeros((), tl.int64) + ALL, tl.zeros((), tl.int64) + ANY
    wanted = tl.load(top_k + row)
    if wanted > 0:
        limit = wanted.to(tl.float64)
        lowest, above = _chosen_digits(counts, states, row, limit, 32 // BITS, BITS)
        allowed = wanted - above
    return lowest, allowed


@triton.jit
def _mass_limit(share, masses, tied, row, BITS: tl.constexpr):
    """A token survives if less mass than this comes before it; and the mass above the ties."""
    BINS: tl.constexpr = 1 << BITS
    first = tl.load(masses + row * (32 // BITS) * BINS + tl.arange(0, BINS))  # this pass saw all
    strict = tl.sum(first, 0)
    return share * (strict + tied).to(tl.float64), strict


@triton.jit(do_not_specialize=["digit"])
def mass_kernel(
    logits,
    temperatures,
    top_k,
    top_p,  # [rows] float64, 1: all
    maxima,
    solved,
    counts,
    count_states,
    masses,  # [rows, digits, bins] int64, added to
    mass_states,
    stride,
    vocab,
    pieces,
    digit,
    COUNT_BITS: tl.constexpr,
    BITS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds up masses in the same way, of tokens that are above top-k's ties."""
    row = tl.program_id(1)
    wait_for_inputs(OVERLAP)
    share = tl.load(top_p + row)
    if (tl.load(solved + row) == 0) & (share < 1.0):
        highest = highest_of(maxima, row, pieces, PIECES)
        lowest, allowed = _cut_of_counts(top_k, counts, count_states, row, COUNT_BITS)
        _, tied = tied_mass(lowest, allowed, highest)
        limit = tl.zeros((), tl.float64)
        if digit > 0:
            limit, _ = _mass_limit(share, masses, tied, row, BITS)
        begin, above = _chosen_digits(masses, mass_states, row, limit, digit, BITS)
        if tl.program_id(0) == 0:
            _note(mass_states, row, begin, above, digit, BITS)
        least = tl.maximum(begin, lowest + 1)
        for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
            best = tl.load(maxima + row * pieces + piece)
            if (key_of(best) >= least) & (highest - best < NO_MASS):
                BINS: tl.constexpr = 1 << BITS
                token = piece * PIECE + tl.arange(0, PIECE)
                value = scaled_value(logits, stride, row, token, token < vocab, temperatures)
                key = key_of(value)
                bin = (key - begin) >> (32 - BITS * (digit + 1))
                there = (token < vocab) & (key >= least) & (bin < BINS)
                if tl.sum(there.to(tl.int32), 0) > 0:
                    mass = tl.where(there, mass_of(value, highest), 0)
                    place = tl.arange(0, BINS)
                    own = tl.where(bin[None, :] == place[:, None], mass[None, :], 0)
                    found = tl.sum(own, 1)
                    here = masses + (row * (32 // BITS) + digit) * BINS + place
                    tl.atomic_add(here, found, mask=found > 0, sem="relaxed")


@triton.jit
def searched_cut(
    top_k, top_p, counts, count_states, masses, mass_states, highest, row,
    COUNT_BITS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """What top-k and top-p leave, after all passes."""
    lowest, allowed = _cut_of_counts(top_k, counts, count_states, row, COUNT_BITS)
    share = tl.load(top_p + row)
    if share < 1.0:
        each, tied = tied_mass(lowest, allowed, highest)
        limit, strict = _mass_limit(share, masses, tied, row, BITS)
        if strict.to(tl.float64) < limit:
            allowed = tl.minimum(allowed, tokens_before(limit, strict, each))
        else:
            lowest, above = _chosen_digits(masses, mass_states, row, limit, 32 // BITS, BITS)
            allowed = tokens_before(limit, above, mass_of(value_of(lowest), highest))
    return lowest, allowed


class DigitSearch:
    """Buffers of a step's rows. ``counts`` and ``masses`` are to be 0 in rows that are searched."""

    def __init__(self, rows: int, pieces: int, device: torch.device) -> None:
        self._grid = (min(pieces, -(-PROGRAMS // rows)), rows)

        def zeros(*sizes: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=kind, device=device)

        self.counts = zeros(32 // COUNT_BITS << COUNT_BITS, kind=torch.int32)
        self.masses = zeros(32 // MASS_DIGIT_BITS << MASS_DIGIT_BITS)
        self._count_states = zeros(32 // COUNT_BITS, 2)
        self._mass_states = zeros(32 // MASS_DIGIT_BITS, 2)

    @property
    def found(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What ``searched_cut`` reads."""
        return self.counts, self._count_states, self.masses, self._mass_states

    def search(
        self,
        values: tuple[Tensor, Tensor],
        limits: tuple[Tensor, Tensor],
        rows: tuple[Tensor, Tensor],
        sizes: tuple[int, int, int],
        PIECES: int,
        **shared: Any,
    ) -> None:
        """``limits``: top-k and top-p; ``rows``: the maxima of pieces, and which are solved."""
        counted = (*values, limits[0], *rows, *self.found[:2], *sizes)
        for digit in range(32 // COUNT_BITS):
            count_kernel[self._grid](*counted, digit, BITS=COUNT_BITS, **shared)
        added = (*values, *limits, *rows, *self.found, *sizes)
        bits = dict(COUNT_BITS=COUNT_BITS, BITS=MASS_DIGIT_BITS)
        for digit in range(32 // MASS_DIGIT_BITS):
            mass_kernel[self._grid](*added, digit, **bits, PIECES=PIECES, **shared)
