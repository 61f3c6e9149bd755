"""Top-k, top-p and min-p on the device: which tokens of a row survive, without a sort.

What survives is the beginning of the ranking by value, ties by the lower id. So there is a lowest
value that survives, and a number of tokens of just this value. Both are found digit by digit: a
value is an integer that is ordered as it is; each pass counts the tokens of every next digit, or
adds up their masses, and the digit is chosen in which the ranking is cut. Counts and masses are
integers: their sums do not depend on the order in which programs add. Pieces of a row whose best
token lies below what is looked for are passed over.

The same definition as ``sampling.kept_tokens``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd_engine.cuda.elementwise import overlapping
from ssd_engine.sampling import MASS_BITS

PIECE = 1024  # tokens of one program
# Bits of a digit: of top-k's search, which counts, and of top-p's, which adds masses up.
COUNT_BITS, MASS_DIGIT_BITS = 8, 4
CUT = 2  # numbers of a row: the lowest key that survives, and how many tokens of just that
MASS_UNIT = tl.constexpr(float(1 << MASS_BITS))
NO_MASS = tl.constexpr(MASS_BITS * 0.7)  # so far below the likeliest token a mass rounds to 0
ALL = tl.constexpr(-1)  # as the lowest key: every token survives
ANY = tl.constexpr(1 << 62)  # as a number of tokens: all of them


@triton.jit
def scaled_value(logits, stride, row, token, inside, temperatures):
    """A logit divided by its row's temperature; greedy rows are divided by 1."""
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def key_of(value):
    """An integer in [0, 2^32) that is ordered as the value is; 0 and -0 are the same."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) + 2147483648


@triton.jit
def _value_of(key):
    ordered = (key - 2147483648).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(value, highest):
    """In units of 2^-MASS_BITS of the mass of the likeliest token."""
    share = tl.exp(value.to(tl.float64) - highest.to(tl.float64))
    return tl.floor(share * MASS_UNIT + 0.5).to(tl.int64)


@triton.jit
def highest_of(maxima, row, pieces, PIECES: tl.constexpr):
    piece = tl.arange(0, PIECES)
    here = maxima + row * pieces + piece
    return tl.max(tl.load(here, mask=piece < pieces, other=float("-inf")), 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prepare_kernel(
    logits,
    temperatures,
    maxima,  # out [rows, pieces] float32
    counts,  # out [rows, COUNTS] int32: cleared
    masses,  # out [rows, MASSES] int64: cleared
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    COUNTS: tl.constexpr,
    MASSES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    token = piece * PIECE + tl.arange(0, PIECE)
    value = scaled_value(logits, stride, row, token, token < vocab, temperatures)
    tl.store(maxima + row * pieces + piece, tl.max(value, 0))
    if piece == 0:
        tl.store(counts + row * COUNTS + tl.arange(0, COUNTS), tl.zeros((COUNTS,), tl.int32))
        tl.store(masses + row * MASSES + tl.arange(0, MASSES), tl.zeros((MASSES,), tl.int64))


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
    counts,  # [rows, digits, bins]
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
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    wanted = tl.load(top_k + row)
    if wanted > 0:
        begin, above = _chosen_digits(counts, states, row, wanted.to(tl.float64), digit, BITS)
        if piece == 0:
            _note(states, row, begin, above, digit, BITS)
        if key_of(tl.load(maxima + row * pieces + piece)) >= begin:
            BINS: tl.constexpr = 1 << BITS
            token = piece * PIECE + tl.arange(0, PIECE)
            value = scaled_value(logits, stride, row, token, token < vocab, temperatures)
            offset = key_of(value) - begin
            place = offset >> (32 - BITS * (digit + 1))
            there = (token < vocab) & (offset >= 0) & (place < BINS)
            found = tl.histogram(tl.where(there, place, 0).to(tl.int32), BINS, mask=there)
            here = counts + (row * (32 // BITS) + digit) * BINS + tl.arange(0, BINS)
            tl.atomic_add(here, found, mask=found > 0)


@triton.jit
def count_cut_kernel(
    top_k,
    counts,
    states,
    cuts,  # out [rows, CUT] int64
    BITS: tl.constexpr,
    CUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Top-k: all digits of the lowest key are known, and so is how many of its tokens survive."""
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    lowest, allowed = tl.zeros((), tl.int64) + ALL, tl.zeros((), tl.int64) + ANY
    wanted = tl.load(top_k + row)
    if wanted > 0:
        limit = wanted.to(tl.float64)
        lowest, above = _chosen_digits(counts, states, row, limit, 32 // BITS, BITS)
        allowed = wanted - above
    tl.store(cuts + row * CUT, lowest)
    tl.store(cuts + row * CUT + 1, allowed)


@triton.jit
def _tied_mass(lowest, allowed, highest):
    """The mass of one token with the lowest key that top-k leaves, and of all such tokens."""
    each = tl.zeros((), tl.int64)
    if lowest > ALL:
        each = mass_of(_value_of(lowest), highest)
    return each, each * tl.where(lowest > ALL, allowed, 0)


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
    top_p,  # [rows] float64, 1: all
    maxima,
    masses,  # [rows, digits, bins]
    states,
    cuts,
    stride,
    vocab,
    pieces,
    digit,
    BITS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    CUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Likewise for masses, of tokens that are above top-k's ties."""
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    share = tl.load(top_p + row)
    if share < 1.0:
        highest = highest_of(maxima, row, pieces, PIECES)
        lowest, allowed = tl.load(cuts + row * CUT), tl.load(cuts + row * CUT + 1)
        _, tied = _tied_mass(lowest, allowed, highest)
        limit = tl.zeros((), tl.float64)
        if digit > 0:
            limit, _ = _mass_limit(share, masses, tied, row, BITS)
        begin, above = _chosen_digits(masses, states, row, limit, digit, BITS)
        if piece == 0:
            _note(states, row, begin, above, digit, BITS)
        best = tl.load(maxima + row * pieces + piece)
        if (key_of(best) >= tl.maximum(begin, lowest + 1)) & (highest - best < NO_MASS):
            BINS: tl.constexpr = 1 << BITS
            token = piece * PIECE + tl.arange(0, PIECE)
            value = scaled_value(logits, stride, row, token, token < vocab, temperatures)
            key = key_of(value)
            bin = (key - begin) >> (32 - BITS * (digit + 1))
            there = (token < vocab) & (key > lowest) & (key >= begin) & (bin < BINS)
            if tl.sum(there.to(tl.int32), 0) > 0:
                mass = tl.where(there, mass_of(value, highest), 0)
                place = tl.arange(0, BINS)
                own = tl.where(bin[None, :] == place[:, None], mass[None, :], 0)
                found = tl.sum(own, 1)
                here = masses + (row * (32 // BITS) + digit) * BINS + place
                tl.atomic_add(here, found, mask=found > 0)


@triton.jit
def mass_cut_kernel(
    top_p,
    log_min_p,  # [rows] float32, -inf: all
    maxima,
    masses,
    states,
    cuts,  # in: what top-k leaves; out: what all leave
    pieces,
    BITS: tl.constexpr,
    PIECES: tl.constexpr,
    CUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    lowest, allowed = tl.load(cuts + row * CUT), tl.load(cuts + row * CUT + 1)
    highest = highest_of(maxima, row, pieces, PIECES)
    share = tl.load(top_p + row)
    if share < 1.0:
        each, tied = _tied_mass(lowest, allowed, highest)
        limit, strict = _mass_limit(share, masses, tied, row, BITS)
        if strict.to(tl.float64) < limit:
            allowed = tl.minimum(allowed, _tokens_before(limit, strict, each))
        else:
            lowest, above = _chosen_digits(masses, states, row, limit, 32 // BITS, BITS)
            allowed = _tokens_before(limit, above, mass_of(_value_of(lowest), highest))
    bound = key_of(highest + tl.load(log_min_p + row))
    allowed = tl.where(bound > lowest, ANY, allowed)
    tl.store(cuts + row * CUT, tl.maximum(bound, lowest))
    tl.store(cuts + row * CUT + 1, allowed)


@triton.jit
def _tokens_before(limit, mass, each):
    """The number of tokens of mass ``each``, after ``mass``, before which less than limit comes."""
    count = tl.floor((limit - mass.to(tl.float64)) / tl.maximum(each, 1).to(tl.float64))
    count = tl.maximum(count, 0.0).to(tl.int64)
    count += (mass + count * each).to(tl.float64) < limit
    count += (mass + count * each).to(tl.float64) < limit
    count -= (count > 0) & ((mass + (count - 1) * each).to(tl.float64) >= limit)
    return tl.where(each > 0, count, ANY)


@triton.jit
def tie_kernel(
    logits,
    temperatures,
    maxima,
    cuts,
    ties,  # out [rows, pieces] int32: tokens of the lowest key
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    CUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    if tl.load(cuts + row * CUT + 1) < ANY:
        lowest, found = tl.load(cuts + row * CUT), 0
        if key_of(tl.load(maxima + row * pieces + piece)) >= lowest:
            token = piece * PIECE + tl.arange(0, PIECE)
            value = scaled_value(logits, stride, row, token, token < vocab, temperatures)
            found = tl.sum(((token < vocab) & (key_of(value) == lowest)).to(tl.int32), 0)
        tl.store(ties + row * pieces + piece, found)


@triton.jit
def survives(
    value, inside, row, piece, pieces, cuts, ties, CUT: tl.constexpr, PIECES: tl.constexpr
):
    """Which tokens of a piece survive the filters of their row."""
    lowest, allowed = tl.load(cuts + row * CUT), tl.load(cuts + row * CUT + 1)
    key = key_of(value)
    kept = inside & (key >= lowest)
    if allowed < ANY:
        others = tl.arange(0, PIECES)
        before = tl.sum(tl.load(ties + row * pieces + others, mask=others < piece, other=0), 0)
        tied = kept & (key == lowest)
        rank = before + tl.cumsum(tied.to(tl.int32), 0) - 1
        kept = kept & ((key > lowest) | (rank < allowed))
    return kept


_Values = tuple[Tensor, Tensor]  # logits, and the temperatures of their rows
_Sizes = tuple[int, int, int]  # numbers between two rows, tokens, pieces


class Filters:
    """The cut of every row of a step, found anew in each of its runs."""

    def __init__(self, rows: int, vocab: int, device: torch.device, overlap: bool) -> None:
        self._rows, self._vocab = rows, vocab
        self.pieces = -(-vocab // PIECE)
        self.padded = triton.next_power_of_2(self.pieces)
        self._grid = (self.pieces, rows)
        self._options = overlapping(overlap)

        def empty(*sizes: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=kind, device=device)

        self._maxima = empty(self.pieces, kind=torch.float32)
        self._counts = empty(32 // COUNT_BITS << COUNT_BITS, kind=torch.int32)
        self._masses = empty(32 // MASS_DIGIT_BITS << MASS_DIGIT_BITS)
        self._count_states = empty(32 // COUNT_BITS, 2)
        self._mass_states = empty(32 // MASS_DIGIT_BITS, 2)
        self.cuts = empty(CUT)
        self.ties = empty(self.pieces, kind=torch.int32)

    def find(
        self,
        logits: Tensor,
        temperatures: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        log_min_p: Tensor,
    ) -> None:
        values, sizes = (logits, temperatures), (logits.stride(0), self._vocab, self.pieces)
        self._prepare(values, sizes)
        self._cut_by_count(values, sizes, top_k)
        self._cut_by_mass(values, sizes, top_p, log_min_p)
        tie_kernel[self._grid](
            *values,
            self._maxima,
            self.cuts,
            self.ties,
            *sizes,
            PIECE=PIECE,
            CUT=CUT,
            **self._options,
        )

    def _prepare(self, values: _Values, sizes: _Sizes) -> None:
        prepare_kernel[self._grid](
            *values,
            self._maxima,
            self._counts,
            self._masses,
            *sizes,
            PIECE=PIECE,
            COUNTS=self._counts.shape[1],
            MASSES=self._masses.shape[1],
            **self._options,
        )

    def _cut_by_count(self, values: _Values, sizes: _Sizes, top_k: Tensor) -> None:
        found = (self._counts, self._count_states)
        for digit in range(32 // COUNT_BITS):
            count_kernel[self._grid](
                *values,
                top_k,
                self._maxima,
                *found,
                *sizes,
                digit,
                BITS=COUNT_BITS,
                PIECE=PIECE,
                **self._options,
            )
        count_cut_kernel[(self._rows,)](
            top_k, *found, self.cuts, BITS=COUNT_BITS, CUT=CUT, **self._options
        )

    def _cut_by_mass(
        self, values: _Values, sizes: _Sizes, top_p: Tensor, log_min_p: Tensor
    ) -> None:
        """Top-p of what top-k leaves; min-p."""
        found = (self._masses, self._mass_states)
        shared = dict(BITS=MASS_DIGIT_BITS, PIECES=self.padded, CUT=CUT, **self._options)
        for digit in range(32 // MASS_DIGIT_BITS):
            mass_kernel[self._grid](
                *values,
                top_p,
                self._maxima,
                *found,
                self.cuts,
                *sizes,
                digit,
                PIECE=PIECE,
                **shared,
            )
        mass_cut_kernel[(self._rows,)](
            top_p, log_min_p, self._maxima, *found, self.cuts, self.pieces, **shared
        )
