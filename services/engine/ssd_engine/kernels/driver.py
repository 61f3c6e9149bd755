"""CUDA C++ compiled at start by NVRTC, which comes with torch, and launched by the driver.

Triton covers most kernels; this is for those that need the last word on registers and loads.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd_engine.kernels.kernel_cache import kept_binary
from ssd_engine.process.progress import tracked

ARCHITECTURE = "sm_90a"  # Hopper, with what it alone has
SOURCES = Path(__file__).parent / "sources"
COMMON = SOURCES / "few_rows_common.cu"  # stands before every source
_CLUSTER = 4  # launch attribute: blocks that run side by side and read each other's memory
_PROGRAMMATIC = 6  # launch attribute: may begin while the kernel before it in the stream ends
_CARVE_OUT = 9  # function attribute: percent of a multiprocessor's memory to use as shared memory
_STATIC_SHARED = 1  # function attribute, to be read: bytes
_RESERVED_SHARED = 1024  # bytes of every block that are the system's
_DYNAMIC_SHARED = 8  # function attribute: bytes that a launch may ask for
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_BFLOAT16, _MAP_SWIZZLE_128, _MAP_PROMOTE_256 = 9, 3, 3  # kinds of tensor maps

# An argument of a kernel; an array goes by value.
Argument = Tensor | float | ctypes.Array[Any] | None


class CompileError(RuntimeError):
    """The source did not compile: the compiler's log is the message."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "12").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    packages = Path(torch.__file__).parents[1]
    for root in (packages / "torch" / "lib", packages / "nvidia"):
        names += map(str, root.rglob(f"libnvrtc.so.{major}"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError(f"libnvrtc.so.{major} was not found: reinstall torch's CUDA build")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _raw_stream(device: int) -> int:
    """The current stream, in a tenth of the time that a stream object takes."""
    raw: Any = torch._C
    return raw._cuda_getCurrentRawStream(device)


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'?').decode()}")


