"""The kernel of few_rows.c, where it was built: on Arm, by whoever had a C compiler."""

import ctypes
import importlib.util
import logging
import platform
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

PANEL = 8  # outputs
MOST_ROWS = 32  # more are as fast with BLAS

Kernel = Callable[[int, int, int, int, int, int], None]  # x, packed, out, rows, outputs, inputs


def load_kernel() -> Kernel | None:
    if platform.machine() != "aarch64":
        return None
    spec = importlib.util.find_spec("ssd_engine._few_rows")
    if spec is None or spec.origin is None:
        log.warning(
            "the kernel for a few rows was not built: speculation is slower on this CPU; "
            "install the package again with a C compiler at hand"
        )
        return None
    function = ctypes.CDLL(spec.origin).few_rows
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 3
    function.restype = None
    return function


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [panels, inputs, 8]"""
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, 0, 0, -outputs % PANEL))
    return whole.view(-1, PANEL, inputs).transpose(1, 2).contiguous()


def multiply(kernel: Kernel, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """x [rows, inputs], float32 -> [rows, outputs]"""
    x = x.contiguous()
    rows, inputs = x.shape
    out = x.new_empty(rows, outputs)
    kernel(x.data_ptr(), packed.data_ptr(), out.data_ptr(), rows, outputs, inputs)
    return out
