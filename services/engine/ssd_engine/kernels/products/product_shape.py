"""What a product is to compute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProductShape:
    """out [rows, n] = x [rows, k] * weight [n, k], and what is fused with it."""

    n: int
    k: int
    rows: int
    norm: bool = False  # x is normalised first
    gated: bool = False  # silu(first half) * second half: out [rows, n / 2]
    residual: bool = False  # out += the product
    bias: bool = False
    wide: bool = False  # out is float32

    @property
    def octets(self) -> int:
        return -(-self.rows // 8)
