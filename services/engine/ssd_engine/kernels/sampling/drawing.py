"""From logits to tokens on the device: coupled noise, the best tokens of a row, and acceptance.

The same function of (seed, position, token) as ``noise.py``. Penalties, bias and filters come
before it, in ``adjusting.py`` and ``filtering.py``.
"""

import triton
import triton.language as tl

from ssd_engine.kernels.sampling.filtering import survives

LEAF = 128  # tokens that are ranked together


@triton.jit
def gumbel(word):
    """The Gumbel noise of the uniform u = (word + 1/2) / 2^32."""
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(u))


@triton.jit
def _scores(
    logits,
    stride,
    row,
    token,
    piece,
    vocab,
    seeds,
    temperatures,
    positions,
    cuts,
    ties,
    FILTERED: tl.constexpr,
    CUT: tl.constexpr,
    CUT_PIECES: tl.constexpr,
):
    """Perturbed scores, in float64; -inf beyond the vocabulary, and for tokens that the row's
    filters leave out. A piece is as long as one of the filters'."""
    inside = token < vocab
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    score = x.to(tl.float64)
    kept = inside
    if temperature > 0:
        position = tl.load(positions + row).to(tl.uint32)
        zero = (token * 0).to(tl.uint32)
        seed = tl.load(seeds + row)
        word, _, _, _ = tl.philox(seed, token.to(tl.uint32), zero + position, zero, zero, 10)
        value = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
        score = value.to(tl.float64) + gumbel(word)
        if FILTERED:
            pieces = tl.cdiv(vocab, token.shape[0])
            kept = survives(value, inside, row, piece, pieces, cuts, ties, CUT, CUT_PIECES)
    return tl.where(kept, score, float("-inf")), inside & ((x != x) | (x == float("inf")))


@triton.jit
def best_of_piece_kernel(
    logits,  # [rows, stride] float32
    seeds,  # [rows] int64
    temperatures,  # [rows] float32, 0: greedy
    positions,  # [rows] of the token to be drawn
    best,  # out [rows, pieces] float64
    best_token,  # out [rows, pieces] int32
    broken,  # out [rows, pieces] int32: values that are no logits
    stride,  # elements between two rows of logits
    vocab,
    pieces,
    cuts,  # the filters' cuts, where FILTERED
    ties,
    PIECE: tl.constexpr,
    FILTERED: tl.constexpr,
    CUT: tl.constexpr,
    CUT_PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = piece * PIECE + tl.arange(0, PIECE)
    score, bad = _scores(
        logits, stride, row, token, piece, vocab, seeds, temperatures, positions, cuts, ties,
        FILTERED, CUT, CUT_PIECES,
    )  # fmt: skip
    highest, at = tl.max(score, 0, return_indices=True)
    here = row * pieces + piece
    tl.store(best + here, highest)
    tl.store(best_token + here, piece * PIECE + at)
    tl.store(broken + here, tl.sum(bad.to(tl.int32), 0))


@triton.jit
def verdict_kernel(
    tokens,  # [rows] what each row was given
    run_begin,  # [runs]
    run_rows,  # [runs]
    best,
    best_token,
    broken,
    out,  # [runs, 1 + 2 * ROWS]: accepted, the rows' tokens, values that are no logits
    last,  # [rows] the tokens once more, for a step that follows
    vocab,
    pieces,
    ROWS: tl.constexpr,  # rows of a run, at most; a power of 2
    PIECES: tl.constexpr,  # a power of 2
    OVERLAP: tl.constexpr,
):
    """A speculated token is right when it is what the target drew in its place."""
    run = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin, rows = tl.load(run_begin + run), tl.load(run_rows + run)
    i, piece = tl.arange(0, ROWS), tl.arange(0, PIECES)
    real = i < rows
    at = (begin + i)[:, None] * pieces + piece[None, :]
    there = real[:, None] & (piece < pieces)[None, :]
    _, chosen = tl.max(tl.load(best + at, mask=there, other=float("-inf")), 1, return_indices=True)
    chosen = tl.minimum(chosen, pieces - 1)  # where something is no number, it may be any
    token = tl.load(best_token + (begin + i) * pieces + chosen, mask=real, other=-1)
    bad = tl.sum(tl.load(broken + at, mask=there, other=0), 1)
    following = tl.load(tokens + begin + i + 1, mask=i + 1 < rows, other=-2)
    here = out + run * (1 + 2 * ROWS)
    tl.store(here, tl.min(tl.where(following == token, ROWS, i), 0))
    tl.store(here + 1 + i, token, mask=real)
    tl.store(here + 1 + ROWS + i, bad, mask=real)
    tl.store(last + begin + i, tl.minimum(tl.maximum(token, 0), vocab - 1), mask=real)


@triton.jit
def follow_kernel(
    tokens,  # [rows]; -n - 1 becomes the best token of row n of the step before
    last,  # [rows] these
    rows,
    ROWS: tl.constexpr,  # a power of 2
):
    row = tl.arange(0, ROWS)
    token = tl.load(tokens + row, mask=row < rows, other=0)
    before = tl.load(last + tl.maximum(-token - 1, 0), mask=token < 0, other=0)
    tl.store(tokens + row, tl.where(token < 0, before, token), mask=row < rows)
