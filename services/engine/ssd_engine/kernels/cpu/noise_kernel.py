"""Noise of every token on a CPU: see noise.c."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ssd_engine.kernels.cpu.library import compiled

Fill = Callable[[Tensor, Tensor, int, int], Tensor]


@functools.cache
def load_uniform_noise() -> Fill | None:
    """Uniform noise [n, tokens], float64, for rows with seed [n] and position [n], both int64, the
    number of tokens and the stream; None where the extension was not built."""
    library = compiled()
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    fill = library.uniform_noise
    fill.argtypes, fill.restype = [pointer, pointer, size, size, ctypes.c_uint32, pointer], None

    def uniform_noise(seed: Tensor, position: Tensor, tokens: int, stream: int) -> Tensor:
        seed, position = seed.contiguous(), position.contiguous()
        out = torch.empty(len(seed), tokens, dtype=torch.float64)
        about = (len(seed), tokens, stream)
        fill(seed.data_ptr(), position.data_ptr(), *about, out.data_ptr())
        return out

    return uniform_noise
