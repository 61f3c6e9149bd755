"""CUDA kernels compiled for a CPU and run there, thread by thread, over tensors of the CPU."""

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ssd_engine.kernels.driver import COMMON, Argument, Arguments, room_for_map

HEADER = Path(__file__).parent / "device.h"
ENTRY = """
extern "C" bool emulate(int x, int y, int block, int cluster, long shared, bool backwards,
                        void** arguments) {
    auto kernel = [=] { call(KERNEL, arguments); };
    return device::launch(x, y, block, cluster, shared, backwards, kernel);
}
"""


def on_cpu(source: str) -> str:
    """The source without what only a device understands; device.h has functions in its place."""
    source = _without_assembly(re.sub(r"^typedef .*\n", "", source, flags=re.MULTILINE))
    source = re.sub(
        r"extern __shared__ (__align__\(1024\) )?uint4 shared\[\];",
        "uint4* shared = SHARED_MEMORY;",
        source,
    )
    return re.sub(
        r"__shared__ (\w+) (\w+)((?:\[[^]]+\])+);",
        r"auto& \2 = *(\1(*)\3)SHARED_MEMORY;",
        source,
    )


def _without_assembly(source: str) -> str:
    """Functions that hold assembly, or what comes to the same, are device.h's."""
    kept, at = [], 0
    for found in re.finditer(r"^(?:template <[^>]*> )?__device__ [^{;]*\{", source, re.MULTILINE):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        if re.search(r"\basm\b|__cvta", source[found.start() : end]):
            kept.append(source[at : found.start()])
            at = end
    return "".join([*kept, source[at:]])


class EmulatedKernel:
    """As driver.Kernel. Blocks run one after the other, which may be the last one first."""

    backwards = False

    def __init__(
        self,
        folder: Path,
        source: Path,
        defines: Mapping[str, int | str],
        block: int,
        shared: int,
        name: str | None = None,
    ) -> None:
        name = name or source.stem
        texts = (COMMON.read_text(), source.read_text(), ENTRY.replace("KERNEL", name))
        number = len(list(folder.iterdir()))
        code, library = folder / f"{name}-{number}.cc", folder / f"{name}-{number}.so"
        code.write_text("\n".join(map(on_cpu, texts)))
        flags = [f"-D{key}={value}" for key, value in defines.items()]
        command = ["g++", "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
        command += ["-include", str(HEADER)]
        subprocess.run([*command, *flags, str(code), "-o", str(library)], check=True)
        self._run = ctypes.CDLL(str(library)).emulate
        self._run.restype = ctypes.c_bool
        self._block, self._shared = block, max(shared, 64 * 1024)

    def launch(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Argument] | Arguments,
        cluster: int = 1,
    ) -> None:
        given = arguments if isinstance(arguments, Arguments) else Arguments(arguments)
        shared, backwards = ctypes.c_long(self._shared), ctypes.c_bool(self.backwards)
        if not self._run(*grid, self._block, cluster, shared, backwards, given.pointers):
            raise RuntimeError("the kernel does not come to an end")

    def most_clusters(self, grid: tuple[int, int], cluster: int) -> int:
        return grid[0] * grid[1] // cluster


def emulated_map(tensor: Tensor, box: Sequence[int]) -> ctypes.Array[Any]:
    """In place of driver.tensor_map; device.h says what it holds."""
    made = room_for_map()
    words = (ctypes.c_uint64 * 16).from_buffer(made)
    words[0], words[1] = tensor.data_ptr(), tensor.dim()
    last_first = zip(reversed(tensor.shape), reversed(tensor.stride()), reversed(box), strict=True)
    for i, (size, stride, boxed) in enumerate(last_first):
        words[2 + 3 * i : 5 + 3 * i] = size, stride * tensor.element_size(), boxed
    return made


class Emulator:
    """In place of driver.compiled_kernel."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, EmulatedKernel] = {}

    def __call__(
        self,
        source: Path,
        defines: Mapping[str, int | str],
        block: int,
        shared: int = 0,
        name: str | None = None,
    ) -> EmulatedKernel:
        key = (source, tuple(sorted(defines.items())), name)
        if key not in self._made:
            self._made[key] = EmulatedKernel(self._folder, source, defines, block, shared, name)
        return self._made[key]
