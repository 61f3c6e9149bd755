"""Rejection verification on the device: which tokens of a speculation stay, and what follows them.

The distributions that tokens were drawn from arrive while a step is computed, so these kernels are
no part of its graph. They read what the step has left of its rows: logits after penalties and bias,
the cuts of its filters, and the token that each row has drawn. Three launches and one copy back
serve all rounds. Sums are made in float64, over pieces of a row, in an order that follows from the
vocabulary alone: a round ends alike whatever runs beside it.

The definition is that of ``rejection.verify_rejection`` over ``sampler.target_distribution``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.forward.result import RejectionVerdict
from ssd_engine.kernels.sampling.filtering import CUT, PIECE, Filters, scaled_value, survives
from ssd_engine.kernels.sampling.reporting import Reports, logprob_bits
from ssd_engine.sampling.noise import STREAM_ACCEPT, STREAM_RESIDUAL, signed64
from ssd_engine.sampling.rejection import WIRE, SampledSpeculation

ACCEPT = tl.constexpr(STREAM_ACCEPT)
RESIDUAL = tl.constexpr(STREAM_RESIDUAL)
# What the device is told of a round: its first line below, known tokens, seed, and the position of
# its first token; and in a line for each of these tokens, and one more: the row of the step, the
# token after it, the address of what that was drawn from (0: a point mass), and the tokens that
# have a probability.
NUMBERS = tl.constexpr(4)  # numbers of a round, and of a line
SIGMA_KINDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _uniform(seed, position, STREAM: tl.constexpr):
    """The number of ``noise.uniform_rows``."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, zero, low, high, zero + STREAM, 10)
    bits = (first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def _weights(
    logits,
    stride,
    row,
    token,
    piece,
    vocab,
    temperatures,
    drawn,
    cuts,
    ties,
    FILTERED: tl.constexpr,
    CUT: tl.constexpr,
    CUT_PIECES: tl.constexpr,
):
    """p of a piece of a row, up to a factor of the row: 1 is the weight of the token that the step
    has drawn there. Noise is bounded, so the likeliest one weighs less than e^27."""
    chosen = tl.load(drawn + row)
    one = scaled_value(logits, stride, row, chosen, chosen < vocab, temperatures)
    inside = token < vocab
    value = scaled_value(logits, stride, row, token, inside, temperatures)
    kept = inside
    if tl.load(temperatures + row) > 0:
        if FILTERED:
            pieces = tl.cdiv(vocab, token.shape[0])
            kept = survives(value, inside, row, piece, pieces, cuts, ties, CUT, CUT_PIECES)
    else:
        kept = token == chosen
    return tl.where(kept, tl.exp(value.to(tl.float64) - one.to(tl.float64)), 0.0)


@triton.jit
def _shipped(address, token, there, KIND: tl.constexpr):
    """Values of a distribution as it was shipped."""
    values = tl.load(address.to(tl.pointer_type(KIND)) + token, mask=there, other=0.0)
    return values.to(tl.float32).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def weigh_rows_kernel(
    logits,  # [rows, stride] float32, after penalties and bias
    temperatures,  # [rows] float32, 0: greedy
    drawn,  # [rows] tokens that the step has drawn
    cuts,  # the filters' cuts, where FILTERED
    ties,
    lines,  # [lines, NUMBERS] int64
    p_sums,  # out [lines, pieces] float64
    wire_sums,  # out [lines, pieces] float64
    following,  # out [lines] float64: weight of the token after it
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    KIND: tl.constexpr,  # the dtype of the distributions
    FILTERED: tl.constexpr,
    CUT: tl.constexpr,
    CUT_PIECES: tl.constexpr,
):
    line, piece = tl.program_id(1), tl.program_id(0)
    here = lines + line * NUMBERS
    row, follows = tl.load(here), tl.load(here + 1)
    address, width = tl.load(here + 2), tl.load(here + 3)
    token = piece * PIECE + tl.arange(0, PIECE)
    weight = _weights(
        logits, stride, row, token, piece, vocab, temperatures, drawn, cuts, ties,
        FILTERED, CUT, CUT_PIECES,
    )  # fmt: skip
    tl.store(p_sums + line * pieces + piece, tl.sum(weight, 0))
    tl.store(following + line + token * 0, weight, mask=token == follows)
    if address != 0:
        wire = _shipped(address, token, token < width, KIND)
        tl.store(wire_sums + line * pieces + piece, tl.sum(wire, 0))


@triton.jit
def _verdict(
    told,
    lines,
    p_sums,
    wire_sums,
    following,
    pieces,
    KIND: tl.constexpr,
    LINES: tl.constexpr,
    PIECES: tl.constexpr,
):
    """How many tokens stay; of the line after them, the sum of weights, and what its distribution
    adds up to: 0 where t is drawn from p."""
    first, known = tl.load(told), tl.load(told + 1)
    seed, position = tl.load(told + 2), tl.load(told + 3)
    i, piece = tl.arange(0, LINES), tl.arange(0, PIECES)
    line, is_known = first + i, i < known
    address = tl.load(lines + line * NUMBERS + 2, mask=is_known, other=0)
    at = line[:, None] * pieces + piece[None, :]
    there = (i <= known)[:, None] & (piece < pieces)[None, :]
    total = tl.sum(tl.load(p_sums + at, mask=there, other=0.0), 1)
    shipped = there & (address != 0)[:, None]
    wire_total = tl.sum(tl.load(wire_sums + at, mask=shipped, other=0.0), 1)
    wire_total = tl.where(address != 0, wire_total, 1.0)

    token = tl.load(lines + line * NUMBERS + 1, mask=is_known, other=0)
    exists = is_known & (token < tl.load(lines + line * NUMBERS + 3, mask=is_known, other=0))
    p = tl.load(following + line, mask=exists, other=0.0) / total
    sigma = _shipped(address, token, exists & (address != 0), KIND) / wire_total
    sigma = tl.where(address != 0, sigma, 1.0)
    is_drawn = is_known & (sigma > 0)  # what sigma excludes was not, and NaN is no sigma
    is_right = is_drawn & (_uniform(seed, position + i, ACCEPT) * sigma < p)

    accepted = tl.min(tl.where(is_right, LINES, i), 0)
    last = i == accepted
    sigma_total = tl.sum(tl.where(last & is_drawn, wire_total, 0.0), 0)
    return accepted, tl.sum(tl.where(last, total, 0.0), 0), sigma_total


@triton.jit
def _probabilities(weight, total, sigma_total, token, follows, address, width, KIND: tl.constexpr):
    """p of the tokens of a piece, and what sigma leaves of it; 0 where t is drawn from p."""
    inside = token < width
    p = tl.where(inside, weight / total, 0.0)
    sigma = tl.where(token == follows, 1.0, p * 0.0)
    if address != 0:
        sigma = _shipped(address, token, inside, KIND) / sigma_total
    return p, tl.where(sigma_total > 0, tl.maximum(p - sigma, 0.0), 0.0)


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def judge_kernel(
    logits,
    temperatures,
    drawn,
    cuts,
    ties,
    lines,
    rounds,  # [rounds, NUMBERS] int64
    p_sums,
    wire_sums,
    following,
    last_p,  # out [rounds, pieces] float64: sums of p where t is drawn
    last_rest,  # out [rounds, pieces] float64: and of what sigma leaves of it
    totals,  # out [rounds, 2] float64: of this row's weights, and of its distribution
    out,  # out [rounds, 2 + LINES] int32: accepted, t or -1, log probabilities
    stride,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    CUT: tl.constexpr,
    CUT_PIECES: tl.constexpr,
    LINES: tl.constexpr,  # lines of a round, at most; a power of 2
):
    """Each piece finds the verdict by itself: it is quicker than another launch."""
    number, piece = tl.program_id(1), tl.program_id(0)
    told = rounds + number * NUMBERS
    accepted, total, sigma_total = _verdict(
        told, lines, p_sums, wire_sums, following, pieces, KIND, LINES, CUT_PIECES
    )
    here = lines + (tl.load(told) + accepted) * NUMBERS
    row, follows = tl.load(here), tl.load(here + 1)
    address, width = tl.load(here + 2), tl.load(here + 3)
    token = piece * PIECE + tl.arange(0, PIECE)
    weight = _weights(
        logits, stride, row, token, piece, vocab, temperatures, drawn, cuts, ties,
        FILTERED, CUT, CUT_PIECES,
    )  # fmt: skip
    p, rest = _probabilities(weight, total, sigma_total, token, follows, address, width, KIND)
    tl.store(last_p + number * pieces + piece, tl.sum(p, 0))
    tl.store(last_rest + number * pieces + piece, tl.sum(rest, 0))
    if piece == 0:
        tl.store(totals + number * 2, total)
        tl.store(totals + number * 2 + 1, sigma_total)
        tl.store(out + number * (2 + LINES), accepted)


@triton.jit
def _first_beyond(weights, before, at, place, NONE: tl.constexpr):
    """The first place at which the sum of weights, after what comes before them, exceeds ``at``;
    the last one that has a weight where rounding leaves none; -1 where nothing has any."""
    reached = before + tl.cumsum(weights, 0)
    found = tl.min(tl.where((reached > at) & (weights > 0), place, NONE), 0)
    last = tl.max(tl.where(weights > 0, place, -1), 0)
    return tl.where(found < NONE, found, last)


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def draw_rest_kernel(
    logits,
    temperatures,
    drawn,
    cuts,
    ties,
    lines,
    rounds,
    last_p,
    last_rest,
    totals,
    out,
    own_logits,  # [rows, own_stride] before penalties and bias; from here on where REPORTED
    own_maxima,  # [rows, pieces] float32
    own_masses,  # [rows, pieces] int64
    stride,
    vocab,
    pieces,
    own_stride,
    PIECE: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    CUT: tl.constexpr,
    CUT_PIECES: tl.constexpr,
    LINES: tl.constexpr,
    REPORTED: tl.constexpr,
):
    """Draws t by the inverse of its distribution; log probabilities of all that is emitted."""
    number = tl.program_id(0)
    told, result = rounds + number * NUMBERS, out + number * (2 + LINES)
    first, accepted = tl.load(told), tl.load(result)
    here = lines + (first + accepted) * NUMBERS
    row, follows = tl.load(here), tl.load(here + 1)
    address, width = tl.load(here + 2), tl.load(here + 3)

    piece = tl.arange(0, CUT_PIECES)
    at = number * pieces + piece
    p_sums = tl.load(last_p + at, mask=piece < pieces, other=0.0)
    rest_sums = tl.load(last_rest + at, mask=piece < pieces, other=0.0)
    is_rest = tl.sum(rest_sums, 0) > 0
    sums = tl.where(is_rest, rest_sums, p_sums)
    u = _uniform(tl.load(told + 2), tl.load(told + 3) + accepted, RESIDUAL)
    reach = u * tl.sum(sums, 0)
    found = tl.maximum(_first_beyond(sums, 0.0, reach, piece, CUT_PIECES), 0)
    before = tl.sum(tl.where(piece < found, sums, 0.0), 0)

    token = found * PIECE + tl.arange(0, PIECE)
    weight = _weights(
        logits, stride, row, token, found, vocab, temperatures, drawn, cuts, ties,
        FILTERED, CUT, CUT_PIECES,
    )  # fmt: skip
    total, sigma_total = tl.load(totals + number * 2), tl.load(totals + number * 2 + 1)
    p, rest = _probabilities(weight, total, sigma_total, token, follows, address, width, KIND)
    t = _first_beyond(tl.where(is_rest, rest, p), before, reach, token, 1 << 30)
    t = tl.where(t >= 0, t, width.to(tl.int32) - 1)
    # The weight of what the step has drawn is 1, unless it is no number.
    tl.store(result + 1, tl.where((total > 0) & (total < float("inf")), t, -1))

    if REPORTED:
        i = tl.arange(0, LINES)
        emitted = i <= accepted
        row = tl.load(lines + (first + i) * NUMBERS, mask=emitted, other=0)
        speculated = tl.load(lines + (first + i) * NUMBERS + 1, mask=emitted, other=0)
        token = tl.where(i == accepted, t, speculated)
        x = tl.load(
            own_logits + row * own_stride + token, mask=emitted & (token < vocab), other=0.0
        )
        at = row[:, None] * pieces + piece[None, :]
        there = emitted[:, None] & (piece < pieces)[None, :]
        highest = tl.max(tl.load(own_maxima + at, mask=there, other=float("-inf")), 1)
        mass = tl.sum(tl.load(own_masses + at, mask=there, other=0), 1)
        tl.store(result + 2 + i, logprob_bits(x, highest, mass), mask=emitted)


@dataclass(frozen=True, slots=True)
class StepScores:
    """What a step has left on the device of its rows, until the next one is launched."""

    logits: Tensor  # [rows, vocab or more] float32
    adjusted: Tensor  # likewise, after penalties and bias
    temperatures: Tensor  # [rows]
    drawn: Tensor  # [rows]
    filters: Filters
    is_filtered: bool  # else all tokens of all rows survive
    reports: Reports
    is_reported: bool


class Rejector:
    """Verifies rounds in buffers that all steps of a server share, large enough for the largest."""

    def __init__(
        self, rounds: int, rows: int, rows_per_round: int, vocab: int, device: torch.device
    ) -> None:
        self._rounds, self._vocab, self._device = rounds, vocab, device
        self._pieces, self._lines = -(-vocab // PIECE), triton.next_power_of_2(rows_per_round)
        is_cuda = device.type == "cuda"

        def empty(*sizes: int, kind: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        told = (rounds + rows, NUMBERS.value)
        self._host_told = torch.zeros(told, dtype=torch.int64, pin_memory=is_cuda)
        self._told = empty(*told, kind=torch.int64)
        self._sums = [empty(rows, self._pieces), empty(rows, self._pieces), empty(rows)]
        self._last = [empty(rounds, self._pieces), empty(rounds, self._pieces), empty(rounds, 2)]
        self._out = empty(rounds, 2 + self._lines, kind=torch.int32)
        self._host_out = torch.zeros(self._out.shape, dtype=torch.int32, pin_memory=is_cuda)

    def judge(
        self, scores: StepScores, rounds: Sequence[tuple[int, SampledSpeculation]]
    ) -> list[RejectionVerdict]:
        """Each round comes with the row of the step before its first token."""
        wires = _on_device([speculation for _, speculation in rounds], self._device)
        count = self._tell(rounds, wires)
        self._launch(scores, len(rounds), count, _kind_of(wires))
        self._host_out.copy_(self._out, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        found = self._host_out[: len(rounds)].numpy()
        return [_verdict_of(line, scores.is_reported) for line in found]

    def warm_up(self, scores: StepScores) -> None:
        """What is compiled on first use is compiled now."""
        wire = torch.zeros(1, self._vocab, dtype=WIRE, device=self._device)
        self.judge(scores, [(0, SampledSpeculation(0, 0, [0], wire))])

    def _tell(
        self, rounds: Sequence[tuple[int, SampledSpeculation]], wires: Sequence[Tensor | None]
    ) -> int:
        """Returns the number of lines."""
        told: list[tuple[int, int, int, int]] = []
        lines: list[tuple[int, int, int, int]] = []
        for (row, speculation), wire in zip(rounds, wires, strict=True):
            known = speculation.known
            told.append((len(lines), known, signed64(speculation.seed), speculation.position))
            shipped = speculation.wire
            width = self._vocab if shipped is None else min(self._vocab, shipped.shape[1])
            drawn = zip(speculation.tokens[:known], _addresses(wire, known), strict=True)
            lines += [(row + i, *about, width) for i, about in enumerate(drawn)]
            lines.append((row + known, -1, 0, width))
        host, begin = self._host_told.numpy(), self._rounds
        host[: len(told)] = told
        host[begin : begin + len(lines)] = lines
        self._told.copy_(self._host_told, non_blocking=True)
        return len(lines)

    def _launch(self, scores: StepScores, rounds: int, lines: int, kind: torch.dtype) -> None:
        filters, reports = scores.filters, scores.reports
        values = (
            *(scores.adjusted, scores.temperatures, scores.drawn),
            *(filters.cuts, filters.ties, self._told[self._rounds :]),
        )
        sizes = (scores.adjusted.stride(0), self._vocab, self._pieces)
        shared: dict[str, Any] = dict(
            PIECE=PIECE,
            KIND=SIGMA_KINDS[kind],
            FILTERED=scores.is_filtered,
            CUT=CUT,
            CUT_PIECES=filters.padded,
        )
        weigh_rows_kernel[(self._pieces, lines)](*values, *self._sums, *sizes, **shared)
        shared["LINES"] = self._lines
        found = (*self._last, self._out)
        judge_kernel[(self._pieces, rounds)](
            *values, self._told, *self._sums, *found, *sizes, **shared
        )
        draw_rest_kernel[(rounds,)](
            *values,
            self._told,
            *found,
            *(scores.logits, reports.maxima, reports.totals),
            *sizes,
            scores.logits.stride(0),
            REPORTED=scores.is_reported,
            **shared,
        )


def _on_device(
    speculations: Sequence[SampledSpeculation], device: torch.device
) -> list[Tensor | None]:
    """The known rows of what was shipped, all of one dtype."""
    wires = [s.wire[: s.known] if s.wire is not None and s.known else None for s in speculations]
    is_short = all(wire is None or wire.dtype == WIRE for wire in wires)
    kind = WIRE if is_short else torch.float32  # it holds all others, too
    return [
        None if wire is None else wire.to(device, kind, non_blocking=True).contiguous()
        for wire in wires
    ]


def _kind_of(wires: Sequence[Tensor | None]) -> torch.dtype:
    return next((wire.dtype for wire in wires if wire is not None), WIRE)


def _addresses(wire: Tensor | None, known: int) -> Sequence[int]:
    if wire is None:
        return [0] * known
    size = wire.shape[1] * wire.itemsize
    return range(wire.data_ptr(), wire.data_ptr() + known * size, size)


def _verdict_of(line: NDArray[np.int32], is_reported: bool) -> RejectionVerdict:
    accepted, token = line[:2].tolist()
    values = line[2 : 3 + accepted].view(np.float32).tolist() if is_reported else []
    return RejectionVerdict(accepted, token, values)
