"""Rotary position embedding (arXiv 2104.09864), with Llama 3.1's and linear scaling."""

import math

import torch
from torch import Tensor

from ssd_engine.checkpoints.model_config import Llama3Scaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.llama3 is not None:
        return _llama3(frequencies, rope.llama3)
    return frequencies / rope.linear_factor


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Fast frequencies stay, slow ones are divided by the factor, those between are blended."""
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    smooth = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class RopeTable:
    """cos and sin of every position, laid out for ``rotate``."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        angle = torch.outer(
            torch.arange(max_positions).float(), inverse_frequencies(rope, head_dim)
        )
        cos, sin = angle.cos(), angle.sin()
        # [positions, 1, head_dim]; the minus of the rotation lives in the first half of sin.
        self.cos = torch.cat((cos, cos), dim=-1)[:, None].to(device, dtype)
        self.sin = torch.cat((-sin, sin), dim=-1)[:, None].to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim/2) of x [rows, heads, head_dim]."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)
