"""The NCCL that this process has loaded, and whether it lets several ranks use one GPU.

torch tells the version that it was compiled with. What runs may be another one, which the loader
was told to take first: so the library itself is asked.
"""

import ctypes
import os

LIBRARY = "libnccl.so.2"
SHARES_GPUS_SINCE = (2, 30)
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"  # read by the library when a communicator is made
# Blocks of a sum wait on the GPU until all ranks are there. Where ranks share it they must not take
# it whole: kernels of a rank that is still to come need room beside them.
FEW_BLOCKS = {"NCCL_MAX_CTAS": "2", "NCCL_MAX_P2P_NCHANNELS": "2"}


def loaded_version() -> tuple[int, int, int] | None:
    """The version of the library that answers here; None where none is loaded."""
    loaded = _loaded_library()
    number = ctypes.c_int()
    if loaded is None or loaded.ncclGetVersion(ctypes.byref(number)):
        return None
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def share_gpus() -> str | None:
    """Asks the library to let ranks share a GPU, and to leave room on it. Returns what is in the
    way; None: nothing is."""
    version = loaded_version()
    if version is None:
        return f"no {LIBRARY} is loaded"
    if version < SHARES_GPUS_SINCE:
        since = ".".join(map(str, SHARES_GPUS_SINCE))
        return f"NCCL {'.'.join(map(str, version))} does not allow that, {since} and later do"
    if os.environ.setdefault(MULTI_RANK, "1") != "1":
        return f"{MULTI_RANK} is {os.environ[MULTI_RANK]!r}, not 1"
    for name, value in FEW_BLOCKS.items():
        os.environ.setdefault(name, value)
    return None


def _loaded_library() -> ctypes.CDLL | None:
    """A library that was loaded before all others answers for every other; else torch's own."""
    whole_process = ctypes.CDLL(None)
    if hasattr(whole_process, "ncclGetVersion"):
        return whole_process
    try:
        return ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
