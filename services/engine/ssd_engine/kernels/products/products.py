"""Rows times the weights of a decoder: which kernel for which shape.

The choice follows from the shape and from what the process may use of the device, never from a
measurement at start: two servers of one configuration give the same bits.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ssd_engine.kernels.driver import SOURCES, compiled_kernel
from ssd_engine.kernels.elementwise import gate_kernel, norm_kernel
from ssd_engine.kernels.kernel_set import KernelSet
from ssd_engine.kernels.products import triton_kernels as triton_products
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.streamed_products import AloneProduct, fits
from ssd_engine.kernels.products.triton_kernels import parts_of

RESIDENT = SOURCES / "few_rows_resident.cu"
SPLIT = SOURCES / "few_rows_split.cu"
BALANCED = SOURCES / "few_rows_balanced.cu"
RESIDENT_WARPS = 16
MOST_RESIDENT_BYTES = 100 * 1024  # bytes of x in shared memory; beyond, cuBLAS is faster
MOST_OCTETS = 4  # groups of eight rows; likewise
GATE_PIECE = 1024
WELL_FILLED = 0.88  # share of the passes over a weight that must have work


class Product(Protocol):
    def __call__(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        """x and out have 8 * octets rows, those beyond ``rows`` are neither used nor written."""


# (x, weight, bias, out, add): out = x * weight + bias, with ``add`` onto what is there.
Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor, bool], None]


@cache
def make_product(
    shape: ProductShape, dtype: torch.dtype, device: torch.device, kernels: KernelSet
) -> Product:
    if kernels.steady:
        if kernels.streams(dtype) and fits(shape):
            return AloneProduct(shape, kernels, device)
        return _Composed(shape, triton_multiply(shape))
    if kernels.hopper and dtype is torch.bfloat16:
        processors = kernels.processors
        if _fits_resident(shape, kernels.shared_memory):
            return _Resident(shape, processors, device)
        if _fits_split(shape):
            if _fits_one_wave(shape, processors) or shape.n // 16 <= processors:
                return _Split(shape, processors, device)
            return _Balanced(shape, processors, device)
    return _Composed(shape, blas_multiply if kernels.blas else triton_multiply(shape))


def _fits_resident(shape: ProductShape, most_shared: int) -> bool:
    if shape.residual or shape.n % 64 or shape.k % 1024 or shape.octets > MOST_OCTETS:
        return False
    if shape.wide and shape.octets > 1:  # the head: one long product, at which cuBLAS is better
        return False
    x_bytes = shape.octets * 8 * shape.k * 2
    return x_bytes <= MOST_RESIDENT_BYTES and _resident_shared(shape, 4) <= most_shared


def _fits_split(shape: ProductShape) -> bool:
    fused = shape.norm or shape.gated or shape.wide
    return not fused and shape.n % 32 == 0 and shape.k % 128 == 0 and shape.octets <= MOST_OCTETS


def _resident_shared(shape: ProductShape, tiles: int) -> int:
    columns = shape.octets * 8
    x = columns * (shape.k // 8 + 4) * 16
    sums = RESIDENT_WARPS * columns * (tiles * 16 + 1) * 4
    return x + sums + columns * 3 * 4


class _Resident:
    """All of x in shared memory: for products of a normalised x, which have many outputs."""

    def __init__(self, shape: ProductShape, processors: int, device: torch.device) -> None:
        self._shape = shape
        tiles, unroll = _resident_tiles(shape, processors)
        slices = _resident_slices(shape, tiles, unroll, processors)
        defines = {
            "N": shape.n,
            "K": shape.k,
            "OCTETS": shape.octets,
            "TILES": tiles,
            "SLICES": slices,
            "UNROLL": unroll,
            "WARPS": RESIDENT_WARPS,
            "GRID": processors,
            "NORM": int(shape.norm),
            "GATED": int(shape.gated),
            "BIAS": int(shape.bias),
            "WIDE": int(shape.wide),
        }
        shared = _resident_shared(shape, tiles)
        self._kernel = compiled_kernel(RESIDENT, defines, RESIDENT_WARPS * 32, shared)
        self._grid = (processors, 1)

    def __call__(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        self._kernel.launch(self._grid, (weight, x, norm, bias, out, eps, self._shape.rows))


def _resident_tiles(shape: ProductShape, processors: int) -> tuple[int, int]:
    """Tiles of 16 weight rows that a warp works on, and its unrolling; what fits in registers."""
    if shape.n // (16 * processors) < 6 and not shape.gated:
        return 1, 4
    if shape.octets == 1 and shape.n // (64 * processors) >= 2:
        return 4, 1
    return (2, 2) if shape.octets <= 3 else (2, 1)


def _resident_slices(shape: ProductShape, tiles: int, unroll: int, processors: int) -> int:
    """Warps that divide the k of a group of tiles: as few as give every warp one, if possible."""
    groups = shape.n // (16 * tiles)
    per_block = -(-groups // processors)
    slices = RESIDENT_WARPS
    while slices > 1 and (
        RESIDENT_WARPS // slices < min(per_block, RESIDENT_WARPS)
        or shape.k % (32 * unroll * slices)
    ):
        slices //= 2
    if tiles == 4:
        slices = max(slices, 2 if per_block < RESIDENT_WARPS else 4)
    while shape.k % (64 * unroll * slices) == 0 and slices < RESIDENT_WARPS:
        at_once = processors * RESIDENT_WARPS // slices
        passes = -(-groups // at_once)
        if passes == 1 or groups >= WELL_FILLED * passes * at_once:
            break
        slices *= 2  # the last pass would be nearly empty
    return slices


class _Split:
    """Blocks divide k among their warps: for long k and few outputs."""

    def __init__(self, shape: ProductShape, processors: int, device: torch.device) -> None:
        self._shape = shape
        one_wave = _fits_one_wave(shape, processors)
        tiles, warps, unroll, ahead = (2, 32, 1, 0) if one_wave else (1, 16, 2, 1)
        defines = {
            "N": shape.n,
            "K": shape.k,
            "OCTETS": shape.octets,
            "TILES": tiles,
            "WARPS": warps,
            "UNROLL": unroll,
            "BLOCKS": 1,
            "AHEAD": ahead,
            "RESIDUAL": int(shape.residual),
            "BIAS": int(shape.bias),
        }
        self._kernel = compiled_kernel(SPLIT, defines, warps * 32)
        self._grid = (shape.n // (16 * tiles), 1)

    def __call__(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        self._kernel.launch(self._grid, (weight, x, out, bias, out, self._shape.rows))


def _fits_one_wave(shape: ProductShape, processors: int) -> bool:
    return shape.octets == 1 and 96 <= shape.n // 32 <= processors


class _Balanced:
    """Like _Split, for more tiles than blocks, which share them evenly.

    All layers of one shape use the same room for sums: their launches follow each other in one
    stream.
    """

    def __init__(self, shape: ProductShape, processors: int, device: torch.device) -> None:
        self._shape = shape
        warps, unroll = 16, _balanced_unroll(shape)
        units = -(-shape.k // (32 * unroll * warps))
        grid = min(processors, shape.n // 16 * units)
        defines = {
            "N": shape.n,
            "K": shape.k,
            "OCTETS": shape.octets,
            "WARPS": warps,
            "UNROLL": unroll,
            "GRID": grid,
            "RESIDUAL": int(shape.residual),
            "BIAS": int(shape.bias),
        }
        self._kernel = compiled_kernel(BALANCED, defines, warps * 32)
        self._grid = (grid, 1)
        self._left = torch.zeros(grid * 2 * shape.octets * 8 * 16, device=device)
        self._have_come = torch.zeros(shape.n // 16, dtype=torch.int32, device=device)

    def __call__(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        shared = (self._left, self._have_come, self._shape.rows)
        self._kernel.launch(self._grid, (weight, x, out, bias, out, *shared))


def _balanced_unroll(shape: ProductShape) -> int:
    """The largest unrolling that registers hold, if possible without a remainder of k."""
    fitting = (4, 5, 3, 2) if shape.octets == 1 else (2, 1)
    return next((unroll for unroll in fitting if shape.k % (512 * unroll) == 0), fitting[0])


class _Composed:
    """A product by itself, and kernels of their own for what our CUDA sources fuse with it."""

    def __init__(self, shape: ProductShape, multiply: Multiply) -> None:
        self._shape, self._multiply = shape, multiply

    def __call__(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        rows = self._shape.rows
        x, out = x[:rows], out[:rows]
        if norm is not None:
            x = normalise(x, norm, eps)
        if self._shape.gated:
            both = x.new_empty(rows, weight.shape[0])
            self._multiply(x, weight, bias, both, False)
            gate(both, out)
        else:
            self._multiply(x, weight, bias, out, self._shape.residual)


def blas_multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    if add:
        out.addmm_(x, weight.t())
        if bias is not None:
            out += bias
    elif bias is None and out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        out.copy_(F.linear(x, weight, bias))


def triton_multiply(shape: ProductShape) -> Multiply:
    return partial(triton_products.multiply, parts=parts_of(shape.n, shape.k))


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[1]
    norm_kernel[(x.shape[0],)](
        x, weight, out, eps, width, triton.next_power_of_2(width), False, num_warps=8
    )
    return out


def gate(x: Tensor, out: Tensor) -> None:
    width = out.shape[1]
    grid = (-(-width // GATE_PIECE), out.shape[0])
    gate_kernel[grid](x, out, width, GATE_PIECE, False)
