"""Log probabilities on the device: of the token that a row has drawn, and of the likeliest ones.

They are the model's own, from logits before any option. The masses of all tokens are integers, as
those of top-p: their sum does not depend on the order in which it is made.

The definition is that of ``sampler.logprobs``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd_engine.kernels.elementwise import overlapping
from ssd_engine.kernels.sampling.drawing import LEAF
from ssd_engine.kernels.sampling.filtering import (
    MASS_UNIT,
    NO_MASS,
    PIECE,
    highest_of,
    mass_of,
    wait_for_inputs,
)
from ssd_engine.sampling.params import MAX_TOP_LOGPROBS

REPORT_WIDTH = 1 + 2 * MAX_TOP_LOGPROBS  # the drawn token's; the likeliest tokens, and theirs


@triton.jit
def survey_kernel(
    logits,
    leaf_best,  # out [rows, leaves] float32
    maxima,  # out [rows, pieces] float32
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
    best = tl.max(tl.reshape(x, (PIECE // LEAF, LEAF)), 1)
    leaf = piece * (PIECE // LEAF) + tl.arange(0, PIECE // LEAF)
    tl.store(leaf_best + row * leaves + leaf, best, mask=leaf < leaves)
    tl.store(maxima + row * pieces + piece, tl.max(x, 0))


@triton.jit
def total_kernel(
    logits,
    maxima,
    totals,  # out [rows, pieces] int64: masses
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,  # a power of 2
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    wait_for_inputs(OVERLAP)
    highest = highest_of(maxima, row, pieces, PIECES)
    total = tl.zeros((), tl.int64)
    if highest - tl.load(maxima + row * pieces + piece) < NO_MASS:
        token = piece * PIECE + tl.arange(0, PIECE)
        here = logits + row.to(tl.int64) * stride + token
        x = tl.load(here, mask=token < vocab, other=float("-inf"))
        total = tl.sum(mass_of(x, highest), 0)
    tl.store(totals + row * pieces + piece, total)


@triton.jit
def rank_kernel(
    scores,
    best,
    wanted,  # [rows]: so many, RANKS at most
    out,  # [rows, RANKS] int32, best first; -1 where there are no more
    stride,  # elements between two rows of scores
    vocab,
    leaves,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,  # RANKS as a power of 2
    LEAF: tl.constexpr,
    LEAVES: tl.constexpr,  # a power of 2
    OVERLAP: tl.constexpr,
):
    """The best tokens lie in the leaves with the best bests. Ties go to the lower id."""
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    count = tl.load(wanted + row)
    leaf = tl.arange(0, LEAVES)
    left = tl.load(best + row * leaves + leaf, mask=leaf < leaves, other=float("-inf"))
    rank = tl.arange(0, WIDTH)
    chosen = tl.full((WIDTH,), -1, tl.int32)
    for i in range(count):
        highest, at = tl.max(left, 0, return_indices=True)
        some = tl.where(highest > float("-inf"), at, -1)
        chosen = tl.where(rank == i, some, chosen)
        left = tl.where(leaf == at, float("-inf"), left)
    token = chosen[:, None] * LEAF + tl.arange(0, LEAF)[None, :]
    there = (chosen >= 0)[:, None] & (token < vocab)
    score = tl.load(scores + row.to(tl.int64) * stride + token, mask=there, other=float("-inf"))
    score, token = tl.reshape(score, (WIDTH * LEAF,)), tl.reshape(token, (WIDTH * LEAF,))
    for i in range(count):
        highest = tl.max(score, 0)
        chosen_token = tl.min(tl.where(score == highest, token, vocab), 0)
        chosen_token = tl.where(highest > float("-inf"), chosen_token, -1)
        tl.store(out + row * RANKS + i, chosen_token)
        score = tl.where(token == chosen_token, float("-inf"), score)


@triton.jit
def logprob_bits(x, highest, mass):
    """The bits of a log probability in float32; ``mass``: of all tokens of the row."""
    log_total = tl.log(mass.to(tl.float64) / MASS_UNIT)
    value = (x.to(tl.float64) - highest.to(tl.float64)) - log_total
    return value.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def report_kernel(
    logits,
    best,  # [rows, pieces] of what was drawn
    best_token,
    maxima,
    totals,
    wanted,  # [rows]
    ranked,  # [rows, RANKS]; as many as are wanted, -1 where there are no more
    out,  # [rows, 1 + 2 * RANKS]
    stride,
    vocab,
    pieces,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,  # RANKS as a power of 2
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    piece = tl.arange(0, PIECES)
    there = piece < pieces
    highest = highest_of(maxima, row, pieces, PIECES)
    total = tl.sum(tl.load(totals + row * pieces + piece, mask=there, other=0), 0)
    score = tl.load(best + row * pieces + piece, mask=there, other=float("-inf"))
    _, chosen = tl.max(score, 0, return_indices=True)
    token = tl.load(best_token + row * pieces + chosen)
    line, here = logits + row.to(tl.int64) * stride, out + row * (1 + 2 * RANKS)
    x = tl.load(line + token, mask=token < vocab, other=0.0)
    tl.store(here, logprob_bits(x, highest, total))
    rank = tl.arange(0, WIDTH)
    asked = rank < tl.load(wanted + row)
    likeliest = tl.load(ranked + row * RANKS + rank, mask=asked, other=-1)
    x = tl.load(line + likeliest, mask=likeliest >= 0, other=0.0)
    tl.store(here + 1 + rank, likeliest, mask=rank < RANKS)
    tl.store(here + 1 + RANKS + rank, logprob_bits(x, highest, total), mask=rank < RANKS)


class Reports:
    """Log probabilities of every row of a step, found anew in each of its runs."""

    def __init__(self, rows: int, vocab: int, device: torch.device, overlap: bool) -> None:
        self._rows, self._vocab = rows, vocab
        self._leaves, self._pieces = -(-vocab // LEAF), -(-vocab // PIECE)
        self._options = overlapping(overlap)

        def empty(*sizes: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=kind, device=device)

        self._leaf_best = empty(self._leaves, kind=torch.float32)
        self.maxima = empty(self._pieces, kind=torch.float32)
        self.totals = empty(self._pieces, kind=torch.int64)
        self._ranked = empty(MAX_TOP_LOGPROBS)
        self.reported = empty(REPORT_WIDTH)  # log probabilities as the bits of float32

    def make(self, logits: Tensor, wanted: Tensor, best: Tensor, best_token: Tensor) -> None:
        """``wanted``: so many of each row's likeliest tokens. ``best``: of each piece of a row,
        what it has drawn from."""
        self._survey(logits)
        rank_kernel[(self._rows,)](
            logits,
            self._leaf_best,
            wanted,
            self._ranked,
            logits.stride(0),
            self._vocab,
            self._leaves,
            RANKS=MAX_TOP_LOGPROBS,
            WIDTH=triton.next_power_of_2(MAX_TOP_LOGPROBS),
            LEAF=LEAF,
            LEAVES=triton.next_power_of_2(self._leaves),
            num_warps=8,
            **self._options,
        )
        report_kernel[(self._rows,)](
            logits,
            best,
            best_token,
            self.maxima,
            self.totals,
            wanted,
            self._ranked,
            self.reported,
            logits.stride(0),
            self._vocab,
            self._pieces,
            RANKS=MAX_TOP_LOGPROBS,
            WIDTH=triton.next_power_of_2(MAX_TOP_LOGPROBS),
            PIECES=triton.next_power_of_2(self._pieces),
            **self._options,
        )

    def _survey(self, logits: Tensor) -> None:
        grid = (self._pieces, self._rows)
        survey_kernel[grid](
            logits,
            self._leaf_best,
            self.maxima,
            logits.stride(0),
            self._vocab,
            self._leaves,
            self._pieces,
            LEAF=LEAF,
            PIECE=PIECE,
            **self._options,
        )
        total_kernel[grid](
            logits,
            self.maxima,
            self.totals,
            logits.stride(0),
            self._vocab,
            self._pieces,
            PIECE=PIECE,
            PIECES=triton.next_power_of_2(self._pieces),
            **self._options,
        )
