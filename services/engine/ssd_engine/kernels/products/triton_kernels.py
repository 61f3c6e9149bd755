"""Rows times a weight, in Triton: for what our CUDA sources do not cover.

Sums along k are float32 and added in one order, whatever the number of rows: tiles are cut along k
by the shape of the weight alone, and every tile of rows goes through the same matrix instructions.
So the result of a row depends on that row and on the weight, not on the rows beside it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 64
MANY_PROGRAMS = 128  # a long product of few rows is cut into so many
LEAST_PART = 256  # elements of k for one program
PART_UNIT = 128  # every tile's depth divides it, so that parts end at the same k in all tilings
MOST_PARTS = 8
MOST_STAGES = 4


@dataclass(frozen=True)
class Tiling:
    """What a program computes, and how. None of it changes the order of additions."""

    rows: int
    columns: int
    depth: int
    num_warps: int

    @classmethod
    def of(cls, rows: int, k: int) -> "Tiling":
        if rows > FEW_ROWS:
            return cls(128, 128, 64, 8)
        return cls(FEW_ROWS, 64, 128 if k % 128 == 0 else 64, 4)

    def stages(self, shared_memory: int) -> int:
        """Tiles that are on their way at a time."""
        size = 2 * (self.rows + self.columns) * self.depth
        return max(1, min(MOST_STAGES, shared_memory // size))


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def parts_of(n: int, k: int) -> int:
    """A few rows are bound by how fast the weight is read, and more programs read it faster.

    Rows have no say in it: they must not change the order of additions.
    """
    programs = -(-n // FEW_ROWS)
    return max(1, min(MANY_PROGRAMS // programs, k // LEAST_PART, MOST_PARTS))


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool, parts: int
) -> None:
    """out [rows, n] = x [rows, k] * weight [n, k] + bias; with ``add`` onto what is there."""
    (rows, k), n = x.shape, weight.shape[0]
    tiling, in_parts = Tiling.of(rows, k), parts > 1
    part = -(-k // (PART_UNIT * parts)) * PART_UNIT
    grid = (-(-n // tiling.columns) * -(-rows // tiling.rows), parts)
    sums = out.new_empty(parts, rows, n, dtype=torch.float32) if in_parts else out
    product_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        sums,
        rows,
        n,
        k,
        part,
        x.stride(0),
        weight.stride(0),
        sums.stride(-2),
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        EVEN=n % tiling.columns == 0 and k == part * parts,
        BIAS=bias is not None and not in_parts,
        ADD=add and not in_parts,
        num_warps=tiling.num_warps,
        num_stages=tiling.stages(_shared_memory(x.device)),
    )
    if in_parts:
        _add_parts(sums, bias, out, add)


def triton_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product for prefills, which have programs enough without dividing k."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    multiply(x, weight, bias, out, add=False, parts=1)
    return out


def _add_parts(sums: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    parts, rows, n = sums.shape
    piece = min(1024, triton.next_power_of_2(n))
    add_parts_kernel[(-(-n // piece), rows)](
        sums,
        sums if bias is None else bias,
        out,
        rows,
        n,
        out.stride(0),
        PARTS=parts,
        PIECE=piece,
        BIAS=bias is not None,
        ADD=add,
    )


@triton.jit
def product_kernel(
    x,  # [rows, k]
    weight,  # [n, k]
    bias,  # [n], where BIAS
    out,  # [rows, n], or [parts, rows, n] float32
    rows,
    n,
    k,
    part_size,  # elements of k, a multiple of DEPTH
    x_stride,
    weight_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,  # every program has whole tiles of the weight
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    # Programs that read the same part of the weight are neighbours.
    row_tiles = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    steps = part_size // DEPTH
    real = row < rows
    inside = column < n
    depth = part * part_size + tl.arange(0, DEPTH)
    from_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + depth[None, :]
    from_weight = weight + column.to(tl.int64)[:, None] * weight_stride + depth[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        if EVEN:
            a = tl.load(from_x)
            b = tl.load(from_weight)
        else:
            left = depth[None, :] < k - step * DEPTH
            a = tl.load(from_x, mask=left, other=0.0)
            b = tl.load(from_weight, mask=left & inside[:, None], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        from_x += DEPTH
        from_weight += DEPTH
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    line = part.to(tl.int64) * rows + row
    to = out + line[:, None] * out_stride + column[None, :]
    written = real[:, None] & inside[None, :]
    if ADD:
        total += tl.load(to, mask=written, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def add_parts_kernel(
    sums,  # [PARTS, rows, n]
    bias,  # [n], where BIAS
    out,  # [rows, n]
    rows,
    n,
    out_stride,
    PARTS: tl.constexpr,
    PIECE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = column < n
    total = tl.zeros((PIECE,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (part * rows + row) * n + column, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    to = out + row * out_stride + column
    if ADD:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
