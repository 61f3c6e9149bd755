"""The compiled kernels of a CPU: which instructions there are, and the threads they run on."""

import ctypes
import importlib.util
import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

PORTABLE = "portable"
INSTRUCTION_SETS = ("AVX-512", "AVX2", "NEON", PORTABLE)  # the best first

Kernel = TypeVar("Kernel")


def compiled() -> ctypes.CDLL | None:
    """The extension; None where it was not built."""
    spec = importlib.util.find_spec("ssd_engine.kernels.cpu._compiled")
    return ctypes.CDLL(spec.origin) if spec is not None and spec.origin is not None else None


def load_best(
    make: Callable[[ctypes.CDLL, str], Kernel], instructions: str | None
) -> Kernel | None:
    """A kernel by the best instructions that the processor has, or by those that are named. None
    where the extension was not built, or the processor lacks what is named."""
    library = compiled()
    if library is None:
        return None
    for name in INSTRUCTION_SETS if instructions is None else (instructions,):
        try:
            return make(library, name)
        except ValueError:
            continue
    return None


def torch_threads() -> int | None:
    """How to run a function on torch's own OpenMP threads: the address of GOMP_parallel, which
    every OpenMP runtime of Linux has. None where there is no such runtime: one thread computes."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        log.warning("torch has no OpenMP threads to share: kernels on the CPU use one thread")
        return None