def compile_source(source: str, defines: Mapping[str, int | str], arch: str) -> bytes:
    """Compiles to a cubin."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"ssd.cu", 0, None, None)
    try:
        return _compile(nvrtc, program, defines, arch)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _compile(
    nvrtc: ctypes.CDLL, program: ctypes.c_void_p, defines: Mapping[str, int | str], arch: str
) -> bytes:
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"-D{k}={v}" for k, v in defines.items()),
    ]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, text)
        raise CompileError(text.value.decode())
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    return binary.raw


class Kernel:
    def __init__(self, binary: bytes, name: str, block: int, shared: int = 0) -> None:
        torch.cuda.current_stream()  # the module is loaded into torch's context
        self._binary, self._device = binary, torch.cuda.current_device()
        self._configs: dict[tuple[tuple[int, int], int], _Config] = {}
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary), f"loading {name}")
        found = _driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode())
        _check(found, name)
        self._block, self._shared = block, shared
        if shared:
            _check(_driver().cuFuncSetAttribute(self._function, _DYNAMIC_SHARED, shared), name)
        _check(_driver().cuFuncSetAttribute(self._function, _CARVE_OUT, self._carve_out()), name)

    def _carve_out(self) -> int:
        """Takes no more shared memory than one block needs: the rest is L1, through which weights
        come, and a kernel's choice stays for those after it. Left to itself the driver makes room
        for more blocks, and products become slower by up to a third."""
        static = ctypes.c_int()
        _driver().cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED, self._function)
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        needed = static.value + self._shared + _RESERVED_SHARED
        most: int = properties.shared_memory_per_multiprocessor
        return min(100, -(-100 * needed // most))

    def launch(
        self,
        grid: tuple[int, int],
        arguments: "Sequence[Argument] | Arguments",
        cluster: int = 1,
    ) -> None:
        """It may begin while the kernel before it ends; it says itself when it must not go on."""
        given = arguments if isinstance(arguments, Arguments) else Arguments(arguments)
        config = self._configs.get((grid, cluster))
        if config is None:
            config = self._configs[grid, cluster] = self._config(grid, cluster)
        config.stream = _raw_stream(self._device)
        code = _driver().cuLaunchKernelEx(
            ctypes.byref(config), self._function, given.pointers, None
        )
        if code:
            _check(code, "launch")

    def most_clusters(self, grid: tuple[int, int], cluster: int) -> int:
        """Clusters of so many blocks for which the device has room at a time. A cluster lies in one
        group of multiprocessors: a process that has few of each group has no room for a large one.
        """
        count, config = ctypes.c_int(), self._config(grid, cluster)
        code = _driver().cuOccupancyMaxActiveClusters(
            ctypes.byref(count), self._function, ctypes.byref(config)
        )
        _check(code, "room for clusters")
        return count.value

    def _config(self, grid: tuple[int, int], cluster: int) -> _Config:
        attributes = (_Attribute * 2)(
            _Attribute(_PROGRAMMATIC, 0, (ctypes.c_int * 16)(1)),
            _Attribute(_CLUSTER, 0, (ctypes.c_int * 16)(cluster, 1, 1)),
        )
        return _Config(
            (*grid, 1),
            (self._block, 1, 1),
            self._shared,
            None,
            attributes,
            2 if cluster > 1 else 1,
        )


def compiled_kernel(
    source: Path,
    defines: Mapping[str, int | str],
    block: int,
    shared: int = 0,
    name: str | None = None,
) -> Kernel:
    """A function, compiled or found in the cache of binaries: the one that is named like its file,
    if no name is given."""
    text, key = _text_and_key(source, defines)
    ahead = _ahead.get(key)
    binary = _binary(source, text, key, defines) if ahead is None else ahead.result()
    return Kernel(binary, name or source.stem, block, shared)


def compile_ahead(source: Path, defines: Mapping[str, int | str]) -> None:
    """Compiles beside everything else: a server needs dozens of kernels, each takes seconds."""
    text, key = _text_and_key(source, defines)
    if key not in _ahead:
        _ahead[key] = _compilers().submit(_binary, source, text, key, dict(defines))


def finish_compiling() -> None:
    """Raises CompileError for what was begun and cannot be compiled."""
    for begun in tracked("compiling kernels", list(_ahead.values()), len(_ahead), "kernels"):
        begun.result()


_ahead: dict[str, Future[bytes]] = {}


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="nvrtc")


def _text_and_key(source: Path, defines: Mapping[str, int | str]) -> tuple[str, str]:
    text = COMMON.read_text() + source.read_text()
    return text, repr((text, sorted(defines.items()), ARCHITECTURE, torch.version.cuda))


def _binary(source: Path, text: str, key: str, defines: Mapping[str, int | str]) -> bytes:
    return kept_binary(source.stem, key, lambda: compile_source(text, defines, ARCHITECTURE))


def room_for_map() -> ctypes.Array[Any]:
    room = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    return (ctypes.c_char * _MAP_BYTES).from_buffer(room, -ctypes.addressof(room) % _MAP_ALIGNMENT)


def tensor_map(tensor: Tensor, box: Sequence[int]) -> ctypes.Array[Any]:
    """The map by which the copy engine finds boxes of a bf16 tensor; their rows of 128 bytes arrive
    swizzled. What a box holds beyond the tensor is zero."""
    made, rank = room_for_map(), tensor.dim()
    sizes = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
    strides = [stride * tensor.element_size() for stride in reversed(tensor.stride()[:-1])]
    code = _driver().cuTensorMapEncodeTiled(
        made,
        _MAP_BFLOAT16,
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        sizes,
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _MAP_SWIZZLE_128,
        _MAP_PROMOTE_256,
        0,
    )
    _check(code, "tensor map")
    return made


class Arguments:
    """A kernel's arguments, where a launch finds them. Those that change are put there anew."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._values = [_argument(argument) for argument in arguments]
        self.pointers = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))

    def put(self, place: int, argument: Argument) -> None:
        if isinstance(argument, ctypes.Array):
            self._values[place] = argument
            self.pointers[place] = ctypes.addressof(argument)
        elif isinstance(argument, Tensor):
            self._values[place].value = argument.data_ptr()
        else:
            self._values[place].value = argument


def _argument(value: Argument) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, ctypes.Array):
        return value
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)
