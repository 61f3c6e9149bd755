"""What the tokens of a row are ranked and cut by: values, integer keys, and masses.

A value is a logit divided by the row's temperature. Its key is an integer that is ordered as it
is. Masses are integers, too: their sums do not depend on the order in which programs add.
"""

import triton
import triton.language as tl

from ssd_engine.sampling.sampler import MASS_BITS

CUT = 2  # numbers of a row: the lowest key that survives, and how many tokens of just that
MASS_UNIT = tl.constexpr(float(1 << MASS_BITS))
# So far below the likeliest token a mass rounds to 0: less than half a unit is left.
NO_MASS = tl.constexpr((MASS_BITS + 1) * 0.7)
ALL = tl.constexpr(-1)  # as the lowest key: every token survives
ANY = tl.constexpr(1 << 62)  # as a number of tokens: all of them


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def scaled_value(logits, stride, row, token, inside, temperatures):
    """A logit divided by its row's temperature; greedy rows are divided by 1."""
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def signed_key(value):
    """An integer in [-2^31, 2^31) that is ordered as the value is; 0 and -0 are the same."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(value):
    """The same key in [0, 2^32)."""
    return signed_key(value).to(tl.int64) + 2147483648


@triton.jit
def value_of(key):
    ordered = (key - 2147483648).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(value, highest):
    """A token's mass, in units of 2^-MASS_BITS of the likeliest one's."""
    share = tl.exp(value.to(tl.float64) - highest.to(tl.float64))
    return tl.floor(share * MASS_UNIT + 0.5).to(tl.int64)


@triton.jit
def highest_of(maxima, row, pieces, PIECES: tl.constexpr):
    piece = tl.arange(0, PIECES)
    here = maxima + row * pieces + piece
    return tl.max(tl.load(here, mask=piece < pieces, other=float("-inf")), 0)


@triton.jit
def tokens_before(limit, mass, each):
    """The number of tokens of mass ``each``, after ``mass``, before which less than limit comes."""
    count = tl.floor((limit - mass.to(tl.float64)) / tl.maximum(each, 1).to(tl.float64))
    count = tl.maximum(count, 0.0).to(tl.int64)
    count += (mass + count * each).to(tl.float64) < limit
    count += (mass + count * each).to(tl.float64) < limit
    count -= (count > 0) & ((mass + (count - 1) * each).to(tl.float64) >= limit)
    return tl.where(each > 0, count, ANY)


@triton.jit
def tied_mass(lowest, allowed, highest):
    """The mass of one token with the lowest key that top-k leaves, and of all such tokens."""
    each = tl.zeros((), tl.int64)
    if lowest > ALL:
        each = mass_of(value_of(lowest), highest)
    return each, each * tl.where(lowest > ALL, allowed, 0)


@triton.jit
def store_cut(cuts, row, lowest, allowed, highest, log_min_p, CUT: tl.constexpr):
    """The cut of top-k and top-p, or that of min-p where it is higher."""
    bound = key_of(highest + tl.load(log_min_p + row))
    lowest, allowed = tl.maximum(bound, lowest), tl.where(bound > lowest, ANY, allowed)
    tl.store(cuts + row * CUT, lowest)
    tl.store(cuts + row * CUT + 1, allowed)
    return lowest, allowed
