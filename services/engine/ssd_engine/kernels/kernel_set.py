"""Which kernels a process may use on its device. Decided once at start, by facts about the device.

Three facts decide: the compute capability, the multiprocessors that this process may use, and
whether these are all that the device has. In a process that has only a part of a device (MPS with
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, a MIG slice) cuBLAS cannot be trusted: with CUDA 13.0 on an H200,
its kernels of halves for clusters of eight blocks leave tiles out there, which was seen in a fifth
of the shapes that were tried. So there every product is one of ours.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

log = logging.getLogger(__name__)

HOPPER = (9, 0)  # the one compute capability on which our CUDA sources have been seen to work
_CORES_PER_PROCESSOR = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_USUAL_CORES = 128
_BUS_ID_BYTES = 32


@dataclass(frozen=True)
class KernelSet:
    hopper: bool  # our CUDA sources; else Triton's kernels
    blas: bool  # cuBLAS, where none of our CUDA sources fits; else Triton
    overlap: bool  # kernels may begin while the one before them ends
    processors: int = 1
    shared_memory: int = 0  # bytes that a block may ask for
    steady: bool = False  # a row's bits must not depend on how many rows there are

    def streams(self, dtype: torch.dtype) -> bool:
        """Whether there are products of that kind in our CUDA sources."""
        return self.steady and self.hopper and dtype is torch.bfloat16


# Where there is no CUDA device: Triton's kernels are interpreted, products are torch's.
INTERPRETED = KernelSet(hopper=False, blas=True, overlap=False)


def choose_kernels(option: str, device: torch.device, steady: bool = False) -> KernelSet:
    """``option`` is that of ``--kernels``: auto, or triton for Triton's kernels alone. ``steady``:
    without cuBLAS, whose choices depend on the number of rows."""
    if device.type != "cuda":
        return INTERPRETED
    properties: Any = torch.cuda.get_device_properties(device)
    is_hopper = (properties.major, properties.minor) == HOPPER
    if option == "auto" and not is_hopper:
        log.warning(
            "this GPU is an sm_%d%d, and our CUDA sources are for sm_%d%d alone: Triton's kernels "
            "serve, which are slower",
            *(properties.major, properties.minor, *HOPPER),
        )
    return KernelSet(
        hopper=is_hopper and option == "auto",
        blas=option == "auto" and not steady and has_whole_device(device),
        overlap=is_hopper,
        processors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        steady=steady,
    )


@cache
def has_whole_device(device: torch.device) -> bool:
    """Whether this process may use every multiprocessor. What cannot be told is a no."""
    properties: Any = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    try:
        cores = _num_cores(torch.cuda.current_device() if device.index is None else device.index)
    except (OSError, AttributeError, RuntimeError) as error:
        log.warning("NVML does not tell how large the device is (%s): no cuBLAS is used", error)
        return False
    total = cores // _CORES_PER_PROCESSOR.get(capability, _USUAL_CORES)
    mine: int = properties.multi_processor_count
    if mine != total:
        log.info("this process may use %d of the device's %d multiprocessors", mine, total)
    return mine == total


def _num_cores(index: int) -> int:
    """CUDA cores of the whole device, whatever part of it is this process's."""
    driver, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    bus, handle, cores = (
        ctypes.create_string_buffer(_BUS_ID_BYTES),
        ctypes.c_void_p(),
        ctypes.c_uint(),
    )
    calls = (
        ("cuDeviceGetPCIBusId", lambda: driver.cuDeviceGetPCIBusId(bus, _BUS_ID_BYTES, index)),
        ("nvmlInit", lambda: nvml.nvmlInit_v2()),
        (
            "nvmlDeviceGetHandleByPciBusId",
            lambda: nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)),
        ),
        (
            "nvmlDeviceGetNumGpuCores",
            lambda: nvml.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores)),
        ),
    )
    for name, call in calls:
        if code := call():
            raise RuntimeError(f"{name} failed with {code}")
    return cores.value
