"""Each operation of a layer in plain torch, and how much rounding may change its result.

Everything is computed in a dtype wider than the model's, from the very inputs that the operation
under test had. Beside a value stands its *spread*: an error of one rounding unit of the model's
dtype in every input and output changes the value by about so many units. For a sum of k products
that is the size of a sum of k random terms, the root of the sum of their squares: errors of terms
are as random as their signs. Sums are added in float32 at best, which adds a part that grows with
the root of k and counts only where the model's dtype is float32, too.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}
TOLERANCE = 8.0  # roundings that an error may be: seen are 2 to 4 among millions of results
SLICE_ELEMENTS = 1 << 25  # elements of a weight that are widened at a time
_SUM_UNIT = torch.finfo(torch.float32).eps / 2
_HALF_SUMS = 2.0**-25  # the smallest step of float16, of numbers whose largest is about 1


@dataclass(frozen=True)
class Expected:
    value: Tensor
    spread: Tensor

    def plus(self, other: Tensor) -> "Expected":
        value = self.value + other
        return Expected(value, self.spread + value.abs())


def unit_of(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


class PlainTorch:
    """The operations of a model in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.wide = dtype, WIDER[dtype]
        self.unit = unit_of(dtype)

    def normalised(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.to(self.wide)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(self.wide)

    def normed(self, x: Expected, weight: Tensor, eps: float) -> Expected:
        """The norm of what is not known exactly."""
        scale = torch.rsqrt(x.value.square().mean(-1, keepdim=True) + eps)
        value = x.value * scale * weight.to(self.wide)
        return Expected(value, value.abs() + x.spread * scale * weight.to(self.wide).abs())

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Expected:
        """The product x [rows, k] * weight [n, k]: [rows, n]."""
        x = x.to(self.wide)
        squares, k = x.square(), weight.shape[1]
        values, terms = [], []
        for some in weight.split(max(1, SLICE_ELEMENTS // k)):
            wide = some.to(self.wide)
            values.append(x @ wide.t())
            terms.append(squares @ wide.square().t())
        value, spread = torch.cat(values, 1), torch.cat(terms, 1).sqrt()
        if bias is not None:
            value = value + bias.to(self.wide)
        return Expected(value, value.abs() + spread * self._sum_factor(k))

    def _sum_factor(self, k: int) -> float:
        """The factor by which sums of k terms in float32 enlarge the errors of their terms."""
        return 1 + math.sqrt(k) * _SUM_UNIT / self.unit

    def gated(self, both: Expected) -> Expected:
        """silu(first half) * second half; each half brings its own spread."""
        (gate, up), (gate_spread, up_spread) = (t.chunk(2, -1) for t in (both.value, both.spread))
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        value = gate * sigmoid * up
        spread = (slope * up).abs() * gate_spread + (gate * sigmoid).abs() * up_spread
        # Where both halves are nearly zero, what is left is the product of their errors.
        spread += TOLERANCE * self.unit * gate_spread * up_spread
        return Expected(value, value.abs() + spread)

    def rotated(
        self, x: Tensor, norm: Tensor | None, eps: float, cosine: Tensor, sine: Tensor
    ) -> Expected:
        """QK-norm and rotary embedding of x [rows, heads, dim]; the sine is negated in its first
        half."""
        x = x.to(self.wide)
        if norm is not None:
            x = self.normalised(x, norm, eps)
        swapped = x.roll(x.shape[-1] // 2, -1)
        straight, turned = x * cosine.to(self.wide), swapped * sine.to(self.wide)
        value = straight + turned
        return Expected(value, value.abs() + straight.abs() + turned.abs())

    def attention(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Expected:
        """query [rows, heads, dim], key and value [keys, kv_heads, dim], visible [rows, keys]:
        [rows, heads * dim].

        Errors of scores and of weights both move a result. Where scores are in the hundreds, as
        some heads of some models have them, their rounding alone can move it anywhere: such heads
        are not told from wrong ones. Kernels may keep sums in float16 next to one power of two for
        a vector, which costs its small entries a part of the largest."""
        rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        q = query.to(self.wide).view(rows, kv_heads, heads // kv_heads, dim)
        k, v = key.to(self.wide), value.to(self.wide)
        scale = 1 / math.sqrt(dim)
        scores = torch.einsum("rhgd,shd->hgrs", q, k) * scale
        p = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out = torch.einsum("hgrs,shd->rhgd", p, v)
        # Errors of scores, squared: of their terms, and of their own size, which is float32's.
        terms = torch.einsum("rhgd,shd->hgrs", q.square(), k.square()) * scale**2
        sizes = (scores.abs().amax(-1, keepdim=True) + scores.abs()) * (_SUM_UNIT / self.unit)
        moved = terms * self._sum_factor(dim) ** 2 + sizes.square()
        weights = p.square() * self._sum_factor(key.shape[0]) ** 2
        by_scores = (weights * moved).sum(-1).sqrt().permute(2, 0, 1)[..., None]
        terms = torch.einsum("hgrs,shd->rhgd", weights * (1 + moved), v.square()).sqrt()
        spread = out.abs() * (1 + by_scores) + terms
        spread = spread + out.abs().amax(-1, keepdim=True) * (_HALF_SUMS / self.unit)
        return Expected(out.reshape(rows, -1), spread.reshape(rows, -1))
