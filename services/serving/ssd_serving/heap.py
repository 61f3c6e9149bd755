"""Memory that long texts took goes back to the system: the C library would keep it for the next."""

import ctypes

LONG_BYTES = 1 << 16  # texts that take noticeable memory while they are read
GIVE_BACK_SECONDS = 1.0  # after the first of them: it takes a while to look through all memory


def give_back() -> None:
    """Where the C library has no such call, it keeps less by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
