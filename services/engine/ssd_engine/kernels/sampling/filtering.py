"""Top-k, top-p and min-p on the device: which tokens of a row survive, without a sort.

What survives is the beginning of the ranking by value, ties by the lower id. So there is a lowest
value that survives, and a number of tokens of just this value: the row's cut. It is found among
few candidates (``candidates.py``), and where these are too many by a search over all tokens
(``digit_search.py``), whose passes have nothing to do in the usual case. Both give the same cut.

The definition is that of ``sampler.kept_tokens``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd_engine.kernels.elementwise import overlapping
from ssd_engine.kernels.sampling.candidates import Candidates
from ssd_engine.kernels.sampling.digit_search import (
    COUNT_BITS,
    MASS_DIGIT_BITS,
    DigitSearch,
    searched_cut,
)
from ssd_engine.kernels.sampling.token_order import (
    ANY,
    CUT,
    highest_of,
    key_of,
    scaled_value,
    store_cut,
)
from ssd_engine.kernels.sampling.token_order import MASS_UNIT as MASS_UNIT
from ssd_engine.kernels.sampling.token_order import NO_MASS as NO_MASS
from ssd_engine.kernels.sampling.token_order import mass_of as mass_of
from ssd_engine.kernels.sampling.token_order import wait_for_inputs as wait_for_inputs

PIECE = 1024  # tokens that are looked at together


@triton.jit
def prepare_kernel(
    logits,
    temperatures,
    maxima,  # out [rows, pieces] float32
    counts,  # out [rows, COUNTS] int32: cleared
    sums,  # out [rows, SUMS] int64: cleared
    listed,  # out [rows] int32: cleared
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    COUNTS: tl.constexpr,
    SUMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    token = piece * PIECE + tl.arange(0, PIECE)
    value = scaled_value(logits, stride, row, token, token < vocab, temperatures)
    tl.store(maxima + row * pieces + piece, tl.max(value, 0))
    if piece == 0:
        tl.store(counts + row * COUNTS + tl.arange(0, COUNTS), tl.zeros((COUNTS,), tl.int32))
        tl.store(sums + row * SUMS + tl.arange(0, SUMS), tl.zeros((SUMS,), tl.int64))
        tl.store(listed + row, 0)


@triton.jit
def tie_kernel(
    logits,
    temperatures,
    top_k,
    top_p,
    log_min_p,  # [rows] float32, -inf: all
    maxima,
    solved,
    counts,
    count_states,
    masses,
    mass_states,
    cuts,  # [rows, CUT] int64: in, where solved; out, where searched for
    ties,  # out [rows, pieces] int32: tokens of the lowest key
    stride,
    vocab,
    pieces,
    COUNT_BITS: tl.constexpr,
    MASS_BITS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    CUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    if tl.load(solved + row) > 0:
        lowest, allowed = tl.load(cuts + row * CUT), tl.load(cuts + row * CUT + 1)
    else:  # every program of the row writes the same
        highest = highest_of(maxima, row, pieces, PIECES)
        lowest, allowed = searched_cut(
            top_k, top_p, counts, count_states, masses, mass_states, highest, row,
            COUNT_BITS, MASS_BITS,
        )  # fmt: skip
        lowest, allowed = store_cut(cuts, row, lowest, allowed, highest, log_min_p, CUT)
    if allowed < ANY:
        found = 0
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


class Filters:
    """The cut of every row of a step, found anew in each of its runs."""

    def __init__(self, rows: int, vocab: int, device: torch.device, overlap: bool) -> None:
        self._rows, self._vocab = rows, vocab
        self.pieces = -(-vocab // PIECE)
        self.padded = triton.next_power_of_2(self.pieces)
        self._options = overlapping(overlap)
        self._maxima = torch.zeros(rows, self.pieces, device=device)
        self._candidates = Candidates(rows, self.pieces, device)
        self._digits = DigitSearch(rows, self.pieces, device)
        self.cuts = torch.zeros(rows, CUT, dtype=torch.int64, device=device)
        self.ties = torch.zeros(rows, self.pieces, dtype=torch.int32, device=device)

    def find(
        self,
        logits: Tensor,
        temperatures: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        log_min_p: Tensor,
    ) -> None:
        values, sizes = (logits, temperatures), (logits.stride(0), self._vocab, self.pieces)
        candidates, digits = self._candidates, self._digits
        limits, maxima, solved = (top_k, top_p), self._maxima, candidates.solved
        padded = dict(PIECES=self.padded, **self._options)
        self._prepare(values, sizes)
        candidates.collect((*values, *limits, maxima), sizes, PIECE=PIECE, **padded)
        out = (self.cuts, digits.counts, digits.masses)
        candidates.cut((*limits, log_min_p, maxima), out, self.pieces, **padded)
        digits.search(values, limits, (maxima, solved), sizes, PIECE=PIECE, **padded)
        tie_kernel[(self.pieces, self._rows)](
            *values,
            *limits,
            log_min_p,
            maxima,
            solved,
            *digits.found,
            self.cuts,
            self.ties,
            *sizes,
            COUNT_BITS=COUNT_BITS,
            MASS_BITS=MASS_DIGIT_BITS,
            PIECE=PIECE,
            CUT=CUT,
            **padded,
        )

    def _prepare(self, values: tuple[Tensor, Tensor], sizes: tuple[int, int, int]) -> None:
        candidates = self._candidates
        prepare_kernel[(self.pieces, self._rows)](
            *values,
            self._maxima,
            candidates.counts,
            candidates.sums,
            candidates.listed,
            *sizes,
            PIECE=PIECE,
            COUNTS=candidates.counts.shape[1],
            SUMS=candidates.sums.shape[1],
            **self._options,
        )
