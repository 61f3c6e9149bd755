"""Products in which a row has the same bits however many rows there are; streamed_product.cu.

How a weight is divided depends on its shape and on the number of multiprocessors. The number of
rows only decides which kernel is launched: rows are padded to one of a few numbers, and more than
the largest are computed in pieces.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ssd_engine.kernels.driver import (
    SOURCES,
    Arguments,
    Kernel,
    compile_ahead,
    compiled_kernel,
    room_for_map,
    tensor_map,
)
from ssd_engine.kernels.elementwise import overlapping, weigh_kernel
from ssd_engine.kernels.kernel_set import KernelSet
from ssd_engine.kernels.products.product_shape import ProductShape

SOURCE = SOURCES / "streamed_product.cu"
WIDTHS = (8, 32, 64, 128, 192, 256)  # numbers of rows that kernels are compiled for
MOST_ROWS = WIDTHS[-1]
FEW_ROWS = 64  # so many are added up by the last block of a tile; more by all, or by another kernel
TILE = 128  # outputs
PANEL = 64  # elements of k; also hidden states whose squares are summed into one number
SPLITS = range(1, 9)
SPLIT_COST = 1600  # elements of k that take as long as adding up the parts of a tile, measured
LEAST_SLICE = 256  # elements of k
MORE = 2  # panels that the last slice has more than the others
MOST_SHARED_WAVES = 1  # waves of tiles whose k is split
BLOCK, ADDING_BLOCK = 384, 256  # threads
CHUNK_ROWS, PITCH = 16, 68  # rows that a group of warps writes at a time, and floats of one
SYSTEM_SHARED = 1024  # bytes that are not the kernel's
FEW_PANELS, MANY_PANELS = 2, 1  # panels of a stage, where rows are few and where they are many
MOST_STAGES = 14
WEIGHED = 1024  # hidden states of a program
MOST_MAPS = 512  # tensor maps of rows that are kept


@dataclass(frozen=True)
class Wave:
    split: int  # blocks that divide the k of a tile
    tiles: int


def waves_of(n: int, k: int, processors: int) -> list[Wave]:
    """Whole waves have a tile for every multiprocessor. What is left is split where that pays."""
    tiles = -(-n // TILE)
    whole, left = divmod(tiles, processors)
    waves = [Wave(1, processors)] * whole
    if not left:
        return waves
    possible = [s for s in SPLITS if s * left <= processors and (s == 1 or k >= s * LEAST_SLICE)]
    split = min(possible, key=lambda s: 1 / s + (SPLIT_COST / k if s > 1 else 0))
    return [Wave(split, left), *waves]


@dataclass(frozen=True)
class Piece:
    """Rows that one launch computes."""

    begin: int
    rows: int
    width: int  # rows with those that pad

    @property
    def span(self) -> slice:
        return slice(self.begin, self.begin + self.rows)


def pieces_of(rows: int) -> list[Piece]:
    most = MOST_ROWS
    pieces = [Piece(begin, most, most) for begin in range(0, rows - most + 1, most)]
    begin = len(pieces) * most
    if begin < rows:
        width = next(width for width in WIDTHS if width >= rows - begin)
        pieces.append(Piece(begin, rows - begin, width))
    return pieces


def fits(shape: ProductShape) -> bool:
    k_unit = PANEL if shape.norm else 8
    return shape.n % (PANEL if shape.residual else 16) == 0 and shape.k % k_unit == 0


@dataclass(frozen=True)
class PartialSums:
    """Where blocks leave their sums, and how many have come. All products share it, as one launch
    follows the other."""

    left: Tensor
    have_come: Tensor


@cache
def room_of(processors: int, device: torch.device) -> PartialSums:
    slots = MOST_SHARED_WAVES * processors
    left = torch.zeros(slots * MOST_ROWS * TILE, device=device)
    return PartialSums(left, torch.zeros(slots, dtype=torch.int32, device=device))


class NormedRows:
    """Hidden states for the product that normalises them: multiplied by the norm's weight, and for
    each piece of the rows their squares, summed in groups of 64."""

    def __init__(self, rows: int, width: int, device: torch.device, overlap: bool = False) -> None:
        self.pieces, self._overlap = pieces_of(rows), overlap
        self.x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
        sizes = [(width // PANEL, piece.width) for piece in self.pieces]
        self.squares = [torch.zeros(size, device=device) for size in sizes]

    def take(self, hidden: Tensor, norm: Tensor) -> None:
        width = hidden.shape[1]
        for piece, squares in zip(self.pieces, self.squares, strict=True):
            weigh_kernel[(-(-width // WEIGHED), piece.rows)](
                hidden[piece.span],
                norm,
                self.x[piece.span],
                squares,
                width,
                piece.width,
                PIECE=WEIGHED,
                PANEL=PANEL,
                **overlapping(self._overlap),
            )


class StreamedKernel:
    """The kernel for one width. Its compilation starts as soon as this is made."""

    def __init__(self, shape: ProductShape, kernels: KernelSet, device: torch.device) -> None:
        """``shape.rows`` is one of WIDTHS."""
        width = shape.rows
        self._width = width
        waves = waves_of(shape.n, shape.k, kernels.processors)
        splits, tiles = [wave.split for wave in waves], [wave.tiles for wave in waves]
        self._apart = width > FEW_ROWS
        panels = MANY_PANELS if self._apart else FEW_PANELS
        buffers = 4 * CHUNK_ROWS * PITCH * 4 if shape.residual else 0
        stage = panels * (2 * PANEL * PANEL * 2 + width * PANEL * 2)
        other = buffers + width * 4 + MOST_STAGES * 16 + 16
        stages = min(MOST_STAGES, (kernels.shared_memory - SYSTEM_SHARED - other) // stage)
        self._shared = stages * stage + other
        self._defines: dict[str, int | str] = {
            "N": shape.n,
            "K": shape.k,
            "ROWS": width,
            "STAGES": stages,
            "PANELS": panels,
            "WAVES": len(waves),
            "SPLIT_LIST": ",".join(map(str, splits)),
            "FIRST_LIST": ",".join(map(str, accumulate(tiles, initial=0))),
            "MORE": MORE,
            "APART": int(self._apart),
            "TOGETHER": int(self._apart and len(waves) == 1 and splits[0] > 1),
            "NORM": int(shape.norm),
            "GATED": int(shape.gated),
            "RESIDUAL": int(shape.residual),
            "BIAS": int(shape.bias),
            "WIDE": int(shape.wide),
        }
        self._gated = shape.gated
        self._grid = (max(wave.split * wave.tiles for wave in waves), 1)
        shared_tiles = sum(wave.tiles for wave in waves if wave.split > 1)
        self._adding_grid = (shared_tiles, width // CHUNK_ROWS)
        self._shares = self._apart and shared_tiles > 0
        self._split, self._tiles = splits[0], tiles[0]
        room = room_of(kernels.processors, device)
        nothing = (None,) * 7 + (0.0, 0)
        self._told = Arguments(
            (room_for_map(), room_for_map(), room.left, room.have_come, *nothing)
        )
        self._told_adding = Arguments((room.left, *nothing, self._grid[0]))
        self._maps: dict[int, ctypes.Array[Any]] = {}  # tensor maps of weights, by address
        self._maps_of_rows: dict[tuple[int, int], ctypes.Array[Any]] = {}
        compile_ahead(SOURCE, self._defines)

    @cached_property
    def _kernel_and_cluster(self) -> tuple[Kernel, int]:
        """The kernel, and how many of its blocks add up a tile among themselves."""
        if self._defines["TOGETHER"]:
            kernel = self._compiled(self._defines)
            if kernel.most_clusters(self._grid, self._split) >= self._tiles:
                return kernel, self._split
        # A part of a device may have no room for all clusters at once.
        return self._compiled({**self._defines, "TOGETHER": 0}), 1

    def _compiled(self, defines: Mapping[str, int | str]) -> Kernel:
        return compiled_kernel(SOURCE, defines, BLOCK, self._shared)

    @cached_property
    def _adding_kernel(self) -> Kernel:
        shared = 2 * CHUNK_ROWS * PITCH * 4
        return compiled_kernel(SOURCE, self._defines, ADDING_BLOCK, shared, "add_slices")

    def launch(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        next_norm: Tensor | None = None,
        next_x: Tensor | None = None,
        next_squares: Tensor | None = None,
    ) -> None:
        """x and out have as many rows as are to be computed, up to the width. What is added to the
        hidden states is added to ``out``."""
        changing = (bias, out, out, next_norm, next_x, next_squares, eps, x.shape[0])
        for place, argument in enumerate((squares, *changing), start=4):
            self._told.put(place, argument)
        self._told.put(0, self._map_of(weight))
        self._told.put(1, self._map_of_rows(x))
        kernel, cluster = self._kernel_and_cluster
        kernel.launch(self._grid, self._told, cluster)
        if self._shares and cluster == 1:
            for place, argument in enumerate((squares, *changing), start=1):
                self._told_adding.put(place, argument)
            self._adding_kernel.launch(self._adding_grid, self._told_adding)

    def _map_of(self, weight: Tensor) -> ctypes.Array[Any]:
        found = self._maps.get(weight.data_ptr())
        if found is None:
            found = self._maps[weight.data_ptr()] = self._new_map(weight)
        return found

    def _map_of_rows(self, x: Tensor) -> ctypes.Array[Any]:
        """Memory is given out again and again: most of it has been seen."""
        key = x.data_ptr(), x.shape[0]
        found = self._maps_of_rows.get(key)
        if found is None:
            if len(self._maps_of_rows) == MOST_MAPS:
                self._maps_of_rows.clear()
            found = self._maps_of_rows[key] = tensor_map(x, (self._width, PANEL))
        return found

    def _new_map(self, weight: Tensor) -> ctypes.Array[Any]:
        if not self._gated:
            return tensor_map(weight, (PANEL, PANEL))
        n, k = weight.shape
        eights = weight.view(2, n // 16, 8, k).transpose(0, 1)
        return tensor_map(eights, (PANEL // 16, 2, 8, PANEL))


@cache
def streamed_kernel(
    shape: ProductShape, kernels: KernelSet, device: torch.device
) -> StreamedKernel:
    return StreamedKernel(shape, kernels, device)


class StreamedProduct:
    """A streamed product over the rows of one shape."""

    def __init__(self, shape: ProductShape, kernels: KernelSet, device: torch.device) -> None:
        self._pieces = [
            (piece, streamed_kernel(replace(shape, rows=piece.width), kernels, device))
            for piece in pieces_of(shape.rows)
        ]

    def plain(self, weight: Tensor, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        for piece, kernel in self._pieces:
            kernel.launch(weight, x[piece.span], out[piece.span], bias=bias)

    def normed(
        self,
        weight: Tensor,
        normed: NormedRows,
        out: Tensor,
        eps: float,
        bias: Tensor | None = None,
    ) -> None:
        """x is what ``normed`` has taken."""
        for (piece, kernel), squares in zip(self._pieces, normed.squares, strict=True):
            kernel.launch(weight, normed.x[piece.span], out[piece.span], squares, eps, bias)

    def onto(
        self,
        weight: Tensor,
        x: Tensor,
        hidden: Tensor,
        bias: Tensor | None,
        norm: Tensor,
        normed: NormedRows,
    ) -> None:
        """Adds to the hidden states, which ``normed`` takes for the norm that comes next."""
        for (piece, kernel), squares in zip(self._pieces, normed.squares, strict=True):
            kernel.launch(
                weight,
                x[piece.span],
                hidden[piece.span],
                bias=bias,
                next_norm=norm,
                next_x=normed.x[piece.span],
                next_squares=squares,
            )


class AloneProduct:
    """A streamed product that is not part of a layer, as a ``Product``."""

    def __init__(self, shape: ProductShape, kernels: KernelSet, device: torch.device) -> None:
        self._shape, self._product = shape, StreamedProduct(shape, kernels, device)
        width = shape.k if shape.norm else shape.n
        needs_rows = shape.norm or shape.residual
        self._normed = NormedRows(shape.rows, width, device) if needs_rows else None

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
        if self._normed is None:
            self._product.plain(weight, x[:rows], out[:rows], bias)
        elif norm is not None:
            self._normed.take(x[:rows], norm)
            self._product.normed(weight, self._normed, out[:rows], eps, bias)
        else:
            any_norm = out[0]  # the next one's is nobody's
            self._product.onto(weight, x[:rows], out[:rows], bias, any_norm, self._normed)
