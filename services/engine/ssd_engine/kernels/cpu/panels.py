"""Weights of a CPU, kept once, in panels that serve one row as well as many: see panels.c."""

import ctypes
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_engine.kernels.cpu.library import PORTABLE, load_best, torch_threads

PANEL = 32  # outputs
MOST_ROWS = 32  # beyond that, more rows are more tiles of the same kinds


class PanelKernel:
    """The compiled products, by one set of instructions."""

    def __init__(self, library: ctypes.CDLL, instructions: str) -> None:
        library.panels_set.restype = ctypes.c_void_p
        library.panels_set.argtypes = [ctypes.c_char_p]
        found = library.panels_set(instructions.encode())
        if found is None:
            raise ValueError(f"{instructions}: this processor does not have it")
        pointer, size, threads = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        library.panels_multiply.argtypes = [*[pointer] * 2, threads, *[pointer] * 3, *[size] * 4]
        library.panels_pack.argtypes = [pointer, threads, *[pointer] * 2, *[size] * 4]
        library.panels_use_large_pages.argtypes = [pointer, size]
        self.instructions = instructions
        # A vector of bfloat16 is widened by one instruction where there are vectors worth the name.
        self.keeps_bfloat16 = instructions != PORTABLE
        self._library, self._set, self._parallel = library, found, torch_threads()

    def allocate(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """Panels [panels, inputs, 32]; what the last one has too much is zero."""
        data = torch.empty(-(-outputs // PANEL), inputs, PANEL, dtype=dtype)
        self._library.panels_use_large_pages(data.data_ptr(), data.nbytes)
        data[-1:].zero_()
        return data

    def pack(self, rows: Tensor, data: Tensor, first: int) -> None:
        """Rows of a weight become the outputs from ``first`` on."""
        rows, threads = rows.contiguous(), torch.get_num_threads()
        about = (first, *rows.shape, rows.itemsize)
        source, target = rows.data_ptr(), data.data_ptr()
        self._library.panels_pack(self._parallel, threads, source, target, *about)

    def multiply(self, x: Tensor, data: Tensor, outputs: int) -> Tensor:
        """The product of x [rows, inputs], float32: [rows, outputs]."""
        out = x.new_empty(x.shape[0], outputs)
        self.multiply_into(out, x.contiguous(), data)
        return out

    def multiply_into(self, out: Tensor, x: Tensor, data: Tensor) -> None:
        """Both tensors are contiguous."""
        rows, inputs = x.shape
        failed = self._library.panels_multiply(
            self._set,
            self._parallel,
            torch.get_num_threads(),
            x.data_ptr(),
            data.data_ptr(),
            out.data_ptr(),
            rows,
            out.shape[1],
            inputs,
            data.itemsize,
        )
        if failed:
            raise MemoryError(f"no memory to copy {rows} rows of {inputs} inputs")


@functools.cache
def load_kernel(instructions: str | None = None) -> PanelKernel | None:
    """The kernel by the best instructions that the processor has, or by those that are named. None
    where the extension was not built, or the processor lacks what is named."""
    return load_best(PanelKernel, instructions)


class PackedWeight:
    """A weight [outputs, inputs], or some rows of one, of which panels are the only copy."""

    def __init__(
        self,
        kernel: PanelKernel,
        data: Tensor,
        outputs: int,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        """The panels hold ``outputs``. From ``begin`` to ``end`` they are this weight's; rows
        beyond those that there are count as zeros."""
        end = outputs if end is None else end
        begin_held, end_held = min(begin, outputs), min(end, outputs)
        first, last = begin_held // PANEL, -(-end_held // PANEL)
        self.kernel, self.panels = kernel, data[first:last]
        self.shape = torch.Size((end - begin, data.shape[1]))
        self.dtype = data.dtype
        self._data, self._outputs = data, outputs
        self._skipped = begin_held - first * PANEL
        self._held = end_held - begin_held
        self._missing = end - begin - self._held

    @classmethod
    def of(cls, kernel: PanelKernel, parts: Sequence[Tensor]) -> "PackedWeight":
        """A weight of the rows of all parts, one after another."""
        dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else torch.float32
        outputs = sum(len(part) for part in parts)
        data = kernel.allocate(outputs, parts[0].shape[1], dtype)
        first = 0
        for part in parts:
            kernel.pack(part.to(dtype), data, first)
            first += len(part)
        return cls(kernel, data, outputs)

    def part(self, begin: int, end: int) -> "PackedWeight":
        """Some of the rows of a whole weight, in the same memory."""
        return PackedWeight(self.kernel, self._data, self._outputs, begin, end)

    def multiply(self, x: Tensor) -> Tensor:
        """The product of x [rows, inputs]: [rows, outputs]."""
        outputs = self._skipped + self._held
        out = self.kernel.multiply(x, self.panels, outputs)
        if self._skipped:
            out = out[:, self._skipped :]
        return F.pad(out, (0, self._missing)) if self._missing else out

    def look_up(self, rows: Tensor) -> Tensor:
        """Some rows, as the weight had them; none of those that are missing."""
        places = rows + self._skipped
        lanes = places % PANEL
        if self.dtype == torch.bfloat16:
            lanes = lanes % (PANEL // 2) * 2 + lanes // (PANEL // 2)
        return self.panels[places // PANEL, :, lanes]

    def split(self, rows: int) -> Iterator[Tensor]:
        """The weight as it was, so many rows at a time."""
        for begin in range(0, self._held, rows):
            yield self.look_up(torch.arange(begin, min(begin + rows, self._held)))
        if self._missing:
            yield self.panels.new_zeros(self._missing, self.shape[1])
