"""Noise of every token on a CPU: see noise.c."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ssd_engine.kernels.cpu.library import compiled

Fill = Callable[[Tensor, Tensor, Tensor | int, int], Tensor]


@functools.cache
def load_uniform_noise() -> Fill | None:
    """Uniform noise [n, width], float64, for rows with seed [n] and position [n], their tokens
    [n, width] or, from 0 on, their width, and a stream; tensors are int64. None where the extension
    was not built."""
    library = compiled()
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    fill = library.uniform_noise
    fill.argtypes, fill.restype = [*[pointer] * 3, size, size, ctypes.c_uint32, pointer], None

    def uniform_noise(seed: Tensor, position: Tensor, tokens: Tensor | int, stream: int) -> Tensor:
        width = tokens if isinstance(tokens, int) else tokens.shape[1]
        out = torch.empty(len(seed), width, dtype=torch.float64)
        seed, position = seed.contiguous(), position.contiguous()
        named = None if isinstance(tokens, int) else tokens.contiguous()
        fill(
            seed.data_ptr(),
            position.data_ptr(),
            None if named is None else named.data_ptr(),
            *(len(seed), width, stream),
            out.data_ptr(),
        )
        return out

    return uniform_noise
